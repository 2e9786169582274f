"""Validate a sweep without creating a job for each element.

Each value is checked once against the type of its field. Each rule between fields is checked once for every distinct
combination of the fields that it reads. So a valid sweep of a thousand elements takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from pydantic import ValidationError

from hpcddp.jobfile.document import Path, dotted
from hpcddp.jobfile.fields import Section
from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.messages import is_secret, sentence_of
from hpcddp.jobfile.rules import RULES, Rule, touches
from hpcddp.jobfile.sweep import (
    LARGEST_SWEEP,
    Combination,
    Grid,
    Listed,
    SweepTable,
    as_text,
    assignment,
    count_elements,
    identity,
    left_range,
    tabulate,
)
from hpcddp.jobfile.sweep_fields import ENVIRONMENT, path_of, read_field, refuse_key, with_values

Finding = tuple[Path, str]
"""The key path of an error, below ``sweep``, and the message."""

NAMED_AT_MOST = 3
FOUND_AT_MOST = 10


def shape_findings(spec: JobSpec) -> Iterator[Finding]:
    """Yield the errors of single keys and values of a sweep, of a job whose fields fit their types."""
    if spec.sweep is None:
        if spec.max_parallel is not None:
            yield ("max_parallel",), f"is {spec.max_parallel}, and there is no sweep; write one, or remove it"
        return
    found = list(_form(spec.sweep)) or list(_keys(spec))
    if not found:
        found = list(islice(_values(tabulate(spec.sweep)), FOUND_AT_MOST))
    yield from found


def _form(sweep: Grid | Listed) -> Iterator[Finding]:
    if not sweep or (not isinstance(sweep, Mapping) and not all(sweep)):
        yield ("sweep",), "holds an element without a value; write for example {train.seed: [0, 1, 2]}"
    elif isinstance(sweep, Mapping):
        for key, values in sweep.items():
            if not values:
                yield ("sweep", key), "lists no value; write for example [0, 1, 2], or leave the key out"
            elif text := left_range(values):
                yield ("sweep", key), f"holds {text}, which is empty, or more than {LARGEST_SWEEP} numbers; write 0..4"
            elif twice := _twice(values):
                yield (
                    ("sweep", key),
                    f"holds {_shown(key, twice)} twice, which would be the same runs again; remove one",
                )
    elif twice := _twice(sweep):
        yield (
            ("sweep",),
            f"holds the element {_all_shown(twice)} twice, which would be the same run again; remove one",
        )
    if sweep and (count := count_elements(sweep)) > LARGEST_SWEEP:
        yield ("sweep",), f"has {count} elements, and {LARGEST_SWEEP} are the most; split it into several sweeps"


def _twice(values: tuple[Any, ...]) -> Any:  # noqa: ANN401
    """Return a value that occurs twice, or None."""
    seen: set[Hashable] = set()
    for value in values:
        same = identity(value)
        if same in seen:
            return value
        seen.add(same)
    return None


def _keys(spec: JobSpec) -> Iterator[Finding]:
    listed = (spec.sweep,) if isinstance(spec.sweep, Mapping) else spec.sweep
    keys = dict.fromkeys(key for element in listed for key in element)
    for key in keys:
        if (why := refuse_key(key) or _lacks_section(spec, path_of(key))) is not None:
            yield ("sweep", key), why
        for other in keys:
            if other.startswith(f"{key}."):
                yield ("sweep", other), f"is a part of {key}, which is swept too; keep one of them"
        if path_of(key)[:2] == ENVIRONMENT:
            lacking = next((index for index, element in enumerate(listed) if key not in element), None)
            if lacking is not None:
                yield ("sweep", key), f"is missing in element {lacking}; give a variable in every element, or in none"


def _lacks_section(spec: JobSpec, path: Path) -> str | None:
    """Return an error message for a field of a section that the job does not have, or None."""
    section: Section = spec
    for depth, name in enumerate(path[:-1], start=1):
        below = getattr(section, name)
        if below is None:
            return f"cannot be swept: the job has no {dotted(path[:depth])}; write one"
        if not isinstance(below, Section):
            return None
        section = below
    return None


def _values(table: SweepTable) -> Iterator[Finding]:
    for key, values in table.values.items():
        for value in values:
            try:
                read_field(key, value)
            except ValidationError as error:
                details = error.errors(include_url=False)[0]
                path = path_of(key)
                # The first part is the field of the model that ``read_field`` creates.
                inner = tuple(str(part) for part in details["loc"][1:] if part != "[key]")
                below = path if inner == path[-len(inner) :] or not inner else (*path, *inner)
                yield ("sweep", key), sentence_of(details, below, None)


def sweep_findings(spec: JobSpec, swept: Sequence[str], wrong: Sequence[Path]) -> Iterator[Finding]:
    """Yield the errors of rules between fields, for all elements.

    Args:
        spec: a job whose sweep has no error in a single key or value.
        swept: the sweep's keys.
        wrong: key paths of the job that have a problem already.
    """
    if not swept:
        return
    table, faulty = tabulate(spec.sweep), [dotted(path) for path in wrong]
    for rule in RULES:
        keys = [key for key in swept if rule.depends_on(key)]
        if keys and not any(touches(read, fault) for read in rule.reads for fault in faulty):
            yield from islice(_check_rule(rule, spec, table, keys), FOUND_AT_MOST)


def _check_rule(rule: Rule, spec: JobSpec, table: SweepTable, keys: Sequence[str]) -> Iterator[Finding]:
    for combination in table.combinations(keys):
        typed = {key: read_field(key, value) for key, value in combination.values.items()}
        for field, sentence in rule.find(with_values(spec, typed)):
            place = next((key for key in keys if field == key), keys[0])
            yield ("sweep", place), f"makes {_elements(combination)}, where {field} {sentence}"


def _elements(combination: Combination) -> str:
    """Return the indices and values of a combination in words."""
    named = combination.elements[:NAMED_AT_MOST]
    more = len(combination.elements) - len(named)
    numbers = ", ".join(map(str, named)) + (f" and {more} more" if more else "")
    word = "element" if len(combination.elements) == 1 else "elements"
    return f"{word} {numbers} with {_all_shown(combination.values)}"


def _all_shown(values: Mapping[str, Any]) -> str:
    return assignment({key: value for key, value in values.items() if not is_secret(path_of(key))}) or ", ".join(values)


def _shown(key: str, value: object) -> str:
    return "a value" if is_secret(path_of(key)) else as_text(value)
