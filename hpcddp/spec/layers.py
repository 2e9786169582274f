"""One mapping out of profile, job file and overrides, which remembers where each value came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hpcddp.spec.document import Path
from hpcddp.spec.fieldtree import Kind, find_place

JOB_FILE = "job file"
OVERRIDE = "--set"
SWEEP_OPTION = "--sweep"
COMMAND_LINE = "command line"
DEFAULT = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Something that values came from.

    Args:
        origin: its name for ``render --json``: "job file", "--set", an option's name, "command line" or "profile NAME".
        file: how an error names it: a path, ``--set key.path``, or an option's name.
        lines: the line of each key path, where it has lines.
        written: scalars that were no text, as they were written.
    """

    origin: str
    file: str
    lines: Mapping[Path, int] = field(default_factory=dict)
    written: Mapping[Path, str] = field(default_factory=dict)

    def line_of(self, path: Path) -> int | None:
        """Return the line of a key path, or of the nearest key above it that has one."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.lines:
                return self.lines[path[:length]]
        return None


class Layers:
    """Values laid over each other; the last one counts.

    Attributes:
        value: the merged mapping.
        owners: the source of every key path in it.
    """

    def __init__(self) -> None:
        self.value: dict[str, Any] = {}
        self.owners: dict[Path, Source] = {}
        self._takers: dict[Path, Source] = {}

    def lay(self, value: Mapping[str, Any], source: Source) -> None:
        """Lay a whole mapping over what is there; sections and open mappings merge, all else is replaced."""
        self._merge(self.value, value, source, ())

    def assign(self, path: Path, value: Any, source: Source) -> None:  # noqa: ANN401
        """Give one key path a value; null takes a value away that cannot be null."""
        parent = self.value
        for position, key in enumerate(path[:-1]):
            below = parent.get(key)
            if not isinstance(below, dict):
                below = parent[key] = {}
            self.owners.setdefault(path[: position + 1], source)
            parent = below
        self._disown(path)
        place = find_place(path)
        if value is None and (place is None or place.kind is Kind.ENTRY or not place.nullable):
            parent.pop(path[-1], None)
            self._takers[path] = source
            return
        parent[path[-1]] = value
        self._own(path, value, source)

    def drop(self, path: Path) -> None:
        """Take the value of a key path away, if there is one."""
        parent: Any = self.value
        for key in path[:-1]:
            parent = parent.get(key) if isinstance(parent, dict) else None
        if isinstance(parent, dict):
            parent.pop(path[-1], None)

    def owner(self, path: Path) -> Source | None:
        """Return what gave a key path its value or took it away, or did so for the nearest key above it."""
        for length in range(len(path), 0, -1):
            source = self.owners.get(path[:length]) or self._takers.get(path[:length])
            if source is not None:
                return source
        return None

    def _merge(self, below: dict[str, Any], above: Mapping[str, Any], source: Source, path: Path) -> None:
        for key, item in above.items():
            here = (*path, key)
            value = _empty_for_null(here) if item is None else item
            merges = _is_open(here) and isinstance(value, dict)
            if not merges:
                if key in below:
                    self._disown(here)
                below[key] = value
                self._own(here, value, source)
                continue
            self.owners[here] = source
            if not isinstance(below.get(key), dict):
                below[key] = {}
            self._merge(below[key], value, source, here)

    def _own(self, path: Path, value: Any, source: Source) -> None:  # noqa: ANN401
        self.owners[path] = source
        if isinstance(value, dict):
            for key, item in value.items():
                self._own((*path, key), item, source)

    def _disown(self, path: Path) -> None:
        for owned in [owned for owned in self.owners if owned[: len(path)] == path]:
            del self.owners[owned]


def _is_open(path: Path) -> bool:
    place = find_place(path)
    return place is not None and place.kind in {Kind.SECTION, Kind.MAPPING}


def _empty_for_null(path: Path) -> Any:  # noqa: ANN401
    """Return what a key with nothing after it holds: a section or list whose lines are all commented out is empty."""
    place = find_place(path)
    if place is None or place.nullable:
        return None
    return {Kind.SECTION: {}, Kind.MAPPING: {}, Kind.LIST: []}.get(place.kind)
