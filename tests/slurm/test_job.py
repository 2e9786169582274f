"""The states of a job, and the cause of its end for every record of Slurm that was seen."""

from __future__ import annotations

from typing import Any

import pytest

from hpcddp.slurm.job import ENDED_STATES, JOB_STATES, JobState, cause_of
from hpcddp.stop.reasons import Cause


def shown(state: str, restarts: int = 2, reason: str = "None", *, preempted: bool = False) -> dict[str, str]:
    """Return the fields that scontrol shows of a job that has started."""
    return {**waiting(state, restarts, reason), "PreemptTime": "2026-11-21T12:00:00" if preempted else "None"}


def waiting(state: str, restarts: int = 2, reason: str = "None") -> dict[str, str]:
    """Return the fields that scontrol shows of a job that waits for its start, also while it still ends."""
    return {"JobState": state, "Restarts": str(restarts), "Reason": reason}


ROWS: list[tuple[str, dict[str, str] | None, dict[str, Any], Cause]] = [
    # (what happened, what scontrol showed about an attempt started with restart count 2, what else is known, the cause)
    ("preempted, in its grace time", shown("RUNNING", preempted=True), {}, Cause.PREEMPTION),
    ("preempted, with the warning signal", shown("RUNNING", preempted=True), {"warned": True}, Cause.PREEMPTION),
    (
        "preempted, a rank failed in the grace time",
        shown("RUNNING", preempted=True),
        {"error_seen": True},
        Cause.PREEMPTION,
    ),
    ("preempted, as the batch log says", shown("RUNNING"), {"preempted": True}, Cause.PREEMPTION),
    ("PreemptMode=CANCEL, the grace is over", shown("COMPLETING", preempted=True), {}, Cause.PREEMPTION),
    ("PreemptMode=CANCEL, all is over", shown("PREEMPTED", preempted=True), {}, Cause.PREEMPTION),
    ("PreemptMode=CANCEL without grace, the log", shown("COMPLETING"), {"preempted": True}, Cause.PREEMPTION),
    ("preempted without grace", waiting("COMPLETING", 3), {}, Cause.REQUEUED),
    ("requeued and already waiting", waiting("PENDING", 3, "BeginTime"), {}, Cause.REQUEUED),
    ("requeued and already running again", shown("RUNNING", 3), {}, Cause.REQUEUED),
    ("scontrol requeue", waiting("COMPLETING", 3), {"error_seen": True}, Cause.REQUEUED),
    ("scontrol requeuehold", waiting("REQUEUE_HOLD", 3), {}, Cause.REQUEUED),
    ("requeued, its nodes are booting", shown("CONFIGURING"), {}, Cause.REQUEUED),
    ("warned of the time limit", shown("RUNNING"), {"warned": True}, Cause.TIME_LIMIT),
    ("the time limit", shown("COMPLETING", reason="TimeLimit"), {"warned": True}, Cause.TIME_LIMIT),
    ("the time limit, all is over", shown("TIMEOUT", reason="TimeLimit"), {}, Cause.TIME_LIMIT),
    ("scancel", shown("COMPLETING"), {}, Cause.CANCELLED),
    ("scancel after the warning", shown("COMPLETING"), {"warned": True}, Cause.CANCELLED),
    ("scancel, all is over", shown("CANCELLED"), {}, Cause.CANCELLED),
    ("scancel in the grace time", shown("COMPLETING", preempted=True), {"cancelled": True}, Cause.CANCELLED),
    ("scancel in the grace time, all is over", shown("CANCELLED", preempted=True), {}, Cause.CANCELLED),
    (
        "scancel --batch --signal=TERM, preempted",
        shown("RUNNING", preempted=True),
        {"cancelled": True},
        Cause.PREEMPTION,
    ),
    ("scancel after a requeue", shown("COMPLETING", 3), {}, Cause.CANCELLED),
    ("a node is lost for good", shown("NODE_FAIL"), {}, Cause.NODE_FAILURE),
    ("a rank crashed", shown("RUNNING"), {"error_seen": True}, Cause.CRASH),
    ("a rank crashed, all is over", shown("FAILED"), {"error_seen": True}, Cause.CRASH),
    ("somebody signalled a rank", shown("RUNNING"), {}, Cause.UNKNOWN),
    ("a state of a newer Slurm", shown("A_WORD_OF_TOMORROW"), {}, Cause.UNKNOWN),
    ("no answer", None, {}, Cause.UNKNOWN),
    ("no answer, warned", None, {"warned": True}, Cause.TIME_LIMIT),
    ("no answer, a rank crashed", None, {"warned": True, "error_seen": True}, Cause.CRASH),
]


@pytest.mark.parametrize(("job", "known", "cause"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_what_slurm_shows_names_the_cause(job: dict[str, str] | None, known: dict[str, Any], cause: Cause) -> None:
    assert cause_of(job, restarts_at_start=2, **known) is cause


def test_each_state_waits_runs_or_has_ended() -> None:
    assert set(JOB_STATES.values()) == set(JobState)
    assert not any(state.is_waiting and state.has_ended for state in JobState)
    assert {
        "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED",
        "TIMEOUT",
    } == ENDED_STATES  # fmt: skip
