"""Module names of hpcddp 0.1.0 that its scripts and pickles still name; for one release.

A job that was submitted before an upgrade runs ``python -m hpcddp.launch.attempt`` and ``hpcddp.launch.task``,
and its pickle names ``hpcddp.launch.work.run``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_file_location
from types import ModuleType
from typing import Final

_MOVED: Final = {
    "hpcddp.launch.attempt": "hpcddp.supervise.__main__",
    "hpcddp.launch.task": "hpcddp.task.__main__",
    "hpcddp.launch.siblings": "hpcddp.task.local_peers",
    "hpcddp.launch.work": "hpcddp.task.work",
}

__path__: list[str] = []  # what makes this module a package, so that its submodules are looked for


class _Forward(MetaPathFinder):
    """Finds the file of a module by its old name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        moved = _MOVED.get(fullname)
        found = find_spec(moved) if moved else None
        return spec_from_file_location(fullname, found.origin) if found is not None and found.origin else None


sys.meta_path.append(_Forward())
