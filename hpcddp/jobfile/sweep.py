"""Sweeps as tables: the values that ``sweep`` gives to each of its elements."""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema

from hpcddp.jobfile.fields import refusal

LARGEST_SWEEP = 100_000
"""The most elements of a sweep. Above Slurm's limit (MaxArraySize) a sweep becomes several arrays."""

Grid = Mapping[str, tuple[Any, ...]]
Listed = tuple[Mapping[str, Any], ...]

_ENCODER = json.JSONEncoder(ensure_ascii=False, sort_keys=True)
_RANGE = re.compile(r"(-?[0-9]{1,18})\.\.(-?[0-9]{1,18})", re.ASCII)


def expand(values: Iterable[Any]) -> Iterator[Any]:
    """Yield values, with the numbers of each range: ``0..4`` is 0, 1, 2, 3, 4.

    A range that is empty, or longer than ``LARGEST_SWEEP``, is not expanded.
    """
    for value in values:
        match = _RANGE.fullmatch(value) if isinstance(value, str) else None
        first, last = (int(match[1]), int(match[2])) if match else (0, -1)
        if first <= last < first + LARGEST_SWEEP:
            yield from range(first, last + 1)
        else:
            yield value


def left_range(values: Iterable[Any]) -> str | None:
    """Return a range that ``expand`` did not expand, or None."""
    return next((value for value in values if isinstance(value, str) and _RANGE.fullmatch(value)), None)


def _shape(value: object) -> Grid | Listed | None:
    """Return a sweep as a grid or a list of elements; ``sweep_rules`` checks keys and values."""
    if value is None:
        return None
    if isinstance(value, Mapping):
        return {str(key): _axis(values) for key, values in value.items()}
    if isinstance(value, list | tuple) and all(isinstance(element, Mapping) for element in value):
        return tuple({str(key): entry for key, entry in element.items()} for element in value)
    raise refusal(
        "a sweep is a mapping from key paths to lists of values, or a list of mappings",
        "write for example {train.seed: [0, 1, 2]}",
    )


def _axis(values: object) -> tuple[object, ...]:
    return tuple(expand(values if isinstance(values, list | tuple) else [values]))


SweepField = Annotated[
    Any,
    PlainValidator(_shape),
    WithJsonSchema(
        {"anyOf": [{"type": "object"}, {"type": "array", "items": {"type": "object"}}, {"type": "null"}]},
    ),
]
"""A grid (key paths with lists of values), a list of elements, or null."""


@dataclass(frozen=True, slots=True)
class Combination:
    """Values of some keys, and the elements that have them.

    Args:
        values: the value of each key that those elements set.
        elements: their indices.
    """

    values: Mapping[str, Any]
    elements: Sequence[int]


@dataclass(frozen=True, slots=True)
class SweepTable:
    """A sweep as a table: a row for each element, a column for each key path.

    Args:
        values: the distinct values of each key, in order of appearance.
        rows: for each element and key, the index of its value; None where it does not set the key.
        is_grid: whether the sweep is a grid, whose last key varies fastest.
    """

    values: Mapping[str, tuple[Any, ...]]
    rows: Sequence[tuple[int | None, ...]]
    is_grid: bool

    @property
    def keys(self) -> tuple[str, ...]:
        """The key paths, in order."""
        return tuple(self.values)

    def __len__(self) -> int:
        """Return how many elements there are."""
        return len(self.rows)

    def element(self, index: int) -> dict[str, Any]:
        """Return one element's values by key path."""
        return {key: self.values[key][chosen] for key, chosen in self._chosen(index) if chosen is not None}

    def elements(self) -> tuple[dict[str, Any], ...]:
        """Return every element's values by key path, in order."""
        return tuple(self.element(index) for index in range(len(self.rows)))

    def stride(self, key: str) -> int:
        """Return the number of elements of a grid after which a key takes its next value."""
        keys = self.keys
        return prod(len(self.values[after]) for after in keys[keys.index(key) + 1 :])

    def combinations(self, keys: Sequence[str]) -> Iterator[Combination]:
        """Yield every distinct combination of values that some element has for ``keys``."""
        columns = [self.keys.index(key) for key in keys]
        found: dict[tuple[int | None, ...], list[int]] = {}
        for index, row in enumerate(self.rows):
            found.setdefault(tuple(row[column] for column in columns), []).append(index)
        for chosen, elements in found.items():
            pairs = zip(keys, chosen, strict=True)
            yield Combination({key: self.values[key][one] for key, one in pairs if one is not None}, elements)

    def _chosen(self, index: int) -> Iterable[tuple[str, int | None]]:
        return zip(self.values, self.rows[index], strict=True)


def count_elements(sweep: Grid | Listed) -> int:
    """Return how many elements a sweep has, without expanding it."""
    return prod(len(values) for values in sweep.values()) if isinstance(sweep, Mapping) else len(sweep)


def tabulate(sweep: Grid | Listed) -> SweepTable:
    """Return a sweep as a table."""
    if isinstance(sweep, Mapping):
        return SweepTable(sweep, list(product(*(range(len(values)) for values in sweep.values()))), is_grid=True)
    keys = tuple(dict.fromkeys(key for element in sweep for key in element))
    known: dict[str, dict[Hashable, int]] = {key: {} for key in keys}
    values: dict[str, list[Any]] = {key: [] for key in keys}
    rows = [tuple(_place(element, key, known[key], values[key]) for key in keys) for element in sweep]
    return SweepTable({key: tuple(found) for key, found in values.items()}, rows, is_grid=False)


def _place(element: Mapping[str, Any], key: str, known: dict[Hashable, int], values: list[Any]) -> int | None:
    """Return the index of an element's value among the values of its key."""
    if key not in element:
        return None
    same = identity(element[key])
    if same not in known:
        known[same] = len(values)
        values.append(element[key])
    return known[same]


def identity(value: object) -> Hashable:
    """Return a hashable that is equal only for equal values of the same type."""
    return (type(value), value) if isinstance(value, str | int | float | None) else as_text(value)


def as_text(value: object) -> str:
    """Return a value as text, which is the same only for equal values."""
    return _ENCODER.encode(value)


def assignment(values: Mapping[str, Any]) -> str:
    """Return the values of an element in one line: ``learning_rate.base=0.1, train.seed=0``."""
    return ", ".join(f"{key}={as_text(value)}" for key, value in values.items())
