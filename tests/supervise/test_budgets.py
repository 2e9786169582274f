"""How often a run may start again, counted in its events."""

from collections.abc import Mapping
from typing import Any

import pytest

from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.sections import Requeue
from hpcddp.run.events import Event, newest_saved_step
from hpcddp.stop.reasons import Cause
from hpcddp.supervise.budgets import (
    count_attempts_without_progress,
    count_requeues,
    is_interruption,
    why_used_up,
    why_without_progress,
)
from tests.facts import assert_facts
from tests.messages import GoldenMessages

REQUEUE = Requeue(max_time_limits=2, max_failures=0)
TRAIN = {"train": {"model": "resnet18", "dataset": "digits", "epochs": 1}}
COMMAND = {"command": ["python", "train.py"]}


def job(work: Mapping[str, Any], limit: int) -> JobSpec:
    batch, requeue = {"global_batch_size": 8}, {"max_attempts_without_progress": limit}
    return JobSpec.model_validate({"name": "x", "batch": batch, "requeue": requeue, **work})


def event(kind: str, step: int | None = None, **known: Any) -> Event:
    return Event(kind=kind, time=0.0, attempt=0, step=step, **known)


def requeue(cause: str) -> Event:
    return event("requeue", cause=cause)


def test_each_cause_has_a_count_of_its_own() -> None:
    causes = ["preemption", "preemption", "time_limit", "crash"]
    assert count_requeues([requeue(cause) for cause in causes]) == {
        Cause.PREEMPTION: 2,
        Cause.TIME_LIMIT: 1,
        Cause.CRASH: 1,
    }


def test_a_requeue_that_the_user_requested_is_not_counted() -> None:
    assert count_requeues([requeue("preemption"), event("requeue", cause="preemption", by="user")]) == {
        Cause.PREEMPTION: 1
    }


def test_a_cause_that_is_missing_or_of_a_newer_version_has_no_budget() -> None:
    requeues = count_requeues([event("requeue"), requeue("eviction"), requeue("crash")])
    assert requeues == {Cause.UNKNOWN: 2, Cause.CRASH: 1}


def test_an_attempt_that_saves_a_newer_step_makes_progress() -> None:
    events = [event("start"), event("save", 10), event("start"), event("save", 20), event("start")]
    assert count_attempts_without_progress(events) == 1


def test_an_attempt_that_is_preempted_before_it_trains_does_not_count() -> None:
    preempted = [event("start"), requeue("preemption")]
    assert count_attempts_without_progress(preempted * 5) == 0
    trained = [event("start"), event("train", 0), requeue("preemption")]
    assert count_attempts_without_progress([*trained, *preempted, *trained]) == 2


def test_saving_the_same_step_again_is_no_progress() -> None:
    events = [event("start"), event("save", 10), event("start"), event("save", 10), event("start"), event("save", 9)]
    assert count_attempts_without_progress(events) == 2


def test_a_person_who_resumes_begins_the_count_anew() -> None:
    events = [event("start"), event("save", 10), event("start"), requeue("time_limit"), event("resume")]
    assert (count_requeues(events), count_attempts_without_progress(events)) == ({}, 0)
    again = [*events, event("start"), event("save", 10)]
    assert count_attempts_without_progress(again) == 0
    assert count_attempts_without_progress([*again, event("start"), event("save", 10)]) == 1


def test_steps_after_a_damaged_checkpoint_are_progress_though_they_were_saved_once() -> None:
    events = [event("start"), event("train", 0), event("save", 265), event("save", 522)]
    for fell_back_to, saved in [(265, 331), (331, 405), (405, 450)]:
        events += [event("start"), event("train", fell_back_to), event("save", saved), requeue("preemption")]
        assert count_attempts_without_progress(events) == 0
        assert newest_saved_step(events) == saved
    # An attempt that saves nothing beyond what it went on from makes none.
    assert count_attempts_without_progress([*events, event("start"), event("train", 450), event("save", 450)]) == 1


def test_a_run_without_progress_says_how_long_and_which_field(golden: GoldenMessages) -> None:
    assert why_without_progress(1, job(TRAIN, limit=2)) is None
    why = golden.message(why_without_progress(2, job(TRAIN, limit=2)))
    assert_facts(why, "the last 2 attempts", "requeue.max_attempts_without_progress is 2")
    why = golden.message(why_without_progress(1, job(TRAIN, limit=1)))
    assert_facts(why, "the last attempt", "requeue.max_attempts_without_progress is 1")
    assert "HPCDDP_PROGRESS_FILE" not in why
    why = golden.message(why_without_progress(1, job(COMMAND, limit=1)))
    assert_facts(why, "the last attempt", "HPCDDP_PROGRESS_FILE", "requeue.max_attempts_without_progress is 1")


@pytest.mark.parametrize(
    ("requeues", "cause", "sentence"),
    [
        ({Cause.PREEMPTION: 1000}, Cause.PREEMPTION, None),
        ({Cause.TIME_LIMIT: 1}, Cause.TIME_LIMIT, None),
        ({Cause.TIME_LIMIT: 2}, Cause.TIME_LIMIT, "requeue.max_time_limits is 2, and that is used up"),
        ({}, Cause.CRASH, "requeue.max_failures is 0"),
        ({Cause.CRASH: 5, Cause.NODE_FAILURE: 5}, Cause.NODE_FAILURE, None),
        ({Cause.TIME_LIMIT: 9, Cause.REQUEUED: 9}, Cause.REQUEUED, None),
        ({Cause.TIME_LIMIT: 9, Cause.UNKNOWN: 9}, Cause.UNKNOWN, None),
    ],
)
def test_a_budget_that_is_used_up_names_its_field(
    requeues: Mapping[Cause, int], cause: Cause, sentence: str | None
) -> None:
    assert why_used_up(requeues, REQUEUE, cause) == sentence


def test_only_preemptions_and_time_limits_say_nothing_of_the_work_itself() -> None:
    assert {cause for cause in Cause if is_interruption(cause)} == {Cause.PREEMPTION, Cause.TIME_LIMIT}


def test_an_attempt_that_ends_because_its_user_wants_another_counts_toward_nothing() -> None:
    again = [event("start"), event("requeue", cause="requeued", by="user")]
    assert (count_requeues(again * 3), count_attempts_without_progress(again * 3)) == ({}, 0)
    by_slurm = [event("start"), event("requeue", cause="requeued", by="slurm")]
    assert count_attempts_without_progress([*again, *by_slurm, *by_slurm]) == 2
