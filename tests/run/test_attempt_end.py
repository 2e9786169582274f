"""When and how an attempt ended, by the event log of its run."""

from __future__ import annotations

import time

import pytest

from hpcddp.run.events import Event, NextStart, attempt_end
from hpcddp.stop.reasons import Cause

STOP_OF_RANKS = Event(kind="stop", time=20.0, attempt=0, cause="preemption", saved=True)
STOP = Event(kind="stop", time=22.0, attempt=0, cause="time_limit")
REQUEUE = Event(kind="requeue", time=23.0, attempt=0, cause="preemption", by="hpcddp")
CANCELLED_WHILE_IT_WAITED = Event(kind="stop", time=90.0, attempt=0, cause="cancelled")
RESUMED = Event(kind="resume", time=91.0, attempt=0)
FOUND_AT_START = Event(kind="requeue", time=100.0, attempt=0, cause="node_failure", by="slurm")
FAILURE = Event(kind="failure", time=24.0, attempt=0, cause="crash")
FINISH = Event(kind="finish", time=25.0, attempt=0)
LAST_SAVE = Event(kind="save", time=26.0, attempt=0, step=3)
OF_ANOTHER = Event(kind="failure", time=27.0, attempt=1)


def submitted_at(moment: float) -> NextStart:
    """Return a start at 100 s of a job that Slurm requeued at some moment."""
    return NextStart(time=100.0, submit_time=time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(moment)))


@pytest.mark.parametrize(
    ("events", "next_start", "ended", "is_known"),
    [
        ([STOP_OF_RANKS, REQUEUE], submitted_at(30), 23.0, True),
        ([STOP_OF_RANKS, STOP, CANCELLED_WHILE_IT_WAITED, RESUMED], submitted_at(95), 22.0, True),
        ([STOP_OF_RANKS, REQUEUE, CANCELLED_WHILE_IT_WAITED], None, 23.0, True),
        ([STOP_OF_RANKS], None, 20.0, True),
        ([FAILURE, OF_ANOTHER], None, 24.0, True),
        ([FINISH, LAST_SAVE], None, 26.0, True),
        ([LAST_SAVE, FOUND_AT_START], submitted_at(40), 40.0, True),
        ([LAST_SAVE, FOUND_AT_START], submitted_at(20), 26.0, False),
        ([LAST_SAVE, FOUND_AT_START], NextStart(time=100.0, submit_time=None), 26.0, False),
        ([OF_ANOTHER], None, 12.0, False),
    ],
)
def test_time_of_the_end(events: list[Event], next_start: NextStart | None, ended: float, *, is_known: bool) -> None:
    end = attempt_end(events, 0, last_sign=12.0, next_start=next_start)
    assert (end.time, end.is_time_known) == (ended, is_known)


def test_cause_is_the_first_that_is_known() -> None:
    unknown = Event(kind="stop", time=19.0, attempt=0, cause="unknown")
    end = attempt_end([unknown, STOP_OF_RANKS, REQUEUE], 0, last_sign=0.0, next_start=None)
    assert (end.cause, end.continuation, end.kinds) == (Cause.PREEMPTION, "requeued", ("stop", "stop", "requeue"))


def test_requeue_that_is_found_at_the_next_start_counts() -> None:
    end = attempt_end([LAST_SAVE, FOUND_AT_START], 0, last_sign=0.0, next_start=submitted_at(40))
    assert (end.cause, end.continuation) == (Cause.NODE_FAILURE, "requeued")


def test_a_restart_ends_an_attempt_when_its_script_records_it() -> None:
    restart = Event(kind="restart", time=21.0, attempt=0, cause="crash")
    end = attempt_end([LAST_SAVE, restart], 0, last_sign=0.0, next_start=NextStart(time=21.1, submit_time=None))
    assert (end.cause, end.continuation, end.time, end.is_time_known) == (Cause.CRASH, "restarted", 21.0, True)
