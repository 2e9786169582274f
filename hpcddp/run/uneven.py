"""Ranks of a command that lost another one: it had ended while they still waited for it, or it did not come in time."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Final, Protocol

from hpcddp.run.directory import AttemptDirectory
from hpcddp.run.files import TAIL_BYTES, read_tail
from hpcddp.run.job_records import member_word, read_exits, read_ranks
from hpcddp.run.record import RecordError

# A frame of a traceback (traceback.StackSummary.format).
_FRAME: Final = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)$', re.MULTILINE)
# Functions of torch's decorators, which stand around its own.
_DECORATORS: Final = frozenset({"wrapper", "inner", "_fn", "decorate_context"})
_LIBRARIES: Final = ("site-packages", "dist-packages", "<frozen ", "/lib/python3")
# What faulthandler writes if torch aborts in its destructors, when Python has ended: no thread has a frame.
_ABORTED_AT_EXIT: Final = re.compile(
    r"^Fatal Python error: Aborted\n\n(?:Thread .*\n  <no Python frame>\n+)+", re.MULTILINE
)
# torchrun names each rank that failed; this stands for none (torch/distributed/elastic/multiprocessing/errors).
_NO_OTHER: Final = "<NO_OTHER_FAILURES>"
_CHILD_FAILED: Final = "ChildFailedError"
# The process of the peer has ended, so the system of its host has closed the connection.
_CLOSED: Final = re.compile("connection (?:closed|reset) by peer", re.IGNORECASE)
# gloo, NCCL's watchdog, and the store.
_TIMED_OUT: Final = re.compile("timed out waiting|collective operation timeout|socket timeout", re.IGNORECASE)


class Failed(Protocol):
    """What is read of the record of a rank that failed."""

    @property
    def rank(self) -> int:
        """The rank."""

    @property
    def time(self) -> float:
        """Seconds since the epoch."""

    @property
    def traceback(self) -> str:
        """The whole traceback."""

    @property
    def secondary(self) -> bool:
        """Whether it only failed because another one had gone."""

    @property
    def place(self) -> str:
        """Which rank it is, and where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenRanks:
    """The ranks that came to their end, and one that lost them.

    Args:
        ended: their numbers; empty where a launcher has started them and does not say which they are.
        waited: the record of the rank that lost them.
        have_aborted: whether one of them aborted when Python had ended, as torch can if a process group is left open.
    """

    ended: Sequence[int]
    waited: Failed
    have_aborted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedOutRanks:
    """The ranks that did not come to a collective, and one that waited for them until its timeout.

    Args:
        missing: their numbers; empty if all ranks waited.
        waited: the record of the rank that waited.
    """

    missing: Sequence[int]
    waited: Failed


def place_of(traceback: str) -> str:
    """Return where a rank was that lost another one: ``backward (train.py:54)``."""
    frames = list(_frames(traceback))
    own = next((frame for frame in reversed(frames) if not _is_library(frame["file"])), None)
    if own is None:
        return "a collective"
    called = frames[frames.index(own) + 1 :]
    named = (frame["function"] for frame in called if frame["function"] not in _DECORATORS)
    function = next(named, own["function"])
    return f"{function} ({PurePath(own['file']).name}:{own['line']})"


def find_timed_out(attempt: AttemptDirectory, records: Sequence[Failed]) -> TimedOutRanks | None:
    """Return which ranks of an attempt did not come; None if any rank has another cause, or none timed out.

    Args:
        attempt: an attempt whose tasks have ended.
        records: its failures, as ``read_failures`` returns them.
    """
    timed_out = [record for record in records if _TIMED_OUT.search(record.traceback)]
    if not timed_out or not all(record.secondary for record in records):
        return None
    try:
        ranks = read_ranks(attempt)
    except RecordError:
        return None
    missing = {*range(len(ranks or ()))} - {record.rank for record in records}
    return TimedOutRanks(missing=sorted(missing), waited=min(timed_out, key=lambda record: record.time))


def find_uneven(
    attempt: AttemptDirectory, records: Sequence[Failed], ended_by_srun: Collection[int] = ()
) -> UnevenRanks | None:
    """Return which ranks of an attempt left the others behind; None if any rank has another cause, or none did.

    Args:
        attempt: an attempt whose tasks have ended.
        records: its failures, as ``read_failures`` returns them.
        ended_by_srun: the tasks that srun has ended, because another one had ended.
    """
    aborted = [record.rank for record in records if _ABORTED_AT_EXIT.search(record.traceback)]
    others = [record for record in records if record.rank not in aborted]
    lost = [record for record in others if record.secondary and record.traceback.startswith("Traceback ")]
    if not lost or not all(record.secondary for record in others):
        return None
    try:
        exits, ranks = read_exits(attempt), read_ranks(attempt)
    except RecordError:
        return None
    waited = min(lost, key=lambda record: record.time)
    if member_word(attempt) == "task":
        # A launcher ends at once if one of its ranks fails, and waits for the other launchers if its ranks end well.
        told = {exit_.rank for exit_ in exits if exit_.notice is not None}
        left = {*range(len(ranks or ()))} - {record.rank for record in lost}
        have_waited = left <= {*told, *ended_by_srun} and not any(_names_a_rank(attempt, task) for task in left)
        is_closed = not left or _CLOSED.search(waited.traceback) is not None
        says_none = _NO_OTHER in read_tail(attempt.rank_log(waited.rank), TAIL_BYTES)
        uneven = ranks is not None and have_waited and is_closed and says_none
        return UnevenRanks(ended=(), waited=waited) if uneven else None
    ended = aborted + [exit_.rank for exit_ in exits if exit_.code == 0 and exit_.notice is None]
    known = {*(exit_.rank for exit_ in exits), *(record.rank for record in records)}
    is_complete = ranks is not None and len(known) == len(ranks)
    if not ended or not is_complete:
        return None
    return UnevenRanks(ended=sorted(ended), waited=waited, have_aborted=bool(aborted))


def _names_a_rank(attempt: AttemptDirectory, task: int) -> bool:
    """Return whether torchrun says in the log of a task that a rank of it failed."""
    return _CHILD_FAILED in read_tail(attempt.rank_log(task), TAIL_BYTES)


def _frames(traceback: str) -> Iterator[re.Match[str]]:
    yield from _FRAME.finditer(traceback)


def _is_library(file: str) -> bool:
    return any(part in file for part in _LIBRARIES)
