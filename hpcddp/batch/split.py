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


def fill(total: int, size: int, parts: int) -> tuple[int, ...]:
    """Return parts that are filled one after the other up to ``size``; the last ones may be empty.

    Args:
        total: what is divided, 0..size * parts.
    """
    return tuple(min(max(total - index * size, 0), size) for index in range(parts))


def divide(total: int, parts: int) -> tuple[int, ...]:
    """Return all parts, in order; they add up to ``total``."""
    quotient, remainder = divmod(total, parts)
    return (quotient + 1,) * remainder + (quotient,) * (parts - remainder)


def ceil_div(total: int, parts: int) -> int:
    """Return ``ceil(total / parts)``, exactly: the largest part."""
    return -(-total // parts)
