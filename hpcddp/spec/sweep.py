"""Many jobs out of one file: which values ``sweep`` gives to which of its elements."""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema

from hpcddp.spec.fields import refusal

LARGEST_SWEEP = 100_000
"""The most elements of a sweep; Slurm's own limit on arrays is lower nearly everywhere, and arrays are many then."""

Grid = Mapping[str, tuple[Any, ...]]
Listed = tuple[Mapping[str, Any], ...]

_ENCODER = json.JSONEncoder(ensure_ascii=False, sort_keys=True)
_RANGE = re.compile(r"(-?[0-9]{1,18})\.\.(-?[0-9]{1,18})", re.ASCII)


def expand(values: Iterable[Any]) -> Iterator[Any]:
    """Yield values, with each number of a range in place of the range: ``0..4`` is 0, 1, 2, 3, 4.

    A range that is empty, or longer than a sweep may be, stays the text that it is.
    """
    for value in values:
        match = _RANGE.fullmatch(value) if isinstance(value, str) else None
        first, last = (int(match[1]), int(match[2])) if match else (0, -1)
        if first <= last < first + LARGEST_SWEEP:
            yield from range(first, last + 1)
        else:
            yield value


def left_range(values: Iterable[Any]) -> str | None:
    """Return a range that ``expand`` has left as it is, or None."""
    return next((value for value in values if isinstance(value, str) and _RANGE.fullmatch(value)), None)


def _shape(value: object) -> Grid | Listed | None:
    """Return a sweep in the form that the rest of the code reads; what is in it is checked later."""
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


def _axis(values: Any) -> Any:  # noqa: ANN401
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
    """One choice of values for some keys, and the elements that have it.

    Args:
        values: the value of each of the keys; a key that those elements do not give is not in it.
        elements: their indices.
    """

    values: Mapping[str, Any]
    elements: Sequence[int]


@dataclass(frozen=True, slots=True)
class SweepTable:
    """A sweep as a table: a row for each element, a column for each key path.

    Args:
        values: the distinct values of each key, in the order in which they come.
        rows: for each element and key, which of the values it has; None where it does not give the key.
        is_grid: whether every element gives every key, the last key varying fastest.
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
        """Return after how many elements of a grid a key takes its next value."""
        keys = self.keys
        return prod(len(self.values[after]) for after in keys[keys.index(key) + 1 :])

    def combinations(self, keys: Sequence[str]) -> Iterator[Combination]:
        """Yield every choice of values that some element makes for ``keys``, once."""
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
    """Return how many elements a sweep has, without making them."""
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
    """Return the place of an element's value among the values of its key."""
    if key not in element:
        return None
    same = identity(element[key])
    if same not in known:
        known[same] = len(values)
        values.append(element[key])
    return known[same]


def identity(value: object) -> Hashable:
    """Return what is the same for equal values of the same type alone."""
    return (type(value), value) if isinstance(value, str | int | float | None) else as_text(value)


def as_text(value: object) -> str:
    """Return a value as a person would write it, the same for equal values alone."""
    return _ENCODER.encode(value)


def assignment(values: Mapping[str, Any]) -> str:
    """Return the values of an element in one line: ``learning_rate.base=0.1, train.seed=0``."""
    return ", ".join(f"{key}={as_text(value)}" for key, value in values.items())
