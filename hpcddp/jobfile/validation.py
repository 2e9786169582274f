"""Validate a merged mapping: first the types, then the rules on the values that fit their types."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from pydantic import ValidationError

from hpcddp.jobfile.document import Path, Source, dotted
from hpcddp.jobfile.job import JobSpec, example_of
from hpcddp.jobfile.merge import SWEEP_OPTION, MergedValues
from hpcddp.jobfile.messages import error_path, sentence_of
from hpcddp.jobfile.problems import MOST_PROBLEMS, Problem
from hpcddp.jobfile.rules import broken_rules, rules_without
from hpcddp.jobfile.sweep import check_sweep


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
    problems: list[Problem] = []
    spec: JobSpec | None = None
    try:
        spec = JobSpec.model_validate(merged.value)
        checked: JobSpec | None = spec
    except ValidationError as error:
        seen: set[Path] = set()
        for details in error.errors(include_url=False):
            path = error_path(details)
            is_known = path in seen or any(path[: len(above)] == above for above in wrong_paths)
            if not is_known and len(problems) < MOST_PROBLEMS:
                owner = merged.owner(path) or fallback
                sentence = sentence_of(details, path, owner.written.get(path))
                problems.append(_problem(path, sentence, owner))
            seen.add(path)
        wrong_paths |= seen
        checked = _with_examples(merged, wrong_paths)
    if checked is not None:
        rules = rules_without(wrong_paths)
        findings = check_sweep(checked, rules) if elements else broken_rules(checked, rules)
        for path, sentence in islice(findings, MOST_PROBLEMS - len(problems)):
            problems.append(_problem(path, sentence, merged.owner(path) or fallback))
    return spec, problems


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


def _problem(path: Path, sentence: str, owner: Source) -> Problem:
    return Problem(
        file=owner.file,
        line=owner.line_of(path),
        # The name of the option contains the key.
        key=dotted(path[1:] if owner.origin == SWEEP_OPTION else path),
        sentence=sentence,
    )
