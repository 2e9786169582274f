"""Divide a count into parts that differ by at most one (batch contract, section 2)."""

from __future__ import annotations


def part(total: int, parts: int, index: int) -> int:
    """Return the size of one part: ``floor(total/parts) + (1 if index < total mod parts else 0)``.

    Args:
        total: what is divided, >= 0.
        parts: into how many, >= 1.
        index: which part, 0..parts-1.
    """
    quotient, remainder = divmod(total, parts)
    return quotient + (index < remainder)


def offset(total: int, parts: int, index: int) -> int:
    """Return the start of part ``index`` when the parts are contiguous; arguments as for ``part``."""
    quotient, remainder = divmod(total, parts)
    return index * quotient + min(index, remainder)


def runs(total: int, parts: int) -> tuple[tuple[int, int], ...]:
    """Return the parts in order, run-length encoded: one or two pairs (number of parts, size), largest first."""
    quotient, remainder = divmod(total, parts)
    pairs = ((remainder, quotient + 1), (parts - remainder, quotient))
    return tuple(pair for pair in pairs if pair[0])


def filled_runs(total: int, size: int, parts: int) -> tuple[tuple[int, int], ...]:
    """Return parts that are filled one after the other up to ``size``, run-length encoded: at most three pairs.

    Args:
        total: what is divided, 0..size * parts.
        size: the largest size of a part, >= 1.
        parts: number of parts; the last ones may be empty.
    """
    full, rest = divmod(total, size)
    pairs = ((full, size), (bool(rest), rest), (parts - full - bool(rest), 0))
    return tuple((int(many), held) for many, held in pairs if many)


def divide(total: int, parts: int) -> tuple[int, ...]:
    """Return all parts, in order; they add up to ``total``."""
    return tuple(size for count, size in runs(total, parts) for _ in range(count))


def ceil_div(total: int, parts: int) -> int:
    """Return ``ceil(total / parts)``, exactly: the largest part."""
    return -(-total // parts)
