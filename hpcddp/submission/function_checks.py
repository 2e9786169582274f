"""The checks of the functions that a job names, ``pkg.module:function``: their source is parsed, and never imported."""

from __future__ import annotations

import importlib.util
import os
import symtable
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from hpcddp.errors import did_you_mean, nearest
from hpcddp.jobfile.cluster import Cluster
from hpcddp.jobfile.fields import is_reference
from hpcddp.jobfile.job import JobSpec
from hpcddp.submission.environment_checks import runs_in_this_python
from hpcddp.submission.request import Obstacle

_FREE = frozenset({"__getattr__", "exec", "globals", "vars", "setattr"})
"""Names with which a module may define any other name."""


def function_obstacles(spec: JobSpec, _: Cluster, environment: Mapping[str, str]) -> Iterator[Obstacle]:
    """Yield the functions of the user that do not exist, or that the ranks could not import.

    Only the directory of submission is searched for a job that runs in another interpreter than this one, whose
    packages are unknown here.
    """
    is_certain = runs_in_this_python(spec.environment) and not (spec.environment.modules or spec.environment.setup)
    directory = str(Path.cwd())
    paths = [directory]
    if is_certain:
        # The order in which the task searches: its own directory last (hpcddp.task.__main__).
        paths = [*_search_path({**environment, **spec.environment.env}), directory]
    train = spec.train
    functions = {"entrypoint": spec.entrypoint, "batch.group": spec.batch.group}
    if train is not None:
        functions |= {"train.model": train.model, "train.dataset": train.dataset, "train.loss": train.loss}
    for key, name in functions.items():
        if name is None or not is_reference(name):
            continue
        module, function = name.split(":", 1)
        top = module.partition(".")[0]
        found = _find(top, paths, is_top=is_certain)
        why: str | None = None
        if found is not None:
            why = _no_function(found, module, function)
        elif is_certain:
            otherwise = "correct its name, or submit from the directory that holds it"
            instead = did_you_mean(top, _modules_in([directory]), otherwise)
            why = f"neither {directory} nor {sys.executable} has a module {top}; {instead}"
        if why is not None:
            yield Obstacle(sentence=f"{key} is {name}, and {why}", certain=is_certain)


def meant_module(module: str, variables: Mapping[str, str]) -> str | None:
    """Return the module of this directory that ``python -m`` was meant to run; None if there is the one that is named.

    Args:
        module: the module that is named.
        variables: the environment of the command.
    """
    name, dot, rest = module.partition(".")
    directory = str(Path.cwd())
    if _find(name, [directory, *_search_path(variables)], is_top=True) is not None:
        return None
    near = nearest(name, _modules_in([directory]))
    return None if near is None else f"{near}{dot}{rest}"


def _search_path(variables: Mapping[str, str]) -> list[str]:
    return [path for path in [*variables.get("PYTHONPATH", "").split(os.pathsep), *sys.path] if path]


def _find(name: str, paths: Sequence[str], *, is_top: bool) -> ModuleSpec | None:
    """Return where a module is; the packages that it is in are not imported."""
    with suppress(ImportError, ValueError):
        spec = PathFinder.find_spec(name, paths)
        # Packages that are installed editable have finders of their own.
        return spec if spec is not None or not is_top else importlib.util.find_spec(name)
    return None


def _modules_in(paths: Sequence[str]) -> list[str]:
    """Return the names of the modules and packages in directories."""
    names: set[str] = set()
    for path in paths:
        with suppress(OSError):
            names |= {
                entry.name.removesuffix(".py")
                for entry in os.scandir(path)
                if entry.name.endswith(".py") or (entry.name.isidentifier() and entry.is_dir())
            }
    return sorted(names)


def _no_function(spec: ModuleSpec, module: str, function: str) -> str | None:
    """Return why a module, whose first package is known, has no such function; None if only an import would show it."""
    name, *parts = module.split(".")
    for part in parts:
        paths = spec.submodule_search_locations
        if paths is None:
            return f"{name} ({spec.origin}) is a module and not a package, so there is no {module}"
        # By its last word alone: with the whole name Python would import the packages of a namespace.
        found = _find(part, paths, is_top=False)
        if found is None:
            return f"package {name} has no module {part}; {did_you_mean(part, _modules_in(paths), 'correct its name')}"
        spec = found
        name = f"{name}.{part}"
    try:
        source = spec.loader.get_source(spec.name) if isinstance(spec.loader, InspectLoader) else None
        table = symtable.symtable(source or "", module, "exec")
    except (ImportError, OSError, RecursionError, MemoryError):
        return None
    except (SyntaxError, ValueError) as error:
        line = f" (line {error.lineno})" if isinstance(error, SyntaxError) and error.lineno else ""
        return f"{spec.origin} is not valid Python{line}: {getattr(error, 'msg', error)}; correct the file"
    names = set(table.get_identifiers())
    if source is None or "import *" in source or names & {function, *_FREE}:
        return None
    instead = did_you_mean(function, names, "write the name of a function in it")
    return f"{module} ({spec.origin}) defines no {function}; {instead}"
