"""Slurm's host lists: ``r[1-2]n[01-03],login`` means seven names.

It does the same as ``scontrol show hostnames``; a test compares the two.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import product

from hpcddp.errors import HpcddpError

MOST_HOSTS = 65536
"""Slurm's own limit for one range (``MAX_RANGE``, measured on 22.05)."""

_RANGE = re.compile(r"(?P<first>[0-9]{1,18})(?:-(?P<last>[0-9]{1,18}))?", re.ASCII)
# A name, or part of one, is any text without separators; brackets are not nested.
_PART = re.compile(r"(?P<text>[^\[\],\s]+)|\[(?P<ranges>[^\[\]]*)\]")
_SEPARATORS = re.compile(r"[,\s]+")


class HostListError(HpcddpError):
    """A text is not a host list."""

    kind = "host_list"


def expand(text: str) -> list[str]:
    """Return the names in a host list, in order, including repeated names.

    Args:
        text: names separated by commas; brackets contain numbers and ranges, and leading zeros of a range's first
            number are kept. Several brackets multiply: the last one varies fastest, then the first, the second and so
            on, as in 22.05.

    Raises:
        HostListError: a bracket is not closed or has no numbers, a range is descending, or it is too long.
    """
    names: list[str] = []
    position = 0
    while position < len(text):
        if separator := _SEPARATORS.match(text, position):
            position = separator.end()
            continue
        parts, position = _parts(text, position)
        names.extend(_combinations(parts))
    return names


def _combinations(parts: list[list[str]]) -> Iterator[str]:
    """Yield every combination of one choice from each part, in Slurm's order."""
    for outer in product(*reversed(parts[:-1])):
        prefix = "".join(reversed(outer))
        yield from (f"{prefix}{choice}" for choice in parts[-1])


def _parts(text: str, position: int) -> tuple[list[list[str]], int]:
    """Return the choices for each part of the name that starts at ``position``, and where it ends.

    Text after the last bracket belongs to that bracket's part.
    """
    parts: list[list[str]] = []
    hosts = 1
    ends_in_text = False
    while match := _PART.match(text, position):
        choices = [match["text"]] if match["ranges"] is None else list(_numbers(match["ranges"], text))
        hosts *= len(choices)
        if hosts > MOST_HOSTS:
            raise HostListError(f"the host list {text!r} stands for more than {MOST_HOSTS} hosts in one name")
        parts.append(choices)
        ends_in_text = match["text"] is not None
        position = match.end()
    if position < len(text) and not _SEPARATORS.match(text, position):
        raise HostListError(f"the host list {text!r} has a bracket without its other half at character {position + 1}")
    if ends_in_text and len(parts) > 1:
        (suffix,) = parts.pop()
        parts[-1] = [f"{choice}{suffix}" for choice in parts[-1]]
    return parts, position


def _numbers(ranges: str, text: str) -> Iterator[str]:
    """Yield the numbers of one bracket as they are written in names."""
    for item in ranges.split(","):
        match = _RANGE.fullmatch(item)
        if match is None:
            raise HostListError(
                f"the host list {text!r} holds {item!r} where a number or a range such as 01-03 belongs"
            )
        first = int(match["first"])
        last = int(match["last"] or match["first"])
        if last < first or last - first >= MOST_HOSTS:
            raise HostListError(f"the host list {text!r} holds the range {item!r}, which runs backwards or is too long")
        width = len(match["first"])
        yield from (f"{number:0{width}d}" for number in range(first, last + 1))


def ranges_text(numbers: Iterable[int]) -> str:
    """Return numbers as Slurm writes those of an array: ``0-2,4``."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][-1] + 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    texts = []
    for span in spans:
        if len(span) == 1:
            texts.append(f"{span[0]}")
        else:
            texts.append(f"{span[0]}-{span[-1]}")
    return ",".join(texts)
