"""Look up key paths in the types of the job file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from hpcddp.jobfile.document import Path
from hpcddp.jobfile.fields import Section
from hpcddp.jobfile.job import JobSpec

_UNIONS = (Union, UnionType)


class Kind(Enum):
    """The kinds of values that a key path can refer to."""

    SECTION = "section"
    """A mapping with fields of its own."""
    MAPPING = "mapping"
    """A mapping whose keys the user names."""
    LIST = "list"
    VALUE = "value"
    ENTRY = "entry"
    """A value inside a mapping whose keys the user names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place of a key path in the types.

    Args:
        kind: the kind of its value.
        nullable: whether the value may be null.
        section: the type of the section, for a section.
    """

    kind: Kind
    nullable: bool
    section: type[Section] | None = None


def find_place(path: Path) -> Place | None:
    """Return the place of a key path, or None if the job file has no such key."""
    section: type[Section] = JobSpec
    place = Place(kind=Kind.SECTION, nullable=False, section=JobSpec)
    for position, key in enumerate(path):
        field = section.model_fields.get(key)
        if field is None:
            return None
        place = place_of(field)
        if place.section is not None:
            section = place.section
        elif position + 1 < len(path):
            return Place(kind=Kind.ENTRY, nullable=True) if place.kind is Kind.MAPPING else None
    return place


def place_of(field: FieldInfo) -> Place:
    """Return the place of a field."""
    choices = tuple(_alternatives(field.annotation))
    nullable = NoneType in choices
    for choice in choices:
        if isinstance(choice, type) and issubclass(choice, Section):
            return Place(kind=Kind.SECTION, nullable=nullable, section=choice)
    origins = {get_origin(choice) or choice for choice in choices}
    kind = Kind.MAPPING if Mapping in origins else Kind.LIST if tuple in origins else Kind.VALUE
    return Place(kind=kind, nullable=nullable)


def field_paths(section: type[Section] = JobSpec, above: Path = ()) -> Iterator[tuple[Path, FieldInfo]]:
    """Yield every field of a section and of the sections in it, a section before its fields."""
    for name, field in section.model_fields.items():
        path = (*above, name)
        yield path, field
        below = place_of(field).section
        if below is not None:
            yield from field_paths(below, path)


def leaf_paths(spec: Section, above: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the path and the value of every field that is not a section."""
    for name in type(spec).model_fields:
        value = getattr(spec, name)
        if isinstance(value, Section):
            yield from leaf_paths(value, (*above, name))
        else:
            yield (*above, name), value


def _alternatives(annotation: object) -> Iterator[object]:
    """Yield the members of a union, without ``Annotated``."""
    if get_origin(annotation) is Annotated:
        yield from _alternatives(get_args(annotation)[0])
    elif get_origin(annotation) in _UNIONS:
        for choice in get_args(annotation):
            yield from _alternatives(choice)
    else:
        yield annotation
