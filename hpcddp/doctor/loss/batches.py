"""Batches of a loss as trees of tensors, and their splits over ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Generator, Tensor

from hpcddp.batch.split import divide
from hpcddp.doctor.errors import DoctorError

_PAIR: Final = 2  # (outputs, targets)
_RANDOM_SPLITS: Final = 4
_SPLITS_OVER_ALL_RANKS: Final = 2
# A loss of one sample may be undefined (a variance, a comparison of samples); few trainings give a rank that little.
_LEAST: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The arguments of a loss.

    Args:
        arguments: outputs first, then targets; trees of tensors in tuples, lists and mappings.
        differentiable: number of outputs, which have gradients.
        samples: n.
    """

    arguments: tuple[Any, ...]
    differentiable: int
    samples: int

    def part(self, rows: Tensor) -> Batch:
        """Return the batch of some samples: those rows of every tensor and list with one entry per sample.

        Args:
            rows: indices of the samples in their new order, int64.
        """
        chosen = rows.tolist()

        def take(leaf: object) -> object:
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

        def convert(leaf: object) -> object:
            return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

        arguments = tuple(map_tree(argument, convert) for argument in self.arguments)
        return Batch(arguments=arguments, differentiable=self.differentiable, samples=self.samples)

    def describe(self) -> str:
        """Return the shapes, such as ``outputs [32, 10], targets [32] int64``."""
        outputs = ", ".join(_shapes(argument) for argument in self.arguments[: self.differentiable])
        targets = ", ".join(_shapes(argument) for argument in self.arguments[self.differentiable :])
        return f"outputs {outputs}" + (f", targets {targets}" if targets else "")


def map_tree(tree: object, function: Callable[[object], object]) -> object:
    """Return the tree with ``function`` applied to its leaves and lists.

    A list that ``function`` returns unchanged is a part of the structure, and its entries are mapped in turn.
    """
    if isinstance(tree, Mapping):
        return {key: map_tree(value, function) for key, value in tree.items()}
    if isinstance(tree, tuple):
        values = [map_tree(value, function) for value in tree]
        # A named tuple takes its values one by one.
        return cast("Callable[..., object]", type(tree))(*values) if hasattr(tree, "_fields") else tuple(values)
    if isinstance(tree, list):
        taken = function(tree)
        return taken if taken is not tree else [map_tree(value, function) for value in tree]
    return function(tree)


def tensors_in(tree: object) -> list[Tensor]:
    """Return the tensors of a tree, in order."""
    found: list[Tensor] = []

    def collect(leaf: object) -> object:
        if isinstance(leaf, Tensor):
            found.append(leaf)
        return leaf

    map_tree(tree, collect)
    return found


def make_batch(pair: object, *, name: str) -> Batch:
    """Return the user's ``(outputs, targets)`` as a batch.

    Raises:
        DoctorError: it is not a pair, or its outputs have no floating-point tensor with a row per sample.
    """
    if not isinstance(pair, tuple | list) or len(pair) != _PAIR:
        raise DoctorError(f"{name} gives a {type(pair).__name__} and not a pair; return (outputs, targets)")
    outputs = [tensor for tensor in tensors_in(pair[0]) if tensor.is_floating_point() and tensor.dim()]
    if not outputs:
        raise DoctorError(
            f"{name} gives outputs without a floating-point tensor of at least one dimension; return what the model "
            "returns, with one row per sample"
        )
    detached = tuple(map_tree(part, lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf) for part in pair)
    return Batch(arguments=detached, differentiable=1, samples=len(outputs[0]))


def _shapes(tree: object) -> str:
    if isinstance(tree, Mapping):
        return "{" + ", ".join(f"{key}: {_shapes(value)}" for key, value in tree.items()) + "}"
    if isinstance(tree, Tensor):
        whole = "" if tree.is_floating_point() else f" {str(tree.dtype).removeprefix('torch.')}"
        return f"{list(tree.shape)}{whole}"
    if isinstance(tree, tuple):
        return f"({', '.join(_shapes(value) for value in tree)})"
    return f"a {type(tree).__name__}" + (f" of {len(tree)}" if isinstance(tree, list) else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A split of a batch over ranks.

    Args:
        name: ``even``, ``uneven`` or ``permuted``.
        rows: the samples of each rank, int64.
    """

    name: str
    rows: tuple[Tensor, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples per rank."""
        return tuple(len(rows) for rows in self.rows)


def contract_split(samples: int, world_size: int) -> Split:
    """Return the split of the batch contract: contiguous shares, whose sizes differ by one sample at most."""
    sizes = divide(samples, world_size)
    return Split(name="even", rows=torch.split(torch.arange(samples), list(sizes)))


def random_splits(samples: int, world_size: int, seed: int) -> list[Split]:
    """Return uneven splits, in order and permuted, over 2 to ``world_size`` ranks.

    Args:
        samples: n.
        world_size: W <= n.
        seed: seed of the splits.
    """
    g = torch.Generator().manual_seed(seed)
    splits = []
    for number in range(_RANDOM_SPLITS):
        over_all = number < _SPLITS_OVER_ALL_RANKS
        ranks = world_size if over_all else int(torch.randint(2, world_size + 1, (), generator=g))
        sizes = _uneven(samples, ranks, g)
        permuted = number % 2 == 1
        rows = torch.randperm(samples, generator=g) if permuted else torch.arange(samples)
        splits.append(Split(name="permuted" if permuted else "uneven", rows=torch.split(rows, sizes)))
    return splits


def _uneven(samples: int, ranks: int, g: Generator) -> list[int]:
    """Return random sizes that add up to ``samples``, each at least 2 where there are enough samples."""
    least = min(_LEAST, samples // ranks)
    extra = samples - least * ranks
    owners = torch.randint(0, ranks, (extra,), generator=g)
    # The first rank takes half of the remaining samples, so that the sizes are never even.
    owners[: extra // 2] = 0
    return [least + int((owners == rank).sum()) for rank in range(ranks)]
