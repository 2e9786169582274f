"""Two passes in one process: the same noise, statistics of one pass, scaling, errors."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from hpcddp import LossError, accumulate_additive
from tests.messages import GoldenMessages


def root_mean(total: Tensor, count: Tensor) -> Tensor:
    return (total / count).sqrt()


def squares(outputs: Tensor) -> tuple[Tensor, Tensor]:
    return outputs.square().sum(), torch.tensor(outputs.numel())


def batches() -> list[Tensor]:
    return list(torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64))


def test_both_passes_see_the_same_noise_and_leave_the_statistics_of_one() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5), nn.BatchNorm1d(5)).double()
    seen: list[Tensor] = []

    def run(batch: Tensor) -> Sequence[Tensor]:
        seen.append(model(batch))
        return squares(seen[-1])

    accumulate_additive(root_mean, run, batches(), model=model)
    assert len(seen) == 6
    for first, second in zip(seen[:3], seen[3:], strict=True):
        assert torch.equal(first.detach(), second.detach())
        assert (first.requires_grad, second.requires_grad) == (False, True)
    assert int(model.get_buffer("2.num_batches_tracked")) == 3


def test_one_micro_batch_takes_one_pass() -> None:
    model = nn.Linear(5, 5).double()
    calls = []

    def run(batch: Tensor) -> Sequence[Tensor]:
        calls.append(batch)
        return squares(model(batch))

    accumulate_additive(root_mean, run, batches()[:1], model=model)
    assert len(calls) == 1


def gradient_scaled_by(factor: float) -> Tensor:
    torch.manual_seed(0)
    model = nn.Linear(5, 5).double()
    accumulate_additive(
        root_mean, lambda batch: squares(model(batch)), batches(), model=model, scale=lambda loss: loss * factor
    )
    return model.weight.grad if model.weight.grad is not None else torch.zeros(5, 5)


def test_every_backward_is_scaled() -> None:
    assert torch.allclose(gradient_scaled_by(1.0) * 1024, gradient_scaled_by(1024.0), rtol=1e-12)


def test_no_micro_batches_are_refused(golden: GoldenMessages) -> None:
    with pytest.raises(LossError) as caught:
        accumulate_additive(root_mean, squares, [], model=nn.Linear(1, 1))
    message = golden.message(caught.value)
    assert "no micro-batches" in message
    assert "give an empty share" in message
