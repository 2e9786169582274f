"""The checksum of a state in memory: equal states have the same one, and different states another one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hpcddp.run.checkpoints import Manifest
from hpcddp.train.checkpoint.memory import MemoryCheckpoint

Contents = dict[str, Any]


@pytest.fixture
def contents() -> Contents:
    """Return what a checkpoint holds after a step of a small training."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(5, 3)).square().sum().backward()
    optimizer.step()
    scaler = {"scale": 65536.0, "_growth_tracker": 3}
    return {"model.pt": model.state_dict(), "optimizer.pt": {"optimizer": optimizer.state_dict(), "scaler": scaler}}


def checksum(contents: Contents) -> int:
    manifest = Manifest(step=1, attempt=0, time=0.0, contract={}, progress={}, information={}, files={})
    return MemoryCheckpoint.of(manifest, contents).checksum()


def first_parameter(contents: Contents) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = contents["optimizer.pt"]["optimizer"]["state"][0]
    return state


def flip_last_bit(tensor: torch.Tensor) -> None:
    tensor.reshape(-1).view(torch.uint8)[-1] ^= 1


def test_a_copy_whose_keys_are_in_another_order_has_the_same_checksum(contents: Contents) -> None:
    other = copy.deepcopy(contents)
    state = first_parameter(other)
    for key in reversed(list(state)):
        state[key] = state.pop(key)
    assert list(state) != list(first_parameter(contents))
    assert checksum(other) == checksum(contents)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda contents: flip_last_bit(contents["model.pt"]["0.weight"]), id="parameter"),
        pytest.param(lambda contents: flip_last_bit(contents["model.pt"]["1.num_batches_tracked"]), id="buffer"),
        pytest.param(lambda contents: flip_last_bit(first_parameter(contents)["exp_avg"]), id="momentum"),
        pytest.param(lambda contents: contents["optimizer.pt"]["scaler"].update(scale=32768.0), id="scaler"),
        pytest.param(
            lambda contents: contents["optimizer.pt"]["optimizer"]["param_groups"][0].update(lr=0.001 * (1 + 1e-15)),
            id="learning rate",
        ),
    ],
)
def test_one_change_changes_the_checksum(contents: Contents, change: Callable[[Contents], None]) -> None:
    other = copy.deepcopy(contents)
    change(other)
    assert checksum(other) != checksum(contents)
