"""Merge defaults, job file and overrides into one mapping, and record the source of each value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcddp.jobfile.document import Layer, Path, Source
from hpcddp.jobfile.job import ValueKind, find_key

JOB_FILE = "job file"
OVERRIDE = "--set"
SWEEP_OPTION = "--sweep"
COMMAND_LINE = "command line"
DEFAULT = "default"


class MergedValues:
    """A mapping merged from several sources; the last source of a value counts.

    Attributes:
        value: the merged mapping.
        owners: the source of every key path in it.
    """

    def __init__(self) -> None:
        self.value: dict[str, Any] = {}
        self.owners: dict[Path, Source] = {}
        self._removed_by: dict[Path, Source] = {}

    def merge(self, layer: Layer) -> None:
        """Merge a layer into the value: sections and mappings are merged key by key, all else is replaced."""
        self._merge(self.value, layer.values, layer.source, ())

    def assign(self, path: Path, value: object, source: Source) -> None:
        """Set one key path; null removes a value that cannot be null."""
        parent = self.value
        for position, key in enumerate(path[:-1]):
            below = parent.get(key)
            if not isinstance(below, dict):
                below = parent[key] = {}
            self.owners.setdefault(path[: position + 1], source)
            parent = below
        self._forget_owners(path)
        key_type = find_key(path)
        if value is None and (key_type is None or key_type.kind is ValueKind.ENTRY or not key_type.nullable):
            parent.pop(path[-1], None)
            self._removed_by[path] = source
            return
        parent[path[-1]] = value
        self._set_owner(path, value, source)

    def replace(self, path: Path, value: object) -> None:
        """Replace the value of a key path, which there is, by another form of it; its source stays."""
        parent: Any = self.value
        for key in path[:-1]:
            parent = parent[key]
        parent[path[-1]] = value

    def drop(self, path: Path) -> None:
        """Remove the value of a key path, if there is one."""
        parent: Any = self.value
        for key in path[:-1]:
            parent = parent.get(key) if isinstance(parent, dict) else None
        if isinstance(parent, dict):
            parent.pop(path[-1], None)

    def owner(self, path: Path) -> Source | None:
        """Return the source that set or removed a key path, or the nearest key above it."""
        for length in range(len(path), 0, -1):
            source = self.owners.get(path[:length]) or self._removed_by.get(path[:length])
            if source is not None:
                return source
        return None

    def _merge(self, below: dict[str, Any], above: Mapping[str, Any], source: Source, path: Path) -> None:
        for key, item in above.items():
            here = (*path, key)
            value = _empty_value(here) if item is None else item
            if not (_merges_by_key(here) and isinstance(value, dict)):
                if key in below:
                    self._forget_owners(here)
                below[key] = value
                self._set_owner(here, value, source)
                continue
            self.owners[here] = source
            if not isinstance(below.get(key), dict):
                below[key] = {}
            self._merge(below[key], value, source, here)

    def _set_owner(self, path: Path, value: object, source: Source) -> None:
        self.owners[path] = source
        if isinstance(value, dict):
            for key, item in value.items():
                self._set_owner((*path, key), item, source)

    def _forget_owners(self, path: Path) -> None:
        for owned in [owned for owned in self.owners if owned[: len(path)] == path]:
            del self.owners[owned]


def _merges_by_key(path: Path) -> bool:
    key_type = find_key(path)
    return key_type is not None and key_type.kind in {ValueKind.SECTION, ValueKind.MAPPING}


def _empty_value(path: Path) -> dict[str, Any] | list[Any] | None:
    """Return the value of a key without one: a section, mapping or list is empty, all else is null."""
    key_type = find_key(path)
    if key_type is None or key_type.nullable:
        return None
    if key_type.kind is ValueKind.LIST:
        return []
    return {} if key_type.kind in {ValueKind.SECTION, ValueKind.MAPPING} else None
