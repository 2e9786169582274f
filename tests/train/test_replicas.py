"""BatchNorm's modes, averaged weights, the guard's sentences and the noise scale, in one process."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hpcddp.batch.plan import PlanError
from hpcddp.run.checkpoints import list_checkpoints
from hpcddp.train.errors import ModelError, ResumeError, UserCodeError
from hpcddp.train.model.normalisation import NativeSyncBatchNorm, SyncBatchNorm, choose_batch_norm
from hpcddp.train.model.replica import LEARNING_RATE, Ema, Replica, digest, drift_error
from hpcddp.train.precision import Precision
from tests.distributed.norm_code import norm_net, own_forward
from tests.distributed.training import evaluations, result, steps
from tests.messages import GoldenMessages
from tests.train.conftest import Training

NewTraining = Callable[[str], Training]
NORM: dict[str, Any] = {"train__model": "tests.distributed.norm_code:norm_net"}


def test_synchronised_layers_keep_names_values_and_objects() -> None:
    model: Any = norm_net(3)
    layers, state = list(model.modules()), copy.deepcopy(model.state_dict())
    choose_batch_norm(model, "local", "cpu")
    assert type(model[1]) is nn.BatchNorm2d
    choose_batch_norm(model, "sync", "cpu")
    assert [type(model[index]) for index in (1, 5)] == [SyncBatchNorm, SyncBatchNorm]
    assert all(one is other for one, other in zip(model.modules(), layers, strict=True))
    assert list(model.state_dict()) == list(state)
    norm_net(3).load_state_dict(model.state_dict())
    choose_batch_norm(model, "sync", "cpu")


@pytest.mark.usefixtures("group")
def test_model_is_in_training_mode_after_an_evaluation_that_was_stopped() -> None:
    model = norm_net(3)
    replica = Replica(
        model=model,
        parallel=model,
        optimizer=torch.optim.SGD(model.parameters()),
        scaler=torch.amp.GradScaler("cpu", enabled=False),
        precision=Precision("fp32", "cpu"),
        placeholder=torch.zeros(2, 3, 8, 8),
    )
    with pytest.raises(KeyboardInterrupt), replica.evaluated():
        _stop_in_evaluation_mode(model)
    assert model.training


def _stop_in_evaluation_mode(model: nn.Module) -> None:
    assert not model.training
    raise KeyboardInterrupt


def test_gpus_take_torchs_own_layer() -> None:
    model: Any = norm_net(3)
    choose_batch_norm(model, "sync", "cuda")
    assert type(model[1]) is NativeSyncBatchNorm
    copy.deepcopy(model)


def test_layers_that_were_synchronised_by_their_author_stay_so() -> None:
    model = nn.Sequential(nn.SyncBatchNorm(3), nn.BatchNorm1d(3))
    choose_batch_norm(model, "local", "cpu")
    assert [type(layer) for layer in model] == [SyncBatchNorm, nn.BatchNorm1d]


@pytest.mark.parametrize(
    ("model", "facts"),
    [
        (own_forward(10), ("layer 1 is a Own", "a forward of its own", "write a plain BatchNorm")),
        (nn.LazyBatchNorm1d(), ("layer (the model) is a LazyBatchNorm1d", "write a BatchNorm with num_features")),
    ],
    ids=["own forward", "lazy"],
)
def test_layers_that_cannot_be_synchronised_are_refused(
    golden: GoldenMessages, model: nn.Module, facts: tuple[str, ...]
) -> None:
    with pytest.raises(ModelError) as caught:
        choose_batch_norm(model, "sync", "cpu")
    message = golden.message(caught.value)
    for fact in ("train.batch_norm is sync", *facts, "or train.batch_norm local"):
        assert fact in message


def test_one_rank_alone_trains_alike_in_both_modes(new_training: NewTraining) -> None:
    digests = set()
    for mode in ("local", "sync"):
        run = new_training(mode)
        run.train(**NORM, train__batch_norm=mode)
        digests.add(result(run.run.path)["parameters_sha256"])
    assert len(digests) == 1


def test_one_sample_over_all_ranks_is_refused_before_the_first_step(golden: GoldenMessages, training: Training) -> None:
    with pytest.raises(PlanError) as caught:
        training.train(**NORM, train__batch_norm="sync", batch__global_batch_size=33)
    message = golden.message(caught.value)
    assert "step 3 of every epoch" in message
    assert "all ranks together in micro-step 0" in message
    assert not training.run.metrics.exists()


def test_averaged_weights_are_evaluated_saved_and_resumed(golden: GoldenMessages, new_training: NewTraining) -> None:
    changes: dict[str, Any] = {**NORM, "train__epochs": 2, "checkpoint": {"every": {"steps": 3}}}
    plain, whole, broken = (new_training(name) for name in ("plain", "whole", "broken"))
    plain.train(**changes)
    whole.train(**changes, train__ema_decay=0.7)
    broken.crash(steps=6, **changes, train__ema_decay=0.7)
    with pytest.raises(ResumeError) as caught:
        broken.train(attempt=1, **changes)
    message = golden.message(caught.value)
    assert "saved with averaged weights" in message
    assert "now train.ema_decay is null" in message
    broken.train(attempt=2, **changes, train__ema_decay=0.7)
    one, other, again = (result(run.run.path) for run in (plain, whole, broken))
    assert one["parameters_sha256"] == other["parameters_sha256"] == again["parameters_sha256"]
    assert one["ema_sha256"] is None
    assert other["ema_sha256"] == again["ema_sha256"] != other["parameters_sha256"]
    assert [record["loss"] for record in steps(plain.run.path)] == [record["loss"] for record in steps(whole.run.path)]
    assert evaluations(plain.run.path)[-1]["val_loss"] != evaluations(whole.run.path)[-1]["val_loss"]
    assert again["val_loss"] == other["val_loss"]
    (note,) = (line for line in whole.said if "averaged weights" in line)
    assert "decay 0.7 per step" in golden.message(note)
    state = torch.load(list_checkpoints(whole.run.checkpoints)[0] / "ema.pt", weights_only=True)
    norm_net(10).load_state_dict(state)


def test_average_of_a_run_that_had_none_is_refused(golden: GoldenMessages, training: Training) -> None:
    training.crash(steps=3, checkpoint={"every": {"steps": 2}})
    with pytest.raises(ResumeError) as caught:
        training.train(attempt=1, train__ema_decay=0.9)
    message = golden.message(caught.value)
    assert "saved without averaged weights" in message
    assert "now train.ema_decay is given" in message


def test_model_that_cannot_be_copied_has_no_average(golden: GoldenMessages) -> None:
    model = nn.Linear(2, 2)
    model.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(UserCodeError) as caught:
        Ema(model, 0.9)
    message = golden.message(caught.value, {str(caught.value.__cause__): "REASON OF PYTHON"})
    assert "train.ema_decay is 0.9" in message
    assert "or leave ema_decay out" in message


def test_average_takes_other_buffers_over_as_they_are() -> None:
    model = nn.Linear(1, 1)
    model.register_buffer("mask", torch.tensor([-torch.inf, 0.0]))
    average = Ema(model, 0.5)
    model.mask[1] = 4.0  # type: ignore[operator]
    average.update(model)
    assert average.model.state_dict()["mask"].tolist() == [-torch.inf, 4.0]


@pytest.mark.parametrize("skipped", [None, torch.tensor(0.0), torch.tensor(1.0)])
def test_average_of_complex_and_real_weights_moves_both(skipped: torch.Tensor | None) -> None:
    model = nn.ParameterList([nn.Parameter(torch.tensor([1 + 2j])), nn.Parameter(torch.ones(1))])
    average = Ema(model, 0.5)
    with torch.no_grad():
        for parameter in model:
            parameter.mul_(3)
    average.update(model, skipped)
    left_out = skipped is not None and bool(skipped)
    expected = [1 + 2j, 1.0] if left_out else [2 + 4j, 2.0]
    assert [parameter.item() for parameter in average.model.parameters()] == expected


def test_complex_parameters_are_refused_in_fp16(golden: GoldenMessages, training: Training) -> None:
    with pytest.raises(ModelError) as caught:
        training.train(train__model="tests.distributed.own_code:complex_model", train__precision="fp16")
    message = golden.message(caught.value)
    assert "train.precision is fp16" in message
    assert "weight is complex" in message
    assert "write bf16 or fp32" in message


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
)
def test_digest_sees_every_entry_and_its_place(dtype: torch.dtype) -> None:
    values = torch.tensor([0, 1, 0, 1, 1, 0]).to(dtype)
    digests = {int(digest(values))}
    for index in range(len(values)):
        other = values.clone()
        other[index] = 1 - other[index].to(torch.int64) if not dtype.is_complex else other[index] + 1
        digests.add(int(digest(other)))
    digests.add(int(digest(values.flip(0))))
    assert len(digests) == 8


def test_digest_does_not_depend_on_the_layout() -> None:
    images = torch.randn(2, 3, 4, 5)
    assert digest(images) == digest(images.to(memory_format=torch.channels_last))
    assert digest(torch.zeros(0)) == 0


@pytest.mark.parametrize(
    ("table", "ranks", "names"),
    [
        ([[1, 5], [1, 6]], "rank 1 differs", "in weight,"),
        ([[1, 5], [1, 6], [1, 6]], "rank 0 differs", "in weight,"),
        ([[1, 5], [2, 5], [1, 5]], "rank 1 differs", "in the learning rate,"),
        ([[1, 5], [2, 6], [1, 4], [1, 5]], "ranks 1 and 1 more differ", "in the learning rate and weight,"),
    ],
    ids=["two ranks", "three ranks", "rate", "two differ"],
)
def test_drift_names_who_differs_from_most(
    golden: GoldenMessages, table: list[list[int]], ranks: str, names: str
) -> None:
    message = golden.message(drift_error((LEARNING_RATE, "weight"), table, 7))
    assert message.startswith(f"after step 7 {ranks} ")
    assert names in message
