"""Which fields a sweep may vary, and what a value of one of them becomes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from pydantic import create_model

from hpcddp.spec.document import Path
from hpcddp.spec.fields import Section
from hpcddp.spec.fieldtree import find_place
from hpcddp.spec.job import JobSpec
from hpcddp.spec.suggestions import unknown_key

ENVIRONMENT: Path = ("environment", "env")

_ONE_ARRAY = "all elements are one job array and ask Slurm for the same; submit once for each value, with --set"
_ONE_SCRIPT = "all elements run the same script; sweep environment.env.NAME, which the tasks read"
# By the beginning of a key path: what differs would be another script, or another place.
_REFUSED: Mapping[Path, str] = {
    ("name",): "the elements of a sweep lie side by side under one name; leave it out",
    ("run_root",): "the elements of a sweep lie side by side in one run_root; leave it out",
    ("profile",): "a profile is one cluster; submit once for each, with --set profile=NAME",
    ("sweep",): "a sweep within a sweep is a longer sweep; name the fields themselves",
    ("max_parallel",): "it is about all elements together; leave it out",
    ("resources",): _ONE_ARRAY,
    ("environment",): _ONE_SCRIPT,
    ("requeue", "causes"): _ONE_ARRAY,
    ("requeue", "signal_lead"): _ONE_ARRAY,
}
_WHOLE: Mapping[Path, str] = {
    ("requeue",): "a part of it is the same for all elements; name the fields of it, such as requeue.max_failures",
    ENVIRONMENT: "the variables are swept one by one; name one of them, as in environment.env.NAME",
}


def path_of(key: str) -> Path:
    """Return a key path as its parts."""
    return tuple(key.split("."))


def refuse_key(key: str) -> str | None:
    """Return why a sweep cannot vary a field, or None if it can.

    Args:
        key: the key path.
    """
    path = path_of(key)
    if not all(path) or find_place(path) is None:
        return unknown_key(path) if all(path) else "is no key path; write for example train.seed"
    if path in _WHOLE:
        return f"cannot be swept: {_WHOLE[path]}"
    if path[: len(ENVIRONMENT)] == ENVIRONMENT:
        return None
    refused = next((why for above, why in _REFUSED.items() if path[: len(above)] == above), None)
    return None if refused is None else f"cannot be swept: {refused}"


def read_field(key: str, value: Any) -> Any:  # noqa: ANN401
    """Return what the type of a field makes of a value.

    Args:
        key: the key path of a field, or of an entry of a mapping that the user names the keys of.
        value: the value as YAML holds it.

    Raises:
        ValidationError: the value does not fit.
    """
    path = path_of(key)
    depth, holder = _holder(path)
    whole = value
    for name in reversed(path[depth:]):
        whole = {name: whole}
    found: Any = holder.model_validate({"value": whole}).value
    for name in path[depth:]:
        found = found[name]
    return found


@lru_cache(maxsize=64)
def _holder(path: Path) -> tuple[int, type[Any]]:
    """Return a section with one field, that which holds a key path, and how many parts of the path name the field."""
    section: type[Section] = JobSpec
    for depth, name in enumerate(path, start=1):
        place = find_place(path[:depth])
        if place is None or place.section is None or depth == len(path):
            field = section.model_fields[name]
            holds: Any = field.annotation
            return depth, create_model("Holder", __base__=Section, value=(holds, field))
        section = place.section
    raise KeyError(path)


def with_values(spec: JobSpec, values: Mapping[str, Any]) -> JobSpec:
    """Return a job with other values of some fields; they are not checked again.

    Args:
        spec: a job.
        values: what ``read_field`` made of the values, by key path.
    """
    changed: Any = spec
    for key, value in values.items():
        changed = _replace(changed, path_of(key), value)
    return changed  # type: ignore[no-any-return]


def _replace(whole: Any, path: Path, value: Any) -> Any:  # noqa: ANN401
    name, *rest = path
    if isinstance(whole, Section):
        inner = _replace(getattr(whole, name), tuple(rest), value) if rest else value
        return whole.model_copy(update={name: inner})
    below = whole if isinstance(whole, Mapping) else {}
    return {**below, name: _replace(below.get(name), tuple(rest), value) if rest else value}
