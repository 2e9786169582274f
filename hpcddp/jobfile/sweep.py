"""Sweeps: the elements of a sweep as a table, the job of each element, and the errors of a sweep.

A key of a sweep is the key path of a field, or the name of a placeholder of the command: ``{lr}`` in a word of the
command is replaced by the value of ``lr``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

from pydantic import ValidationError

from hpcddp.errors import did_you_mean
from hpcddp.jobfile.document import Path, dotted, path_of
from hpcddp.jobfile.environment import VARIABLES
from hpcddp.jobfile.fields import LARGEST_SWEEP, UNEXPANDED_RANGE, Grid, Listed
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
Elements = tuple[Mapping[str, Any], ...]
"""The values of each element of a sweep, by key path."""


def count_elements(sweep: Grid | Listed) -> int:
    """Return the number of elements of a sweep, without expanding it."""
    if isinstance(sweep, Mapping):
        return prod(len(values) for values in sweep.values())
    return len(sweep)


def elements_of(sweep: Grid | Listed) -> Elements:
    """Return the elements of a sweep; in those of a grid the last key varies fastest."""
    if isinstance(sweep, Mapping):
        return tuple(dict(zip(sweep, values, strict=True)) for values in product(*sweep.values()))
    return sweep


def is_placeholder(key: str) -> bool:
    """Return whether a key of a sweep is no field of the job file, but a name that a command may hold in braces."""
    return find_key((key,)) is None and re.fullmatch(PLACEHOLDER, key, re.ASCII) is not None


def field_of(key: str) -> str:
    """Return the key path of the field that a key of a sweep changes."""
    return "command" if is_placeholder(key) else key


def assignment(values: Mapping[str, Any]) -> str:
    """Return the values of an element in one line: ``learning_rate.base=0.1, train.seed=0``."""
    return ", ".join(f"{key}={as_text(value)}" for key, value in values.items())


def element_spec(spec: JobSpec, values: Mapping[str, Any]) -> JobSpec:
    """Return the job of an element of a sweep.

    Args:
        values: the element's values by key path.

    Raises:
        JobFileError: the job with these values is not valid; has the first problem.
    """
    for name in values:
        if is_placeholder(name) and (refusal := _refuse_placeholder(spec, name)):
            raise _element_error(values, ("sweep", name), refusal)
    return _with_values(_without_sweep(spec, values), values, _rules_about(values, RULES))


def _refuse_placeholder(spec: JobSpec, name: str) -> str | None:
    """Return why a sweep cannot give a placeholder of the command its value, or None if it can."""
    names = placeholders_of(spec.command or ())
    if name in RUN_PLACEHOLDERS:
        return f"is filled in by each task, as {{{name}}} in the command; choose another name"
    if name in names:
        return None
    instead = did_you_mean(name, names, f"write {{{name}}} in the command where the value belongs")
    return f"is neither a field of the job file nor a placeholder of the command; {instead}"


def _element_error(values: Mapping[str, Any], path: Path, sentence: str) -> JobFileError:
    source = f"the job with {_without_secrets(values)}"
    return JobFileError.of([Problem(file=source, key=dotted(path), sentence=sentence)])


def _without_sweep(spec: JobSpec, keys: Iterable[str]) -> dict[str, Any]:
    """Return the values of a job without its sweep, which take the values of an element.

    Sections that none of the keys changes stay as they are validated, so that only the others are validated again.
    """
    changed_sections = {path_of(field_of(key))[0] for key in keys}
    job_values = dict(spec)
    job_values.update(spec.model_dump(mode="json", include=changed_sections, exclude_unset=True))
    job_values.update(sweep=None, max_parallel=None)
    return job_values


def _with_values(job_values: Mapping[str, Any], values: Mapping[str, Any], rules: Iterable[Rule]) -> JobSpec:
    """Return the job of an element.

    Args:
        job_values: the values of the job without its sweep.
        values: the element's values by key path.
        rules: the rules that it must keep.

    Raises:
        JobFileError: the job with these values is not valid; has the first problem.
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
    try:
        element = JobSpec.model_validate(job_values)
    except ValidationError as error:
        details = error.errors(include_url=False)[0]
        path = error_path(details)
        raise _element_error(values, path, sentence_of(details, path, None)) from error
    for path, sentence in broken_rules(element, rules):
        raise _element_error(values, path, sentence)
    return element


def _rules_about(keys: Iterable[str], rules: Iterable[Rule]) -> list[Rule]:
    """Return the rules whose result can differ between elements that have other values of some keys."""
    fields = {field_of(key) for key in keys}
    return [rule for rule in rules if rule.depends_on(fields)]


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
    sweep_findings = list(_form_findings(spec.sweep)) or list(_key_findings(spec, spec.sweep))
    if sweep_findings:
        yield from broken_rules(spec, rules)
        yield from sweep_findings
        return
    elements = elements_of(spec.sweep)
    keys = _keys_of(spec.sweep)
    rules_of_elements = _rules_about(keys, rules)
    # The other rules have the same result for the job and for every element.
    yield from broken_rules(spec, [rule for rule in rules if rule not in rules_of_elements])
    job_values = _without_sweep(spec, keys)
    for index, values in enumerate(elements):
        try:
            _with_values(job_values, values, rules_of_elements)
        except JobFileError as error:
            (problem,) = error.values["problems"]
            sentence = f"{problem.key} {problem.sentence}"
            yield ("sweep",), f"element {index} with {_without_secrets(values)}: {sentence}"
            return


def _keys_of(sweep: Grid | Listed) -> list[str]:
    """Return the keys that some element has, in order of appearance."""
    mappings = (sweep,) if isinstance(sweep, Mapping) else sweep
    return list(dict.fromkeys(key for mapping in mappings for key in mapping))


def _form_findings(sweep: Grid | Listed) -> Iterator[Finding]:
    """Yield the errors of a sweep that show without the job: values that are missing, repeated or too many."""
    for key, values in sweep.items() if isinstance(sweep, Mapping) else ():
        if not values:
            yield ("sweep", key), "lists no value; write for example [0, 1, 2], or leave the key out"
        for value in values:
            if isinstance(value, str) and UNEXPANDED_RANGE.fullmatch(value):
                why = f"which is no range of at most {LARGEST_SWEEP} integers, the smallest one first"
                yield ("sweep", key), f"holds {value}, {why}; write one, as in 0..4, or the values, as in 0.1,0.2,0.4"
    count = count_elements(sweep)
    if not sweep:
        yield ("sweep",), "contains no element; write for example {train.seed: [0, 1, 2]}"
    elif count > LARGEST_SWEEP:
        yield ("sweep",), f"has {count} elements, but at most {LARGEST_SWEEP} are allowed; split it into several sweeps"
    else:
        yield from _element_findings(elements_of(sweep))


def _element_findings(elements: Elements) -> Iterator[Finding]:
    """Yield the first error of the elements: one without a value, with a number that is not finite, or repeated."""
    texts: set[str] = set()
    for index, element in enumerate(elements):
        if not element:
            yield ("sweep",), f"has no value in element {index}; write for example {{train.seed: 0}}"
            return
        try:
            # JSON and YAML cannot be written with another number.
            text = json.dumps(element, sort_keys=True, allow_nan=False)
        except ValueError:
            sentence = f"holds a number that is not finite in element {index}; write a number, or a text in quotes"
            yield ("sweep",), sentence
            return
        if text in texts:
            sentence = f"holds the element {_without_secrets(element)} twice, which would be the same run again"
            yield ("sweep",), f"{sentence}; remove one"
            return
        texts.add(text)


_SAME_FOR_ALL = "it is the same for all elements; leave it out"
_ONE_ARRAY = "all elements are one job array and ask Slurm for the same; submit once for each value, with --set"
_ONE_SCRIPT = "all elements run the same script; sweep environment.env.NAME, which the tasks read"
# The fields that are the same for the script and the directory of all elements.
_UNSWEPT: Mapping[Path, str] = {
    ("name",): _SAME_FOR_ALL,
    ("run_root",): _SAME_FOR_ALL,
    ("sweep",): _SAME_FOR_ALL,
    ("max_parallel",): _SAME_FOR_ALL,
    ("profile",): _ONE_ARRAY,
    ("launcher",): _ONE_ARRAY,
    ("resources",): _ONE_ARRAY,
    ("environment",): _ONE_SCRIPT,
    ("requeue", "causes"): _ONE_ARRAY,
    ("requeue", "signal_lead"): _ONE_ARRAY,
}


def refuse_key(key: str) -> str | None:
    """Return why a sweep cannot vary a field, or None if it can."""
    path = path_of(key)
    if not all(path):
        return "is not a key path; write for example train.seed"
    if find_key(path) is None:
        return unknown_key(path)
    if path[:-1] == VARIABLES:
        return None
    for field, reason in _UNSWEPT.items():
        # Also of a section that holds the field.
        if path[: len(field)] == field[: len(path)]:
            return f"cannot be swept: {reason}"
    return None


def _key_findings(spec: JobSpec, sweep: Grid | Listed) -> Iterator[Finding]:
    """Yield the errors of the keys of a job's sweep."""
    keys = _keys_of(sweep)
    for key in keys:
        is_value_of_command = spec.command is not None and is_placeholder(key)
        if is_value_of_command:
            refusal = _refuse_placeholder(spec, key)
        elif any(f"{{{key}}}" in word for word in spec.command or ()):
            refusal = f"is a field of the job file, and {{{key}}} in the command is not; choose another name"
        else:
            refusal = refuse_key(key)
        if refusal is not None:
            yield ("sweep", key), refusal
            continue
        for other_key in keys:
            if other_key.startswith(f"{key}.") or (key == "command" and is_placeholder(other_key)):
                yield ("sweep", other_key), f"is a part of {key}, which is swept too; keep one of them"
        if isinstance(sweep, Mapping) or not (is_value_of_command or path_of(key)[:-1] == VARIABLES):
            continue
        for index, element in enumerate(sweep):
            if key not in element:
                yield ("sweep", key), f"is missing in element {index}; give it in every element, or in none"
                break


def _without_secrets(values: Mapping[str, Any]) -> str:
    """Return the values of an element without those that may be secrets; of only such values, their names."""
    public_values = {key: value for key, value in values.items() if not is_secret(path_of(key))}
    if not public_values:
        return ", ".join(values)
    return assignment(public_values)
