"""The cause of the end of a job, for every record of Slurm that was seen."""

import pytest

from hpcddp.stop.reasons import Cause, JobFacts, cause_of

ROWS = [
    # (what happened, what scontrol showed about an attempt started with restart count 2, the cause)
    ("preempted, in its grace time", JobFacts(state="RUNNING", restarts=2, preempted=True), Cause.PREEMPTION),
    (
        "preempted, with the warning signal",
        JobFacts(state="RUNNING", restarts=2, preempted=True, warned=True),
        Cause.PREEMPTION,
    ),
    (
        "preempted, a rank failed in the grace time",
        JobFacts(state="RUNNING", restarts=2, preempted=True, error_seen=True),
        Cause.PREEMPTION,
    ),
    (
        "PreemptMode=CANCEL, the grace is over",
        JobFacts(state="COMPLETING", restarts=2, preempted=True),
        Cause.PREEMPTION,
    ),
    ("PreemptMode=CANCEL, all is over", JobFacts(state="PREEMPTED", restarts=2, preempted=True), Cause.PREEMPTION),
    ("preempted without grace", JobFacts(state="COMPLETING", restarts=3), Cause.REQUEUED),
    ("requeued and already waiting", JobFacts(state="PENDING", restarts=3, reason="BeginTime"), Cause.REQUEUED),
    ("scontrol requeue", JobFacts(state="COMPLETING", restarts=3, error_seen=True), Cause.REQUEUED),
    ("scontrol requeuehold", JobFacts(state="REQUEUE_HOLD", restarts=3), Cause.REQUEUED),
    ("warned of the time limit", JobFacts(state="RUNNING", restarts=2, warned=True), Cause.TIME_LIMIT),
    ("the time limit", JobFacts(state="COMPLETING", restarts=2, reason="TimeLimit", warned=True), Cause.TIME_LIMIT),
    ("the time limit, all is over", JobFacts(state="TIMEOUT", restarts=2, reason="TimeLimit"), Cause.TIME_LIMIT),
    ("scancel", JobFacts(state="COMPLETING", restarts=2), Cause.CANCELLED),
    ("scancel after the warning", JobFacts(state="COMPLETING", restarts=2, warned=True), Cause.CANCELLED),
    ("scancel, all is over", JobFacts(state="CANCELLED", restarts=2), Cause.CANCELLED),
    ("a node is lost for good", JobFacts(state="NODE_FAIL", restarts=2), Cause.NODE_FAILURE),
    ("a rank crashed", JobFacts(state="RUNNING", restarts=2, error_seen=True), Cause.CRASH),
    ("somebody signalled a rank", JobFacts(state="RUNNING", restarts=2), Cause.UNKNOWN),
    ("no answer", JobFacts(state=None), Cause.UNKNOWN),
    ("no answer, warned", JobFacts(state=None, warned=True), Cause.TIME_LIMIT),
    ("no answer, a rank crashed", JobFacts(state=None, warned=True, error_seen=True), Cause.CRASH),
]


@pytest.mark.parametrize(("facts", "cause"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_what_slurm_shows_names_the_cause(facts: JobFacts, cause: Cause) -> None:
    asked = JobFacts(
        state=facts.state,
        restarts=facts.restarts,
        restarts_at_start=2,
        preempted=facts.preempted,
        reason=facts.reason,
        warned=facts.warned,
        error_seen=facts.error_seen,
    )
    assert cause_of(asked) is cause
