"""Ranks of a command that lost another one: it had ended while they still waited for it, or it did not come in time."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Final

from hpcddp.run.directory import AttemptDirectory
from hpcddp.run.files import TAIL_BYTES, read_tail
from hpcddp.run.job_records import FailureRecord, member_word, read_exits, read_ranks
from hpcddp.run.record import RecordError

# A frame of a traceback (traceback.StackSummary.format).
_FRAME: Final = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)$', re.MULTILINE)
# Functions of torch's decorators, which stand around its own.
_DECORATORS: Final = frozenset({"wrapper", "inner", "_fn", "decorate_context"})
_LIBRARIES: Final = ("site-packages", "dist-packages", "<frozen ", "/lib/python3")
_PACKAGE: Final = f"{Path(__file__).parents[1]}/"
# What faulthandler writes if torch aborts in its destructors, when Python has ended: no thread has a frame. Where a
# thread of torch aborts before, such as NCCL's watchdog, the main thread has some.
_ABORTED: Final = "Fatal Python error: Aborted"
_NO_FRAME: Final = "<no Python frame>"
_ANY_FRAME: Final = '  File "'
# torchrun names each rank that failed; this stands for none (torch/distributed/elastic/multiprocessing/errors).
_NO_OTHER: Final = "<NO_OTHER_FAILURES>"
_CHILD_FAILED: Final = "ChildFailedError"
# The process of the peer has ended, so the system of its host has closed the connection.
_CLOSED: Final = re.compile("connection (?:closed|reset) by peer", re.IGNORECASE)
# gloo, NCCL's watchdog, and the store.
_TIMED_OUT: Final = re.compile("timed out waiting|collective operation timeout|socket timeout", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenRanks:
    """The ranks that came to their end, and one that lost them.

    Args:
        ended: their numbers; empty where a launcher has started them and does not say which they are.
        waited: the record of the rank that lost them.
        have_aborted: whether one of them aborted when Python had ended, as torch can if a process group is left open.
    """

    ended: Sequence[int]
    waited: FailureRecord
    have_aborted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedOutRanks:
    """The ranks that did not come to a collective, and one that waited for them until its timeout.

    Args:
        missing: their numbers; empty if all ranks waited.
        waited: the record of the rank that waited.
    """

    missing: Sequence[int]
    waited: FailureRecord


def place_of(traceback: str) -> str:
    """Return where a rank was that lost another one: ``backward (train.py:54)``."""
    frames = list(_FRAME.finditer(traceback))
    own_frame = next((frame for frame in reversed(frames) if not is_library(frame["file"])), None)
    if own_frame is None:
        return "a collective"
    called = frames[frames.index(own_frame) + 1 :]
    named = (frame["function"] for frame in called if frame["function"] not in _DECORATORS)
    function = next(named, own_frame["function"])
    return f"{function} ({PurePath(own_frame['file']).name}:{own_frame['line']})"


def find_lost_peers(
    attempt: AttemptDirectory, records: Sequence[FailureRecord], ended_by_srun: Collection[int]
) -> UnevenRanks | TimedOutRanks | None:
    """Return which ranks of an attempt the others lost; None if any rank has another cause, or none lost another one.

    Args:
        attempt: an attempt whose tasks have ended.
        records: its failures, as ``read_failures`` returns them.
        ended_by_srun: the tasks that srun has ended, because another one had ended.
    """
    aborted = {record.rank for record in records if _has_aborted_at_exit(record)}
    failed = [record for record in records if record.rank not in aborted]
    if not all(record.secondary for record in failed):
        return None
    lost_a_peer = [record for record in failed if record.traceback.startswith("Traceback ")]
    if not lost_a_peer:
        return None
    try:
        exits = read_exits(attempt)
        ranks = read_ranks(attempt)
    except RecordError:
        return None
    if ranks is None:
        return None
    told_to_end = {exit_.rank for exit_ in exits if exit_.notice is not None}
    ends = _Ends(
        attempt=attempt,
        numbers=frozenset(range(len(ranks))),
        well=frozenset(exit_.rank for exit_ in exits if exit_.code == 0 and exit_.notice is None),
        aborted=frozenset(aborted),
        told=frozenset({*told_to_end, *ended_by_srun}),
        recorded=frozenset({*(exit_.rank for exit_ in exits), *(record.rank for record in records)}),
    )
    if member_word(attempt) == "task":
        uneven_ranks = _uneven_launchers(lost_a_peer, ends)
    else:
        uneven_ranks = _uneven_ranks(lost_a_peer, ends)
    return uneven_ranks or _timed_out(failed, ends)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ends:
    """How the tasks of an attempt ended.

    Args:
        numbers: all of them.
        well: those with exit code 0 that were not told to end.
        aborted: those that aborted when Python had ended.
        told: those that were told to end, or that srun has ended, because another one had ended.
        recorded: those that left a record of their end.
    """

    attempt: AttemptDirectory
    numbers: frozenset[int]
    well: frozenset[int]
    aborted: frozenset[int]
    told: frozenset[int]
    recorded: frozenset[int]


def _uneven_ranks(lost: Sequence[FailureRecord], ends: _Ends) -> UnevenRanks | None:
    ended = ends.well | ends.aborted
    if not ended or ends.recorded != ends.numbers:
        return None
    return UnevenRanks(ended=sorted(ended), waited=_earliest(lost), have_aborted=bool(ends.aborted))


def _uneven_launchers(lost: Sequence[FailureRecord], ends: _Ends) -> UnevenRanks | None:
    """Return the same for tasks that start launchers.

    A launcher ends at once if one of its ranks fails, and waits for the other launchers if its ranks end well.
    """
    waited = _earliest(lost)
    if _NO_OTHER not in read_tail(ends.attempt.rank_log(waited.rank), TAIL_BYTES):
        return None
    others = ends.numbers - {record.rank for record in lost}
    if others and not _CLOSED.search(waited.traceback):
        return None
    if not others <= ends.told:
        return None
    # torchrun says in the log of a task that a rank of it failed.
    if any(_CHILD_FAILED in read_tail(ends.attempt.rank_log(task), TAIL_BYTES) for task in others):
        return None
    return UnevenRanks(ended=(), waited=waited)


def _timed_out(failed: Sequence[FailureRecord], ends: _Ends) -> TimedOutRanks | None:
    timed_out = [record for record in failed if _TIMED_OUT.search(record.traceback)]
    missing = ends.numbers - {record.rank for record in failed}
    # One that has ended by itself has a cause of its own.
    if not timed_out or not missing <= ends.told:
        return None
    return TimedOutRanks(missing=sorted(missing), waited=_earliest(timed_out))


def _earliest(records: Sequence[FailureRecord]) -> FailureRecord:
    return min(records, key=lambda record: record.time)


def _has_aborted_at_exit(record: FailureRecord) -> bool:
    _, aborted, stacks = record.traceback.partition(_ABORTED)
    return bool(aborted) and _NO_FRAME in stacks and _ANY_FRAME not in stacks


def is_library(file: str) -> bool:
    """Return whether a path in a stack is that of an installed package, of hpcddp or of Python itself."""
    return file.startswith(_PACKAGE) or any(part in file for part in _LIBRARIES)
