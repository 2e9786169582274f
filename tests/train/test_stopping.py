"""All ranks stop after the same step, and leave a decision."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import nn

from hpcddp.run.checkpoints import list_checkpoints
from hpcddp.run.events import read_events
from hpcddp.run.job_records import Decision, read_decision
from hpcddp.stop import faults
from hpcddp.stop.deadline import Deadline
from hpcddp.stop.reasons import StopReason
from hpcddp.train.checkpoint.checkpointer import Checkpointer
from hpcddp.train.errors import StoppedError
from hpcddp.train.stopper import RunStopper
from tests.distributed.training import records, result, without_times
from tests.messages import GoldenMessages
from tests.train.conftest import Training

NewTraining = Callable[[str], Training]

# 4 steps of 32 in an epoch; 10 batches of 32 in an evaluation, so that the ranks ask each other once in it.
LONG: dict[str, Any] = {"train__epochs": 2, "train__dataset_args": {"val": 300}}


@pytest.fixture(autouse=True)
def _no_faults() -> Iterator[None]:
    yield
    faults.arm(None, rank=0, attempt=0)


def votes(*codes: int) -> Callable[[], int]:
    left = iter(codes)
    return lambda: next(left, 0)


def stop(training: Training, *, attempt: int = 0, **changes: Any) -> Decision:
    with pytest.raises(StoppedError) as caught:
        training.train(attempt=attempt, **changes)
    decision = read_decision(training.run.attempt(attempt))
    assert decision is not None
    assert (decision.attempt, decision.step) == (attempt, caught.value.step)
    assert decision.reason is caught.value.reason
    return decision


def kinds(training: Training) -> list[str]:
    return [event.kind for event in read_events(training.run.events)]


def test_a_stop_in_a_long_evaluation_is_heard_and_the_next_attempt_makes_it_up(new_training: NewTraining) -> None:
    whole, stopped = new_training("whole"), new_training("stopped")
    whole.train(**LONG)
    decision = stop(stopped, stop_reason=votes(0, 0, 0, 0, StopReason.TERMINATED), **LONG)
    assert (decision.step, decision.saved, decision.reason) == (4, True, StopReason.TERMINATED)
    assert not [record for record in records(stopped.run.path) if "val_loss" in record]
    stopped.train(attempt=1, **LONG)
    assert without_times(stopped.run.path) == without_times(whole.run.path)
    assert result(stopped.run.path)["parameters_sha256"] == result(whole.run.path)["parameters_sha256"]


def test_a_stop_while_a_missing_evaluation_is_made_up_needs_no_other_save(training: Training) -> None:
    stop(training, stop_reason=votes(0, 0, 0, 0, StopReason.TERMINATED), **LONG)
    decision = stop(training, attempt=1, stop_reason=votes(StopReason.WARNED), **LONG)
    assert (decision.step, decision.saved, decision.save_s) == (4, True, 0.0)
    assert kinds(training).count("save") == 1
    assert [path.name for path in list_checkpoints(training.run.checkpoints)] == ["step-000004"]


def test_a_stop_in_the_long_last_evaluation_is_finished_by_the_next_attempt(new_training: NewTraining) -> None:
    whole, stopped = new_training("whole"), new_training("stopped")
    once = {**LONG, "train__epochs": 1}
    whole.train(**once)
    assert stop(stopped, stop_reason=votes(0, 0, 0, 0, StopReason.TERMINATED), **once).step == 4
    stopped.train(attempt=1, **once)
    assert without_times(stopped.run.path) == without_times(whole.run.path)


def test_a_stop_that_comes_while_the_last_step_finishes_ends_as_finished(training: Training) -> None:
    training.train(stop_reason=votes(0, 0, 0, StopReason.TERMINATED), train__epochs=1)
    assert result(training.run.path)["status"] == "finished"
    assert read_decision(training.run.attempt(0)) is None


def test_the_decision_and_the_event_say_why(golden: GoldenMessages, training: Training) -> None:
    decision = stop(training, stop_reason=votes(StopReason.TERMINATED), cause=lambda: "preemption")
    assert (decision.step, decision.cause, decision.saved) == (2, "preemption", True)
    event = read_events(training.run.events)[-1]
    assert (event.kind, event.reason, event.cause, event.step) == ("stop", "terminated", "preemption", 2)
    message = golden.message(re.sub(r"in [0-9.]+ s", "in N s", training.said[-1]))
    assert "after step 2 (terminated, cause preemption)" in message
    assert "saved in N s" in message


def test_a_clock_that_nears_the_end_of_the_job_is_a_reason_too(training: Training) -> None:
    decision = stop(training, deadline=Deadline(end_time=time.time() + 5, start_time=time.time()))
    assert (decision.reason, decision.cause, decision.saved) == (StopReason.DEADLINE, "time_limit", True)


def test_a_clock_that_is_far_from_the_end_is_none(training: Training) -> None:
    training.train(deadline=Deadline(end_time=time.time() + 86400, start_time=time.time()), train__epochs=1)
    assert result(training.run.path)["status"] == "finished"


def test_a_stop_whose_save_fails_says_so(golden: GoldenMessages, training: Training) -> None:
    faults.arm("oserror=ENOSPC@save.file", rank=0, attempt=0)
    with pytest.raises(StoppedError) as caught:
        training.train(stop_reason=votes(StopReason.WARNED))
    message = golden.message(caught.value)
    assert "after step 2 (warned)" in message
    assert "the state is not saved" in message
    decision = read_decision(training.run.attempt(0))
    assert decision is not None
    assert not decision.saved
    assert training.said[-1].endswith("not saved")


def test_a_decision_that_cannot_be_written_is_told_and_the_ranks_stop_all_the_same(training: Training) -> None:
    in_the_way = training.run.attempt(0).decision
    in_the_way.mkdir(parents=True)
    with pytest.raises(StoppedError):
        training.train(stop_reason=votes(StopReason.WARNED))
    assert any(said.startswith(f"warning: {in_the_way} cannot be written (") for said in training.said)


def test_a_lead_that_is_shorter_than_a_save_is_told_once(training: Training) -> None:
    # A second passes at every look at the clock.
    clock = iter(range(10**6))
    training.train(
        monotonic=lambda: float(next(clock)),
        deadline=Deadline(end_time=time.time() + 86400, start_time=time.time()),
        train__epochs=12,
        checkpoint={"every": {"steps": 2}},
        requeue={"signal_lead": "1s"},
        resources={"time_limit": "10:00:00"},
    )
    warned = [said for said in training.said if said.startswith("warning: requeue.signal_lead is 1 s")]
    assert len(warned) == 1
    events = [event for event in read_events(training.run.events) if event.kind == "warning"]
    assert [event.reason for event in events] == [warned[0].removeprefix("warning: ")]


def test_reasons_have_words() -> None:
    assert [reason.word for reason in StopReason] == [
        "none",
        "requested",
        "deadline",
        "warned",
        "terminated",
        "interrupted",
    ]


def test_a_stop_asked_for_in_a_slow_step_comes_after_that_step(training: Training) -> None:
    # Each look at the clock is a second later, so that every step seems slow.
    clock = iter(range(10**6))
    asked: list[int] = []

    def ask_in_step_five() -> int:
        asked.append(1)
        return StopReason.WARNED if len(asked) == 5 else StopReason.NONE

    decision = stop(training, stop_reason=ask_in_step_five, monotonic=lambda: float(next(clock)), train__epochs=3)
    assert decision.step == 5


def test_the_durations_of_past_saves_decide_how_early_the_clock_stops(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    context = training.context(deadline=Deadline(end_time=now + 40, start_time=now))
    assert RunStopper(context).vote() is StopReason.NONE
    monkeypatch.setattr(Checkpointer, "seconds", [60.0])
    checkpointer = Checkpointer(training.run.path, {"model": nn.Linear(1, 1)})
    assert RunStopper(context, checkpointer).vote() is StopReason.DEADLINE


def test_the_largest_reason_of_several_agreements_counts(training: Training) -> None:
    stopper = RunStopper(training.context())
    for reason in (StopReason.NONE, StopReason.DEADLINE, StopReason.REQUESTED, StopReason.NONE):
        stopper.set_agreed(reason)
    assert stopper.agreed is StopReason.DEADLINE
    assert stopper.reason == "deadline"
