"""How often a run may start again, counted in its events."""

from typing import Any

import pytest

from hpcddp.run.events import Event
from hpcddp.stop.reasons import Cause
from hpcddp.supervise.decision import Limits, Spent, is_interruption, spent_of, stuck, used_up
from tests.facts import assert_facts
from tests.messages import GoldenMessages

LIMITS = Limits(preemptions=None, time_limits=2, failures=0, attempts_without_progress=2)


def event(kind: str, step: int | None = None, **known: Any) -> Event:
    return Event(kind=kind, time=0.0, attempt=0, step=step, **known)


def requeue(cause: str) -> Event:
    return event("requeue", cause=cause)


def test_each_cause_has_a_count_of_its_own() -> None:
    causes = ["preemption", "preemption", "time_limit", "crash", "node_failure", "requeued", "unknown"]
    spent = spent_of([requeue(cause) for cause in causes])
    assert spent == Spent(preemptions=2, time_limits=1, failures=1)


def test_a_cause_that_is_missing_or_of_a_newer_version_has_no_count() -> None:
    assert spent_of([event("requeue"), requeue("eviction"), requeue("crash")]) == Spent(failures=1)


def test_an_attempt_that_saves_a_newer_step_makes_progress() -> None:
    events = [event("start"), event("save", 10), event("start"), event("save", 20), event("start")]
    assert spent_of(events).attempts_without_progress == 1


def test_an_attempt_that_is_preempted_before_it_trains_does_not_count() -> None:
    preempted = [event("start"), requeue("preemption")]
    assert spent_of(preempted * 5).attempts_without_progress == 0
    trained = [event("start"), event("train", 0), requeue("preemption")]
    assert spent_of([*trained, *preempted, *trained]).attempts_without_progress == 2


def test_saving_the_same_step_again_is_no_progress() -> None:
    events = [event("start"), event("save", 10), event("start"), event("save", 10), event("start"), event("save", 9)]
    assert spent_of(events).attempts_without_progress == 2


def test_a_person_who_resumes_begins_the_count_anew_but_old_steps_stay_old() -> None:
    events = [event("start"), event("save", 10), event("start"), requeue("time_limit"), event("resume")]
    assert spent_of(events) == Spent()
    assert spent_of([*events, event("start"), event("save", 10)]).attempts_without_progress == 1


def test_a_run_without_progress_says_how_long_and_which_field(golden: GoldenMessages) -> None:
    assert stuck(Spent(attempts_without_progress=1), LIMITS) is None
    why = golden.message(stuck(Spent(attempts_without_progress=2), LIMITS))
    assert_facts(why, "the last 2 attempts", "requeue.max_attempts_without_progress is 2")
    strict = Limits(preemptions=None, time_limits=2, failures=0, attempts_without_progress=1)
    why = golden.message(stuck(Spent(attempts_without_progress=1), strict))
    assert_facts(why, "the last attempt", "requeue.max_attempts_without_progress is 1")
    assert "HPCDDP_PROGRESS_FILE" not in why
    program = Limits(preemptions=None, time_limits=2, failures=0, attempts_without_progress=1, of_program=True)
    why = golden.message(stuck(Spent(attempts_without_progress=1), program))
    assert_facts(why, "the last attempt", "HPCDDP_PROGRESS_FILE", "requeue.max_attempts_without_progress is 1")


@pytest.mark.parametrize(
    ("spent", "cause", "sentence"),
    [
        (Spent(preemptions=1000), Cause.PREEMPTION, None),
        (Spent(time_limits=1), Cause.TIME_LIMIT, None),
        (Spent(time_limits=2), Cause.TIME_LIMIT, "requeue.max_time_limits is 2, all used up"),
        (Spent(), Cause.CRASH, "requeue.max_failures is 0"),
        (Spent(failures=5), Cause.NODE_FAILURE, None),
        (Spent(time_limits=9), Cause.REQUEUED, None),
        (Spent(time_limits=9), Cause.UNKNOWN, None),
    ],
)
def test_a_budget_that_is_used_up_names_its_field(spent: Spent, cause: Cause, sentence: str | None) -> None:
    assert used_up(spent, LIMITS, cause) == sentence


def test_only_preemptions_and_time_limits_say_nothing_of_the_work_itself() -> None:
    assert {cause for cause in Cause if is_interruption(cause)} == {Cause.PREEMPTION, Cause.TIME_LIMIT}


def test_an_attempt_that_ends_because_its_user_wants_another_counts_toward_nothing() -> None:
    again = [event("start"), event("requeue", cause="requeued", by="user")]
    assert spent_of([*again, *again, *again]) == Spent()
    by_slurm = [event("start"), event("requeue", cause="requeued", by="slurm")]
    assert spent_of([*again, *by_slurm, *by_slurm]) == Spent(attempts_without_progress=2)
