"""The states of a job, and the cause of its end for every record of Slurm that was seen."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from hpcddp.slurm.job import ENDED_STATES, JOB_STATES, ask_end, cause_of, end_time_of
from hpcddp.slurm.job_environment import NO_LIMIT_S
from hpcddp.stop.reasons import Cause
from tests.slurm.programs import program


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
    ("slurmctld has forgotten this start", waiting("COMPLETING", 2), {}, Cause.REQUEUED),
    ("scancel after a requeue", shown("COMPLETING", 3), {}, Cause.CANCELLED),
    ("scancel after a requeue, all is over", shown("CANCELLED", 3), {}, Cause.CANCELLED),
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
    assert not any(state.is_waiting and state.has_ended for state in JOB_STATES.values())
    assert {
        "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED",
        "TIMEOUT",
    } == ENDED_STATES  # fmt: skip


ALLOCATION = {"EndTime": "1970-01-01T00:01:00", "TimeLimit": "00:01:00"}
HERE = {"HPCDDP_LOCAL_JOB_ID": "99", "SLURM_JOB_ID": "7"}


@pytest.mark.parametrize(
    ("job", "environment", "end"),
    [
        ({"EndTime": "1970-01-01T00:01:00", "TimeLimit": "00:01:00"}, {}, 60.0 + time.timezone),
        ({"EndTime": "2026-01-01T00:00:00", "TimeLimit": "UNLIMITED"}, {}, None),
        ({"EndTime": "Unknown", "TimeLimit": "00:01:00"}, {}, None),
        ({"EndTime": "(null)", "TimeLimit": "00:01:00"}, {}, None),
        (None, {"SLURM_JOB_END_TIME": "77"}, 77.0),
        (None, {"SUBMITIT_LOCAL_TIMEOUT_S": "60"}, 65.0),
        (None, {"SUBMITIT_LOCAL_TIMEOUT_S": str(NO_LIMIT_S)}, None),
        (None, {}, None),
        # A run in an allocation: the earlier one of both ends.
        (ALLOCATION, HERE | {"SUBMITIT_LOCAL_TIMEOUT_S": "30"}, 35.0 + time.timezone),
        (ALLOCATION, HERE | {"SUBMITIT_LOCAL_TIMEOUT_S": "90"}, 60.0 + time.timezone),
        (ALLOCATION, HERE | {"SUBMITIT_LOCAL_TIMEOUT_S": str(NO_LIMIT_S)}, 60.0 + time.timezone),
        (ALLOCATION | {"TimeLimit": "UNLIMITED"}, HERE | {"SUBMITIT_LOCAL_TIMEOUT_S": "30"}, 35.0),
        (None, HERE | {"SUBMITIT_LOCAL_TIMEOUT_S": "30"}, 35.0),
    ],
)
def test_the_end_of_the_jobs_time_is_known_at_the_start(
    job: dict[str, str] | None, environment: dict[str, str], end: float | None
) -> None:
    assert end_time_of(job, environment, now=5.0) == end


@pytest.mark.parametrize(
    ("answer", "end"),
    [
        ("JobState=RUNNING TimeLimit=00:01:00 EndTime=1970-01-01T00:01:00", 60.0 + time.timezone),
        ("JobState=RUNNING TimeLimit=UNLIMITED EndTime=Unknown", None),
    ],
)
def test_slurm_says_when_a_job_ends(
    answer: str, end: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", program(tmp_path, "scontrol", f"echo '{answer}'")["PATH"])
    known = ask_end("7")
    assert known is not None
    assert known.end_time == end
    assert abs(known.time - time.time()) < 60


@pytest.mark.parametrize(
    "body",
    [
        "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1",
        "kill -TERM $$",
        "echo 'JobState=RUNNING PreemptTime=None TimeLimit=00:01:00 EndTime=Unknown'",
        "echo 'JobState=COMPLETING PreemptTime=None TimeLimit=00:01:00 EndTime=1970-01-01T00:01:00'",
        "echo 'JobState=RUNNING PreemptTime=2026-11-21T12:00:00 TimeLimit=00:01:00 EndTime=1970-01-01T00:01:00'",
    ],
    ids=["no controller", "killed", "unknown", "it is ending", "it is in its grace time"],
)
def test_an_end_that_slurm_does_not_say_is_not_known(
    body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", program(tmp_path, "scontrol", body)["PATH"])
    assert ask_end("7") is None
