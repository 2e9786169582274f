"""The code of the project in a task, imported from its copy alone."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path, PurePath
from typing import Final

from hpcddp.jobfile.launchers import PYTHON
from hpcddp.run.code import CodeError, read_copy
from hpcddp.run.directory import RunDirectory
from hpcddp.stop.listener import write_to_stderr

_SEARCH_PATH: Final = "PYTHONPATH"
# hpcddp may itself be installed from a checkout, and the project be this checkout.
_OWN_PACKAGE: Final = "hpcddp"
_LIBRARY: Final = re.compile(r"/lib(?:64)?/python3[^/]*/")
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
    roots = [str(copy / record.directory), str(copy), str(copy / "src")]
    given = [path for path in environment.get(_SEARCH_PATH, "").split(os.pathsep) if path]
    given_in_copy = {path: _in_copy(path, record.root, copy) for path in given}
    environment[_SEARCH_PATH] = os.pathsep.join(dict.fromkeys([*roots, *given_in_copy.values()]))
    # Behind the standard library, which no module of the project hides, and before every installed package.
    installed = (index for index, path in enumerate(sys.path) if PurePath(path).name in _INSTALLED)
    first_installed = next(installed, len(sys.path))
    sys.path[:] = [given_in_copy.get(path, path) for path in sys.path]
    sys.path[first_installed:first_installed] = roots


def _in_copy(path: str, root: str, copy: Path) -> str:
    """Return the path in the copy for an absolute path in the project; any other path as it is."""
    real = Path(os.path.realpath(path))
    if real.is_absolute() and real.is_relative_to(root):
        return str(copy / real.relative_to(root))
    return path


def check_imports(run: RunDirectory, program: str, environment: Mapping[str, str]) -> None:
    """Ask Python from where it would import the modules that the copy has.

    Args:
        program: the program that imports them; one that is no Python is taken to start ``python``.
        environment: the environment of the program.

    Raises:
        CodeError: it would import one from the project itself.
    """
    record, copy = read_copy(run)
    python = program if PYTHON.fullmatch(PurePath(program).name) else "python"
    try:
        probe = subprocess.run(
            [python, "-c", _PROBE],
            env=dict(environment),
            input=json.dumps(_modules_of(copy)),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_PROBE_TIMEOUT_S,
            check=True,
            text=True,
        )
        files: dict[str, str] = json.loads(probe.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        write_to_stderr(f"hpcddp: warning: {python} did not say from where it imports the modules of the project\n")
        return
    for name, file in files.items():
        real = Path(os.path.realpath(file))
        # An environment may be in the project.
        if real.is_relative_to(record.root) and not real.is_relative_to(copy.resolve()) and not _LIBRARY.search(file):
            raise CodeError(
                f"environment.code is snapshot, and the module {name} would be imported from {file}, where later edits "
                "are; put it at the top of the project or in src, and let git track it, or write environment.code: "
                f"frozen (the project {record.root} is on the import path, perhaps by pip install -e)"
            )


def _modules_of(copy: Path) -> list[str]:
    """Return the modules and packages of which the copy has the source, without those in a package."""
    names = set()
    for path in copy.rglob("*.py"):
        if path.is_symlink():
            continue
        module = path.with_suffix("")
        while (module.parent / "__init__.py").exists():
            module = module.parent
        names.add(module.name)
    return sorted(name for name in names if name.isidentifier() and name != _OWN_PACKAGE)
