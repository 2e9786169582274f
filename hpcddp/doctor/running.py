"""Calling the user's loss: on copies, under a seed; its value and its gradients, or one sentence about why not."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hpcddp.doctor.batches import Batch, map_tree, tensors_in
from hpcddp.doctor.errors import NoLossError, UnusableError
from hpcddp.doctor.target import blame

_SEED = 20_140_612
# Torch's words where shapes differ and would be broadcast: never what was meant.
_MISMATCH = "Using a target size"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A loss on a batch.

    Args:
        value: float64, a number.
        gradients: with respect to every output, float64, rows as in the batch.
        parameter_gradients: with respect to the loss's own parameters.
        dtype: of the loss as it was returned.
        changed: whether the loss changed its arguments.
    """

    value: float
    gradients: tuple[Tensor, ...]
    parameter_gradients: tuple[Tensor, ...]
    dtype: torch.dtype
    changed: bool

    @property
    def finite(self) -> bool:
        """Whether value and gradients are finite."""
        tensors = (torch.tensor(self.value), *self.gradients, *self.parameter_gradients)
        return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The user's loss, ready to be called.

    Args:
        name: as the user wrote it.
        function: the loss.
    """

    name: str
    function: Callable[..., Any]

    def evaluate(self, batch: Batch, *, seed: int = _SEED) -> Evaluation:
        """Call the loss on copies of a batch and differentiate it.

        Args:
            batch: what it is called with.
            seed: of torch's generator during the call.

        Raises:
            UnusableError: it raises, or returns no scalar with a gradient.
        """
        function = copy.deepcopy(self.function) if isinstance(self.function, nn.Module) else self.function
        arguments, leaves = _copies(batch)
        before = [tensor._version for tensor in tensors_in(arguments)]  # noqa: SLF001
        loss = self._call(function, arguments, seed)
        changed = [tensor._version for tensor in tensors_in(arguments)] != before  # noqa: SLF001
        parameters = list(function.parameters()) if isinstance(function, nn.Module) else []
        gradients = self._differentiate(loss, [*leaves, *(p for p in parameters if p.requires_grad)])
        return Evaluation(
            value=float(loss.detach().double()),
            gradients=tuple(gradients[: len(leaves)]),
            parameter_gradients=tuple(gradients[len(leaves) :]),
            dtype=loss.dtype,
            changed=changed,
        )

    def _call(self, function: Callable[..., Any], arguments: Sequence[Any], seed: int) -> Tensor:
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            with (
                torch.random.fork_rng(devices=[]),
                warnings.catch_warnings(),
                blame(f"{self.name} failed", UnusableError),
            ):
                torch.manual_seed(seed)
                warnings.simplefilter("ignore")
                warnings.filterwarnings("error", message=_MISMATCH)
                return _scalar(self.name, function(*arguments))
        finally:
            torch.set_default_dtype(default)

    def _differentiate(self, loss: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
        with blame(f"the backward of {self.name} failed", UnusableError):
            found = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        return [gradient.double() for gradient in found]


def _copies(batch: Batch) -> tuple[tuple[Any, ...], list[Tensor]]:
    """Return arguments that the loss may change, and the leaves that its outputs are made of."""
    leaves: list[Tensor] = []

    def output(leaf: Any) -> Any:  # noqa: ANN401
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            leaves.append(leaf.detach().clone().requires_grad_())
            # A model's outputs are no leaves: losses may change them in place.
            return leaves[-1].clone()
        return target(leaf)

    def target(leaf: Any) -> Any:  # noqa: ANN401
        return leaf.clone() if isinstance(leaf, Tensor) else leaf

    first = batch.differentiable
    outputs = [map_tree(argument, output) for argument in batch.arguments[:first]]
    return (*outputs, *(map_tree(argument, target) for argument in batch.arguments[first:])), leaves


def _scalar(name: str, loss: object) -> Tensor:
    """Return the loss if it is a scalar with a gradient.

    Raises:
        NoLossError: it is something else.
    """
    if not isinstance(loss, Tensor):
        shown = f" ({loss:.6g})" if isinstance(loss, int | float) else ""
        raise NoLossError(
            f"{name} returns a {type(loss).__name__}{shown}, no tensor; return the loss alone, as torch made it"
        )
    if loss.dim() != 0:
        raise NoLossError(
            f"{name} returns a tensor of shape {tuple(loss.shape)}, and a loss is a scalar; return its mean, or name "
            "a function that does" + (" (in a job file: train.loss_reduction: per_sample)" if loss.dim() == 1 else "")
        )
    if not loss.is_floating_point():
        raise NoLossError(
            f"{name} returns a tensor of {str(loss.dtype).removeprefix('torch.')}, which has no gradient; a loss is a "
            "floating-point number: compute it from the outputs themselves, not from argmax, counts or comparisons"
        )
    if not loss.requires_grad:
        raise NoLossError(
            f"{name} returns a number without a gradient: it does not depend on the outputs, or loses them on the way "
            "(detach, item, argmax, no_grad), so that nothing can be learned from it; return a function of the outputs"
        )
    return loss
