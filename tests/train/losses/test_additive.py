"""Additive losses in one process: shares that are played one after the other, values, errors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import hpcddp
from hpcddp import LossError, additive_loss, gather_with_grad, sum_statistics, weighted_mean
from tests.messages import GoldenMessages


def iou(intersection: Tensor, union: Tensor) -> Tensor:
    return 1 - intersection / union


def test_without_a_process_group_the_loss_is_that_of_the_batch() -> None:
    outputs = torch.tensor([0.2, 0.9, 0.4], requires_grad=True)
    targets = torch.tensor([0.0, 1.0, 1.0])
    loss = additive_loss(iou, (outputs * targets).sum(), (outputs + targets - outputs * targets).sum())
    (found,) = torch.autograd.grad(loss, outputs)
    plain = 1 - (outputs * targets).sum() / (outputs + targets - outputs * targets).sum()
    (expected,) = torch.autograd.grad(plain, outputs)
    assert float(loss.detach()) == pytest.approx(float(plain.detach()), rel=1e-6)
    assert torch.allclose(found, expected, rtol=1e-6)


def test_sums_are_float64_whatever_the_statistics_are_in() -> None:
    # float32 has 24 bits: it cannot hold the sum.
    large, one = torch.tensor(2.0**24, dtype=torch.float32), torch.tensor(1)
    (total, count) = sum_statistics([[large, one], [one.float(), one]])
    assert (total.dtype, count.dtype) == (torch.float64, torch.float64)
    assert (float(total), float(count)) == (2.0**24 + 1, 2.0)


def test_micro_batches_with_the_totals_add_up_to_the_gradient_of_the_batch() -> None:
    x = torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.float64, requires_grad=True)
    parts = [slice(0, 1), slice(1, 4), slice(4, 4)]
    totals = sum_statistics([x[part].square().sum(), torch.tensor(len(x[part]))] for part in parts)
    assert not any(total.requires_grad for total in totals)
    for part in parts:
        loss = additive_loss(
            lambda s, n: (s / n).sqrt(), x[part].square().sum(), torch.tensor(len(x[part])), totals=totals
        )
        assert float(loss.detach()) == pytest.approx(float(x.detach().square().mean().sqrt()))
        loss.backward()  # type: ignore[no-untyped-call]
    (expected,) = torch.autograd.grad(x.square().mean().sqrt(), x)
    assert x.grad is not None
    assert (x.grad - expected).abs().max() <= 1e-15


def test_statistics_may_have_any_shape() -> None:
    confusion = torch.ones(3, 3, requires_grad=True)
    loss = additive_loss(lambda c, n: c.diagonal().sum() / n, confusion, torch.tensor(9))
    loss.backward()  # type: ignore[no-untyped-call]
    assert confusion.grad is not None
    assert torch.allclose(confusion.grad, torch.eye(3) / 9)


def test_weighted_mean_takes_the_gradient_of_the_count_too() -> None:
    weight = torch.tensor(2.0, requires_grad=True)
    weighted_mean(3 * weight, weight + 4).backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    assert float(weight.grad) == pytest.approx(12 / 36)


@pytest.mark.parametrize(
    ("count", "words"),
    [(None, "neither count nor global_count"), (torch.tensor(2), "both count and global_count")],
)
def test_weighted_mean_needs_one_count(golden: GoldenMessages, count: Tensor | None, words: str) -> None:
    with pytest.raises(LossError) as caught:
        weighted_mean(torch.tensor(1.0), count, global_count=count)
    message = golden.message(caught.value)
    assert f"weighted_mean got {words}" in message
    assert "one backward per step, global_count" in message


def test_totals_of_other_shapes_are_refused(golden: GoldenMessages) -> None:
    with pytest.raises(LossError) as caught:
        additive_loss(iou, torch.ones(()), torch.ones(()), totals=[torch.ones(2)])
    message = golden.message(caught.value)
    assert "statistics of shapes [(), ()]" in message
    assert "totals of shapes [(2,)]" in message
    assert "same statistics to sum_statistics" in message


def test_a_function_that_returns_no_scalar_is_refused(golden: GoldenMessages) -> None:
    with pytest.raises(LossError) as caught:
        additive_loss(lambda s: s, torch.ones(2))
    message = golden.message(caught.value)
    assert "a tensor of shape (2,)" in message
    assert "return its mean or sum" in message
    with pytest.raises(LossError, match="returns a float"):
        additive_loss(float, torch.ones(()))  # type: ignore[arg-type]


def test_complex_statistics_are_refused(golden: GoldenMessages) -> None:
    total, count = torch.tensor(1 + 2j), torch.tensor(3)
    uses: tuple[Callable[[], object], ...] = (
        lambda: sum_statistics([[count, total]]),
        lambda: additive_loss(torch.div, total, count, totals=[torch.ones(()), count]),
        lambda: weighted_mean(total, global_count=count),
    )
    for use in uses:
        with pytest.raises(LossError) as caught:
            use()
        message = golden.message(caught.value)
        assert "a statistic is complex" in message
        assert "give torch.view_as_real" in message


def test_misuse_is_refused_in_one_process_too(golden: GoldenMessages) -> None:
    vector, one = torch.ones(3), torch.ones(())
    wrong: dict[tuple[str, ...], Callable[[], object]] = {
        ("a statistic is no tensor", "as a tensor", "global_count"): lambda: weighted_mean(one, 5),  # type: ignore[arg-type]
        ("micro-batches are not as many", "losses.sum()"): lambda: sum_statistics([[vector], [one]]),
        ("gathered is no tensor", "[n, ...]"): lambda: gather_with_grad(1.0),  # type: ignore[arg-type]
        ("weighted_mean got a tensor of 3 numbers", "write losses.sum()"): lambda: weighted_mean(vector, one),
        ("a tensor of 3 numbers", "losses.sum()"): lambda: weighted_mean(vector, global_count=one),
        ("gathered is a scalar", "give the outputs [n, ...]"): lambda: gather_with_grad(one),
        ("sizes holds 2 numbers", "there are 1 ranks", "leave sizes out"): lambda: gather_with_grad(
            vector, sizes=[2, 1]
        ),
        ("sizes holds 2 for rank 0", "gives 3 rows", "leave sizes out"): lambda: gather_with_grad(vector, sizes=[2]),
    }
    for facts, use in wrong.items():
        with pytest.raises(LossError) as caught:
            use()
        message = golden.message(caught.value)
        for fact in facts:
            assert fact in message
    assert torch.equal(gather_with_grad(vector, sizes=[3]), vector)


def test_statistics_of_many_numbers_are_summed() -> None:
    many = torch.arange(1000.0)
    (total, two) = sum_statistics([[many, torch.ones(2)], [many, torch.ones(2)]])
    assert torch.equal(total, 2 * many.double())
    assert two.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("nothing", [[], [[]]])
def test_a_rank_that_gives_no_statistics_is_refused(golden: GoldenMessages, nothing: list[list[Tensor]]) -> None:
    with pytest.raises(LossError) as caught:
        sum_statistics(nothing)
    message = golden.message(caught.value)
    assert "sum_statistics got no statistics" in message
    assert "give those of an empty share" in message


def test_the_public_api_is_loaded_when_it_is_used() -> None:
    assert {"additive_loss", "gather_with_grad", "weighted_mean"} <= set(dir(hpcddp))
    with pytest.raises(AttributeError, match="module 'hpcddp' has no attribute 'no_such_loss'"):
        _ = hpcddp.no_such_loss  # type: ignore[attr-defined]  # a type checker knows it too
