"""A resumption with another global batch: what it needs, writes and refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hpcddp.batch.plan import PlanError
from hpcddp.run.checkpoints import list_checkpoints
from hpcddp.run.events import read_events
from hpcddp.stop.reasons import StopReason
from hpcddp.train.errors import ResumeError, StoppedError
from tests.distributed.named_batches import name_batch
from tests.distributed.training import evaluations, result, steps, without_times
from tests.messages import GoldenMessages
from tests.train.conftest import Training

NewTraining = Callable[[str], Training]

# 100 samples in batches of 32: 4 steps per epoch. The crash is mid-epoch, and step 6 is saved.
SAVES: dict[str, Any] = {"checkpoint": {"every": {"steps": 3}}, "train__epochs": 3}
LARGER: dict[str, Any] = {**SAVES, "batch__global_batch_size": 48}
STOP = StopReason.WARNED
NORM = "tests.distributed.own_code:norm_model"


def progress(training: Training, step: int) -> dict[str, Any]:
    path = training.run.checkpoints / f"step-{step:06d}" / "manifest.json"
    document: dict[str, Any] = json.loads(path.read_text())["progress"]
    return document


@pytest.mark.parametrize("named", [None, 64], ids=["nothing named", "another number named"])
def test_a_batch_that_no_command_line_has_named_is_refused(
    golden: GoldenMessages, training: Training, named: int | None
) -> None:
    training.crash(steps=7, **SAVES)
    if named is not None:
        name_batch(training.run.path, named)
    with pytest.raises(ResumeError) as caught:
        training.train(attempt=1, **LARGER)
    message = golden.message(caught.value)
    assert "batch.global_batch_size 32" in message
    assert "now it is 48" in message
    assert "restore the old one" in message


def test_other_differences_are_refused_with_a_named_batch_too(golden: GoldenMessages, training: Training) -> None:
    training.crash(steps=7, **SAVES)
    name_batch(training.run.path, 48)
    with pytest.raises(ResumeError) as caught:
        training.train(attempt=1, **LARGER, train__seed=1)
    message = golden.message(caught.value)
    assert "train.seed 0" in message
    assert "now it is 1" in message


def test_the_log_the_event_and_the_plan_say_what_has_changed(golden: GoldenMessages, training: Training) -> None:
    training.crash(steps=7, **SAVES)
    name_batch(training.run.path, 48)
    training.train(attempt=1, **LARGER)
    (begin,) = (line for line in training.said if "from step 7 on" in line)
    assert any("10 steps in 3 epochs" in line for line in training.said)
    (start,) = (line for line in training.said if "going on" in line)
    (event,) = [event for event in read_events(training.run.events) if event.kind == "train" and event.attempt == 1]
    for text in (golden.message(begin), golden.message(event.reason)):
        assert "batches of 48 samples from step 7" in text
        assert "epoch 1, after 64 of its samples" in text
    golden.message(start)
    assert "after step 6 (epoch 1, 0 steps" in start
    assert "164 samples seen" in start
    assert json.loads(training.run.plan.read_text())["total_steps"] == 10
    assert [record["samples_seen"] for record in steps(training.run.path)][5:] == [164, 200, 248, 296, 300]
    assert [record["step"] for record in evaluations(training.run.path)] == [4, 7, 10]
    assert result(training.run.path)["steps"] == 10


@pytest.mark.parametrize("crash", [1, 2, 3])
def test_a_run_that_stops_again_goes_on_bit_for_bit(new_training: NewTraining, crash: int) -> None:
    whole, broken = new_training("whole"), new_training("broken")
    for run in (whole, broken):
        run.crash(steps=7, **SAVES)
        name_batch(run.run.path, 48)
    whole.train(attempt=1, **LARGER)
    # The crash may come before the first save with the new batch: then it begins at the old checkpoint once more.
    broken.crash(steps=crash, attempt=1, **LARGER)
    broken.train(attempt=2, **LARGER)
    assert without_times(broken.run.path) == without_times(whole.run.path)
    assert result(broken.run.path)["parameters_sha256"] == result(whole.run.path)["parameters_sha256"]
    assert progress(broken, 10)["batch_starts"] == progress(whole, 10)["batch_starts"]


def test_checkpoints_of_a_run_without_a_change_are_as_before(training: Training) -> None:
    training.train(**SAVES)
    assert all("batch_starts" not in progress(training, int(path.name[5:])) for path in _saved(training))


def _saved(training: Training) -> list[Any]:
    return list_checkpoints(training.run.checkpoints)


def test_an_evaluation_that_was_due_before_the_change_is_made_after_it(training: Training) -> None:
    # The stop comes with the last step of the second epoch, and does not wait for its evaluation.
    calls = iter(range(6))
    with pytest.raises(StoppedError, match="after step 8"):
        training.train(**SAVES, stop_reason=lambda: StopReason.NONE if next(calls, None) is not None else STOP)
    assert [record["epoch"] for record in evaluations(training.run.path)] == [0]
    name_batch(training.run.path, 48)
    training.train(attempt=1, **LARGER)
    assert [(record["epoch"], record["step"]) for record in evaluations(training.run.path)] == [(0, 4), (1, 8), (2, 11)]


def test_a_dropped_rest_ends_the_epoch_and_is_evaluated(training: Training) -> None:
    dropping = {**SAVES, "batch__tail": "drop"}
    training.crash(steps=6, **dropping)
    name_batch(training.run.path, 60)
    # Step 5 is the second of three in the second epoch; 36 samples of it are left, fewer than 60.
    training.train(attempt=1, **{**dropping, "checkpoint": {"every": {"steps": 5}}, "batch__global_batch_size": 60})
    assert result(training.run.path)["epochs"] == 3
    assert [record["epoch"] for record in evaluations(training.run.path)] == [0, 1, 2]


def test_betas_follow_the_rule_for_the_new_batch(training: Training) -> None:
    adam: dict[str, Any] = {
        "train__optimizer": {"name": "adamw", "betas": [0.9, 0.99]},
        "learning_rate__base": 0.01,
        "learning_rate__rule": "sqrt",
        "learning_rate__base_global_batch_size": 32,
    }
    training.crash(steps=7, **SAVES, **adam)
    name_batch(training.run.path, 48)
    training.train(attempt=1, **LARGER, **adam)
    saved = torch.load(training.run.checkpoints / "step-000010" / "optimizer.pt", weights_only=True)
    (group,) = saved["optimizer"]["param_groups"]
    # kappa is 3/2: beta -> 1 - kappa (1 - beta).
    assert group["betas"] == pytest.approx((0.85, 0.985), rel=0, abs=1e-15)
    assert group["lr"] == pytest.approx(0.01 * 1.5**0.5, rel=1e-12)


def test_a_rest_of_one_sample_is_refused_for_a_model_with_batch_norm(training: Training) -> None:
    training.crash(steps=7, **SAVES, train__model=NORM)
    name_batch(training.run.path, 35)
    # 36 samples are left of the epoch: 35 and 1. A whole epoch has no such batch.
    with pytest.raises(PlanError, match="1 sample"):
        training.train(attempt=1, **{**SAVES, "batch__global_batch_size": 35}, train__model=NORM)
