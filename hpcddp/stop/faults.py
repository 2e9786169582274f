"""Faults on purpose: what a process does to itself at a named place, so that tests can show what it survives.

Nothing happens unless a text is armed; a task arms what ``HPCDDP_FAULTS`` holds. One fault, or several with ``;``
between them::

    ACTION@POINT[:STEP][,rank=R][,attempt=A]

    kill@step:20,rank=1,attempt=0      rank 1 of the first attempt is killed before its step 21
    kill=TERM@step:20,rank=1           it sends itself that signal
    sleep=2@save.rename                every save takes 2 s longer, just before its checkpoint gets its name
    exception@step:5                   an exception, as of the user's code
    oserror=ENOSPC@save.file           an error of the operating system, as of a full disk
    exit=3@step:5                      os._exit(3)
    stop@step:5,rank=0                 SIGSTOP: the process stands still

Without a step, a rank or an attempt it is every one of them.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import time
from dataclasses import dataclass
from typing import Final, Literal, get_args

from hpcddp.errors import UserError

VARIABLE: Final = "HPCDDP_FAULTS"
"""The environment variable that a task arms; the job file passes it as ``environment.env``."""

Point = Literal["step", "save.begin", "save.file", "save.manifest", "save.rename", "save.latest", "save.prune"]
"""Where a fault can be: at the boundary of a step, and before each part of a save (``save.begin`` before all of it)."""

POINTS: Final[tuple[Point, ...]] = get_args(Point)
SAVE_POINTS: Final = tuple(point for point in POINTS if point.startswith("save."))

_FAULT = re.compile(
    r"(?P<action>[a-z]+)(=(?P<value>[A-Za-z0-9.]+))?@(?P<point>[a-z.]+)(:(?P<step>\d+))?(?P<conditions>(,[a-z]+=\d+)*)",
    re.ASCII,
)
_ACTIONS: Final = ("kill", "exception", "oserror", "exit", "stop", "sleep")
_CONDITIONS: Final = ("rank", "attempt")


class FaultError(UserError):
    """The text that describes faults cannot be read."""

    kind = "fault"


class InjectedError(RuntimeError):
    """The exception of the action ``exception``; stands for one of the user's code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault.

    Args:
        action: what happens.
        value: a signal's name, an error's name, an exit code or seconds; None where the action needs none.
        point: where.
        step: optimizer steps done there; None = any.
        rank: on which rank; None = on each.
        attempt: in which attempt; None = in each.
    """

    action: str
    value: str | None
    point: Point
    step: int | None = None
    rank: int | None = None
    attempt: int | None = None

    def fits(self, *, rank: int, attempt: int) -> bool:
        """Return whether it may happen in a process."""
        return self.rank in (None, rank) and self.attempt in (None, attempt)

    def happen(self) -> None:
        """Do it to this process."""
        if self.action == "sleep":
            time.sleep(float(self.value or 0))
        elif self.action == "exception":
            raise InjectedError(f"a fault was asked for at {self.point}")
        elif self.action == "oserror":
            number = getattr(errno, self.value or "")
            raise OSError(number, os.strerror(number))
        elif self.action == "exit":
            os._exit(int(self.value or 0))
        else:
            # To this very thread: with kill(2) another one takes the signal, and this one runs on for a moment.
            signal.raise_signal(signal.SIGSTOP if self.action == "stop" else _signal(self.value))


def _signal(name: str | None) -> signal.Signals:
    return signal.Signals[f"SIG{name or 'KILL'}"]


def parse(text: str) -> list[Fault]:
    """Return the faults that a text describes.

    Raises:
        FaultError: says which part cannot be read, and why.
    """
    return [_parse_one(part.strip()) for part in text.split(";") if part.strip()]


def _parse_one(text: str) -> Fault:
    match = _FAULT.fullmatch(text)
    if match is None:
        raise _unreadable(text, "it is not ACTION[=VALUE]@POINT[:STEP][,rank=R][,attempt=A]")
    action, value = match["action"], match["value"]
    if action not in _ACTIONS:
        raise _unreadable(text, f"an action is one of {', '.join(_ACTIONS)}")
    if not _has_its_value(action, value):
        raise _unreadable(text, f"{action} does not go with {value or 'no value'}")
    point = next((known for known in POINTS if known == match["point"]), None)
    if point is None:
        raise _unreadable(text, f"a point is one of {', '.join(POINTS)}")
    conditions = dict(pair.split("=") for pair in match["conditions"].split(",")[1:])
    if unknown := conditions.keys() - set(_CONDITIONS):
        raise _unreadable(text, f"{unknown.pop()} is neither rank nor attempt")
    numbers = {name: int(number) for name, number in conditions.items()}
    step = None if match["step"] is None else int(match["step"])
    return Fault(action=action, value=value, point=point, step=step, **numbers)


def _has_its_value(action: str, value: str | None) -> bool:
    if action in ("exception", "stop"):
        return value is None
    if action == "kill":
        return value is None or f"SIG{value}" in signal.Signals.__members__
    if value is None:
        return False
    if action == "oserror":
        return value in errno.errorcode.values()
    return re.fullmatch(r"\d+" if action == "exit" else r"\d+(\.\d+)?", value) is not None


def _unreadable(text: str, why: str) -> FaultError:
    return FaultError(f"{VARIABLE} has {text!r}, which cannot be read: {why}; write for example kill@step:20,rank=1")


_armed: list[Fault] = []


def arm(text: str | None, *, rank: int, attempt: int) -> None:
    """Let faults happen in this process from now on; they replace those armed before.

    Args:
        text: what ``HPCDDP_FAULTS`` holds; None or nothing disarms.
        rank: this process's rank.
        attempt: the attempt's number.

    Raises:
        FaultError: the text cannot be read.
    """
    _armed[:] = [fault for fault in parse(text or "") if fault.fits(rank=rank, attempt=attempt)]


def reach(point: Point, *, step: int | None = None) -> None:
    """Say that this process is at a point; what is armed for it happens.

    Args:
        point: the point.
        step: optimizer steps done.

    Raises:
        InjectedError: the fault is an exception.
        OSError: the fault is one.
    """
    for fault in _armed:
        if fault.point == point and fault.step in (None, step):
            fault.happen()
