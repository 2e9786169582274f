"""Sweeps: the elements of a sweep as a table, the job of each element, and the errors of a sweep.

A key of a sweep is the key path of a field, or the name of a placeholder of the command: ``{lr}`` in a word of the
command is replaced by the value of ``lr``.
"""

from __future__ import annotations

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
from hpcddp.jobfile.fields import LARGEST_SWEEP, Grid, Listed, Section, meant_range, unexpanded_range, why_unexpanded
from hpcddp.jobfile.job import JobSpec, find_key, is_secret
from hpcddp.jobfile.messages import error_path, sentence_of, unknown_key
from hpcddp.jobfile.placeholders import (
    BRACES,
    PLACEHOLDER,
    RUN_PLACEHOLDERS,
    as_text,
    doubled,
    fill_sweep_placeholders,
)
from hpcddp.jobfile.problems import JobFileError, Problem, shown
from hpcddp.jobfile.rules import RULES, Rule, broken_rules

Finding = tuple[Path, str]
"""The key path of an error, and the message."""

# The most elements that a message names, and the most errors of one kind that are listed.
_NAMED = 3
_SHOWN = 10

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
        chosen = zip(self.values, self.rows[index], strict=True)
        return {key: self.values[key][position] for key, position in chosen if position is not None}

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
        elements_by_row: dict[tuple[int | None, ...], list[int]] = {}
        for index, row in enumerate(self.rows):
            elements_by_row.setdefault(tuple(row[column] for column in columns), []).append(index)
        for chosen, elements in elements_by_row.items():
            pairs = zip(keys, chosen, strict=True)
            yield Combination(
                {key: self.values[key][position] for key, position in pairs if position is not None}, elements
            )

    def common(self, elements: Sequence[int]) -> dict[str, Any]:
        """Return the values, by key path, that several elements have in common."""
        rows = [self.rows[index] for index in elements]
        shared = {key: column[0] for key, *column in zip(self.values, *rows, strict=True) if len({*column}) == 1}
        return {key: self.values[key][position] for key, position in shared.items() if position is not None}


def count_elements(sweep: Grid | Listed) -> int:
    """Return the number of elements of a sweep, without expanding it."""
    return prod(len(values) for values in sweep.values()) if isinstance(sweep, Mapping) else len(sweep)


def tabulate(sweep: Grid | Listed) -> SweepTable:
    """Return a sweep as a table."""
    if isinstance(sweep, Mapping):
        return SweepTable(sweep, list(product(*(range(len(values)) for values in sweep.values()))), is_grid=True)
    keys = tuple(dict.fromkeys(key for element in sweep for key in element))
    indices: dict[str, dict[Hashable, int]] = {key: {} for key in keys}
    values: dict[str, list[Any]] = {key: [] for key in keys}
    rows = [tuple(_value_index(element, key, indices[key], values[key]) for key in keys) for element in sweep]
    return SweepTable({key: tuple(listed) for key, listed in values.items()}, rows, is_grid=False)


def _value_index(element: Mapping[str, Any], key: str, known: dict[Hashable, int], values: list[Any]) -> int | None:
    """Return the index of an element's value among the values of its key; a new value is added to them."""
    if key not in element:
        return None
    same = _identity(element[key])
    if same not in known:
        known[same] = len(values)
        values.append(element[key])
    return known[same]


def _identity(value: object) -> Hashable:
    """Return a hashable that is equal only for equal values of the same type."""
    return (type(value), value) if isinstance(value, str | int | float | None) else as_text(value)


def is_placeholder(key: str) -> bool:
    """Return whether a key of a sweep is no field of the job file, but a name that a command may hold in braces."""
    return find_key((key,)) is None and re.fullmatch(PLACEHOLDER, key, re.ASCII) is not None


def field_of(key: str) -> str:
    """Return the key path of the field that a key of a sweep changes."""
    return "command" if is_placeholder(key) else key


def _command_findings(command: Sequence[str], names: Sequence[str]) -> Iterator[Finding]:
    """Yield the errors of a command with placeholders.

    Args:
        command: its words.
        names: the placeholders that the sweep gives a value.
    """
    found: dict[str, None] = {}
    filled = {*names, *RUN_PLACEHOLDERS}
    for word in command:
        braces = list(BRACES.finditer(word))
        found |= dict.fromkeys(match[1] for match in braces if match[1] and match[1] not in RUN_PLACEHOLDERS)
        if any(match[0] in {"{", "}"} for match in braces):
            instead = BRACES.sub(lambda match: match[0] if match[1] in filled else doubled(match[0]), word)
            yield _COMMAND, f"holds {shown(word)}, with a brace that begins or ends no placeholder; write {instead!r}"
    unknown = [name for name in found if name not in names]
    unused = [name for name in names if name not in found]
    if len(unused) == len(unknown) == 1 and nearest(unused[0], unknown) is None:
        (meant,), (name,) = unused, unknown
        instead = f"did you mean {{{meant}}}? Or write {{{{{name}}}}} for the text"
        yield _COMMAND, f"holds {{{name}}}, which has no values in the sweep; {instead}"
        return
    for name in unused:
        near = nearest(name, unknown)
        if near is None:
            instead = f"write {{{name}}} in the command where the value belongs"
            yield ("sweep", name), f"is neither a field of the job file nor a placeholder of the command; {instead}"
        else:
            # One mistake, and one error for it.
            unknown.remove(near)
            yield ("sweep", name), f"is not a placeholder of the command, which holds {{{near}}}; did you mean {near}?"
    for name in unknown:
        near = nearest(name, names)
        instead = f"did you mean {{{near}}}? Or write" if near else "give it values in the sweep, or write"
        yield _COMMAND, f"holds {{{name}}}, which has no values in the sweep; {instead} {{{{{name}}}}} for the text"


def assignment(values: Mapping[str, Any]) -> str:
    """Return the values of an element in one line: ``learning_rate.base=0.1, train.seed=0``."""
    return ", ".join(f"{key}={as_text(value)}" for key, value in values.items())


def element_spec(spec: JobSpec, values: Mapping[str, Any]) -> JobSpec:
    """Return the job of an element of a sweep.

    Args:
        spec: a valid job.
        values: the element's values by key path.

    Raises:
        JobFileError: the job with these values is not valid.
    """
    names = [key for key in values if is_placeholder(key)]
    elements = _Elements(spec, values, RULES)
    findings = list(_command_findings(spec.command or (), names)) if names else []
    findings = findings or elements.check(values)[1]
    if findings:
        place = f"the job with {_without_secrets(values)}"
        raise JobFileError.of(Problem(file=place, key=dotted(path), sentence=why) for path, why in findings)
    return elements.job(values)


class _Elements:
    """Builds the jobs of elements of a sweep and validates each like the job of a job file.

    Sections without a swept field are validated already, so that only the others are validated again.

    Args:
        keys: the key paths that the sweep sets.
        rules: the rules to check; those that read none of ``keys`` are left out.
    """

    def __init__(self, spec: JobSpec, keys: Iterable[str], rules: Iterable[Rule]) -> None:
        swept = tuple(dict.fromkeys(map(field_of, keys)))
        unswept = {"sweep": None, "max_parallel": None}
        sections = {path_of(key)[0] for key in swept}
        self._job = {**dict(spec), **spec.model_dump(mode="json", include=sections, exclude_unset=True), **unswept}
        self.rules = [rule for rule in rules if rule.depends_on(swept)]

    def job(self, values: Mapping[str, Any]) -> JobSpec:
        """Return the job of an element.

        Raises:
            ValidationError: a value does not fit its type.
        """
        job = self._job
        placeholders = {key: value for key, value in values.items() if is_placeholder(key)}
        for key, value in values.items():
            if key not in placeholders:
                job = _assigned(job, path_of(key), value)
        if placeholders:
            job = {**job, "command": fill_sweep_placeholders(job["command"], placeholders)}
        return JobSpec.model_validate(job)

    def check(self, values: Mapping[str, Any]) -> tuple[bool, list[Finding]]:
        """Return whether the values of an element fit their types, and the errors of its job."""
        try:
            spec = self.job(values)
        except ValidationError as error:
            sentences: dict[Path, str] = {}
            for details in error.errors(include_url=False):
                path = error_path(details)
                sentences.setdefault(path, sentence_of(details, path, None))
            return False, list(sentences.items())
        return True, broken_rules(spec, self.rules)


def _assigned(mapping: Mapping[str, Any], path: Path, value: object) -> dict[str, Any]:
    """Return a copy of a mapping in which one key path has another value."""
    name, *rest = path
    below = mapping.get(name)
    inner = below if isinstance(below, Mapping) else {}
    return {**mapping, name: _assigned(inner, tuple(rest), value) if rest else value}


def check_sweep(spec: JobSpec, rules: Sequence[Rule]) -> Iterator[Finding]:
    """Yield the errors of a job and of the elements of its sweep.

    An error of the job itself is reported at its own key only if every element has it, because elements have other
    values.

    Args:
        spec: a job whose fields fit their types.
        rules: the rules to check.
    """
    if spec.sweep is None:
        yield from broken_rules(spec, rules)
        if spec.max_parallel is not None:
            yield ("max_parallel",), f"is {spec.max_parallel}, and there is no sweep; write one, or remove it"
        return
    if faults := list(_form_findings(spec.sweep)) or list(_key_findings(spec)):
        yield from (*broken_rules(spec, rules), *faults)
        return
    table = tabulate(spec.sweep)
    elements = _Elements(spec, table.keys, rules)
    # The other rules have the same result for the job and for every element.
    yield from broken_rules(spec, [rule for rule in rules if rule not in elements.rules])
    findings_of_job = broken_rules(spec, elements.rules)
    checked = [elements.check(table.element(index)) for index in range(len(table))]
    fitting = [index for index, (fits, _) in enumerate(checked) if fits]
    broken: dict[Finding, list[int]] = {}
    for index in fitting:
        for finding in checked[index][1]:
            broken.setdefault(finding, []).append(index)
    of_all = [finding for finding in findings_of_job if broken.get(finding, []) == fitting]
    yield from of_all
    wrong_types = dict.fromkeys(finding for fits, findings in checked if not fits for finding in findings)
    yield from _first([(("sweep", _key_of(path, table.keys)), sentence) for path, sentence in wrong_types])
    yield from _first([_explain(finding, broken[finding], table) for finding in broken if finding not in of_all])


def _first(findings: Sequence[Finding]) -> Iterator[Finding]:
    """Yield the first errors of one kind, and one that says how many more there are."""
    yield from findings[:_SHOWN]
    if (more := len(findings) - _SHOWN) > 0:
        yield ("sweep",), f"has {more} more error{'s' if more > 1 else ''} of this kind; correct those above first"


def _explain(finding: Finding, indices: Sequence[int], table: SweepTable) -> Finding:
    """Return the error of some elements, at a key that they set and with the values that they have in common."""
    (path, sentence), values = finding, table.common(indices)
    suspects = [key for key in values if len(table.values[key]) > 1] or table.keys
    with_values = f" with {_without_secrets(values)}" if values else ""
    found = f"makes {_numbers(indices)}{with_values}, where {dotted(path)} {sentence}"
    return ("sweep", _key_of(path, table.keys, suspects[0])), found


def _key_of(path: Path, keys: Iterable[str], otherwise: str = "") -> str:
    """Return the key of a sweep that sets a field or a part of it."""
    fields = {key: path_of(field_of(key)) for key in keys}
    return next((key for key, field in fields.items() if path[: len(field)] == field), otherwise)


def _form_findings(sweep: Grid | Listed) -> Iterator[Finding]:
    if not sweep or (not isinstance(sweep, Mapping) and not all(sweep)):
        yield ("sweep",), "contains an element without a value; write for example {train.seed: [0, 1, 2]}"
    elif isinstance(sweep, Mapping):
        for key, values in sweep.items():
            if not values:
                yield ("sweep", key), "lists no value; write for example [0, 1, 2], or leave the key out"
            elif text := unexpanded_range(values):
                yield ("sweep", key), f"holds {text}, {why_unexpanded(text)}"
            elif len(values) == 1 and (meant := meant_range(values[0])):
                yield ("sweep", key), f"holds {values[0]}, which is one value; write {meant}"
            elif twice := _twice(values):
                shown = "a value" if is_secret(path_of(key)) else as_text(twice[0])
                yield ("sweep", key), f"holds {shown} twice, which would be the same runs again; remove one"
    elif twice := _twice(sweep):
        yield (
            ("sweep",),
            f"holds the element {_without_secrets(twice[0])} twice, which would be the same run again; remove one",
        )
    if sweep and (count := count_elements(sweep)) > LARGEST_SWEEP:
        yield ("sweep",), f"has {count} elements, and {LARGEST_SWEEP} are the most; split it into several sweeps"


def _twice(values: tuple[Any, ...]) -> list[Any]:
    """Return the values that occur again."""
    first: dict[Hashable, int] = {}
    return [value for index, value in enumerate(values) if first.setdefault(_identity(value), index) != index]


_ONE_ARRAY = "all elements are one job array and ask Slurm for the same; submit once for each value, with --set"
_ONE_SCRIPT = "all elements run the same script; sweep environment.env.NAME, which the tasks read"
# By the beginning of a key path: fields that must be the same for the script and directory of all elements.
_REFUSED: Mapping[Path, str] = {
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
_WHOLE: Mapping[Path, str] = {
    ("requeue",): "a part of it is the same for all elements; name the fields of it, such as requeue.max_failures",
    VARIABLES: "the variables are swept one by one; name one of them, as in environment.env.NAME",
}


def refuse_key(key: str) -> str | None:
    """Return why a sweep cannot vary a field, or None if it can."""
    path = path_of(key)
    if not all(path) or find_key(path) is None:
        return unknown_key(path) if all(path) else "is not a key path; write for example train.seed"
    if path in _WHOLE:
        return f"cannot be swept: {_WHOLE[path]}"
    if path[: len(VARIABLES)] == VARIABLES:
        return None
    refused = next((why for above, why in _REFUSED.items() if path[: len(above)] == above), None)
    return None if refused is None else f"cannot be swept: {refused}"


def _key_findings(spec: JobSpec) -> Iterator[Finding]:
    listed = (spec.sweep,) if isinstance(spec.sweep, Mapping) else spec.sweep
    keys = dict.fromkeys(key for element in listed for key in element)
    placeholders = [key for key in keys if spec.command is not None and is_placeholder(key)]
    if placeholders:
        yield from _placeholder_findings(spec, placeholders, listed)
    for key in keys:
        if key in placeholders:
            continue
        if any(f"{{{key}}}" in word for word in spec.command or ()):
            yield (
                ("sweep", key),
                f"is a field of the job file, and {{{key}}} in the command is not; choose another name",
            )
            continue
        if (why := refuse_key(key) or _lacks_section(spec, path_of(key))) is not None:
            yield ("sweep", key), why
        for other in keys:
            if other.startswith(f"{key}."):
                yield ("sweep", other), f"is a part of {key}, which is swept too; keep one of them"
        if path_of(key)[:2] == VARIABLES:
            lacking = next((index for index, element in enumerate(listed) if key not in element), None)
            if lacking is not None:
                yield ("sweep", key), f"is missing in element {lacking}; give a variable in every element, or in none"


def _placeholder_findings(
    spec: JobSpec, names: Sequence[str], listed: Sequence[Mapping[str, Any]]
) -> Iterator[Finding]:
    if any("command" in element for element in listed):
        yield ("sweep", names[0]), "is a value of the command, which is swept too; keep one of them"
        return
    filled_by_tasks = [name for name in names if name in RUN_PLACEHOLDERS]
    if filled_by_tasks:
        name = filled_by_tasks[0]
        yield ("sweep", name), f"is filled in by each task, as {{{name}}} in the command; choose another name"
        return
    yield from _command_findings(spec.command or (), names)
    for name in names:
        lacking = next((index for index, element in enumerate(listed) if name not in element), None)
        if lacking is not None:
            yield ("sweep", name), f"is missing in element {lacking}; give a value of the command in every element"


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


def _numbers(elements: Sequence[int]) -> str:
    """Return the indices of elements in words: ``elements 0, 1, 2 and 5 more``."""
    numbers = ", ".join(map(str, elements[:_NAMED]))
    more = f" and {len(elements) - _NAMED} more" if len(elements) > _NAMED else ""
    return f"element{'s' if len(elements) > 1 else ''} {numbers}{more}"


def _without_secrets(values: Mapping[str, Any]) -> str:
    """Return the values of an element without those that may be secrets; of only such values, their names."""
    return assignment({key: value for key, value in values.items() if not is_secret(path_of(key))}) or ", ".join(values)
