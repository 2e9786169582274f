"""Losses with a declared reduction over samples, from which the weight of each share follows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from torch import Tensor

from hpcddp.train.errors import LossError, describe


class Reduction(StrEnum):
    """The reduction of a loss over samples."""

    MEAN = "mean"
    """A scalar, the mean over the samples that the function receives."""
    SUM = "sum"
    """A scalar, the sum over them."""
    PER_SAMPLE = "per_sample"
    """The vector ``[n]`` itself; its mean over the global batch is what is trained."""
    GLOBAL = "global"
    """A scalar, the loss of the global batch, as ``additive_loss`` or ``gather_with_grad`` makes it; A is 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The part of a global batch that one rank takes in one micro-step.

    Args:
        samples: n[r,a], 0 for an empty share.
        global_samples: b, samples of this global batch.
        world_size: W.
    """

    samples: int
    global_samples: int
    world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareLoss:
    """The loss of a share.

    Args:
        backward: L[r,a], the scalar to call ``backward`` on.
        logged: a float64 scalar without gradient; its sum over ranks and micro-steps is the loss of the global batch.
    """

    backward: Tensor
    logged: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredLoss:
    """A loss ``function(outputs, targets)`` with its reduction over samples.

    ``(1/W) sum over r, a of L[r,a]`` must be the loss of the global batch (batch contract, section 0). L[r,a] is
    therefore::

        mean         W * n[r,a] / b * loss     the target is the mean over the b samples
        sum          W * loss                  the target is the sum over the b samples
        per_sample   W / b * sum of losses     the target is the mean over the b samples
        global       loss                      the target itself: the helper includes the factor W

    Args:
        reduction: its reduction, also as text such as ``"sum"``; `hpcddp doctor loss` checks it.

    Raises:
        LossError: there is no such reduction.
    """

    function: Callable[[Any, Any], Tensor]
    reduction: Reduction = Reduction.MEAN

    def __post_init__(self) -> None:
        try:
            reduction = Reduction(self.reduction)
        except ValueError as error:
            raise LossError(
                f"the reduction of a DeclaredLoss is {self.reduction!r}, and there is no such one; write one of "
                f"{', '.join(Reduction)}"
            ) from error
        # A text compares equal to its enum member, but the code compares with `is`.
        object.__setattr__(self, "reduction", reduction)

    def of_share(self, outputs: object, targets: object, share: Share) -> ShareLoss:
        """Return the loss of one share.

        Args:
            outputs: outputs of the model for the share. For an empty share the outputs for placeholder inputs; if
                the reduction is global, without rows, because every rank takes part in the collectives of the helper.
            targets: the targets of the share; for an empty share used only if the reduction is global.
            share: the part of the global batch.

        Raises:
            LossError: the shape of the loss is not that of its reduction.
        """
        if share.samples == 0 and self.reduction is not Reduction.GLOBAL:
            # The sum of the outputs times 0, never a mean, which would be NaN (batch contract, section 2).
            zero = zero_of(outputs)
            return ShareLoss(backward=zero, logged=zero.detach().double())
        loss = self._require_shape(self.function(outputs, targets), share.samples)
        if self.reduction is Reduction.PER_SAMPLE:
            loss = loss.sum()
        weight = self._weight(share)
        logged = loss.detach().double() * (weight / share.world_size)
        # A product with 1 changes nothing, and has a backward of its own.
        if weight != 1:
            loss = loss * weight
        return ShareLoss(backward=loss, logged=logged)

    def _weight(self, share: Share) -> float:
        """Return the factor on the loss of a share, which is a scalar."""
        match self.reduction:
            case Reduction.GLOBAL:
                return 1.0
            case Reduction.SUM:
                return float(share.world_size)
            case Reduction.MEAN:
                return share.world_size * share.samples / share.global_samples
            case Reduction.PER_SAMPLE:
                # The losses of the samples have been summed.
                return share.world_size / share.global_samples

    def _require_shape(self, loss: object, samples: int) -> Tensor:
        """Return the loss if it has the shape of its reduction."""
        expected = (samples,) if self.reduction is Reduction.PER_SAMPLE else ()
        if isinstance(loss, Tensor) and loss.shape == expected:
            return loss
        raise LossError(
            f"the loss is declared {self.reduction.value} and returns {describe(loss)} for {samples} samples, "
            f"not a tensor of shape {expected}; return that, or declare it otherwise: {', '.join(Reduction)}"
        )


def zero_of(outputs: object) -> Tensor:
    """Return 0 as a function of every output, so that the backward joins the same collectives."""
    differentiable = [t for t in _tensors(outputs) if t.is_floating_point() or t.is_complex()]
    zeros = [t.real.sum() * 0 for t in differentiable]
    if not zeros:
        raise LossError(
            f"the model returned a {type(outputs).__name__} without a floating-point tensor for an empty share, so "
            "that there is nothing to call backward on; return the tensors that the loss uses"
        )
    return sum(zeros[1:], start=zeros[0])


def _tensors(tree: object) -> Iterator[Tensor]:
    """Yield the tensors of nested tuples, lists and mappings."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, tuple | list):
        for value in tree:
            yield from _tensors(value)


def first_rows(outputs: object, count: int) -> Any:  # noqa: ANN401  of the type that the model returns
    """Return a copy of the first rows of the outputs, of the same type and with the same autograd graph."""
    if isinstance(outputs, Tensor):
        return outputs[:count].clone()
    if isinstance(outputs, tuple | list):
        parts = [first_rows(output, count) for output in outputs]
        # A named tuple takes its values one by one.
        return type(outputs)(*parts) if hasattr(outputs, "_fields") else type(outputs)(parts)
    return outputs
