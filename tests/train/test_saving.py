"""Saving beside the training: what is saved is the state of the step's boundary, and the training waits for nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpcddp.run.checkpoints import list_checkpoints, newest_valid
from hpcddp.run.events import read_events
from hpcddp.run.ownership import FencedError
from hpcddp.stop import faults
from hpcddp.stop.faults import InjectedError
from hpcddp.train.checkpoint.checkpointer import Staging
from hpcddp.train.errors import StoppedError
from hpcddp.train.loop import state
from tests.distributed.training import result, without_times
from tests.train.conftest import Training
from tests.waiting import join_threads

NewTraining = Callable[[str], Training]

# 100 samples in batches of 32: 4 steps per epoch, 12 in all.
SAVES: dict[str, Any] = {"checkpoint": {"every": {"steps": 3}}, "train__epochs": 3}
VARIANTS: dict[str, dict[str, Any]] = {
    "momentum": {"train__optimizer": {"name": "sgd", "momentum": 0.9}, "learning_rate__base": 0.5},
    "adamw, average": {
        "train__optimizer": {"name": "adamw", "weight_decay": 0.01},
        "learning_rate__base": 0.1,
        "train__ema_decay": 0.9,
    },
    "batch norm, bf16": {"train__model": "tests.distributed.own_code:norm_model", "train__precision": "bf16"},
}
SLOW = "sleep=0.5@save.begin"


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    faults.arm(None, rank=0, attempt=0)


def saved_state(training: Training, step: int) -> dict[str, Any]:
    folder = training.run.checkpoints / f"step-{step:06d}"
    return {path.name: torch.load(path, weights_only=True) for path in sorted(folder.glob("*.pt"))}


def saves(training: Training) -> list[int | None]:
    return [event.step for event in read_events(training.run.events) if event.kind == "save"]


def one_slow_save(new_training: NewTraining, changes: Mapping[str, Any]) -> tuple[Training, Training]:
    """Return an undisturbed run, and one whose save of step 6 is written while the six steps after it are made."""
    whole, slow = new_training("whole"), new_training("slow")
    whole.train(**SAVES, **changes)
    # Saves after this one would have to wait for it.
    faults.arm(f"{SLOW}:6", rank=0, attempt=0)
    begun: list[float] = []

    def crash_at_the_end() -> int:
        begun.append(time.monotonic())
        if len(begun) == 8:
            assert saves(slow)[-1] != 6
            raise KeyboardInterrupt
        return 0

    with pytest.raises(KeyboardInterrupt):
        slow.train(stop_reason=crash_at_the_end, **SAVES, **changes)
    return whole, slow


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_state_is_that_of_the_boundary_although_the_training_went_on(
    new_training: NewTraining, changes: dict[str, Any]
) -> None:
    whole, slow = one_slow_save(new_training, {**changes, "checkpoint__keep": 9})
    assert saves(slow)[-1] == 6
    assert str(saved_state(slow, 6)) == str(saved_state(whole, 6))
    slow.train(attempt=1, **SAVES, **changes)
    assert any("going on after step 6" in line for line in slow.said)
    assert result(slow.run.path)["parameters_sha256"] == result(whole.run.path)["parameters_sha256"]
    assert without_times(slow.run.path) == without_times(whole.run.path)


def test_without_a_copy_the_state_would_be_another(new_training: NewTraining, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Staging, "copy", lambda _, files: dict(files))
    whole, slow = one_slow_save(new_training, {**VARIANTS["momentum"], "checkpoint__keep": 9})
    assert str(saved_state(slow, 6)) != str(saved_state(whole, 6))


def test_stop_waits_until_its_checkpoint_is_there(training: Training) -> None:
    faults.arm(SLOW.replace("begin", "rename"), rank=0, attempt=0)
    calls = iter([0, 0, 1])
    with pytest.raises(StoppedError) as caught:
        training.train(stop_reason=lambda: next(calls, 0), checkpoint={"every": {"epochs": 9}}, train__epochs=3)
    newest = newest_valid(training.run.checkpoints, expected=True, warn=training.said.append)
    assert newest is not None
    assert newest.manifest.step == caught.value.step
    assert caught.value.outcome.error is None
    assert caught.value.outcome.seconds >= 0.5


def test_stop_whose_save_fails_says_so(training: Training) -> None:
    faults.arm("oserror=ENOSPC@save.file", rank=0, attempt=0)
    calls = iter([0, 0, 1])
    with pytest.raises(StoppedError, match="and the state is not saved") as caught:
        training.train(stop_reason=lambda: next(calls, 0), checkpoint={"every": {"epochs": 9}}, train__epochs=3)
    assert caught.value.outcome.error is not None


def test_finished_run_has_its_last_checkpoint(training: Training) -> None:
    faults.arm(SLOW, rank=0, attempt=0)
    training.train(checkpoint={"every": {"epochs": 9}}, train__epochs=1)
    assert [path.name for path in list_checkpoints(training.run.checkpoints)] == ["step-000004"]


def test_clock_asks_for_no_save_while_one_is_written(training: Training) -> None:
    faults.arm("sleep=0.3@save.begin:2", rank=0, attempt=0)
    training.train(checkpoint={"every": "1s"}, train__epochs=3, monotonic=_hurrying())
    # One was due after each step; the epoch's own, after step 4, waited for the first.
    assert saves(training)[:2] == [2, 4]
    assert result(training.run.path)["status"] == "finished"


def _hurrying() -> Callable[[], float]:
    began = time.monotonic()
    return lambda: (time.monotonic() - began) * 1e6


def test_loader_workers_are_forked_while_a_checkpoint_is_written(new_training: NewTraining) -> None:
    whole, slow = new_training("whole"), new_training("slow")
    changes: dict[str, Any] = {"train__num_workers": 2, "train__epochs": 6, "checkpoint": {"every": {"steps": 1}}}
    whole.train(**changes)
    # Every evaluation forks workers; all of it goes on while something is written.
    faults.arm("sleep=0.05@save.file", rank=0, attempt=0)
    slow.train(**changes)
    assert without_times(slow.run.path) == without_times(whole.run.path)


def test_error_of_the_training_lets_a_quick_write_end(training: Training) -> None:
    faults.arm("sleep=0.3@save.rename:4", rank=0, attempt=0)
    training.crash(steps=4, **SAVES)
    assert saves(training) == [3, 4]


def test_error_in_the_writing_thread_ends_the_training(training: Training) -> None:
    faults.arm("exception@save.manifest:3", rank=0, attempt=0)
    with pytest.raises(InjectedError):
        training.train(**SAVES)
    assert saves(training) == []


def test_error_in_the_writing_thread_is_heard_at_the_next_step_and_not_at_the_next_save(training: Training) -> None:
    faults.arm("exception@save.manifest:4", rank=0, attempt=0)
    asked: list[None] = []

    def when_written() -> int:
        asked.append(None)
        join_threads("hpcddp-checkpoint")
        return 0

    # Step 5 begins after the write; the save after step 8 would have heard of it, too.
    with pytest.raises(InjectedError):
        training.train(stop_reason=when_written, checkpoint={"every": {"epochs": 1}}, train__epochs=3)
    assert len(asked) == 5


def test_attempt_that_is_overtaken_while_it_writes_publishes_nothing_and_ends(training: Training) -> None:
    faults.arm("sleep=0.5@save.manifest:6", rank=0, attempt=0)
    calls = iter(range(100))

    def overtaken() -> int:
        if next(calls) == 7:
            training.run.attempt(1).path.mkdir()
        return 0

    with pytest.raises(FencedError):
        training.train(stop_reason=overtaken, **{**SAVES, "train__epochs": 30})
    assert [path.name for path in list_checkpoints(training.run.checkpoints)] == ["step-000004", "step-000003"]
    assert saves(training) == [3, 4]


def test_the_states_of_all_ranks_are_freed_after_a_save_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(state, "gather_samples", lambda *_: [1, 1])
    monkeypatch.setattr(state, "gather_differing", lambda _: {"bn": torch.zeros(2)})
    replica: Any = SimpleNamespace(samples=1, placeholder=torch.zeros(1), models=[])
    ranks = state._RankStates(replica)
    with suppress(OSError), ranks.gathered():
        assert set(ranks.state_dict()) == {"world_size", "samples", "buffers"}
        raise OSError("disk")
    assert ranks.state_dict() == {}
