"""Batches of a loss as trees of tensors, and their splits over ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, cast

import torch
from torch import Generator, Tensor
from torch.nn import functional

from hpcddp.batch.split import divide
from hpcddp.doctor.errors import DoctorError

_PAIR: Final = 2  # (outputs, targets)
_RANDOM_SPLITS: Final = 4
_SPLITS_OVER_ALL_RANKS: Final = 2
# A loss of one sample may be undefined (a variance, a comparison of samples), and few trainings have such a share.
_SMALLEST_SHARE: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The arguments of a loss.

    Args:
        arguments: outputs first, then targets; trees of tensors in tuples, lists and mappings.
        differentiable: number of outputs, which have gradients.
        samples: n.
        dimension: the dimension of the outputs that counts samples; 1 for outputs ``[T, n, C]``.
    """

    arguments: tuple[Any, ...]
    differentiable: int
    samples: int
    dimension: int = 0

    def part(self, rows: Tensor) -> Batch:
        """Return the batch of some samples: those rows of every tensor and list with one entry per sample.

        Args:
            rows: indices of the samples in their new order, int64.
        """
        arguments = []
        for position, argument in enumerate(self.arguments):
            # If both dimensions have n entries, the first one of these counts samples.
            dimensions = (self.dimension, 0) if position < self.differentiable else (0, self.dimension)
            arguments.append(map_tree(argument, partial(self._select_rows, rows=rows, dimensions=dimensions)))
        return replace(self, arguments=tuple(arguments), samples=len(rows))

    def _select_rows(self, leaf: object, *, rows: Tensor, dimensions: Sequence[int]) -> object:
        if isinstance(leaf, Tensor):
            for dimension in dimensions:
                if self._counts_samples(leaf, dimension):
                    return leaf.index_select(dimension, rows)
        if isinstance(leaf, list) and len(leaf) == self.samples:
            return [leaf[row] for row in rows.tolist()]
        return leaf

    def _counts_samples(self, tensor: Tensor, dimension: int) -> bool:
        return tensor.dim() > dimension and tensor.shape[dimension] == self.samples

    @property
    def outputs(self) -> list[Tensor]:
        """The outputs that have gradients."""
        return [output for output in tensors_in(self.arguments[: self.differentiable]) if _can_have_gradient(output)]

    def with_outputs(self, outputs: Sequence[Tensor]) -> Batch:
        """Return the batch with other tensors in place of ``outputs``, in the same order."""
        remaining = iter(outputs)

        def next_output(leaf: object) -> object:
            return next(remaining) if _can_have_gradient(leaf) else leaf

        changed = [map_tree(argument, next_output) for argument in self.arguments[: self.differentiable]]
        return replace(self, arguments=(*changed, *self.arguments[self.differentiable :]))

    def with_tensors(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """Return the batch with ``change`` applied to each of its tensors."""

        def changed(leaf: object) -> object:
            return change(leaf) if isinstance(leaf, Tensor) else leaf

        return replace(self, arguments=tuple(map_tree(argument, changed) for argument in self.arguments))

    def to(self, dtype: torch.dtype) -> Batch:
        """Return the batch with its floating-point tensors in ``dtype``."""
        return self.with_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)

    def scaled(self, factors: Tensor) -> Batch:
        """Return the batch with the outputs of each sample times a factor ``[n]``."""
        outputs = []
        for output in self.outputs:
            if self._counts_samples(output, self.dimension):
                shape = [1] * output.dim()
                shape[self.dimension] = self.samples
                outputs.append(output * factors.to(output.real.dtype).view(shape))
            else:
                outputs.append(output)
        return self.with_outputs(outputs)

    def near_targets(self, factors: Tensor) -> Batch | None:
        """Return the batch with outputs that fit their targets, but for a deviation times a factor ``[n]``.

        None where the outputs are neither of the shape of the targets nor scores of classes.
        """
        if len(self.arguments) != _PAIR or self.dimension != 0:
            return None
        output, target = self.arguments
        if not isinstance(output, Tensor) or not isinstance(target, Tensor) or not output.is_floating_point():
            return None
        if target.is_floating_point() and target.shape == output.shape:
            shape = (self.samples, *[1] * (output.dim() - 1))
            return self.with_outputs([target + factors.view(shape).to(output) * (output - target)])
        if target.dtype == torch.int64 and output.dim() == _PAIR and target.shape == output.shape[:1]:
            strength = (1 / factors).to(output)[:, None]
            one_hot = functional.one_hot(target.clamp(min=0), output.shape[1]).to(output)
            return self.with_outputs([output + strength * one_hot])
        return None

    def rows_first(self, output: Tensor) -> Tensor:
        """Return an output, or its gradient, with the samples in dimension 0."""
        return output.movedim(self.dimension, 0) if self._counts_samples(output, self.dimension) else output

    def describe(self) -> str:
        """Return the shapes, such as ``outputs [32, 10], targets [32] int64``."""
        outputs = ", ".join(_describe_tree(argument) for argument in self.arguments[: self.differentiable])
        targets = ", ".join(_describe_tree(argument) for argument in self.arguments[self.differentiable :])
        return f"outputs {outputs}, targets {targets}" if targets else f"outputs {outputs}"


def _can_have_gradient(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def map_tree(tree: object, function: Callable[[object], object]) -> object:
    """Return the tree with ``function`` applied to its leaves and lists.

    If ``function`` returns a list unchanged, its entries are mapped too.
    """
    if isinstance(tree, Mapping):
        return {key: map_tree(value, function) for key, value in tree.items()}
    if isinstance(tree, tuple):
        values = [map_tree(value, function) for value in tree]
        if hasattr(tree, "_fields"):
            # A named tuple takes its values one by one.
            return cast("Callable[..., object]", type(tree))(*values)
        return tuple(values)
    if isinstance(tree, list):
        result = function(tree)
        return [map_tree(value, function) for value in tree] if result is tree else result
    return function(tree)


def tensors_in(tree: object) -> list[Tensor]:
    """Return the tensors of a tree, in order."""
    tensors: list[Tensor] = []

    def collect(leaf: object) -> object:
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
        return leaf

    map_tree(tree, collect)
    return tensors


def make_batch(given: object, *, name: str, arguments: int | None = None, dimension: int = 0) -> Batch:
    """Return the user's ``(outputs, targets)``, or all arguments of a loss of more, as a batch.

    Args:
        given: what the user gives.
        name: where it comes from, for messages.
        arguments: how many the loss takes; None = unknown, taken for two.
        dimension: the dimension of the outputs that counts samples.

    Raises:
        DoctorError: there are fewer or more, or the outputs have no floating-point tensor with that dimension.
    """
    needed = max(_PAIR, arguments or _PAIR)
    if not isinstance(given, tuple | list) or len(given) != needed:
        refusal = f"{name} gives a {type(given).__name__} and not"
        if needed == _PAIR:
            raise DoctorError(f"{refusal} a pair; return (outputs, targets)")
        raise DoctorError(f"{refusal} the {needed} arguments of the loss; return them in a tuple, outputs first")
    outputs = [tensor for tensor in tensors_in(given[0]) if tensor.is_floating_point() and tensor.dim()]
    if not outputs:
        raise DoctorError(
            f"{name} gives outputs without a floating-point tensor of at least one dimension; return what the model "
            "returns, with one row per sample"
        )
    if outputs[0].dim() <= dimension:
        raise DoctorError(
            f"--batch-dim is {dimension}, and {name} gives outputs of shape {tuple(outputs[0].shape)}, which have "
            f"{outputs[0].dim()} dimensions; write the one, counted from 0, that counts samples"
        )
    batch = Batch(arguments=tuple(given), differentiable=1, samples=outputs[0].shape[dimension], dimension=dimension)
    return batch.with_tensors(lambda tensor: tensor.detach())


def _describe_tree(tree: object) -> str:
    """Return the shapes of the tensors of a tree, and the dtypes that are not floating-point ones."""
    if isinstance(tree, Mapping):
        entries = ", ".join(f"{key}: {_describe_tree(value)}" for key, value in tree.items())
        return f"{{{entries}}}"
    if isinstance(tree, tuple):
        return f"({', '.join(_describe_tree(value) for value in tree)})"
    if isinstance(tree, list):
        return f"a {type(tree).__name__} of {len(tree)}"
    if not isinstance(tree, Tensor):
        return f"a {type(tree).__name__}"
    if tree.is_floating_point():
        return f"{list(tree.shape)}"
    return f"{list(tree.shape)} {str(tree.dtype).removeprefix('torch.')}"


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


def even_split(samples: int, parts: int, *, seed: int | None = None) -> Split:
    """Return the split of the batch contract: shares whose sizes differ by one sample at most.

    Args:
        samples: n.
        parts: number of shares.
        seed: seed of a permutation of the samples; None = the samples stay in order.
    """
    rows = torch.arange(samples) if seed is None else torch.randperm(samples, generator=Generator().manual_seed(seed))
    return Split(name="even", rows=torch.split(rows, list(divide(samples, parts))))


def random_splits(samples: int, world_size: int, seed: int) -> list[Split]:
    """Return uneven splits, in order and permuted, over 2 to ``world_size`` ranks."""
    g = Generator().manual_seed(seed)
    splits = []
    for number in range(_RANDOM_SPLITS):
        ranks = world_size
        if number >= _SPLITS_OVER_ALL_RANKS:
            ranks = int(torch.randint(2, world_size + 1, (), generator=g))
        sizes = _uneven_sizes(samples, ranks, g)
        if number % 2 == 0:
            splits.append(Split(name="uneven", rows=torch.split(torch.arange(samples), sizes)))
        else:
            order = torch.randperm(samples, generator=g)
            splits.append(Split(name="permuted", rows=torch.split(order, sizes)))
    return splits


def _uneven_sizes(samples: int, ranks: int, g: Generator) -> list[int]:
    """Return random sizes that add up to ``samples``, each at least 2 where there are enough samples."""
    smallest = min(_SMALLEST_SHARE, samples // ranks)
    remaining = samples - smallest * ranks
    owners = torch.randint(0, ranks, (remaining,), generator=g)
    # The first rank takes half of the remaining samples, so that the sizes are never even.
    owners[: remaining // 2] = 0
    return [smallest + int((owners == rank).sum()) for rank in range(ranks)]
