"""Numbers and times as a person reads them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from hpcddp.errors import printable
from hpcddp.slurm.hostlist import ranges_text

NOTHING: Final = "-"
"""Shown in place of a value that does not exist, or does not exist yet."""


def one_line(text: str) -> str:
    """Return a text as a terminal can show it on one line, with escapes for newlines and control characters."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


_MINUTE: Final = 60
_HOUR: Final = 3600
_DAY: Final = 86400
_SECONDS_MATTER_BELOW_S: Final = 600


def duration_text(seconds: float | None) -> str:
    """Return a duration in its two largest units: ``45s``, ``1m40s``, ``12m``, ``3h05m``, ``2d04h``."""
    if seconds is None:
        return NOTHING
    whole = max(0, round(seconds))
    if whole < _MINUTE:
        return f"{whole}s"
    if whole < _SECONDS_MATTER_BELOW_S:
        return f"{whole // _MINUTE}m{whole % _MINUTE:02d}s"
    if whole < _HOUR:
        return f"{whole // _MINUTE}m"
    if whole < _DAY:
        return f"{whole // _HOUR}h{whole % _HOUR // _MINUTE:02d}m"
    return f"{whole // _DAY}d{whole % _DAY // _HOUR:02d}h"


def used_text(used_s: float | None, limit_s: float | None) -> str:
    """Return how much of a time limit is used."""
    if limit_s is None:
        return duration_text(used_s)
    used = "0s" if used_s is None else duration_text(used_s)
    return f"{used} of {limit_text(limit_s)}"


def limit_text(seconds: float) -> str:
    """Return a limit, which is most often a round number: ``2h`` and not ``2h00m``."""
    text = duration_text(seconds)
    for zero in ("00s", "00m", "00h"):
        text = text.removesuffix(zero)
    return text


_KIB: Final = 1024


def size_text(size: int) -> str:
    """Return a number of bytes with a binary unit."""
    if size < _KIB:
        return f"{size} B"
    value = size / _KIB
    unit = "KiB"
    for larger_unit in ("MiB", "GiB", "TiB"):
        if value < _KIB:
            break
        value /= _KIB
        unit = larger_unit
    return f"{value:.1f} {unit}"


def step_text(step: int | None, total: int | None) -> str:
    """Return how far a run is."""
    done = NOTHING if step is None else str(step)
    return done if total is None else f"{done}/{total}"


def number_text(value: float | None, form: str) -> str:
    """Return a number in a format of its own, or the sign for a value that does not exist."""
    return NOTHING if value is None else format(value, form)


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ranks with runs of neighbours drawn together: ``0-2, 4-7``."""
    return ranges_text(ranks).replace(",", ", ")


def numbered_text(noun: str, numbers: Sequence[int]) -> str:
    """Return what has these numbers: ``rank 3``, ``ranks 0-2, 4``."""
    plural = f"{noun}s" if len(numbers) > 1 else noun
    return f"{plural} {ranks_text(numbers)}"


def processes_text(ids: Sequence[int]) -> str:
    """Return the ids of processes: ``process 12``, ``processes 12, 13``."""
    noun = "processes" if len(ids) > 1 else "process"
    return f"{noun} {', '.join(map(str, ids))}"
