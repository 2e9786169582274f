"""Losses that several ranks and one process compute: what a rank does, and the plain loss of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from examples import class_weighted_cross_entropy, contrastive_clip, segmentation_iou
from hpcddp import accumulate_additive, additive_loss, gather_with_grad, weighted_mean

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """One loss.

    ``backward`` runs a step on one rank and returns its loss; ``plain`` is the loss of a whole batch in one process.
    """

    load: Callable[[], Pair]
    make_model: Callable[[], nn.Module]
    backward: Callable[[nn.Module, Sequence[Pair]], Tensor]
    plain: Callable[[nn.Module, Tensor, Tensor], Tensor]
    accumulates: bool = True


def plain_iou(model: nn.Module, images: Tensor, masks: Tensor) -> Tensor:
    p = model(images).sigmoid()
    return cast("Tensor", 1 - (p * masks).sum() / (p + masks - p * masks).sum())


def dice(both: Tensor, sizes: Tensor) -> Tensor:
    return 1 - (2 * both + 1) / (sizes + 1)


def dice_backward(model: nn.Module, micro_batches: Sequence[Pair]) -> Tensor:
    def overlap(batch: Pair) -> Pair:
        p = model(batch[0]).sigmoid()
        return (p * batch[1]).sum(), p.sum() + batch[1].sum()

    return accumulate_additive(dice, overlap, micro_batches, model=model)


def plain_dice(model: nn.Module, images: Tensor, masks: Tensor) -> Tensor:
    p = model(images).sigmoid()
    return dice((p * masks).sum(), p.sum() + masks.sum())


def plain_class_weights(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(model(images), labels, weight=class_weighted_cross_entropy.class_weights())


def plain_clip(model: nn.Module, upper: Tensor, lower: Tensor) -> Tensor:
    one, two = model(upper, lower)
    logits = one @ two.T * cast("Tensor", model.log_scale).exp()
    labels = torch.arange(len(logits))
    return (functional.cross_entropy(logits, labels) + functional.cross_entropy(logits.T, labels)) / 2


def plain_correlation(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    one, two = model(images)[:, 0], labels.double()
    return 1 - torch.corrcoef(torch.stack((one, two)))[0, 1]


def correlation(n: Tensor, x: Tensor, y: Tensor, xx: Tensor, yy: Tensor, xy: Tensor) -> Tensor:
    return 1 - (n * xy - x * y) / ((n * xx - x * x) * (n * yy - y * y)).sqrt()


def one_correlation(model: nn.Module, micro_batches: Sequence[Pair]) -> Tensor:
    ((images, labels),) = micro_batches
    x, y = model(images)[:, 0], labels.double()
    count = torch.tensor(len(x))
    loss = additive_loss(correlation, count, x.sum(), y.sum(), (x * x).sum(), (y * y).sum(), (x * y).sum())
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def one_contrast(model: nn.Module, micro_batches: Sequence[Pair]) -> Tensor:
    (pairs,) = micro_batches
    return contrastive_clip.backward(model, pairs)


def one_weighted_mean(model: nn.Module, micro_batches: Sequence[Pair]) -> Tensor:
    ((images, labels),) = micro_batches
    weights = class_weighted_cross_entropy.class_weights()
    total = functional.cross_entropy(model(images), labels, weight=weights, reduction="sum")
    loss = weighted_mean(total, weights[labels].sum())
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def one_supervised_contrast(model: nn.Module, micro_batches: Sequence[Pair]) -> Tensor:
    ((images, labels),) = micro_batches
    loss = same_class_attracts(gather_with_grad(model(images)), gather_with_grad(labels))
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def plain_supervised_contrast(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return same_class_attracts(model(images), labels)


def same_class_attracts(outputs: Tensor, labels: Tensor) -> Tensor:
    z = functional.normalize(outputs, dim=1)
    same = (labels[:, None] == labels[None]).double()
    return -((z @ z.T).log_softmax(1) * same).sum(1).div(same.sum(1)).mean()


CLASSES = (class_weighted_cross_entropy.load_digits, class_weighted_cross_entropy.make_model)
CASES = {
    "segmentation_iou": Case(
        segmentation_iou.load_digits, segmentation_iou.make_model, segmentation_iou.backward, plain_iou
    ),
    "batch_dice": Case(segmentation_iou.load_digits, segmentation_iou.make_model, dice_backward, plain_dice),
    "class_weights": Case(*CLASSES, class_weighted_cross_entropy.backward, plain_class_weights),
    "contrastive_clip": Case(
        contrastive_clip.load_digits, contrastive_clip.make_model, one_contrast, plain_clip, accumulates=False
    ),
    "weighted_mean": Case(*CLASSES, one_weighted_mean, plain_class_weights, accumulates=False),
    "correlation": Case(*CLASSES, one_correlation, plain_correlation, accumulates=False),
    "supervised_contrast": Case(*CLASSES, one_supervised_contrast, plain_supervised_contrast, accumulates=False),
}
# With 7 samples, 4 ranks and 2 micro-steps one micro-batch is empty.
BATCHES = (32, 30, 7)
RUNS = [
    (name, batch, micro_steps)
    for name, case in CASES.items()
    for batch in BATCHES
    for micro_steps in ((1, 2) if case.accumulates else (1,))
]
