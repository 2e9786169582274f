"""Every problem of a merged mapping: the types first, then the rules on what fits its type."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from hpcddp.spec.document import Path, dotted
from hpcddp.spec.fieldtree import Kind, find_place
from hpcddp.spec.job import JobSpec
from hpcddp.spec.layers import SWEEP_OPTION, Layers, Source
from hpcddp.spec.problems import Problem
from hpcddp.spec.rules import broken_rules
from hpcddp.spec.sentences import is_secret, sentence_of
from hpcddp.spec.sweep import tabulate
from hpcddp.spec.sweep_fields import path_of
from hpcddp.spec.sweep_rules import shape_findings, sweep_findings

# What stands in for a required field that is missing or wrong, so that the rules on all other fields can be asked.
_STAND_INS: dict[Path, Any] = {
    ("name",): "stand-in",
    ("batch",): {"global_batch_size": 1},
    ("batch", "global_batch_size"): 1,
    ("train", "model"): "resnet18",
    ("train", "dataset"): "digits",
    ("environment", "container", "image"): "stand-in",
}


def check_values(layers: Layers, fallback: Source, wrong: Iterable[Path] = ()) -> tuple[JobSpec | None, list[Problem]]:
    """Check a merged mapping.

    Args:
        layers: the mapping and the source of each value.
        fallback: the source that a missing value belongs to.
        wrong: key paths that have a problem already; nothing more is said about them.

    Returns:
        The job, or None where the types do not fit, and the problems.
    """
    known = set(wrong)
    try:
        spec = JobSpec.model_validate(layers.value)
    except ValidationError as error:
        return None, list(_of_types(error, layers, fallback, known))
    return spec, [_problem(path, sentence, layers, fallback) for path, sentence in _of_rules(spec, known)]


def _of_types(error: ValidationError, layers: Layers, fallback: Source, known: set[Path]) -> Iterator[Problem]:
    found: set[Path] = set()
    for details in error.errors(include_url=False):
        path = _path_of(details)
        if path not in found and not _below_any(path, known):
            yield _problem(path, sentence_of(details, path, _written(path, layers)), layers, fallback)
        found.add(path)
    spec = _with_stand_ins(layers, found | known)
    if spec is not None:
        for path, sentence in _of_rules(spec, found | known):
            yield _problem(path, sentence, layers, fallback)


def _of_rules(spec: JobSpec, wrong: Iterable[Path]) -> Iterator[tuple[Path, str]]:
    known = list(wrong)
    faults = list(shape_findings(spec))
    swept = () if faults or spec.sweep is None else tabulate(spec.sweep).keys
    # A swept field has other values than the job's own; the rules on it are asked about those.
    for key, sentence in broken_rules(spec, known, swept):
        yield path_of(key), sentence
    yield from faults or sweep_findings(spec, swept, known)


def _with_stand_ins(layers: Layers, wrong: set[Path]) -> JobSpec | None:
    """Return the job without its wrong values, or None where that makes no job either."""
    patched = Layers()
    patched.value = copy.deepcopy(layers.value)
    for path in sorted(wrong):
        patched.drop(path)
        if path in _STAND_INS:
            patched.assign(path, _STAND_INS[path], Source(origin="", file=""))
    try:
        return JobSpec.model_validate(patched.value)
    except ValidationError:
        return None


def _path_of(details: ErrorDetails) -> Path:
    return tuple(str(part) for part in details["loc"] if part != "[key]")


def _below_any(path: Path, known: set[Path]) -> bool:
    return any(path[: len(above)] == above for above in known)


def _written(path: Path, layers: Layers) -> str | None:
    owner = layers.owner(path)
    return owner.written.get(path) if owner is not None else None


def _problem(path: Path, sentence: str, layers: Layers, fallback: Source) -> Problem:
    place = layers.owner(path) or fallback
    return Problem(
        file=place.file,
        line=place.line_of(path),
        # The option has the name of the key in it.
        key=dotted(path[1:] if place.origin == SWEEP_OPTION else path),
        value=_value_at(path, layers),
        sentence=sentence,
    )


def _value_at(path: Path, layers: Layers) -> Any:  # noqa: ANN401
    """Return the single value of a field; a mapping, an unknown key and a secret may hold what nobody is to see."""
    place = find_place(path)
    if is_secret(path) or place is None or place.kind in {Kind.SECTION, Kind.MAPPING}:
        return None
    value: Any = layers.value
    for key in path:
        if isinstance(value, dict):
            value = value.get(key)
        elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            return None
    return value
