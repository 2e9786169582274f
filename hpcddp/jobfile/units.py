"""Times in Slurm's grammar, and durations as numbers with a unit."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from typing import Self

MINUTE = 60
HOUR = 60 * MINUTE
DAY = 24 * HOUR
UNIT_SECONDS = {"h": HOUR, "min": MINUTE, "s": 1}

# Slurm stores a time limit as a C int of seconds.
LONGEST_SECONDS = 2**31 - 1

_CLOCK = re.compile(r"(?:(?P<days>[0-9]{1,18})-)?(?P<parts>[0-9]{1,18}(?::[0-9]{1,18}){0,2})", re.ASCII)
_PART = r"([0-9]{1,18}(?:\.[0-9]{1,6})?) ?([A-Za-z]{1,7})"
_NUMBER_AND_UNIT = re.compile(_PART, re.ASCII)
_WITH_UNITS = re.compile(rf"{_PART}(?: ?{_PART}){{0,3}}", re.ASCII)
UNITS = {
    word: unit
    for unit, words in {
        "s": ("s", "sec", "secs", "second", "seconds"),
        "min": ("m", "min", "mins", "minute", "minutes"),
        "h": ("h", "hr", "hrs", "hour", "hours"),
        "d": ("d", "day", "days"),
    }.items()
    for word in words
}
"""The words for each unit."""

TIME_FORMS = "minutes (90), 90min, 2h, minutes:seconds (10:00), 1:30:00, 2-00:00:00 or unlimited"
DURATION_FORMS = "a number with its unit: 90s, 10min or 2h"


class UnitError(ValueError):
    """A text is not a time or duration; the message is the middle of a sentence."""


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """A Slurm time limit.

    Args:
        seconds: the limit in seconds, 1 to 2**31 - 1; None is unlimited.
    """

    seconds: int | None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a time in the grammar of ``sbatch --time``, or a number with a unit.

        Args:
            text: minutes, ``M:S``, ``H:M:S``, ``D-H``, ``D-H:M``, ``D-H:M:S``, ``90min``, ``1h30m`` or ``unlimited``.

        Returns:
            The limit.

        Raises:
            UnitError: the text is none of these, a part is out of its range, or the time is zero.
        """
        word = text.strip()
        if word.lower() == "unlimited":
            return cls(None)
        with_units = _seconds_of_units(word)
        seconds = _seconds_of_clock(word) if with_units is None else with_units
        if seconds == 0:
            raise UnitError("Slurm reads 0 as unlimited")
        if seconds > LONGEST_SECONDS:
            raise UnitError("it is longer than Slurm can count (24855 days)")
        return cls(seconds)

    def __str__(self) -> str:
        if self.seconds is None:
            return "UNLIMITED"
        days, rest = divmod(self.seconds, DAY)
        clock = f"{rest // HOUR:02d}:{rest % HOUR // MINUTE:02d}:{rest % MINUTE:02d}"
        return f"{days}-{clock}" if days else clock


def parse_duration(text: str) -> timedelta:
    """Read a duration such as ``90s``, ``10min`` or ``1h30m``.

    Args:
        text: numbers with their units, the largest first; with decimals, if it is a whole number of seconds.

    Returns:
        The duration, at least one second.

    Raises:
        UnitError: the text is not a duration, is zero, or is not a whole number of seconds.
    """
    word = text.strip()
    seconds = _seconds_of_units(word)
    if seconds is None:
        if re.fullmatch(r"[0-9.]+", word, re.ASCII):
            raise UnitError("it has no unit")
        raise UnitError("it is not a duration")
    if seconds == 0:
        raise UnitError("it must be longer than zero")
    if seconds > LONGEST_SECONDS:
        raise UnitError("it is longer than 24855 days")
    return timedelta(seconds=seconds)


def format_duration(duration: timedelta) -> str:
    """Return the shortest text that ``parse_duration`` reads back as this duration (whole seconds)."""
    seconds = round(duration.total_seconds())
    unit, size = next((unit, size) for unit, size in UNIT_SECONDS.items() if seconds % size == 0)
    return f"{seconds // size}{unit}"


def _seconds_of_units(word: str) -> int | None:
    """Return the seconds of numbers with their units, ``1h30m``; None for another text."""
    if not _WITH_UNITS.fullmatch(word):
        return None
    parts = [(Decimal(number), UNITS.get(unit.lower())) for number, unit in _NUMBER_AND_UNIT.findall(word)]
    sizes = [0 if unit is None else UNIT_SECONDS.get(unit, DAY) for _, unit in parts]
    if 0 in sizes or sizes != sorted(set(sizes), reverse=True):
        return None
    seconds = sum(number * size for (number, _), size in zip(parts, sizes, strict=True))
    if seconds != int(seconds):
        raise UnitError("it is not a whole number of seconds")
    return int(seconds)


def _seconds_of_clock(word: str) -> int:
    match = _CLOCK.fullmatch(word)
    if match is None:
        raise UnitError("it is not a time that Slurm accepts")
    parts = [int(part) for part in match["parts"].split(":")]
    if match["days"] is not None:
        return int(match["days"]) * DAY + _hours_first(parts)
    if len(parts) == 1:
        return parts[0] * MINUTE
    _check_below(parts[1:], 60)
    hours, minutes, seconds = [0, *parts][-3:]
    return hours * HOUR + minutes * MINUTE + seconds


def _hours_first(parts: list[int]) -> int:
    """Return the seconds of ``hours[:minutes[:seconds]]``, the part after the days (man sbatch, --time)."""
    if parts[0] * HOUR >= DAY:
        raise UnitError(f"it has {parts[0]} hours after the days, but a day has 24")
    _check_below(parts[1:], 60)
    return sum(part * size for part, size in zip(parts, (HOUR, MINUTE, 1), strict=False))


def _check_below(parts: list[int], limit: int) -> None:
    for part in parts:
        if part >= limit:
            raise UnitError(f"it has {part} as minutes or seconds, which must be below {limit}")
