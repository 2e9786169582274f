"""A training that goes on in the same process from a state in memory, as the ranks do that are left after a death."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpcddp.run.checkpoints import list_checkpoints, verify
from hpcddp.run.events import read_events
from hpcddp.stop.reasons import StopReason
from hpcddp.train.checkpoint.memory import MemoryCheckpoint
from hpcddp.train.checkpoint.start import load_file
from hpcddp.train.context import Recovery, Survivor, TrainContext
from hpcddp.train.errors import StoppedError
from hpcddp.train.loop.job import run_training
from tests.distributed.training import result, steps
from tests.train.conftest import Training

# This process is the only one that is left of two. Steps: 4 in an epoch.
JOB: dict[str, Any] = {"train__epochs": 3, "requeue__max_failures": 1}


class LeftError(RuntimeError):
    """Stands for the error of a collective whose peer has died."""


def context_after(training: Training, state: MemoryCheckpoint, **told: Any) -> TrainContext:
    """Return the context of the rank that is left, which goes on from a state."""
    context = training.context(resources={"tasks_per_node": 2}, **JOB, **told)
    recovery = Recovery(state=state, data=None, source=0, shares_state=False, completes_records=True)
    return replace(context, recovery=recovery)


def memory_checkpoint(path: Path) -> MemoryCheckpoint:
    """Return what a checkpoint on the disk holds."""
    checkpoint = verify(path)
    contents = {name: load_file(checkpoint, name) for name in checkpoint.manifest.files}
    return MemoryCheckpoint.of(checkpoint.manifest, contents)


@pytest.fixture
def state(training: Training) -> MemoryCheckpoint:
    """Return the state after step 6 of a run; on the disk there is a checkpoint of step 4 alone."""
    calls = iter(range(4))
    training.run.attempt(0).path.mkdir(parents=True)
    with pytest.raises(StoppedError):
        training.train(
            resources={"tasks_per_node": 1},
            stop_reason=lambda: 0 if next(calls, None) is not None else StopReason.TERMINATED,
            **JOB,
        )
    newest, *_ = list_checkpoints(training.run.checkpoints)
    state = memory_checkpoint(newest)
    for path in newest.iterdir():
        path.unlink()
    newest.rmdir()
    assert state.manifest.step == 6
    return state


def test_training_goes_on_from_the_state_and_comes_out_as_if_it_had_not_stopped(
    training: Training, state: MemoryCheckpoint, new_training: Any
) -> None:
    run_training(context_after(training, state))
    whole = new_training("whole")
    whole.train(**JOB)
    assert result(training.run.path)["parameters_sha256"] == result(whole.run.path)["parameters_sha256"]
    assert [record["step"] for record in steps(training.run.path)] == list(range(1, 13))
    assert [line for line in training.said if line.startswith("going on after step 6 with 1 rank")]


def test_last_step_that_is_only_in_memory_is_saved_before_the_run_has_finished(
    training: Training, new_training: Callable[[str], Training]
) -> None:
    whole = new_training("whole")
    whole.train(**JOB)
    last = memory_checkpoint(list_checkpoints(whole.run.checkpoints)[0])
    training.run.attempt(0).path.mkdir(parents=True)
    run_training(context_after(training, last))
    newest, *_ = list_checkpoints(training.run.checkpoints)
    assert newest.name == "step-000012"
    assert result(training.run.path)["status"] == "finished"


def test_state_that_is_only_in_memory_is_saved_although_no_step_was_made_from_it(
    training: Training, state: MemoryCheckpoint
) -> None:
    def end(survivor: Survivor) -> None:
        survivor.save()
        raise LeftError

    with pytest.raises(LeftError):
        run_training(replace(context_after(training, state), offer_survivor=end))
    assert [event.step for event in read_events(training.run.events) if event.kind == "save"][-1] == 6
    newest, *_ = list_checkpoints(training.run.checkpoints)
    assert newest.name == "step-000006"


def test_state_that_a_rank_has_taken_and_then_saves_is_recorded_once(
    training: Training, state: MemoryCheckpoint
) -> None:
    survivors: list[Survivor] = []
    calls = iter(range(2))

    def leave() -> int:
        if next(calls, None) is None:
            raise LeftError
        return 0

    context = context_after(training, state, stop_reason=leave)
    with pytest.raises(LeftError):
        run_training(replace(context, offer_survivor=survivors.append))
    (survivor,) = survivors
    taken = survivor.state()
    assert taken is not None
    assert taken.manifest.step == 8
    survivor.save()
    (newest, *_) = list_checkpoints(training.run.checkpoints)
    assert verify(newest).manifest.progress["samples_seen"] == taken.manifest.progress["samples_seen"]
    assert [record["step"] for record in steps(training.run.path)] == list(range(1, 9))
