"""Random batches on which a loss is judged, of all kinds that a loss may be written for.

The worst verdict counts, because a dimension may have another meaning on other shapes. A loss that reduces the last
dimension mixes samples on a vector, and one that compares samples may compare pixels on a map.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Generator, Tensor
from torch.nn import functional

from hpcddp.doctor.loss.batches import Batch

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
        one_number: whether a sample is a single number.
        dimension: the dimension of the outputs that counts samples.
    """

    name: str
    make: Callable[[int, Generator], tuple[Any, ...]]
    differentiable: int = 1
    one_number: bool = False
    dimension: int = 0

    def batch(self, samples: int, seed: int) -> Batch:
        """Return a batch of ``samples`` in float64, drawn with the seed."""
        arguments = self.make(samples, Generator().manual_seed(seed))
        return Batch(arguments=arguments, differentiable=self.differentiable, samples=samples, dimension=self.dimension)


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledKind(Kind):
    """A kind with class indices.

    Args:
        labels: their position among the arguments.
        classes: K.
    """

    labels: int
    classes: int

    def with_ignored(self, samples: int, seed: int, label: int) -> Batch:
        """Return the batch of the seed with some of its class indices replaced by ``label``."""
        batch = self.batch(samples, seed)
        labels = batch.arguments[self.labels]
        ignored = torch.rand(labels.shape, generator=Generator().manual_seed(seed)) < _IGNORED_PART
        ignored[0] = True  # so that a small batch has one too
        return self._with_labels(batch, labels.masked_fill(ignored, label))

    def with_every_class(self, samples: int) -> list[Batch]:
        """Return as many batches as it takes for every class index to occur."""
        batches = []
        for seed, first_class in enumerate(range(0, self.classes, samples)):
            batch = self.batch(samples, seed)
            labels = batch.arguments[self.labels]
            counted = (first_class + torch.arange(labels.numel())).remainder(self.classes)
            batches.append(self._with_labels(batch, counted.view_as(labels)))
        return batches

    def _with_labels(self, batch: Batch, labels: Tensor) -> Batch:
        arguments = list(batch.arguments)
        arguments[self.labels] = labels
        return replace(batch, arguments=tuple(arguments))


def kinds(arguments: int | None, samples: int) -> list[Kind]:
    """Return the kinds to try, in order.

    Args:
        arguments: how many arguments the loss takes; None = unknown, taken for two.
        samples: n; the number of classes is chosen different from it.
    """
    match arguments:
        case None | 0 | 2:
            classes = CLASSES if samples != CLASSES else CLASSES + 1
            return [*_labelled_kinds(classes), *_MAPS, *_kinds_with_targets(classes), *_PAIRS, *_SINGLE_NUMBERS]
        case 1:
            return [*_ONE_ARGUMENT]
        case 3:
            return [*_THREE_ARGUMENTS]
        case _:
            return [*_FOUR_ARGUMENTS]


def kinds_with_other_classes(samples: int) -> Iterator[Kind]:
    """Yield kinds with many numbers of classes, for losses with one weight per class.

    The number of classes that equals the number of samples comes last, since a loss could confuse the two dimensions.
    """
    numbers = [number for number in _OTHER_CLASSES if number != samples]
    for classes in (*numbers, samples):
        yield _labelled_kind("logits and class indices", _make_logits, classes)
        yield _labelled_kind("maps of logits and of class indices", _make_maps_of_logits, classes)
        yield _multi_hot_kind(classes)


def _labelled_kinds(classes: int) -> list[Kind]:
    return [
        _labelled_kind("logits and class indices", _make_logits, classes),
        _labelled_kind("maps of logits and of class indices", _make_maps_of_logits, classes),
        _labelled_kind("logits per token and token indices, padded with 0", _make_tokens, classes),
        _labelled_kind("probabilities and class indices", _make_probabilities, classes),
        _labelled_kind("confident logits and class indices", _make_confident_logits, classes),
        _labelled_kind("maps of confident logits and of class indices", _make_maps_of_confident_logits, classes),
    ]


def _labelled_kind(
    name: str, make: Callable[[int, int, Generator], tuple[Tensor, Tensor]], classes: int
) -> LabelledKind:
    return LabelledKind(name=f"{name}, {classes} classes", make=partial(make, classes), labels=1, classes=classes)


def _make_logits(classes: int, n: int, g: Generator) -> tuple[Tensor, Tensor]:
    return _normal(g, n, classes), _labels(g, classes, n)


def _make_maps_of_logits(classes: int, n: int, g: Generator) -> tuple[Tensor, Tensor]:
    return _normal(g, n, classes, _SIDE, _SIDE), _labels(g, classes, n, _SIDE, _SIDE)


def _make_tokens(classes: int, n: int, g: Generator) -> tuple[Tensor, Tensor]:
    return _normal(g, n, _TOKENS, classes), _padded(_labels(g, classes, n, _TOKENS), g)


def _make_probabilities(classes: int, n: int, g: Generator) -> tuple[Tensor, Tensor]:
    return _normal(g, n, classes).softmax(1), _labels(g, classes, n)


def _make_confident_logits(classes: int, n: int, g: Generator) -> tuple[Tensor, Tensor]:
    labels = _labels(g, classes, n)
    return _confident_logits(labels, classes, g), labels


def _make_maps_of_confident_logits(classes: int, n: int, g: Generator) -> tuple[Tensor, Tensor]:
    labels = _labels(g, classes, n, _SIDE, _SIDE)
    return _confident_logits(labels, classes, g), labels


def _confident_logits(labels: Tensor, classes: int, g: Generator) -> Tensor:
    """Return logits of a partly trained model."""
    confidence = _CONFIDENCE * torch.rand(labels.shape, generator=g, dtype=torch.float64).unsqueeze(1)
    right_class = functional.one_hot(labels, classes).movedim(-1, 1)
    return _normal(g, *right_class.shape) + confidence * right_class


def _kinds_with_targets(width: int) -> list[Kind]:
    """Return the kinds of ``width`` numbers and ``width`` targets per sample."""
    return [
        Kind(
            name=f"maps of logits and one-hot maps, {width} classes",
            make=lambda n, g: (_normal(g, n, width, _SIDE, _SIDE), _one_hot(g, width, n, _SIDE, _SIDE)),
        ),
        _multi_hot_kind(width),
        Kind(
            name=f"{width} probabilities and {width} 0/1 targets per sample",
            make=lambda n, g: (_uniform(g, n, width), _zeros_and_ones(g, n, width)),
        ),
        Kind(
            name=f"logits and one-hot targets, {width} classes",
            make=lambda n, g: (_normal(g, n, width), _one_hot(g, width, n)),
        ),
        Kind(name=f"{width} values and {width} values per sample", make=lambda n, g: _correlated_pair(g, n, width)),
        Kind(
            name=f"log-probabilities and probabilities, {width} classes",
            make=lambda n, g: (_normal(g, n, width).log_softmax(1), _normal(g, n, width).softmax(1)),
        ),
    ]


def _multi_hot_kind(width: int) -> Kind:
    return Kind(
        name=f"{width} logits and {width} 0/1 targets per sample",
        make=lambda n, g: (_normal(g, n, width), _zeros_and_ones(g, n, width)),
    )


_MAPS: Final = (
    Kind(
        name="maps of logits and 0/1 masks",
        make=lambda n, g: (_normal(g, n, 1, _SIDE, _SIDE), _zeros_and_ones(g, n, 1, _SIDE, _SIDE)),
    ),
    Kind(
        name="maps of probabilities and 0/1 masks",
        make=lambda n, g: (_uniform(g, n, 1, _SIDE, _SIDE), _zeros_and_ones(g, n, 1, _SIDE, _SIDE)),
    ),
)
_PAIRS: Final = (
    LabelledKind(
        name="a pair of embeddings, and class indices",
        make=lambda n, g: (_correlated_pair(g, n, _WIDTH), _labels(g, CLASSES, n)),
        labels=1,
        classes=CLASSES,
    ),
    Kind(name="a pair of embeddings, and no targets", make=lambda n, g: (_correlated_pair(g, n, _WIDTH), None)),
)
_SINGLE_NUMBERS: Final = (
    Kind(
        name="a logit and a 0/1 target per sample",
        make=lambda n, g: (_normal(g, n), _zeros_and_ones(g, n)),
        one_number=True,
    ),
    Kind(
        name="a probability and a 0/1 target per sample",
        make=lambda n, g: (_uniform(g, n), _zeros_and_ones(g, n)),
        one_number=True,
    ),
    Kind(name="a value and a value per sample", make=lambda n, g: _correlated_pair(g, n), one_number=True),
)
_ONE_ARGUMENT: Final = (
    Kind(name="embeddings", make=lambda n, g: (_normal(g, n, _WIDTH),)),
    Kind(name="a pair of embeddings", make=lambda n, g: (_correlated_pair(g, n, _WIDTH),)),
    Kind(name="one number per sample", make=lambda n, g: (_normal(g, n),), one_number=True),
)
_THREE_ARGUMENTS: Final = (
    Kind(
        name="two embeddings and a target of -1 or 1",
        differentiable=2,
        make=lambda n, g: (*_correlated_pair(g, n, _WIDTH), _plus_minus_ones(g, n)),
    ),
    Kind(name="anchor, positive and negative", differentiable=3, make=lambda n, g: _triplet(g, n, _WIDTH)),
    LabelledKind(
        name="two embeddings and class indices",
        differentiable=2,
        make=lambda n, g: (*_correlated_pair(g, n, _WIDTH), _labels(g, CLASSES, n)),
        labels=2,
        classes=CLASSES,
    ),
    Kind(
        name="two numbers and a target of -1 or 1",
        differentiable=2,
        make=lambda n, g: (*_correlated_pair(g, n), _plus_minus_ones(g, n)),
        one_number=True,
    ),
    Kind(
        name="mean, target and variance", make=lambda n, g: (*_correlated_pair(g, n), _uniform(g, n)), one_number=True
    ),
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


def _labels(g: Generator, classes: int, *shape: int) -> Tensor:
    """Return class indices, int64."""
    return torch.randint(0, classes, shape, generator=g)


def _one_hot(g: Generator, classes: int, *shape: int) -> Tensor:
    """Return class indices as float64 vectors of 0 and 1 in dimension 1."""
    return functional.one_hot(_labels(g, classes, *shape), classes).movedim(-1, 1).double()


def _normal(g: Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=g, dtype=torch.float64)


def _uniform(g: Generator, *shape: int) -> Tensor:
    """Return probabilities, none of them 0 or 1."""
    return torch.rand(shape, generator=g, dtype=torch.float64) * 0.98 + 0.01


def _zeros_and_ones(g: Generator, *shape: int) -> Tensor:
    return torch.randint(0, 2, shape, generator=g).double()


def _plus_minus_ones(g: Generator, *shape: int) -> Tensor:
    return _zeros_and_ones(g, *shape) * 2 - 1


def _correlated_pair(g: Generator, *shape: int) -> tuple[Tensor, Tensor]:
    """Return two correlated tensors: the second one is the first with noise."""
    first = _normal(g, *shape)
    return first, first + 0.5 * _normal(g, *shape)


def _triplet(g: Generator, *shape: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return an anchor and two tensors that are about as far from it, so that margins matter."""
    anchor, positive = _correlated_pair(g, *shape)
    return anchor, positive, anchor + 0.6 * _normal(g, *shape)


def _padded(tokens: Tensor, g: Generator) -> Tensor:
    """Return sequences of different lengths, padded with 0."""
    lengths = torch.randint(2, tokens.shape[1] + 1, (len(tokens), 1), generator=g)
    return tokens * (torch.arange(tokens.shape[1]) < lengths)
