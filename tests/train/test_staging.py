"""Copies of a training's state: exact, of their own, and in the same memory each time."""

from __future__ import annotations

import io
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn, optim

from hpcddp.train.checkpoint.checkpointer import Staging


def stepped_model() -> tuple[nn.Module, optim.Optimizer]:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)
    optimizer = optim.AdamW(model.parameters())
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    optimizer.step()
    return model, optimizer


def saved(content: Any) -> Any:
    stream = io.BytesIO()
    torch.save(content, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=True)


def test_copy_loads_as_the_original_does() -> None:
    model, optimizer = stepped_model()
    copies = Staging().copy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    other, other_optimizer = stepped_model()
    other.load_state_dict(saved(copies["model"]))
    other_optimizer.load_state_dict(saved(copies["optimizer"]))
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value)
        assert copies["model"][name].stride() == value.stride()
    assert str(other_optimizer.state_dict()) == str(optimizer.state_dict())
    # Modules read their version from it when they load.
    assert vars(copies["model"])["_metadata"] == vars(model.state_dict())["_metadata"]


def test_copy_stays_as_it_was_when_the_original_goes_on() -> None:
    model, optimizer = stepped_model()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    copies = Staging().copy(state)
    before = {name: value.clone() for name, value in copies["model"].items()}
    with torch.no_grad():
        for value in model.state_dict().values():
            value.zero_()
        optimizer.state_dict()["state"][0]["exp_avg"].zero_()
    assert all(torch.equal(copies["model"][name], value) for name, value in before.items())
    assert copies["optimizer"]["state"][0]["exp_avg"].any()


def test_memory_is_taken_once() -> None:
    staging = Staging()
    value = torch.zeros(1000)
    first = staging.copy({"model": {"weight": value}})["model"]["weight"]
    value.fill_(1)
    second = staging.copy({"model": {"weight": value}})["model"]["weight"]
    assert first.data_ptr() == second.data_ptr()
    assert second.sum() == 1000
    assert sum(buffer.nbytes for buffer in staging._buffers.values()) == 4000


@pytest.mark.parametrize("other", [torch.zeros(3), torch.zeros(2, dtype=torch.float64), torch.zeros(2, 2).T[0]])
def test_memory_that_no_longer_fits_is_replaced(other: torch.Tensor) -> None:
    staging = Staging()
    staging.copy({"model": {"weight": torch.ones(2)}})
    copied = staging.copy({"model": {"weight": other}})["model"]["weight"]
    assert (copied.dtype, copied.shape) == (other.dtype, other.shape)
    assert torch.equal(copied, other)


def test_tied_weights_stay_tied() -> None:
    weight = torch.ones(1000)
    copies = Staging().copy({"model": {"encoder": weight, "decoder": weight, "other": weight.clone()}})["model"]
    assert copies["encoder"] is copies["decoder"]
    assert copies["encoder"] is not copies["other"]


def test_part_of_a_larger_tensor_is_saved_alone() -> None:
    stream = io.BytesIO()
    torch.save(Staging().copy({"model": {"part": torch.zeros(1_000_000)[:10]}}), stream)
    assert len(stream.getvalue()) < 10_000


def test_containers_and_numbers_are_copies_too() -> None:
    inner: dict[str, Any] = {"list": [1, {"deep": torch.ones(1)}], "tuple": (1, "a"), "set": {1, 2}, "none": None}
    copied = Staging().copy({"own": OrderedDict(inner)})["own"]
    inner["list"].append(2)
    inner["list"][1]["deep"].zero_()
    inner["set"].add(3)
    assert type(copied) is OrderedDict
    assert copied["list"] == [1, {"deep": torch.ones(1)}]
    assert (copied["tuple"], copied["set"], copied["none"]) == ((1, "a"), {1, 2}, None)


def test_parameter_becomes_a_plain_tensor_without_gradient() -> None:
    copied = Staging().copy({"model": {"weight": nn.Parameter(torch.ones(2))}})["model"]["weight"]
    assert type(copied) is torch.Tensor
    assert not copied.requires_grad


def test_sparse_tensor_is_copied_as_it_is() -> None:
    sparse = torch.eye(3).to_sparse()
    copied = Staging().copy({"model": {"weight": sparse}})["model"]["weight"]
    assert torch.equal(copied.to_dense(), torch.eye(3))


def test_nothing_to_wait_for_without_a_gpu() -> None:
    staging = Staging()
    staging.copy({"model": {"weight": torch.ones(2)}})
    staging.wait_until_copied()
