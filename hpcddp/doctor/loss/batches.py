"""Batches of a loss as trees of tensors: plain ones, the user's own, and their splits over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, cast

import torch
from torch import Generator, Tensor

from hpcddp.batch.split import divide
from hpcddp.doctor.errors import DoctorError

_PAIR: Final = 2  # (outputs, targets)
# A loss of one sample may be undefined (a variance, a comparison of samples), and few trainings have such a share.
_SMALLEST_SHARE: Final = 2
_SEEDS: Final = (0, 1)
_CLASSES: Final = 10
_VALUES: Final = 12
_SIDE: Final = 6  # height and width of a map


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The arguments of a loss.

    Args:
        data: what they are, for the report.
        arguments: outputs first, then targets; trees of tensors in tuples, lists and mappings.
        samples: n.
        dimension: the dimension of the outputs that counts samples; 1 for outputs ``[T, n, C]``.
    """

    data: str
    arguments: tuple[Any, ...]
    samples: int
    dimension: int = 0

    def part(self, rows: Tensor) -> Batch:
        """Return the batch of some samples: those rows of every tensor and list with one entry per sample.

        Args:
            rows: indices of the samples in their new order, int64.
        """
        # If both dimensions have n entries, the first one of these counts samples.
        of_outputs = partial(self._select_rows, rows=rows, dimensions=(self.dimension, 0))
        of_targets = partial(self._select_rows, rows=rows, dimensions=(0, self.dimension))
        outputs, *targets = self.arguments
        arguments = (map_tree(outputs, of_outputs), *(map_tree(target, of_targets) for target in targets))
        return replace(self, arguments=arguments, samples=len(rows))

    def _select_rows(self, leaf: object, *, rows: Tensor, dimensions: tuple[int, int]) -> object:
        if isinstance(leaf, Tensor):
            for dimension in dimensions:
                if self._counts_samples(leaf, dimension):
                    return leaf.index_select(dimension, rows)
        if isinstance(leaf, list) and len(leaf) == self.samples:
            return [leaf[row] for row in rows.tolist()]
        return leaf

    def _counts_samples(self, tensor: Tensor, dimension: int) -> bool:
        return tensor.dim() > dimension and tensor.shape[dimension] == self.samples

    def to(self, dtype: torch.dtype) -> Batch:
        """Return the batch with its floating-point tensors in ``dtype``."""

        def convert(leaf: object) -> object:
            return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

        return replace(self, arguments=tuple(map_tree(argument, convert) for argument in self.arguments))

    def rows_first(self, output: Tensor) -> Tensor:
        """Return an output, or its gradient, with the samples in dimension 0."""
        if self._counts_samples(output, self.dimension):
            return output.movedim(self.dimension, 0)
        return output

    def describe(self) -> str:
        """Return the shapes, such as ``outputs [32, 10], targets [32]``."""
        shapes = [", ".join(str(list(tensor.shape)) for tensor in tensors_in(tree)) for tree in self.arguments]
        outputs, *targets = shapes
        if targets:
            return f"outputs {outputs}, targets {', '.join(targets)}"
        return f"outputs {outputs}"


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
    result = function(tree)
    if isinstance(tree, list) and result is tree:
        return [map_tree(value, function) for value in tree]
    return result


def tensors_in(tree: object) -> list[Tensor]:
    """Return the tensors of a tree, in order."""
    tensors: list[Tensor] = []

    def collect(leaf: object) -> object:
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
        return leaf

    map_tree(tree, collect)
    return tensors


def plain_batches(samples: int) -> Iterator[Batch]:
    """Yield a random batch of each plain kind: classification, maps, regression."""
    g = Generator().manual_seed(0)
    labels = torch.randint(0, _CLASSES, (samples,), generator=g)
    yield Batch(
        data="logits and class indices",
        arguments=(torch.randn(samples, _CLASSES, generator=g), labels),
        samples=samples,
    )
    shape = (samples, 1, _SIDE, _SIDE)
    yield Batch(
        data="logits and 0/1 masks",
        arguments=(
            torch.randn(shape, generator=g),
            torch.randint(0, 2, shape, generator=g).to(torch.get_default_dtype()),
        ),
        samples=samples,
    )
    values = torch.randn(samples, _VALUES, generator=g)
    yield Batch(
        data="values and values",
        arguments=(values, values + 0.5 * torch.randn(samples, _VALUES, generator=g)),
        samples=samples,
    )


def make_batch(given: object, *, name: str, arguments: int | None, dimension: int) -> Batch:
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
    # A loss of one argument takes the outputs alone.
    taken = given[:1] if arguments == 1 else given
    samples = outputs[0].shape[dimension]
    return Batch(data=f"your own, {name}", arguments=tuple(taken), samples=samples, dimension=dimension)


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A split of a batch over ranks.

    Args:
        name: ``order``, ``even``, ``uneven`` or ``permuted``.
        rows: the samples of each rank, int64.
    """

    name: str
    rows: tuple[Tensor, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples per rank."""
        return tuple(len(rows) for rows in self.rows)


def judged_splits(samples: int, world_size: int) -> Iterator[Split]:
    """Yield the splits on which a loss is judged, the one of the batch contract (shares of equal size) first.

    The split ``order`` has one share: all samples in another order.
    """
    in_order = torch.arange(samples)
    yield Split(name="even", rows=torch.split(in_order, list(divide(samples, world_size))))
    for seed in _SEEDS:
        g = Generator().manual_seed(seed)
        sizes = _uneven_sizes(samples, world_size, g)
        permuted = torch.randperm(samples, generator=g)
        yield Split(name="order", rows=(permuted,))
        yield Split(name="uneven", rows=torch.split(in_order, sizes))
        yield Split(name="permuted", rows=torch.split(permuted, sizes))


def _uneven_sizes(samples: int, ranks: int, g: Generator) -> list[int]:
    """Return random sizes that add up to ``samples``, each at least 2 where there are enough samples."""
    smallest = min(_SMALLEST_SHARE, samples // ranks)
    remaining = samples - smallest * ranks
    owners = torch.randint(0, ranks, (remaining,), generator=g)
    # The first rank takes half of the remaining samples, so that the sizes are never even.
    owners[: remaining // 2] = 0
    return [smallest + int((owners == rank).sum()) for rank in range(ranks)]
