"""Fields that a sweep may vary, and the validation of their values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

from pydantic import create_model

from hpcddp.jobfile.document import Path
from hpcddp.jobfile.field_tree import find_place
from hpcddp.jobfile.fields import Section
from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.messages import unknown_key

SectionT = TypeVar("SectionT", bound=Section)
ENVIRONMENT: Path = ("environment", "env")


def path_of(key: str) -> Path:
    """Return a key path as its parts."""
    return tuple(key.split("."))


_ONE_ARRAY = "all elements are one job array and ask Slurm for the same; submit once for each value, with --set"
_ONE_SCRIPT = "all elements run the same script; sweep environment.env.NAME, which the tasks read"
# By the beginning of a key path: fields that must be the same for the script and directory of all elements.
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


def refuse_key(key: str) -> str | None:
    """Return why a sweep cannot vary a field, or None if it can."""
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
    """Return a value converted to the type of its field.

    Args:
        key: the key path of a field, or of an entry of an open mapping such as ``environment.env``.
        value: the value as parsed from YAML.

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
    """Return a model whose one field is the field of a key path, and how many parts of the path name that field."""
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
    """Return a job with some fields replaced, without validation.

    Args:
        spec: a job.
        values: results of ``read_field``, by key path.
    """
    for key, value in values.items():
        spec = _replace(spec, path_of(key), value)
    return spec


def _replace(section: SectionT, path: Path, value: object) -> SectionT:
    name, *rest = path
    if not rest:
        return section.model_copy(update={name: value})
    inner = getattr(section, name)
    changed = _replace(inner, tuple(rest), value) if isinstance(inner, Section) else _replace_entry(inner, rest, value)
    return section.model_copy(update={name: changed})


def _replace_entry(mapping: object, path: Sequence[str], value: object) -> dict[str, object]:
    name, *rest = path
    changed = dict(mapping) if isinstance(mapping, Mapping) else {}
    changed[name] = _replace_entry(changed.get(name), rest, value) if rest else value
    return changed


def element_spec(spec: JobSpec, values: Mapping[str, Any]) -> JobSpec:
    """Return the job of an element of a sweep.

    Args:
        spec: a valid job with a sweep.
        values: the element's values by key path.
    """
    typed = {key: read_field(key, value) for key, value in values.items()}
    return with_values(spec, {**typed, "sweep": None, "max_parallel": None})
