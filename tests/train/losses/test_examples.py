"""The examples train, and accumulation changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from examples import class_weighted_cross_entropy, contrastive_clip, segmentation_iou


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("example", [segmentation_iou, class_weighted_cross_entropy])
def test_the_loss_falls_and_does_not_depend_on_the_number_of_micro_steps(example: ModuleType) -> None:
    losses = list(example.train(micro_steps=1))
    assert losses[-1] < losses[0]
    assert list(example.train(micro_steps=3)) == pytest.approx(losses, abs=1e-12)


def test_the_contrastive_loss_falls() -> None:
    losses = list(contrastive_clip.train())
    assert losses[-1] < losses[0]
