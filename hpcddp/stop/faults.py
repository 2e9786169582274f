"""Fault injection: a process kills, stops or delays itself, or raises, at a named point, for tests of recovery.

A task arms the faults that ``HPCDDP_FAULTS`` describes; without it nothing is injected. Several faults are separated
by ``;``::

    ACTION@POINT[:STEP][,rank=R][,attempt=A]

    kill@step:20,rank=1,attempt=0      rank 1 of the first attempt is killed before its step 21
    kill=TERM@step:20,rank=1           it sends itself that signal
    sleep=2@save.rename                every save takes 2 s longer, just before its checkpoint gets its name
    exception@step:5                   an exception, like one of the user's code
    oserror=ENOSPC@save.file           an error of the operating system, like that of a full disk
    exit=3@step:5                      os._exit(3)
    stop@step:5,rank=0                 SIGSTOP: the process is stopped

A fault without a step, a rank or an attempt is injected at each of them.
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
"""The environment variable that describes faults; a job file sets it in ``environment.env``."""

Point = Literal[
    "step",
    "evaluation",
    "save.begin",
    "save.file",
    "save.manifest",
    "save.rename",
    "save.latest",
    "save.prune",
    "best",
]
"""The points of injection: a step boundary, before an evaluation, before each part of a save (``save.begin``: before
all of it), and before ``checkpoints/best`` moves."""

POINTS: Final[tuple[Point, ...]] = get_args(Point)
SAVE_POINTS: Final = tuple(point for point in POINTS if point.startswith("save."))

_FAULT: Final = re.compile(
    r"(?P<action>kill|exception|oserror|exit|stop|sleep)(=(?P<value>[A-Za-z0-9.]+))?"
    rf"@(?P<point>{'|'.join(map(re.escape, POINTS))})(:(?P<step>\d+))?"
    r"(,rank=(?P<rank>\d+))?(,attempt=(?P<attempt>\d+))?",
    re.ASCII,
)


class FaultError(UserError):
    """The description of faults is not valid."""

    kind = "fault"


class InjectedError(RuntimeError):
    """The exception of the action ``exception``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault.

    Args:
        action: what it does to the process.
        value: the name of a signal or an error, an exit code or seconds; None for an action without a value.
        point: where it is injected.
        step: optimizer steps done there; None = any.
        rank: the rank; None = each.
        attempt: the attempt; None = each.
    """

    action: str
    value: str | None
    point: str
    step: int | None = None
    rank: int | None = None
    attempt: int | None = None

    def trigger(self) -> None:
        """Carry out the action in this process."""
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
            name = "STOP" if self.action == "stop" else self.value or "KILL"
            # To this thread: with kill(2) another thread may take the signal, and this one runs on for a moment.
            signal.raise_signal(signal.Signals[f"SIG{name}"])


def parse(text: str) -> list[Fault]:
    """Return the faults that a text describes.

    Raises:
        FaultError: the description is not valid; the message names the part.
    """
    return [_parse_one(part.strip()) for part in text.split(";") if part.strip()]


def _parse_one(text: str) -> Fault:
    match = _FAULT.fullmatch(text)
    if match is None:
        raise FaultError(
            f"{VARIABLE} has {text!r}, which is not ACTION[=VALUE]@POINT[:STEP][,rank=R][,attempt=A]; write for "
            "example kill@step:20,rank=1"
        )
    step, rank, attempt = (None if number is None else int(number) for number in match.group("step", "rank", "attempt"))
    return Fault(
        action=match["action"], value=match["value"], point=match["point"], step=step, rank=rank, attempt=attempt
    )


_armed: list[Fault] = []


def arm(text: str | None, *, rank: int, attempt: int) -> None:
    """Arm faults in this process; they replace those that were armed before.

    Args:
        text: the value of ``HPCDDP_FAULTS``; None or an empty text disarms.
        rank: the rank of this process.

    Raises:
        FaultError: the description is not valid.
    """
    _armed[:] = [
        fault for fault in parse(text or "") if fault.rank in (None, rank) and fault.attempt in (None, attempt)
    ]


def inject(point: Point, *, step: int | None = None) -> None:
    """Trigger the faults that are armed for a point that this process has reached.

    Args:
        step: optimizer steps done.

    Raises:
        InjectedError: the action is ``exception``.
        OSError: the action is ``oserror``.
    """
    for fault in _armed:
        if fault.point == point and fault.step in (None, step):
            fault.trigger()
