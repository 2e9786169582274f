"""A batch as a tree of tensors, and its parts: rows of everything that has one entry per sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hpcddp.doctor.errors import DoctorError


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What a loss is called with.

    Args:
        arguments: outputs first, then targets; trees of tensors in tuples, lists and mappings.
        differentiable: how many of the first arguments are outputs, with a gradient.
        samples: n.
    """

    arguments: tuple[Any, ...]
    differentiable: int
    samples: int

    def part(self, rows: Tensor) -> Batch:
        """Return the batch of some samples.

        Args:
            rows: their indices, int64, in the order that they get.
        """
        chosen = rows.tolist()

        def take(leaf: Any) -> Any:  # noqa: ANN401
            if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == self.samples:
                return leaf[rows]
            if isinstance(leaf, list) and len(leaf) == self.samples:
                return [leaf[row] for row in chosen]
            return leaf

        return Batch(
            arguments=tuple(map_tree(argument, take) for argument in self.arguments),
            differentiable=self.differentiable,
            samples=len(rows),
        )

    def to(self, dtype: torch.dtype | None) -> Batch:
        """Return the batch with its floating-point tensors in ``dtype``; None = as they are."""

        def cast(leaf: Any) -> Any:  # noqa: ANN401
            return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

        arguments = tuple(map_tree(argument, cast) for argument in self.arguments)
        return Batch(arguments=arguments, differentiable=self.differentiable, samples=self.samples)

    def describe(self) -> str:
        """Return the shapes, such as ``outputs [32, 10], targets [32] int64``."""
        outputs = ", ".join(_shapes(argument) for argument in self.arguments[: self.differentiable])
        targets = ", ".join(_shapes(argument) for argument in self.arguments[self.differentiable :])
        return f"outputs {outputs}" + (f", targets {targets}" if targets else "")


def map_tree(tree: Any, function: Callable[[Any], Any]) -> Any:  # noqa: ANN401
    """Return the tree with ``function`` applied to its tensors, to lists that are no structure, and to other leaves."""
    if isinstance(tree, Mapping):
        return {key: map_tree(value, function) for key, value in tree.items()}
    if isinstance(tree, tuple):
        values = [map_tree(value, function) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else tuple(values)
    if isinstance(tree, list):
        taken = function(tree)
        return taken if taken is not tree else [map_tree(value, function) for value in tree]
    return function(tree)


def tensors_in(tree: Any) -> list[Tensor]:  # noqa: ANN401
    """Return the tensors of a tree, in order."""
    found: list[Tensor] = []
    map_tree(tree, lambda leaf: found.append(leaf) if isinstance(leaf, Tensor) else leaf)
    return found


def make_batch(pair: Any, *, name: str) -> Batch:  # noqa: ANN401
    """Return the user's ``(outputs, targets)`` as a batch.

    Raises:
        DoctorError: it is no pair, or its first output is no floating-point tensor with a row per sample.
    """
    if not isinstance(pair, tuple | list) or len(pair) != 2:  # noqa: PLR2004
        raise DoctorError(f"{name} gives a {type(pair).__name__} and not a pair; return (outputs, targets)")
    outputs = [tensor for tensor in tensors_in(pair[0]) if tensor.is_floating_point() and tensor.dim()]
    if not outputs:
        raise DoctorError(
            f"{name} gives outputs without a floating-point tensor of at least one dimension; return what the model "
            "returns, with one row per sample"
        )
    detached = tuple(map_tree(part, lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf) for part in pair)
    return Batch(arguments=detached, differentiable=1, samples=len(outputs[0]))


def _shapes(tree: Any) -> str:  # noqa: ANN401
    if isinstance(tree, Mapping):
        return "{" + ", ".join(f"{key}: {_shapes(value)}" for key, value in tree.items()) + "}"
    if isinstance(tree, Tensor):
        whole = "" if tree.is_floating_point() else f" {str(tree.dtype).removeprefix('torch.')}"
        return f"{list(tree.shape)}{whole}"
    if isinstance(tree, tuple):
        return f"({', '.join(_shapes(value) for value in tree)})"
    return f"a {type(tree).__name__}" + (f" of {len(tree)}" if isinstance(tree, list) else "")
