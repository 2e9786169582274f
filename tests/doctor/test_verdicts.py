"""The doctor's verdicts against the mean condition, which is computed here by other means: no false all-clear."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from hpcddp.doctor.loss.call import Batch, Loss, plain_batches
from hpcddp.doctor.loss.examination import Verdict, judge
from tests.doctor import sample_losses
from tests.examples import examples

SAMPLES = "tests.doctor.sample_losses"
SIZES = ((8, 8, 8, 8), (17, 5, 6, 4), (2, 11, 19), (30, 2))
ROUNDING = 1e-9

Function = Callable[..., Tensor]
Data = Callable[[torch.Generator], tuple[Any, Any]]


def labelled(g: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(32, 10, generator=g), torch.randint(0, 10, (32,), generator=g)


def learned(g: torch.Generator) -> tuple[Tensor, Tensor]:
    outputs, targets = labelled(g)
    return outputs + 8 * torch.rand(32, 1, generator=g) * functional.one_hot(targets, 10), targets


def of_a_thousand(g: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(32, 1000, generator=g), torch.arange(760, 792)


def marked_with(label: int) -> Data:
    def data(g: torch.Generator) -> tuple[Tensor, Tensor]:
        outputs, targets = labelled(g)
        return outputs, targets.masked_fill(torch.rand(32, generator=g) < 0.3, label)

    return data


def embeddings(g: torch.Generator) -> tuple[Tensor, Tensor]:
    first = torch.randn(32, 12, generator=g)
    return first, first + 0.5 * torch.randn(32, 12, generator=g)


def masks(g: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(32, 1, 5, 5, generator=g), torch.randint(0, 2, (32, 1, 5, 5), generator=g).double()


def many_labels(g: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(32, 10, generator=g), torch.randint(0, 2, (32, 10), generator=g).double()


def probabilities(g: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(32, 10, generator=g), torch.randn(32, 10, generator=g).softmax(1)


# What each loss is written for. Those that are means come first.
LOSSES: dict[str, Data] = {
    "torch.nn.functional:cross_entropy": labelled,
    "torch.nn.functional:mse_loss": embeddings,
    "torch.nn.functional:l1_loss": embeddings,
    "torch.nn.functional:smooth_l1_loss": embeddings,
    "torch.nn:HuberLoss": embeddings,
    "torch.nn.functional:binary_cross_entropy_with_logits": many_labels,
    "torch.nn.functional:multilabel_soft_margin_loss": many_labels,
    "torch.nn.functional:multi_margin_loss": labelled,
    "nll": labelled,
    "focal": labelled,
    "label_smoothing": labelled,
    "positive_weight": masks,
    "kl_batchmean": probabilities,
    "distillation": embeddings,
    "cosine_distance": embeddings,
    "dice_per_sample": masks,
    "in_place": embeddings,
    "cross_entropy_sum": labelled,
    "ten_weights": labelled,
    "one_rare_class": of_a_thousand,
    "ignores_0": labelled,
    "ignores_3": labelled,
    "ignores_250": marked_with(250),
    "ignores_255": marked_with(255),
    "ignores_what_is_said": marked_with(77),
    "Ignores119": marked_with(119),
    "hard_samples": learned,
    "focal_over_positives": masks,
    "batch_dice_smooth": masks,
    "batch_iou": masks,
    "rmse": embeddings,
    "correlation": embeddings,
    "infonce": embeddings,
    "supervised_contrast": labelled,
    "batch_hard": labelled,
    "barlow": embeddings,
    "vicreg": embeddings,
    "mmd": embeddings,
    "energy_distance": embeddings,
    "rkd_distance": embeddings,
    "rkd_angle": embeddings,
    "similarity_preserving": embeddings,
    "dist_kd": embeddings,
    "coral": embeddings,
    "cka": embeddings,
    "neighbours": embeddings,
}
WEIGHTED = {
    "ten_weights",
    "one_rare_class",
    "ignores_0",
    "ignores_3",
    "ignores_250",
    "ignores_255",
    "ignores_what_is_said",
    "Ignores119",
    "hard_samples",
    "focal_over_positives",
}
MEANS = [*LOSSES][: [*LOSSES].index("cross_entropy_sum")]


def full(name: str) -> str:
    return name if ":" in name else f"{SAMPLES}:{name}"


def function_of(name: str) -> Function:
    module, _, attribute = full(name).partition(":")
    found = getattr({SAMPLES: sample_losses, "torch.nn": nn, "torch.nn.functional": functional}[module], attribute)
    made: Function = found() if isinstance(found, type) else found
    return made


def with_gradient(function: Function, outputs: Any, targets: Any) -> tuple[Tensor, list[Tensor]]:
    """Return the loss of a batch and its gradient with respect to every output."""
    leaves = [part.clone().requires_grad_() for part in (outputs if isinstance(outputs, tuple) else (outputs,))]
    copies = [leaf.clone() for leaf in leaves]
    loss = function(tuple(copies) if isinstance(outputs, tuple) else copies[0], targets)
    return loss.detach(), list(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))


def rows_of(tree: Any, rows: Tensor) -> Any:
    if isinstance(tree, tuple):
        return tuple(part[rows] for part in tree)
    return None if tree is None else tree[rows]


def error_of_the_mean(function: Function, outputs: Any, targets: Any) -> float:
    """Return the largest error, over splits, of the weighted mean of the shares' losses, in value and gradient."""
    value, gradients = with_gradient(function, outputs, targets)
    samples, errors = len(gradients[0]), []
    for number, sizes in enumerate(SIZES):
        g = torch.Generator().manual_seed(number)
        order = torch.arange(samples) if number % 2 == 0 else torch.randperm(samples, generator=g)
        mean, means = torch.zeros_like(value), [torch.zeros_like(gradient) for gradient in gradients]
        for rows in torch.split(order, list(sizes)):
            share, parts = with_gradient(function, rows_of(outputs, rows), rows_of(targets, rows))
            mean += len(rows) / samples * share
            for whole, part in zip(means, parts, strict=True):
                whole[rows] = len(rows) / samples * part
        errors.append(float((mean - value).abs() / value.abs()))
        errors += [float((a - b).norm() / b.norm()) for a, b in zip(means, gradients, strict=True) if b.norm()]
    # A share without a finite loss breaks the mean as well.
    return max(float("inf") if error != error else error for error in errors)  # noqa: PLR0124  NaN


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def own_batch(outputs: Any, targets: Any) -> Batch:
    return Batch(data="own", arguments=(outputs, targets), samples=32).to(torch.float64)


@pytest.mark.parametrize("name", LOSSES)
def test_the_verdict_is_that_of_the_mean_condition_computed_here(name: str) -> None:
    function, data = function_of(name), LOSSES[name](torch.Generator().manual_seed(7))
    error = error_of_the_mean(function, *data)
    found = judge(Loss(name=name, function=function), own_batch(*data), world_size=4).verdict
    assert (error <= ROUNDING) == (name in MEANS)
    assert (found is Verdict.MEAN) == (name in MEANS)
    assert (found is Verdict.SUM) == (name == "cross_entropy_sum")
    assert (found is Verdict.WEIGHTED_MEAN) == (name in WEIGHTED)


@examples(0.2)
@given(
    mean=st.sampled_from(["mse_loss", "l1_loss", "smooth_l1_loss"]),
    other=st.sampled_from(["mmd", "rkd_distance", "similarity_preserving", "coral", "rmse", "dist_kd"]),
    weight=st.sampled_from([0.0, 1e-3, 0.1, 1.0, 30.0]),
    world_size=st.sampled_from([2, 3, 4, 8]),
    samples=st.integers(16, 40),
)
def test_a_mean_with_a_share_of_another_loss_is_mean_only_where_that_share_is_nothing(
    mean: str, other: str, weight: float, world_size: int, samples: int
) -> None:
    def mixed(outputs: Tensor, targets: Tensor) -> Tensor:
        total: Tensor = getattr(functional, mean)(outputs, targets)
        return total + weight * getattr(sample_losses, other)(outputs, targets) if weight else total

    *_, batch = plain_batches(samples)
    found = judge(Loss(name="mixed", function=mixed), batch.to(torch.float64), world_size=world_size)
    assert (found.verdict is Verdict.MEAN) == (weight == 0)
