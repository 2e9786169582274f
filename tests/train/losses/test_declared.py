"""Losses by declaration: shares of any size add up to the loss of the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hpcddp import DeclaredLoss, LossError, Reduction, Share
from hpcddp.batch.plan import plan_batch
from tests.messages import GoldenMessages


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.mse_loss(outputs, targets, reduction="none")


SPLIT = (Reduction.MEAN, Reduction.SUM, Reduction.PER_SAMPLE)
LOSSES: dict[Reduction, Callable[[Tensor, Tensor], Tensor]] = {
    Reduction.MEAN: lambda outputs, targets: squares(outputs, targets).mean(),
    Reduction.SUM: lambda outputs, targets: squares(outputs, targets).sum(),
    Reduction.PER_SAMPLE: squares,
}


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("reduction", SPLIT)
@pytest.mark.parametrize(("batch", "ranks", "micro_steps"), [(12, 3, 1), (11, 3, 2), (5, 4, 3)])
def test_the_average_over_ranks_is_the_loss_of_the_global_batch(
    reduction: Reduction, batch: int, ranks: int, micro_steps: int, *, as_text: bool
) -> None:
    g = torch.Generator().manual_seed(0)
    outputs = torch.randn(batch, generator=g, dtype=torch.float64, requires_grad=True)
    targets = torch.randn(batch, generator=g, dtype=torch.float64)
    plan = plan_batch(global_batch_size=batch, world_size=ranks, samples=None, grad_accum_steps=micro_steps)
    given: Any = reduction.value if as_text else reduction
    declared = DeclaredLoss(function=LOSSES[reduction], reduction=given)
    begin, logged = 0, 0.0
    for share in (n for rank in plan.share(batch) for n in rank):
        rows = slice(begin, begin + share)
        loss = declared.of_share(
            outputs[rows], targets[rows], Share(samples=share, global_samples=batch, world_size=ranks)
        )
        (loss.backward / ranks).backward()  # type: ignore[no-untyped-call]
        begin, logged = begin + share, logged + float(loss.logged)
    plain = squares(outputs, targets).sum() if reduction is Reduction.SUM else functional.mse_loss(outputs, targets)
    (expected,) = torch.autograd.grad(plain, outputs)
    assert outputs.grad is not None
    assert (outputs.grad - expected).abs().max() <= 1e-15
    assert logged == pytest.approx(float(plain.detach()), abs=1e-13)


def test_an_empty_share_is_zero_and_reaches_every_output() -> None:
    main, auxiliary = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    declared = DeclaredLoss(function=functional.mse_loss)
    outputs = {"main": main * 1, "others": [auxiliary * 1, torch.tensor([3])]}
    loss = declared.of_share(outputs, None, Share(samples=0, global_samples=3, world_size=4))
    loss.backward.backward()  # type: ignore[no-untyped-call]
    assert float(loss.logged) == 0
    assert main.grad is not None
    assert auxiliary.grad is not None
    assert (main.grad.tolist(), auxiliary.grad.tolist()) == ([0, 0], [0, 0])


def test_an_empty_share_reaches_complex_outputs() -> None:
    output = torch.tensor([1 + 2j], requires_grad=True)
    declared = DeclaredLoss(function=functional.mse_loss)
    loss = declared.of_share(output * 1, None, Share(samples=0, global_samples=3, world_size=4))
    loss.backward.backward()  # type: ignore[no-untyped-call]
    assert output.grad is not None
    assert output.grad.tolist() == [0]


@pytest.mark.parametrize(
    ("reduction", "returned", "kind", "expected"),
    [
        (Reduction.MEAN, torch.ones(3), "a tensor of shape (3,)", "a tensor of shape ()"),
        (Reduction.PER_SAMPLE, torch.ones(()), "a tensor of shape ()", "a tensor of shape (3,)"),
        (Reduction.SUM, 1.5, "a float", "a tensor of shape ()"),
    ],
)
def test_a_loss_that_is_not_what_it_is_declared_is_refused(
    golden: GoldenMessages, reduction: Reduction, returned: Any, kind: str, expected: str
) -> None:
    declared = DeclaredLoss(function=lambda _outputs, _targets: returned, reduction=reduction)
    with pytest.raises(LossError) as caught:
        declared.of_share(None, None, Share(samples=3, global_samples=3, world_size=1))
    message = golden.message(caught.value)
    assert f"declared {reduction.value} and returns {kind} for 3 samples" in message
    assert f"not {expected}; return that" in message
    assert "mean, sum, per_sample, global" in message


@pytest.mark.parametrize("reduction", ["Mean", "none", None])
def test_a_reduction_that_there_is_not_is_refused(golden: GoldenMessages, reduction: Any) -> None:
    with pytest.raises(LossError) as caught:
        DeclaredLoss(function=functional.mse_loss, reduction=reduction)
    message = golden.message(caught.value)
    assert f"is {reduction!r}" in message
    assert "write one of mean, sum, per_sample, global" in message


@pytest.mark.parametrize("samples", [0, 3])
def test_a_loss_of_the_global_batch_is_left_as_its_helper_made_it(samples: int) -> None:
    outputs = torch.ones(3, requires_grad=True)
    declared = DeclaredLoss(function=lambda rows, _: 7 + rows.sum(), reduction=Reduction.GLOBAL)
    loss = declared.of_share(outputs[:samples], None, Share(samples=samples, global_samples=9, world_size=4))
    loss.backward.backward()  # type: ignore[no-untyped-call]
    # Every rank logs its part of what all of them return.
    assert float(loss.logged) == (7 + samples) / 4
    assert outputs.grad is not None
    assert outputs.grad.tolist() == [1.0] * samples + [0.0] * (3 - samples)


def test_an_empty_share_without_outputs_is_refused(golden: GoldenMessages) -> None:
    declared = DeclaredLoss(function=functional.mse_loss)
    with pytest.raises(LossError) as caught:
        declared.of_share(None, None, Share(samples=0, global_samples=3, world_size=1))
    message = golden.message(caught.value)
    assert "returned a NoneType" in message
    assert "empty share" in message
