"""What happens after an attempt, as a table."""

from typing import Any

import pytest

from hpcddp.stop.reasons import Cause
from hpcddp.supervise.decision import Action, ActionKind, EndFacts, decide
from tests.facts import assert_facts
from tests.messages import GoldenMessages

CAUSES = list(Cause)

ROWS: list[tuple[str, dict[str, Any], ActionKind, int]] = [
    ("finished", {"finished": True, "cause": Cause.UNKNOWN}, ActionKind.FINISH, 0),
    ("finished and preempted", {"finished": True, "cause": Cause.PREEMPTION}, ActionKind.FINISH, 0),
    ("a newer attempt", {"fenced": True, "finished": True, "cause": Cause.PREEMPTION}, ActionKind.FENCED, 76),
    ("the user's code", {"error_code": 70, "cause": Cause.CRASH}, ActionKind.FAIL, 70),
    ("the user's code while preempted", {"error_code": 70, "cause": Cause.PREEMPTION}, ActionKind.FAIL, 70),
    ("no usable checkpoint", {"error_code": 65, "cause": Cause.CRASH}, ActionKind.FAIL, 65),
    ("cancelled", {"cause": Cause.CANCELLED}, ActionKind.CANCEL, 130),
    ("cancelled, a peer was lost", {"cause": Cause.CANCELLED, "error_code": 71}, ActionKind.CANCEL, 130),
    ("preempted", {"cause": Cause.PREEMPTION}, ActionKind.REQUEUE, 75),
    ("preempted, a peer was lost", {"cause": Cause.PREEMPTION, "error_code": 71}, ActionKind.REQUEUE, 75),
    ("time limit", {"cause": Cause.TIME_LIMIT}, ActionKind.REQUEUE, 75),
    ("a node was lost", {"cause": Cause.NODE_FAILURE}, ActionKind.REQUEUE, 75),
    ("stopped for another reason", {"cause": Cause.UNKNOWN}, ActionKind.REQUEUE, 75),
    (
        "requeued by somebody else",
        {"cause": Cause.REQUEUED, "why_without_progress": "no progress"},
        ActionKind.LEAVE_TO_SLURM,
        75,
    ),
    (
        "requeued by its user",
        {"cause": Cause.REQUEUED, "requested": True, "why_without_progress": "x", "why_used_up": "y"},
        ActionKind.REQUEUE,
        75,
    ),
    (
        "requeued by its user where requeue is forbidden",
        {"cause": Cause.REQUEUED, "requested": True, "requeue_allowed": False},
        ActionKind.STOP,
        75,
    ),
    (
        "requeued by its user, and the user's code failed",
        {"cause": Cause.REQUEUED, "requested": True, "error_code": 70},
        ActionKind.FAIL,
        70,
    ),
    ("a crash within the budget", {"cause": Cause.CRASH}, ActionKind.REQUEUE, 75),
    ("a crash that a restart repairs", {"cause": Cause.CRASH, "can_restart": True}, ActionKind.RESTART, 75),
    (
        "a crash on this machine that a restart repairs",
        {"cause": Cause.CRASH, "can_restart": True, "on_slurm": False},
        ActionKind.RESTART,
        75,
    ),
    (
        "a restart over the budget",
        {"cause": Cause.CRASH, "can_restart": True, "why_used_up": "x"},
        ActionKind.FAIL,
        71,
    ),
    ("a crash over the budget", {"cause": Cause.CRASH, "why_used_up": "max_failures is 0"}, ActionKind.FAIL, 71),
    ("a hang within the budget", {"cause": Cause.CRASH, "error_code": 124}, ActionKind.REQUEUE, 75),
    ("a hang over the budget", {"cause": Cause.CRASH, "error_code": 124, "why_used_up": "x"}, ActionKind.FAIL, 124),
    ("a preemption over the budget", {"cause": Cause.PREEMPTION, "why_used_up": "x"}, ActionKind.FAIL, 93),
    ("no progress", {"cause": Cause.TIME_LIMIT, "why_without_progress": "x"}, ActionKind.FAIL, 93),
    (
        "no progress and crashes",
        {"cause": Cause.CRASH, "why_without_progress": "x", "why_used_up": "y"},
        ActionKind.FAIL,
        93,
    ),
    ("a cause that is not named", {"cause": Cause.TIME_LIMIT, "causes": frozenset()}, ActionKind.STOP, 75),
    ("requeue is forbidden", {"cause": Cause.PREEMPTION, "requeue_allowed": False}, ActionKind.STOP, 75),
    ("a chain with a job left", {"cause": Cause.TIME_LIMIT, "later_jobs": ["8"]}, ActionKind.CONTINUE, 75),
    (
        "a chain goes on after a cause that is not named",
        {"cause": Cause.TIME_LIMIT, "later_jobs": ["8"], "causes": frozenset(), "requeue_allowed": False},
        ActionKind.CONTINUE,
        75,
    ),
    ("the last job of a chain", {"cause": Cause.TIME_LIMIT, "later_jobs": []}, ActionKind.STOP, 75),
    (
        "a chain whose user requested a requeue",
        {"cause": Cause.REQUEUED, "later_jobs": ["8"], "requested": True},
        ActionKind.CONTINUE,
        75,
    ),
    (
        "a crash in a chain that a restart repairs",
        {"cause": Cause.CRASH, "later_jobs": ["8"], "can_restart": True},
        ActionKind.RESTART,
        75,
    ),
    (
        "a crash in a chain over the budget",
        {"cause": Cause.CRASH, "later_jobs": ["8"], "why_used_up": "x"},
        ActionKind.FAIL,
        71,
    ),
    ("a chain that is cancelled", {"cause": Cause.CANCELLED, "later_jobs": ["8"]}, ActionKind.CANCEL, 130),
    ("the time limit of a local run", {"cause": Cause.TIME_LIMIT, "on_slurm": False}, ActionKind.STOP, 75),
    ("a crash of a local run", {"cause": Cause.CRASH, "on_slurm": False}, ActionKind.FAIL, 71),
]


@pytest.mark.parametrize(("facts", "deed", "code"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_the_facts_name_the_deed(facts: dict[str, Any], deed: ActionKind, code: int) -> None:
    action = decide(EndFacts(**facts))
    assert (action.kind, action.exit_code) == (deed, code)


@pytest.mark.parametrize("cause", CAUSES)
def test_whatever_happened_a_user_error_is_never_requeued(cause: Cause) -> None:
    assert decide(EndFacts(cause=cause, error_code=70)).kind is ActionKind.FAIL


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("requeue_allowed", [True, False])
def test_a_finished_run_is_left_alone_whatever_happened(cause: Cause, *, requeue_allowed: bool) -> None:
    facts = EndFacts(cause=cause, finished=True, error_code=70, requeue_allowed=requeue_allowed)
    assert decide(facts) == Action(kind=ActionKind.FINISH, exit_code=0)


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"cause": Cause.TIME_LIMIT, "causes": frozenset()}, "requeue.causes does not name time_limit"),
        ({"cause": Cause.PREEMPTION, "requeue_allowed": False}, "not allowed to requeue it (Requeue=0)"),
        ({"cause": Cause.TIME_LIMIT, "on_slurm": False}, "runs on this machine are not requeued"),
        ({"cause": Cause.PREEMPTION, "why_without_progress": "no progress"}, "no progress"),
    ],
)
def test_what_does_not_go_on_says_why(facts: dict[str, Any], why: str, golden: GoldenMessages) -> None:
    assert_facts(golden.message(decide(EndFacts(**facts)).why), why)
