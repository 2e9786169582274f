"""Merge default settings, job file and command line into one flat map of values, each with its source."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any, Final

from hpcddp.jobfile.document import Path, Source
from hpcddp.jobfile.job import KeyType, ValueKind, find_key

JOB_FILE = "job file"
OVERRIDE = "--set"
SWEEP_OPTION = "--sweep"
COMMAND_LINE = "command line"
DEFAULT = "default"

_REMOVED: Final = object()
_UNKNOWN: Final = KeyType(kind=ValueKind.VALUE, nullable=True)


class MergedValues:
    """A mapping merged from several sources, as its leaves; the last source of a value counts.

    Attributes:
        leaves: the value and the source of each key path. A section, or a mapping whose keys the user names, is an
            empty mapping, with the leaves of its keys after it.
    """

    def __init__(self) -> None:
        self.leaves: dict[Path, tuple[Any, Source]] = {}

    def merge(self, values: Mapping[str, Any], source: Source, above: Path = ()) -> None:
        """Merge a mapping: sections and mappings are merged key by key, all else is replaced, by null taken away."""
        for key, item in values.items():
            path = (*above, key)
            key_type = find_key(path) or _UNKNOWN
            value = item
            if item is None and not key_type.nullable:
                if key_type.kind is ValueKind.SECTION:
                    # All its keys may be comments.
                    continue
                if key_type.kind is ValueKind.LIST:
                    value = []
                elif key_type.kind is ValueKind.MAPPING or path in self.leaves:
                    value = _REMOVED
            if isinstance(value, dict) and key_type.kind in {ValueKind.SECTION, ValueKind.MAPPING}:
                if self._takes_keys(path, source):
                    self.leaves[path] = ({}, source)
                    self.merge(value, source, path)
            else:
                if path in self.leaves:
                    self.drop(path)
                self.leaves[path] = (value, source)

    def assign(self, path: Path, value: object, source: Source) -> None:
        """Set one key path; null removes a value that cannot be null."""
        if not all(self._takes_keys(path[:length], source) for length in range(1, len(path))):
            return
        self.drop(path)
        if value is None and not (find_key(path) or _UNKNOWN).nullable:
            self.leaves[path] = (_REMOVED, source)
        else:
            self.merge({path[-1]: value}, source, path[:-1])

    def _takes_keys(self, path: Path, source: Source) -> bool:
        """Make a missing section or mapping. A value of another type stays, so that it is refused: return False."""
        if self.leaves.get(path, (None,))[0] in (None, _REMOVED):
            self.leaves[path] = ({}, source)
        return isinstance(self.leaves[path][0], dict)

    def drop(self, path: Path) -> None:
        """Remove the leaves of a key path and below it."""
        for below in list(self.leaves):
            if below[: len(path)] == path:
                del self.leaves[below]

    def owner(self, path: Path) -> Source | None:
        """Return the source that set or removed a key path, or the nearest key above it."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.leaves:
                return self.leaves[path[:length]][1]
        return None

    def origin(self, path: Path) -> str:
        """Return the origin of the value of a key path."""
        value, source = self.leaves.get(path, (_REMOVED, Source()))
        return DEFAULT if value is _REMOVED else source.origin

    @property
    def value(self) -> dict[str, Any]:
        """The merged mapping."""
        merged: dict[str, Any] = {}
        for path, (value, _) in self.leaves.items():
            if value is not _REMOVED:
                parent = merged
                for key in path[:-1]:
                    parent = parent[key]
                parent[path[-1]] = copy(value)
        return merged
