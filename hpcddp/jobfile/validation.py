"""Validate a merged mapping: first the types, then the rules on the values that fit their types."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from pydantic import ValidationError

from hpcddp.jobfile.document import Path, Source, dotted
from hpcddp.jobfile.job import JobSpec, ValueKind, example_of, find_key, is_secret
from hpcddp.jobfile.merge import SWEEP_OPTION, MergedValues
from hpcddp.jobfile.messages import error_path, sentence_of
from hpcddp.jobfile.problems import MOST_PROBLEMS, Problem
from hpcddp.jobfile.rules import broken_rules, rules_without
from hpcddp.jobfile.sweep import Finding, check_sweep


def check_values(
    merged: MergedValues, fallback: Source, wrong: Iterable[Path] = (), *, elements: bool = True
) -> tuple[JobSpec | None, list[Problem]]:
    """Check a merged mapping.

    Args:
        merged: the mapping and the source of each value.
        fallback: the source to which missing values are attributed.
        wrong: key paths that have a problem already; no other problem of them is reported.
        elements: whether the elements of a sweep are checked too.

    Returns:
        The job, or None where the types do not fit, and the problems.
    """
    # A problem of the whole file, such as an anchor before its first key, is no reason to report no other.
    wrong_paths = {path for path in wrong if path}
    try:
        spec = JobSpec.model_validate(merged.value)
    except ValidationError as error:
        problems = _problems_of_types(error, merged, fallback, wrong_paths, elements=elements)
        return None, list(islice(problems, MOST_PROBLEMS))
    findings = islice(_rule_findings(spec, wrong_paths, elements=elements), MOST_PROBLEMS)
    return spec, [_problem(path, sentence, merged, fallback) for path, sentence in findings]


def _problems_of_types(
    error: ValidationError, merged: MergedValues, fallback: Source, wrong: set[Path], *, elements: bool
) -> Iterator[Problem]:
    seen: set[Path] = set()
    for details in error.errors(include_url=False):
        path = error_path(details)
        if path not in seen and not any(path[: len(above)] == above for above in wrong):
            sentence = sentence_of(details, path, _written(path, merged))
            yield _problem(path, sentence, merged, fallback)
        seen.add(path)
    spec = _with_examples(merged, seen | wrong)
    if spec is not None:
        for path, sentence in _rule_findings(spec, seen | wrong, elements=elements):
            yield _problem(path, sentence, merged, fallback)


def _rule_findings(spec: JobSpec, wrong: Iterable[Path], *, elements: bool) -> Iterator[Finding]:
    rules = rules_without(wrong)
    return check_sweep(spec, rules) if elements else iter(broken_rules(spec, rules))


def _with_examples(merged: MergedValues, wrong: set[Path]) -> JobSpec | None:
    """Return the job without its wrong values, so that the rules between all other fields can be checked.

    A required field has the value of its example. None: that is not valid either.
    """
    patched = MergedValues()
    patched.leaves = dict(merged.leaves)
    for path in sorted(wrong):
        patched.drop(path)
        example = example_of(path)
        if example is not None:
            patched.assign(path, example, Source())
    try:
        return JobSpec.model_validate(patched.value)
    except ValidationError:
        return None


def _written(path: Path, merged: MergedValues) -> str | None:
    owner = merged.owner(path)
    return owner.written.get(path) if owner is not None else None


def _problem(path: Path, sentence: str, merged: MergedValues, fallback: Source) -> Problem:
    owner = merged.owner(path) or fallback
    return Problem(
        file=owner.file,
        line=owner.line_of(path),
        # The name of the option contains the key.
        key=dotted(path[1:] if owner.origin == SWEEP_OPTION else path),
        value=_value_at(path, merged),
        sentence=sentence,
    )


def _value_at(path: Path, merged: MergedValues) -> object:
    """Return the single value of a field; None for a mapping, an unknown key and a secret, which must not be shown."""
    key_type = find_key(path)
    if is_secret(path) or key_type is None or key_type.kind in {ValueKind.SECTION, ValueKind.MAPPING}:
        return None
    value: Any = merged.value
    for key in path:
        if isinstance(value, dict):
            value = value.get(key)
        elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            return None
    return value
