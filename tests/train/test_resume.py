"""A run that is started again goes on as if nothing had been (batch contract, section 6)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from hpcddp.run.checkpoints import NoCheckpointError, list_checkpoints
from hpcddp.run.events import append_event, read_events
from hpcddp.run.job_records import read_decision
from hpcddp.run.ownership import FencedError
from hpcddp.stop.reasons import StopReason
from hpcddp.train.errors import ResumeError, StoppedError
from hpcddp.train.model import replica
from tests.distributed.training import evaluations, records, result, steps
from tests.messages import GoldenMessages
from tests.run.checkpoints import correct_checksum, flip
from tests.train.conftest import Training
from tests.waiting import wait_until

NewTraining = Callable[[str], Training]

# 100 samples in batches of 32: 4 steps per epoch, 12 in all; the crash is mid-epoch, between two saves.
SAVES: dict[str, Any] = {"checkpoint": {"every": {"steps": 3}}, "train__epochs": 3}
VARIANTS: dict[str, dict[str, Any]] = {
    "momentum": {"train__optimizer": {"name": "sgd", "momentum": 0.9, "nesterov": True}},
    "adamw": {"train__optimizer": {"name": "adamw", "weight_decay": 0.01}, "learning_rate__base": 0.01},
    "batch norm, dropout, accumulation": {
        "train__model": "tests.distributed.own_code:norm_model",
        "train__precision": "fp32",
        "batch__max_per_device_batch_size": 9,
        "batch__tail": "wrap",
    },
    "bf16, torch's order, cosine": {
        "train__precision": "bf16",
        "batch__order": "torch",
        "batch__tail": "drop",
        "learning_rate__schedule": "cosine",
        "learning_rate__warmup_epochs": 1,
        "train__channels_last": True,
    },
    "loader workers": {"train__num_workers": 2},
}


def without_times(run: Training) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in record.items() if name not in ("time", "samples_per_s", "eval_s")}
        for record in records(run.run.path)
    ]


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_resumed_run_equals_the_uninterrupted_one_bit_for_bit(
    new_training: NewTraining, changes: dict[str, Any]
) -> None:
    changes = {**SAVES, **changes}
    whole, broken = new_training("whole"), new_training("broken")
    whole.train(**changes)
    broken.crash(steps=7, **changes)
    broken.train(attempt=1, **changes)
    assert any("going on after step 6" in line for line in broken.said)
    assert result(broken.run.path)["parameters_sha256"] == result(whole.run.path)["parameters_sha256"]
    assert without_times(broken) == without_times(whole)
    assert result(broken.run.path)["attempts"] == 2


@pytest.mark.parametrize("variant", ["momentum", "adamw"])
def test_the_kernels_of_the_optimizer_are_those_of_this_device(
    training: Training, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    training.crash(steps=7, **SAVES, **VARIANTS[variant])
    optimizers: list[Optimizer] = []

    def build_fused(_: object, model: nn.Module, *, learning_rate: float, **__: object) -> Optimizer:
        # As on a GPU.
        build = partial(SGD, momentum=0.9) if variant == "momentum" else AdamW
        optimizers.append(build(model.parameters(), learning_rate, fused=True))
        return optimizers[0]

    monkeypatch.setattr(replica, "build_optimizer", build_fused)
    training.train(attempt=1, **SAVES, **VARIANTS[variant])
    (optimizer,) = optimizers
    assert optimizer.param_groups[0]["fused"] is True
    assert result(training.run.path)["attempts"] == 2


def test_every_attempt_adds_to_the_time_that_the_run_took(new_training: NewTraining) -> None:
    broken = new_training("broken")
    broken.crash(steps=7, **SAVES)
    manifest = json.loads((list_checkpoints(broken.run.checkpoints)[0] / "manifest.json").read_text())
    broken.train(attempt=1, **SAVES)
    assert result(broken.run.path)["wall_s"] >= round(manifest["progress"]["wall_s"], 3) > 0


def test_run_that_died_after_its_last_save_only_writes_its_result(training: Training) -> None:
    training.train(**SAVES)
    before = result(training.run.path)
    lines = training.run.metrics.read_text()
    training.run.result.unlink()
    training.train(attempt=1, **SAVES)
    after = result(training.run.path)
    assert {**after, "wall_s": 0, "attempts": 0} == {**before, "wall_s": 0, "attempts": 0}
    assert training.run.metrics.read_text() == lines


def test_finished_run_is_not_touched(golden: GoldenMessages, training: Training) -> None:
    training.train(**SAVES)
    before = {path: path.stat().st_mtime_ns for path in training.run.path.rglob("*")}
    training.run.attempt(1).path.mkdir()
    training.train(attempt=1, **SAVES)
    after = {path: path.stat().st_mtime_ns for path in training.run.path.rglob("*")}
    assert {path: after[path] for path in before if path != training.run.attempts} == {
        path: time for path, time in before.items() if path != training.run.attempts
    }
    assert "run run has finished already" in golden.message(training.said[-1])


def test_stop_saves_and_loses_no_step(golden: GoldenMessages, new_training: NewTraining) -> None:
    whole, stopped = new_training("whole"), new_training("stopped")
    whole.train(**SAVES)
    calls = iter([0, 0, 0, 0, 5])
    with pytest.raises(StoppedError) as caught:
        stopped.train(stop_reason=lambda: next(calls, 0), **SAVES)
    message = golden.message(caught.value)
    assert "after step 6 (interrupted)" in message
    assert "the state is saved" in message
    assert (caught.value.step, caught.value.reason, caught.value.exit_code) == (6, StopReason.INTERRUPTED, 75)
    stop = read_events(stopped.run.events)[-1]
    assert (stop.kind, stop.step, stop.reason, stop.saved) == ("stop", 6, "interrupted", True)
    decision = read_decision(stopped.run.attempt(0))
    assert decision is not None
    assert (decision.attempt, decision.step, decision.reason, decision.saved) == (0, 6, StopReason.INTERRUPTED, True)
    stopped.train(attempt=1, **SAVES)
    assert without_times(stopped) == without_times(whole)


def test_evaluation_that_a_stop_left_out_is_made_up_for(new_training: NewTraining) -> None:
    whole, stopped = new_training("whole"), new_training("stopped")
    whole.train(train__epochs=3)
    calls = iter([0, 0, 1])
    with pytest.raises(StoppedError):
        stopped.train(stop_reason=lambda: next(calls, 0), train__epochs=3)
    assert steps(stopped.run.path)[-1]["step"] == 4
    assert evaluations(stopped.run.path) == []
    stopped.train(attempt=1, train__epochs=3)
    assert without_times(stopped) == without_times(whole)


def test_stop_that_comes_with_the_last_step_lets_the_run_finish(training: Training) -> None:
    training.train(train__epochs=1, stop_reason=iter([0, 0, 0, 1]).__next__)
    assert result(training.run.path)["status"] == "finished"


def test_rotten_newest_checkpoint_is_passed_over_loudly(new_training: NewTraining) -> None:
    whole, broken = new_training("whole"), new_training("broken")
    whole.train(**SAVES)
    broken.crash(steps=7, **SAVES)
    newest = broken.run.checkpoints / "step-000006" / "model.pt"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    broken.train(attempt=1, **SAVES)
    assert any(
        "checkpoint step-000006 is skipped" in line and "model.pt has another sha256" in line for line in broken.said
    )
    assert any("going on after step 4" in line for line in broken.said)
    assert result(broken.run.path)["parameters_sha256"] == result(whole.run.path)["parameters_sha256"]
    assert without_times(broken) == without_times(whole)
    (aside,) = broken.run.checkpoints.glob("invalid-*")
    assert aside.name.startswith("invalid-step-000006-")


@pytest.mark.parametrize("fits_checksum", [False, True])
@pytest.mark.parametrize(
    ("part", "bit", "sentence"),
    [
        # 6 becomes 4: the step before was trained twice.
        (b'"step": 6,\n    "epoch"', 8 * 8 + 1, "its step is 6, that of its progress 4"),
        (b'"epoch": 1', 8, "its progress is not that of a training"),
    ],
    ids=["number", "name"],
)
def test_flipped_bit_in_the_progress_of_the_newest_checkpoint_is_noticed(
    new_training: NewTraining, part: bytes, bit: int, sentence: str, *, fits_checksum: bool
) -> None:
    whole, broken = new_training("whole"), new_training("broken")
    whole.train(**SAVES)
    broken.crash(steps=7, **SAVES)
    newest = broken.run.checkpoints / "step-000006"
    flip(newest / "manifest.json", part, bit)
    if fits_checksum:
        correct_checksum(newest)
    broken.train(attempt=1, **SAVES)
    why = sentence if fits_checksum else "its content does not have its checksum"
    assert any("checkpoint step-000006 is skipped" in line and why in line for line in broken.said)
    assert any("going on after step 4" in line for line in broken.said)
    assert result(broken.run.path)["parameters_sha256"] == result(whole.run.path)["parameters_sha256"]
    assert without_times(broken) == without_times(whole)


def test_run_without_a_valid_checkpoint_never_starts_anew(golden: GoldenMessages, training: Training) -> None:
    training.crash(steps=7, **SAVES)
    for path in list_checkpoints(training.run.checkpoints):
        (path / "manifest.json").unlink()
    with pytest.raises(NoCheckpointError) as caught:
        training.train(attempt=1, **SAVES)
    message = golden.message(caught.value)
    assert f"{training.run.checkpoints} holds no valid checkpoint" in message
    assert "restore a copy" in message
    assert any("step-000006 is skipped" in line and "manifest.json is missing" in line for line in training.said)


@pytest.mark.parametrize("left", ["nothing", "the start of this attempt"])
def test_run_whose_checkpoints_and_events_are_gone_never_starts_anew(training: Training, left: str) -> None:
    training.crash(steps=7, **SAVES)
    training.run.checkpoints.rename(training.run.path / "elsewhere")
    training.run.events.unlink()
    made = steps(training.run.path)
    if left == "the start of this attempt":
        append_event(training.run.events, kind="start", time=0.0, attempt=1)
    with pytest.raises(NoCheckpointError, match="although the run has saved some"):
        training.train(attempt=1, **SAVES)
    assert steps(training.run.path) == made != []


def test_run_whose_checkpoints_are_gone_never_starts_anew(training: Training) -> None:
    training.crash(steps=7, **SAVES)
    training.run.checkpoints.rename(training.run.path / "elsewhere")
    with pytest.raises(NoCheckpointError) as caught:
        training.train(attempt=1, **SAVES)
    assert caught.value.exit_code == 65


def test_run_that_never_saved_starts_anew(new_training: NewTraining) -> None:
    whole, broken = new_training("whole"), new_training("broken")
    whole.train(**SAVES)
    broken.crash(steps=2, **SAVES)
    broken.train(attempt=1, **SAVES)
    assert without_times(broken) == without_times(whole)


@pytest.mark.parametrize(
    ("changes", "before", "after"),
    [
        ({"train__dataset_args": {"train": 101}}, "the number of training samples 100", "101"),
        ({"batch__global_batch_size": 33}, "batch.global_batch_size 32", "33"),
        ({"train__seed": 1}, "train.seed 0", "1"),
        ({"batch__tail": "drop"}, "batch.tail keep", "drop"),
        ({"batch__order": "torch"}, "batch.order keyed", "torch"),
    ],
)
def test_resume_with_other_batches_is_refused(
    golden: GoldenMessages, training: Training, changes: dict[str, Any], before: str, after: str
) -> None:
    training.crash(steps=7, **SAVES)
    with pytest.raises(ResumeError) as caught:
        training.train(attempt=1, **{**SAVES, **changes})
    message = golden.message(caught.value)
    assert f"step-000006 was saved with {before}, " in message
    assert f"now it is {after}," in message
    assert "restore the old one" in message


def test_resume_with_other_data_is_refused(golden: GoldenMessages, training: Training) -> None:
    training.crash(steps=7, **SAVES)
    with pytest.raises(ResumeError) as caught:
        training.train(attempt=1, **SAVES, train__dataset_args={"first": 1})
    before, after = re.findall("[0-9a-f]{64}", str(caught.value))
    assert before != after
    message = golden.message(caught.value, {before: "FINGERPRINT", after: "OTHER FINGERPRINT"})
    assert f"the fingerprint of the training data {before}" in message
    assert f"now it is {after}," in message


def test_resume_with_another_model_is_refused(training: Training) -> None:
    training.crash(steps=7, **SAVES)
    with pytest.raises(ResumeError, match=r"step-000006 is of another model .* train\.model"):
        training.train(attempt=1, **SAVES, train__model_args={"hidden": 17})


def test_attempt_that_is_no_longer_the_newest_writes_nothing(golden: GoldenMessages, training: Training) -> None:
    training.crash(steps=7, **SAVES)
    training.run.attempt(2).path.mkdir()
    before = set(training.run.path.rglob("*"))
    with pytest.raises(FencedError) as caught:
        training.train(attempt=1, **SAVES)
    assert caught.value.exit_code == 76
    message = golden.message(caught.value)
    assert "attempt 2 owns the run run" in message
    assert "attempt 1 ends here and writes nothing" in message
    assert set(training.run.path.rglob("*")) - before == {training.run.attempt(1).path}


def test_attempt_that_is_overtaken_while_it_trains_publishes_nothing(training: Training) -> None:
    calls = iter(range(100))

    def is_saved(step: int) -> bool:
        return any(event.kind == "save" and event.step == step for event in read_events(training.run.events))

    def overtaken() -> int:
        if next(calls) == 4:
            # The write after step 4 goes on beside the training.
            wait_until(lambda: is_saved(4), "the write after step 4")
            training.run.attempt(1).path.mkdir()
        return 0

    with pytest.raises(FencedError):
        training.train(stop_reason=overtaken, **SAVES)
    assert [path.name for path in list_checkpoints(training.run.checkpoints)] == ["step-000004", "step-000003"]
    assert steps(training.run.path)[-1]["step"] == 4


def test_checkpoint_with_objects_of_the_models_own_is_refused_with_a_sentence(training: Training) -> None:
    changes = {**SAVES, "train__model": "tests.train.odd_code:unpicklable_state"}
    training.crash(steps=7, **changes)
    with pytest.raises(ResumeError, match=r"step-000006 holds objects that could run code.*get_extra_state"):
        training.train(attempt=1, **changes)
