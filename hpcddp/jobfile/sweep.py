"""Sweeps: the elements of a sweep as a table, the job of each element, and the errors of a sweep.

A key of a sweep is the key path of a field, or the name of a placeholder of the command: ``{lr}`` in a word of the
command is replaced by the value of ``lr``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from pydantic import ValidationError

from hpcddp.errors import nearest
from hpcddp.jobfile.document import Path, dotted, path_of
from hpcddp.jobfile.environment import VARIABLES
from hpcddp.jobfile.fields import LARGEST_SWEEP, Grid, Listed, Section, unexpanded_range, why_unexpanded
from hpcddp.jobfile.job import JobSpec, find_key, is_secret
from hpcddp.jobfile.messages import error_path, sentence_of, unknown_key
from hpcddp.jobfile.placeholders import (
    PLACEHOLDER,
    RUN_PLACEHOLDERS,
    as_text,
    fill_sweep_placeholders,
    placeholders_of,
)
from hpcddp.jobfile.problems import JobFileError, Problem
from hpcddp.jobfile.rules import RULES, Rule, broken_rules

Finding = tuple[Path, str]
"""The key path of an error, and the message."""

_MOST_ERRORS_OF_ELEMENTS = 10

_COMMAND = ("command",)


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
        """Return the number of elements."""
        return len(self.rows)

    def element(self, index: int) -> dict[str, Any]:
        """Return one element's values by key path."""
        return self._values_at(self.keys, self.rows[index])

    def elements(self) -> tuple[dict[str, Any], ...]:
        """Return every element's values by key path, in order."""
        return tuple(self.element(index) for index in range(len(self.rows)))

    def stride(self, key: str) -> int:
        """Return the number of elements of a grid after which a key takes its next value."""
        faster_keys = self.keys[self.keys.index(key) + 1 :]
        return prod(len(self.values[faster_key]) for faster_key in faster_keys)

    def combinations(self, keys: Sequence[str]) -> Iterator[Combination]:
        """Yield every distinct combination of values that some element has for ``keys``."""
        columns = [self.keys.index(key) for key in keys]
        elements_by_positions: dict[tuple[int | None, ...], list[int]] = {}
        for index, row in enumerate(self.rows):
            positions = tuple(row[column] for column in columns)
            elements_by_positions.setdefault(positions, []).append(index)
        for positions, elements in elements_by_positions.items():
            yield Combination(self._values_at(keys, positions), elements)

    def _values_at(self, keys: Sequence[str], positions: Sequence[int | None]) -> dict[str, Any]:
        """Return the values of keys by their positions in ``values``; a key without a position is left out."""
        pairs = zip(keys, positions, strict=True)
        return {key: self.values[key][position] for key, position in pairs if position is not None}


def count_elements(sweep: Grid | Listed) -> int:
    """Return the number of elements of a sweep, without expanding it."""
    if isinstance(sweep, Mapping):
        return prod(len(values) for values in sweep.values())
    return len(sweep)


def tabulate(sweep: Grid | Listed) -> SweepTable:
    """Return a sweep as a table."""
    if isinstance(sweep, Mapping):
        positions_of_keys = [range(len(values)) for values in sweep.values()]
        return SweepTable(sweep, list(product(*positions_of_keys)), is_grid=True)
    return _tabulate_list(sweep)


def _tabulate_list(elements: Listed) -> SweepTable:
    distinct_values: dict[str, tuple[Any, ...]] = {}
    columns: list[list[int | None]] = []
    for key in _keys_in_order(elements):
        # Not by the values themselves: 1, 1.0 and True are equal, but a field can tell them apart.
        values: dict[Hashable, Any] = {}
        positions: dict[Hashable, int] = {}
        column: list[int | None] = []
        for element in elements:
            if key not in element:
                column.append(None)
                continue
            identity = _identity(element[key])
            if identity not in positions:
                positions[identity] = len(positions)
                values[identity] = element[key]
            column.append(positions[identity])
        distinct_values[key] = tuple(values.values())
        columns.append(column)
    rows = [tuple(column[index] for column in columns) for index in range(len(elements))]
    return SweepTable(distinct_values, rows, is_grid=False)


def _keys_in_order(elements: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the keys that some element has, in order of appearance."""
    keys: dict[str, None] = {}
    for element in elements:
        keys.update(dict.fromkeys(element))
    return tuple(keys)


def _identity(value: object) -> Hashable:
    """Return a hashable that is equal only for equal values of the same type."""
    if isinstance(value, str | int | float | None):
        return (type(value), value)
    return as_text(value)


def is_placeholder(key: str) -> bool:
    """Return whether a key of a sweep is no field of the job file, but a name that a command may hold in braces."""
    return find_key((key,)) is None and re.fullmatch(PLACEHOLDER, key, re.ASCII) is not None


def field_of(key: str) -> str:
    """Return the key path of the field that a key of a sweep changes."""
    return "command" if is_placeholder(key) else key


def _command_findings(command: Sequence[str], swept_names: Sequence[str]) -> Iterator[Finding]:
    """Yield the errors of a command with placeholders.

    Args:
        swept_names: the placeholders that the sweep gives a value.
    """
    names = placeholders_of(command)
    without_values = sorted(names - {*swept_names, *RUN_PLACEHOLDERS})
    for name in swept_names:
        if name in names:
            continue
        similar_name = nearest(name, without_values)
        advice = f"write {{{name}}} in the command where the value belongs"
        if similar_name is not None:
            # One mistake, and one error for it.
            without_values.remove(similar_name)
            advice = f"the command holds {{{similar_name}}}: did you mean {similar_name}?"
        yield ("sweep", name), f"is neither a field of the job file nor a placeholder of the command; {advice}"
    for name in without_values:
        similar_name = nearest(name, swept_names)
        if similar_name is not None:
            sentence = f"holds {{{name}}}, which has no values in the sweep; did you mean {{{similar_name}}}?"
            yield _COMMAND, sentence


def assignment(values: Mapping[str, Any]) -> str:
    """Return the values of an element in one line: ``learning_rate.base=0.1, train.seed=0``."""
    return ", ".join(f"{key}={as_text(value)}" for key, value in values.items())


def element_spec(spec: JobSpec, values: Mapping[str, Any]) -> JobSpec:
    """Return the job of an element of a sweep.

    Args:
        values: the element's values by key path.

    Raises:
        JobFileError: the job with these values is not valid.
    """
    placeholders = [key for key in values if is_placeholder(key)]
    if placeholders:
        command_findings = list(_command_findings(spec.command or (), placeholders))
        if command_findings:
            raise _element_error(values, command_findings)
    try:
        element = _with_values(_without_sweep(spec, values), values)
    except ValidationError as error:
        raise _element_error(values, _type_findings(error)) from error
    rule_findings = broken_rules(element, _rules_about(values, RULES))
    if rule_findings:
        raise _element_error(values, rule_findings)
    return element


def _element_error(values: Mapping[str, Any], findings: Iterable[Finding]) -> JobFileError:
    source = f"the job with {_without_secrets(values)}"
    return JobFileError.of(Problem(file=source, key=dotted(path), sentence=sentence) for path, sentence in findings)


def _without_sweep(spec: JobSpec, keys: Iterable[str]) -> dict[str, Any]:
    """Return the values of a job without its sweep, which take the values of an element.

    Sections that none of the keys changes stay as they are validated, so that only the others are validated again.
    """
    changed_sections = {path_of(field_of(key))[0] for key in keys}
    job_values = dict(spec)
    job_values.update(spec.model_dump(mode="json", include=changed_sections, exclude_unset=True))
    job_values.update(sweep=None, max_parallel=None)
    return job_values


def _with_values(job_values: Mapping[str, Any], values: Mapping[str, Any]) -> JobSpec:
    """Return the job of an element.

    Args:
        job_values: the values of the job without its sweep.
        values: the element's values by key path.

    Raises:
        ValidationError: a value does not fit its type.
    """
    placeholders: dict[str, Any] = {}
    for key, value in values.items():
        if is_placeholder(key):
            placeholders[key] = value
        else:
            job_values = _assigned(job_values, path_of(key), value)
    if placeholders:
        command = fill_sweep_placeholders(job_values["command"], placeholders)
        job_values = {**job_values, "command": command}
    return JobSpec.model_validate(job_values)


def _rules_about(keys: Iterable[str], rules: Iterable[Rule]) -> list[Rule]:
    """Return the rules whose result can differ between elements that have other values of some keys."""
    fields = {field_of(key) for key in keys}
    return [rule for rule in rules if rule.depends_on(fields)]


def _type_findings(error: ValidationError) -> list[Finding]:
    """Return the errors of values that do not fit their types, one for each key path."""
    sentences: dict[Path, str] = {}
    for details in error.errors(include_url=False):
        path = error_path(details)
        if path not in sentences:
            sentences[path] = sentence_of(details, path, None)
    return list(sentences.items())


def _assigned(mapping: Mapping[str, Any], path: Path, value: object) -> dict[str, Any]:
    """Return a copy of a mapping in which one key path has another value."""
    name, *rest = path
    if not rest:
        return {**mapping, name: value}
    section = mapping.get(name)
    if not isinstance(section, Mapping):
        section = {}
    return {**mapping, name: _assigned(section, tuple(rest), value)}


def check_sweep(spec: JobSpec, rules: Sequence[Rule]) -> Iterator[Finding]:
    """Yield the errors of a job and of the elements of its sweep.

    Args:
        spec: a job whose fields fit their types.
        rules: the rules to check.
    """
    if spec.sweep is None:
        yield from broken_rules(spec, rules)
        if spec.max_parallel is not None:
            yield ("max_parallel",), f"is {spec.max_parallel}, but the job has no sweep; write one, or remove it"
        return
    sweep_findings = list(_form_findings(spec.sweep)) or list(_key_findings(spec))
    if sweep_findings:
        yield from broken_rules(spec, rules)
        yield from sweep_findings
        return
    yield from _check_elements(spec, tabulate(spec.sweep), rules)


def _check_elements(spec: JobSpec, table: SweepTable, rules: Sequence[Rule]) -> Iterator[Finding]:
    """Yield the errors of a job and of the elements of its sweep, whose keys can be swept.

    An error that several elements have is that of the first one.
    """
    rules_of_elements = _rules_about(table.keys, rules)
    # The other rules have the same result for the job and for every element.
    yield from broken_rules(spec, [rule for rule in rules if rule not in rules_of_elements])

    job_values = _without_sweep(spec, table.keys)
    reported: set[Finding] = set()
    for index in range(len(table)):
        values = table.element(index)
        try:
            findings = broken_rules(_with_values(job_values, values), rules_of_elements)
        except ValidationError as error:
            findings = _type_findings(error)
        for path, sentence in findings:
            if (path, sentence) in reported:
                continue
            if len(reported) == _MOST_ERRORS_OF_ELEMENTS:
                yield ("sweep",), "has more errors in its elements; correct those above first"
                return
            reported.add((path, sentence))
            key = _key_of(path, values) or table.keys[0]
            yield ("sweep", key), f"element {index} with {_without_secrets(values)}: {dotted(path)} {sentence}"


def _key_of(path: Path, keys: Iterable[str]) -> str | None:
    """Return the key of a sweep that sets a field, or a part of it; None if there is none."""
    for key in keys:
        field = path_of(field_of(key))
        if path[: len(field)] == field:
            return key
    return None


def _form_findings(sweep: Grid | Listed) -> Iterator[Finding]:
    """Yield the errors of a sweep that show without the job: values that are missing, repeated or too many."""
    is_grid = isinstance(sweep, Mapping)
    if not sweep or (not is_grid and not all(sweep)):
        yield ("sweep",), "contains an element without a value; write for example {train.seed: [0, 1, 2]}"
    elif isinstance(sweep, Mapping):
        for key, values in sweep.items():
            sentence = _refuse_values(key, values)
            if sentence is not None:
                yield ("sweep", key), sentence
    else:
        yield from _element_findings(sweep)
    count = count_elements(sweep)
    if sweep and count > LARGEST_SWEEP:
        yield ("sweep",), f"has {count} elements, but at most {LARGEST_SWEEP} are allowed; split it into several sweeps"


_WRITE_A_NUMBER = "write a number, or a text in quotes"


def _element_findings(sweep: Listed) -> Iterator[Finding]:
    """Yield the errors of listed elements: numbers that are not finite, an element that is repeated."""
    for index, element in enumerate(sweep):
        bad_keys = [key for key, value in element.items() if not _is_finite(value)]
        for key in bad_keys:
            yield ("sweep", key), f"holds a number that is not finite in element {index}; {_WRITE_A_NUMBER}"
    repeated_elements = _repeated(sweep)
    if repeated_elements:
        repeated_element = _without_secrets(repeated_elements[0])
        yield ("sweep",), f"holds the element {repeated_element} twice, which would be the same run again; remove one"


def _is_finite(value: object) -> bool:
    """Return whether all numbers in a value are finite: JSON and YAML cannot be written with another one."""
    if isinstance(value, Mapping):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _refuse_values(key: str, values: Sequence[Any]) -> str | None:
    """Return why a key of a grid cannot have these values, or None if it can."""
    if not values:
        return "lists no value; write for example [0, 1, 2], or leave the key out"
    if not _is_finite(values):
        return f"holds a number that is not finite; {_WRITE_A_NUMBER}"
    unexpanded = unexpanded_range(values)
    if unexpanded is not None:
        return f"holds {unexpanded}, {why_unexpanded(unexpanded)}"
    repeated_values = _repeated(values)
    if repeated_values:
        repeated_value = "a value" if is_secret(path_of(key)) else as_text(repeated_values[0])
        return f"holds {repeated_value} twice, which would be the same runs again; remove one"
    return None


def _repeated(values: Iterable[Any]) -> list[Any]:
    """Return the values that have occurred before."""
    identities: set[Hashable] = set()
    repeated_values = []
    for value in values:
        identity = _identity(value)
        if identity in identities:
            repeated_values.append(value)
        identities.add(identity)
    return repeated_values


_ONE_ARRAY = "all elements are one job array and ask Slurm for the same; submit once for each value, with --set"
_ONE_SCRIPT = "all elements run the same script; sweep environment.env.NAME, which the tasks read"
# By the beginning of a key path: fields that must be the same for the script and directory of all elements.
_SAME_FOR_ALL: Mapping[Path, str] = {
    ("name",): "all elements of a sweep have the same name; leave it out",
    ("run_root",): "all elements of a sweep have the same run_root; leave it out",
    ("profile",): "a profile is one cluster; submit once for each, with --set profile=NAME",
    ("sweep",): "a sweep cannot contain a sweep; name the fields themselves",
    ("max_parallel",): "it is about all elements together; leave it out",
    ("launcher",): _ONE_ARRAY,
    ("resources",): _ONE_ARRAY,
    ("environment",): _ONE_SCRIPT,
    ("requeue", "causes"): _ONE_ARRAY,
    ("requeue", "signal_lead"): _ONE_ARRAY,
}
# Sections that cannot be swept as a whole, and some of their fields can.
_SWEPT_IN_PARTS: Mapping[Path, str] = {
    ("requeue",): "a part of it is the same for all elements; name the fields of it, such as requeue.max_failures",
    VARIABLES: "the variables are swept one by one; name one of them, as in environment.env.NAME",
}


def refuse_key(key: str) -> str | None:
    """Return why a sweep cannot vary a field, or None if it can."""
    path = path_of(key)
    if not all(path):
        return "is not a key path; write for example train.seed"
    if find_key(path) is None:
        return unknown_key(path)
    if path in _SWEPT_IN_PARTS:
        return f"cannot be swept: {_SWEPT_IN_PARTS[path]}"
    if _is_variable(path):
        return None
    for field, reason in _SAME_FOR_ALL.items():
        if path[: len(field)] == field:
            return f"cannot be swept: {reason}"
    return None


def _is_variable(path: Path) -> bool:
    """Return whether a key path is that of an environment variable, or of all of them."""
    return path[: len(VARIABLES)] == VARIABLES


def _key_findings(spec: JobSpec) -> Iterator[Finding]:
    """Yield the errors of the keys of a job's sweep."""
    elements = (spec.sweep,) if isinstance(spec.sweep, Mapping) else spec.sweep
    keys = _keys_in_order(elements)
    placeholders = [key for key in keys if spec.command is not None and is_placeholder(key)]
    if placeholders:
        yield from _placeholder_findings(spec, placeholders, elements)
    for key in keys:
        if key not in placeholders:
            yield from _field_findings(spec, key, keys, elements)


def _field_findings(
    spec: JobSpec, key: str, keys: Sequence[str], elements: Sequence[Mapping[str, Any]]
) -> Iterator[Finding]:
    """Yield the errors of a key of a sweep that is no placeholder, and of its parts.

    Args:
        keys: all keys of the sweep.
    """
    if any(f"{{{key}}}" in word for word in spec.command or ()):
        yield ("sweep", key), f"is a field of the job file, and {{{key}}} in the command is not; choose another name"
        return
    path = path_of(key)
    refusal = refuse_key(key) or _lacks_section(spec, path)
    if refusal is not None:
        yield ("sweep", key), refusal
    for other_key in keys:
        if other_key.startswith(f"{key}."):
            yield ("sweep", other_key), f"is a part of {key}, which is swept too; keep one of them"
    if _is_variable(path):
        element = _first_without(key, elements)
        if element is not None:
            yield ("sweep", key), f"is missing in element {element}; give a variable in every element, or in none"


def _placeholder_findings(
    spec: JobSpec, placeholders: Sequence[str], elements: Sequence[Mapping[str, Any]]
) -> Iterator[Finding]:
    """Yield the errors of the keys of a sweep that are placeholders, and of the command that holds them."""
    if any("command" in element for element in elements):
        yield ("sweep", placeholders[0]), "is a value of the command, which is swept too; keep one of them"
        return
    for name in placeholders:
        if name in RUN_PLACEHOLDERS:
            yield ("sweep", name), f"is filled in by each task, as {{{name}}} in the command; choose another name"
            return
    yield from _command_findings(spec.command or (), placeholders)
    for name in placeholders:
        element = _first_without(name, elements)
        if element is not None:
            yield ("sweep", name), f"is missing in element {element}; give a value of the command in every element"


def _first_without(key: str, elements: Iterable[Mapping[str, Any]]) -> int | None:
    """Return the first element that has no value of a key; None if all have one."""
    for index, element in enumerate(elements):
        if key not in element:
            return index
    return None


def _lacks_section(spec: JobSpec, path: Path) -> str | None:
    """Return an error message for a field of a section that the job does not have, or None."""
    section: Section = spec
    for depth, name in enumerate(path[:-1], start=1):
        subsection = getattr(section, name)
        if subsection is None:
            return f"cannot be swept: the job has no {dotted(path[:depth])}; write one"
        if not isinstance(subsection, Section):
            return None
        section = subsection
    return None


def _without_secrets(values: Mapping[str, Any]) -> str:
    """Return the values of an element without those that may be secrets; of only such values, their names."""
    public_values = {key: value for key, value in values.items() if not is_secret(path_of(key))}
    if not public_values:
        return ", ".join(values)
    return assignment(public_values)
