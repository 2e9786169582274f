"""The code of the project in a task, imported from its copy alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path, PurePath
from types import ModuleType
from typing import Final

from hpcddp.jobfile.launchers import PYTHON
from hpcddp.run.code import (
    CodeError,
    CodeRecord,
    import_roots,
    in_copy,
    outside_copy,
    read_copy,
)
from hpcddp.run.directory import RunDirectory
from hpcddp.stop.listener import write_to_stderr

_SEARCH_PATH: Final = "PYTHONPATH"
# hpcddp may itself be installed from a checkout, and the project be this checkout.
_OWN_PACKAGE: Final = "hpcddp"
_INSTALLED: Final = frozenset({"site-packages", "dist-packages"})
_PROBE_TIMEOUT_S: Final = 120.0
# Prints the files of those modules that Python would import; nothing of them runs.
_PROBE: Final = """
import importlib.util, json, sys
files = {}
for name in json.load(sys.stdin):
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        continue
    if spec is not None and spec.origin is not None:
        files[name] = spec.origin
print(json.dumps(files))
"""


def enter_copy(run: RunDirectory, environment: MutableMapping[str, str]) -> None:
    """Change to the copy of the directory of submission, and let this process and its children import from the copy.

    Args:
        environment: the environment of this process, whose ``PYTHONPATH`` changes.

    Raises:
        HpcddpError: there is no copy.
    """
    record, copy = read_copy(run)
    os.chdir(copy / record.directory)
    roots = import_roots(copy, record.directory)
    given = [path for path in environment.get(_SEARCH_PATH, "").split(os.pathsep) if path]
    given_in_copy = {path: in_copy(path, record.root, copy) for path in given}
    search_path = dict.fromkeys([*roots, *given_in_copy.values()])
    environment[_SEARCH_PATH] = os.pathsep.join(search_path)
    # Behind the standard library, which no module of the project hides, and before every installed package.
    installed = (index for index, path in enumerate(sys.path) if PurePath(path).name in _INSTALLED)
    first_installed = next(installed, len(sys.path))
    sys.path[:] = [given_in_copy.get(path, path) for path in sys.path]
    sys.path[first_installed:first_installed] = roots
    sys.meta_path.insert(0, _CopyGuard(record, copy))


def _refusal(name: str, file: str, record: CodeRecord) -> CodeError:
    return CodeError(
        f"environment.code is snapshot, and the module {name} would be imported from {file}, where later edits are; "
        "put it at the top of the project or in src, and let git track it, or write environment.code: frozen (the "
        f"project {record.root} is on the import path, perhaps by pip install -e)"
    )


class _CopyGuard(MetaPathFinder):
    """Refuses to import a module of the project that is not in the copy."""

    def __init__(self, record: CodeRecord, copy: Path) -> None:
        self._record = record
        self._is_outside = outside_copy(record.root, copy)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return what the other finders return; raise ``CodeError`` for a file of the project outside the copy."""
        for finder in sys.meta_path:
            # Python asks no finder that lacks the method either.
            find_spec = getattr(finder, "find_spec", None)
            if finder is self or find_spec is None:
                continue
            spec: ModuleSpec | None = find_spec(fullname, path, target)
            if spec is not None:
                self._check(fullname, spec.origin)
                return spec
        return None

    def _check(self, name: str, file: str | None) -> None:
        if file is None or name.partition(".")[0] == _OWN_PACKAGE:
            return
        if self._is_outside(file):
            raise _refusal(name, file, self._record)


def check_program(run: RunDirectory, command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Ask the Python of a command from where it would import the modules of the project.

    Args:
        environment: the environment of its program.

    Raises:
        CodeError: it would import one from outside the copy.
    """
    record, copy = read_copy(run)
    names = _modules_of(record)
    if not names:
        return
    python = "python"
    if PYTHON.fullmatch(PurePath(command[0]).name):
        python = command[0]
    try:
        files = _imported_files(python, names, environment)
    except (OSError, ValueError, subprocess.SubprocessError):
        write_to_stderr(f"hpcddp: warning: {python} did not say from where it imports the modules of the project\n")
        return
    is_outside = outside_copy(record.root, copy)
    for name, file in files.items():
        if is_outside(file):
            raise _refusal(name, file, record)


def _imported_files(python: str, names: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the file of each of these modules that an interpreter would import; nothing of them runs.

    Raises:
        OSError: the interpreter cannot be started.
        subprocess.SubprocessError: it fails, or does not answer in time.
        ValueError: its answer is not what the probe prints.
    """
    probe = subprocess.run(
        [python, "-c", _PROBE],
        env=dict(environment),
        input=json.dumps(names),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        timeout=_PROBE_TIMEOUT_S,
        check=True,
        text=True,
    )
    files: dict[str, str] = json.loads(probe.stdout)
    return files


def _modules_of(record: CodeRecord) -> list[str]:
    """Return the modules and packages of the project, without those in a package."""
    packages = {PurePath(name).parent for name in record.files if PurePath(name).name == "__init__.py"}
    names = set()
    for name in record.files:
        path = PurePath(name)
        if path.suffix != ".py":
            continue
        module = path.with_suffix("")
        while module.parent in packages:
            module = module.parent
        names.add(module.name)
    return sorted(name for name in names if name.isidentifier() and name != _OWN_PACKAGE)
