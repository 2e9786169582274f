"""Batches of a loss as trees of tensors, their splits over ranks, and random batches.

A loss is judged on all kinds of random batches that it accepts, and the worst verdict counts, because a dimension may
have another meaning on other shapes. A loss that reduces the last dimension mixes samples on a vector, and one that
compares samples may compare pixels on a map.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
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
_LEAST: Final = 2


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
        chosen = rows.tolist()

        def take(leaf: object, dimensions: Sequence[int]) -> object:
            if isinstance(leaf, Tensor):
                counting = next((d for d in dimensions if self._counts_samples(leaf, d)), None)
                return leaf if counting is None else leaf.index_select(counting, rows)
            if isinstance(leaf, list) and len(leaf) == self.samples:
                return [leaf[row] for row in chosen]
            return leaf

        dimension = self.dimension
        arguments = tuple(
            map_tree(
                argument, partial(take, dimensions=(dimension, 0) if position < self.differentiable else (0, dimension))
            )
            for position, argument in enumerate(self.arguments)
        )
        return replace(self, arguments=arguments, samples=len(rows))

    @property
    def outputs(self) -> list[Tensor]:
        """The outputs that have gradients."""
        outputs: list[Tensor] = []

        def collect(output: Tensor) -> Tensor:
            outputs.append(output)
            return output

        self.with_outputs(collect)
        return outputs

    def with_outputs(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """Return the batch with other outputs; ``change`` gets those that have gradients, one by one."""

        def changed(leaf: object) -> object:
            if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
                return change(leaf)
            return leaf

        outputs = (map_tree(argument, changed) for argument in self.arguments[: self.differentiable])
        return replace(self, arguments=(*outputs, *self.arguments[self.differentiable :]))

    def scaled(self, factors: Tensor) -> Batch:
        """Return the batch with the outputs of each sample times a factor ``[n]``."""

        def scale(output: Tensor) -> Tensor:
            if not self._counts_samples(output, self.dimension):
                return output
            shape = [1] * output.dim()
            shape[self.dimension] = self.samples
            return output * factors.to(output.real.dtype).view(shape)

        return self.with_outputs(scale)

    def near_targets(self, factors: Tensor) -> Batch | None:
        """Return the batch with outputs that fit their targets, but for a deviation times a factor ``[n]``.

        None where the outputs are neither of the shape of the targets nor scores of classes.
        """
        if len(self.arguments) != _PAIR or self.dimension or not isinstance(target := self.arguments[1], Tensor):
            return None
        output = self.arguments[0]
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return None
        if target.is_floating_point() and target.shape == output.shape:
            shape = (self.samples, *[1] * (output.dim() - 1))
            return self.with_outputs(lambda given: target + factors.view(shape).to(given) * (given - target))
        if target.dtype == torch.int64 and output.dim() == _PAIR and target.shape == output.shape[:1]:
            strength = (1 / factors).to(output)[:, None]
            one_hot = functional.one_hot(target.clamp(min=0), output.shape[1]).to(output)
            return self.with_outputs(lambda given: given + strength * one_hot)
        return None

    def _counts_samples(self, tensor: Tensor, dimension: int) -> bool:
        return tensor.dim() > dimension and tensor.shape[dimension] == self.samples

    def rows_first(self, output: Tensor) -> Tensor:
        """Return an output, or its gradient, with the samples in dimension 0."""
        return output.movedim(self.dimension, 0) if self._counts_samples(output, self.dimension) else output

    def to(self, dtype: torch.dtype | None) -> Batch:
        """Return the batch with its floating-point tensors in ``dtype``; None = as they are."""

        def convert(leaf: object) -> object:
            return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

        arguments = tuple(map_tree(argument, convert) for argument in self.arguments)
        return replace(self, arguments=arguments)

    def describe(self) -> str:
        """Return the shapes, such as ``outputs [32, 10], targets [32] int64``."""
        outputs = ", ".join(_shapes(argument) for argument in self.arguments[: self.differentiable])
        targets = ", ".join(_shapes(argument) for argument in self.arguments[self.differentiable :])
        return f"outputs {outputs}" + (f", targets {targets}" if targets else "")


def map_tree(tree: object, function: Callable[[object], object]) -> object:
    """Return the tree with ``function`` applied to its leaves and lists.

    If ``function`` returns a list unchanged, its entries are mapped too.
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
    tensors: list[Tensor] = []

    def collect(leaf: object) -> object:
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
        return leaf

    map_tree(tree, collect)
    return tensors


def make_batch(pair: object, *, name: str, arguments: int | None = None, dimension: int = 0) -> Batch:
    """Return the user's ``(outputs, targets)``, or all arguments of a loss of more, as a batch.

    Args:
        pair: what the user gives.
        name: where it comes from, for messages.
        arguments: how many the loss takes; None = unknown, taken for two.
        dimension: the dimension of the outputs that counts samples.

    Raises:
        DoctorError: there are fewer or more, or the outputs have no floating-point tensor with that dimension.
    """
    wanted = max(_PAIR, arguments or _PAIR)
    if not isinstance(pair, tuple | list) or len(pair) != wanted:
        given = f"{name} gives a {type(pair).__name__} and not"
        if wanted == _PAIR:
            raise DoctorError(f"{given} a pair; return (outputs, targets)")
        raise DoctorError(f"{given} the {wanted} arguments of the loss; return them in a tuple, outputs first")
    outputs = [tensor for tensor in tensors_in(pair[0]) if tensor.is_floating_point() and tensor.dim()]
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
    detached = tuple(map_tree(part, lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf) for part in pair)
    return Batch(arguments=detached, differentiable=1, samples=outputs[0].shape[dimension], dimension=dimension)


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


def even_split(samples: int, parts: int, *, seed: int | None = None) -> Split:
    """Return the split of the batch contract: shares whose sizes differ by one sample at most.

    Args:
        samples: n.
        parts: number of shares.
        seed: seed of a permutation of the samples; None = the samples stay in order.
    """
    return _split("even", divide(samples, parts), None if seed is None else Generator().manual_seed(seed))


def _split(name: str, sizes: Sequence[int], g: Generator | None) -> Split:
    """Return contiguous shares of these sizes, of the samples in order, or permuted by ``g``."""
    rows = torch.arange(sum(sizes)) if g is None else torch.randperm(sum(sizes), generator=g)
    return Split(name=name, rows=torch.split(rows, list(sizes)))


def random_splits(samples: int, world_size: int, seed: int) -> list[Split]:
    """Return uneven splits, in order and permuted, over 2 to ``world_size`` ranks."""
    g = Generator().manual_seed(seed)
    splits = []
    for number in range(_RANDOM_SPLITS):
        over_all = number < _SPLITS_OVER_ALL_RANKS
        ranks = world_size if over_all else int(torch.randint(2, world_size + 1, (), generator=g))
        sizes = _uneven(samples, ranks, g)
        splits.append(_split("permuted", sizes, g) if number % 2 else _split("uneven", sizes, None))
    return splits


def _uneven(samples: int, ranks: int, g: Generator) -> list[int]:
    """Return random sizes that add up to ``samples``, each at least 2 where there are enough samples."""
    least = min(_LEAST, samples // ranks)
    extra = samples - least * ranks
    owners = torch.randint(0, ranks, (extra,), generator=g)
    # The first rank takes half of the remaining samples, so that the sizes are never even.
    owners[: extra // 2] = 0
    return [least + int((owners == rank).sum()) for rank in range(ranks)]


CLASSES: Final = 10
# Numbers of classes to try: a loss with one weight per class accepts only its own number.
_OTHER_CLASSES: Final = (*range(2, 10), *range(11, 33), 40, 80, 81, 90, 91, 100, 150, 151, 200, 365, 1000)
_SIDE: Final = 6  # height and width of a segmentation map, another number than samples, classes and channels
_TOKENS: Final = 7
_WIDTH: Final = 12  # of embeddings
_IGNORED_PART: Final = 0.3
# The most that is added to the logit of the right class, which gives it a probability of 0.99 and more.
_CONFIDENCE: Final = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of random batch.

    Args:
        name: description of the outputs and targets.
        make: returns the arguments for n samples, outputs first.
        differentiable: how many of them are outputs.
        labels: position of class indices among the arguments; None = there are none.
        classes: K, the number of classes; 0 without class indices.
        one_number: whether a sample is a single number.
        dimension: the dimension of the outputs that counts samples.
    """

    name: str
    make: Callable[[int, Generator], tuple[Any, ...]]
    differentiable: int = 1
    labels: int | None = None
    classes: int = 0
    one_number: bool = False
    dimension: int = 0

    def batch(self, samples: int, seed: int) -> Batch:
        """Return a batch of ``samples`` in float64, drawn with the seed."""
        arguments = self.make(samples, torch.Generator().manual_seed(seed))
        return Batch(arguments=arguments, differentiable=self.differentiable, samples=samples, dimension=self.dimension)

    def with_ignored(self, samples: int, seed: int, label: int) -> Batch:
        """Return the same batch with some of its class indices replaced by ``label``."""
        chosen = torch.Generator().manual_seed(seed)

        def replaced(labels: Tensor) -> Tensor:
            ignored = torch.rand(labels.shape, generator=chosen) < _IGNORED_PART
            ignored[0] = True  # so that a small batch has one too
            return labels.masked_fill(ignored, label)

        return self._relabelled(self.batch(samples, seed), replaced)

    def with_every_class(self, samples: int) -> list[Batch]:
        """Return as many batches as it takes for every class index to occur."""

        def counted_from(first: int) -> Callable[[Tensor], Tensor]:
            return lambda labels: (first + torch.arange(labels.numel())).remainder(self.classes).view_as(labels)

        firsts = range(0, self.classes, samples)
        return [self._relabelled(self.batch(samples, seed), counted_from(first)) for seed, first in enumerate(firsts)]

    def _relabelled(self, batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
        """Return the batch with other class indices."""
        arguments = tuple(change(a) if position == self.labels else a for position, a in enumerate(batch.arguments))
        return replace(batch, arguments=arguments)


def kinds(arguments: int | None, samples: int) -> Iterator[Kind]:
    """Yield the kinds to try, in order.

    Args:
        arguments: how many arguments the loss takes; None = unknown, taken for two.
        samples: n; the number of classes is chosen different from it.
    """
    if arguments == 1:
        yield from _ONE_ARGUMENT
    elif arguments is not None and arguments > _PAIR:
        yield from _THREE_ARGUMENTS if arguments == _PAIR + 1 else _FOUR_ARGUMENTS
    else:
        classes = CLASSES if samples != CLASSES else CLASSES + 1
        yield from _with_labels(classes)
        yield from _MAPS
        yield from _with_targets(classes)
        yield from _PAIRS
        yield from _SINGLE_NUMBERS


def kinds_with_other_classes(samples: int) -> Iterator[Kind]:
    """Yield kinds with many numbers of classes, for losses with one weight per class.

    The number of classes that equals the number of samples comes last, since a loss could confuse the two dimensions.
    """
    for classes in (*(number for number in _OTHER_CLASSES if number != samples), samples):
        yield from itertools.islice(_with_labels(classes), 2)
        yield _multi_hot(classes)


def _with_labels(classes: int) -> Iterator[Kind]:
    """Yield the kinds with class indices."""

    def labels(n: int, g: Generator, *shape: int) -> Tensor:
        return torch.randint(0, classes, (n, *shape), generator=g)

    def learned(n: int, g: Generator, *shape: int) -> tuple[Tensor, Tensor]:
        """Return logits of a partly trained model, and the class indices."""
        targets = labels(n, g, *shape)
        sure = _CONFIDENCE * torch.rand(targets.shape, generator=g, dtype=torch.float64).unsqueeze(1)
        answers = functional.one_hot(targets, classes).movedim(-1, 1)
        return _normal(g, n, classes, *shape) + sure * answers, targets

    def kind(name: str, make: Callable[[int, Generator], tuple[Any, ...]]) -> Kind:
        return Kind(name=f"{name}, {classes} classes", make=make, labels=1, classes=classes)

    def maps(n: int, g: Generator) -> tuple[Tensor, Tensor]:
        return _normal(g, n, classes, _SIDE, _SIDE), labels(n, g, _SIDE, _SIDE)

    def tokens(n: int, g: Generator) -> tuple[Tensor, Tensor]:
        return _normal(g, n, _TOKENS, classes), _padded(labels(n, g, _TOKENS), g)

    yield kind("logits and class indices", lambda n, g: (_normal(g, n, classes), labels(n, g)))
    yield kind("maps of logits and of class indices", maps)
    yield kind("logits per token and token indices, padded with 0", tokens)
    yield kind("probabilities and class indices", lambda n, g: (_normal(g, n, classes).softmax(1), labels(n, g)))
    yield kind("confident logits and class indices", learned)
    yield kind("maps of confident logits and of class indices", lambda n, g: learned(n, g, _SIDE, _SIDE))


def _with_targets(width: int) -> Iterator[Kind]:
    """Yield the kinds of ``width`` numbers and ``width`` targets per sample."""
    yield Kind(
        name=f"maps of logits and one-hot maps, {width} classes",
        make=lambda n, g: (
            _normal(g, n, width, _SIDE, _SIDE),
            functional.one_hot(torch.randint(0, width, (n, _SIDE, _SIDE), generator=g), width).movedim(-1, 1).double(),
        ),
    )
    yield _multi_hot(width)
    yield Kind(
        name=f"{width} probabilities and {width} 0/1 targets per sample",
        make=lambda n, g: (_uniform(g, n, width), _bits(g, n, width)),
    )
    yield Kind(
        name=f"logits and one-hot targets, {width} classes",
        make=lambda n, g: (
            _normal(g, n, width),
            functional.one_hot(torch.randint(0, width, (n,), generator=g), width).double(),
        ),
    )
    yield Kind(name=f"{width} values and {width} values per sample", make=lambda n, g: _two(g, n, width))
    yield Kind(
        name=f"log-probabilities and probabilities, {width} classes",
        make=lambda n, g: (_normal(g, n, width).log_softmax(1), _normal(g, n, width).softmax(1)),
    )


def _multi_hot(width: int) -> Kind:
    return Kind(
        name=f"{width} logits and {width} 0/1 targets per sample",
        make=lambda n, g: (_normal(g, n, width), _bits(g, n, width)),
    )


_MAPS: Final = (
    Kind(
        name="maps of logits and 0/1 masks",
        make=lambda n, g: (_normal(g, n, 1, _SIDE, _SIDE), _bits(g, n, 1, _SIDE, _SIDE)),
    ),
    Kind(
        name="maps of probabilities and 0/1 masks",
        make=lambda n, g: (_uniform(g, n, 1, _SIDE, _SIDE), _bits(g, n, 1, _SIDE, _SIDE)),
    ),
)
_PAIRS: Final = (
    Kind(
        name="a pair of embeddings, and class indices",
        make=lambda n, g: (_two(g, n, _WIDTH), torch.randint(0, CLASSES, (n,), generator=g)),
        labels=1,
        classes=CLASSES,
    ),
    Kind(name="a pair of embeddings, and no targets", make=lambda n, g: (_two(g, n, _WIDTH), None)),
)
_SINGLE_NUMBERS: Final = (
    Kind(name="a logit and a 0/1 target per sample", make=lambda n, g: (_normal(g, n), _bits(g, n)), one_number=True),
    Kind(
        name="a probability and a 0/1 target per sample",
        make=lambda n, g: (_uniform(g, n), _bits(g, n)),
        one_number=True,
    ),
    Kind(name="a value and a value per sample", make=lambda n, g: _two(g, n), one_number=True),
)
_ONE_ARGUMENT: Final = (
    Kind(name="embeddings", make=lambda n, g: (_normal(g, n, _WIDTH),)),
    Kind(name="a pair of embeddings", make=lambda n, g: (_two(g, n, _WIDTH),)),
    Kind(name="one number per sample", make=lambda n, g: (_normal(g, n),), one_number=True),
)
_THREE_ARGUMENTS: Final = (
    Kind(
        name="two embeddings and a target of -1 or 1",
        differentiable=2,
        make=lambda n, g: (*_two(g, n, _WIDTH), _signs(g, n)),
    ),
    Kind(name="anchor, positive and negative", differentiable=3, make=lambda n, g: _three(g, n, _WIDTH)),
    Kind(
        name="two embeddings and class indices",
        differentiable=2,
        make=lambda n, g: (*_two(g, n, _WIDTH), torch.randint(0, CLASSES, (n,), generator=g)),
        labels=2,
        classes=CLASSES,
    ),
    Kind(
        name="two numbers and a target of -1 or 1",
        differentiable=2,
        make=lambda n, g: (*_two(g, n), _signs(g, n)),
        one_number=True,
    ),
    Kind(name="mean, target and variance", make=lambda n, g: (*_two(g, n), _uniform(g, n)), one_number=True),
)


def _sequences(n: int, g: Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log-probabilities ``[T, n, C]``, labels ``[n, S]`` without the blank 0, and the lengths of both."""
    labels = torch.randint(1, CLASSES, (n, _TOKENS), generator=g)
    lengths = torch.randint(2, _TOKENS + 1, (n,), generator=g)
    frames = 2 * _TOKENS + 1  # so that every sequence of labels fits
    return _normal(g, frames, n, CLASSES).log_softmax(2), labels, torch.full((n,), frames), lengths


_FOUR_ARGUMENTS: Final = (
    Kind(name="log-probabilities [T, n, C], labels, and the lengths of both (CTC)", make=_sequences, dimension=1),
)


def _normal(g: Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=g, dtype=torch.float64)


def _uniform(g: Generator, *shape: int) -> Tensor:
    """Return probabilities, none of them 0 or 1."""
    return torch.rand(shape, generator=g, dtype=torch.float64) * 0.98 + 0.01


def _bits(g: Generator, *shape: int) -> Tensor:
    return torch.randint(0, 2, shape, generator=g).double()


def _signs(g: Generator, *shape: int) -> Tensor:
    return _bits(g, *shape) * 2 - 1


def _two(g: Generator, *shape: int) -> tuple[Tensor, Tensor]:
    """Return two correlated tensors: the second one is the first with noise."""
    first = _normal(g, *shape)
    return first, first + 0.5 * _normal(g, *shape)


def _three(g: Generator, *shape: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return an anchor and two tensors that are about as far from it, so that margins matter."""
    anchor, positive = _two(g, *shape)
    return anchor, positive, anchor + 0.6 * _normal(g, *shape)


def _padded(tokens: Tensor, g: Generator) -> Tensor:
    """Return sequences of different lengths, padded with 0."""
    lengths = torch.randint(2, tokens.shape[1] + 1, (len(tokens), 1), generator=g)
    return tokens * (torch.arange(tokens.shape[1]) < lengths)
