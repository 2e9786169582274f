"""Environment variables that a sweep varies, as the script picks the value of an element."""

from __future__ import annotations

from dataclasses import dataclass

from hpcddp.spec.job import JobSpec
from hpcddp.spec.sweep import tabulate
from hpcddp.spec.sweep_fields import ENVIRONMENT, path_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SweptVariable:
    """The values of one variable: element i has number ``i // stride % count`` of them.

    Args:
        values: the values.
        stride: how many elements in a row have the same one.
        count: how many values there are.
    """

    values: tuple[str, ...]
    stride: int
    count: int


def swept_variables(spec: JobSpec) -> dict[str, SweptVariable]:
    """Return the swept variables of a job by their names."""
    if spec.sweep is None:
        return {}
    table = tabulate(spec.sweep)
    found: dict[str, SweptVariable] = {}
    for key in table.keys:
        if path_of(key)[: len(ENVIRONMENT)] == ENVIRONMENT:
            listed = tuple(table.element(index)[key] for index in range(len(table)))
            values, stride = (table.values[key], table.stride(key)) if table.is_grid else (listed, 1)
            found[path_of(key)[-1]] = SweptVariable(values=values, stride=stride, count=len(values))
    return found
