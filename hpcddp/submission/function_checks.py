"""The checks of the functions that a job names, ``pkg.module:function``: their source is parsed, and never imported."""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from hpcddp.errors import did_you_mean, nearest
from hpcddp.jobfile.cluster import Cluster
from hpcddp.jobfile.fields import is_reference
from hpcddp.jobfile.job import JobSpec
from hpcddp.submission.environment_checks import runs_in_this_python
from hpcddp.submission.request import Obstacle

_FREE = frozenset({"exec", "globals", "vars", "setattr"})
"""Calls that may define any name."""


def function_obstacles(spec: JobSpec, _: Cluster, environment: Mapping[str, str]) -> Iterator[Obstacle]:
    """Yield the functions of the user that do not exist, or that the ranks could not import.

    Only the directory of submission is searched for a job that runs in another interpreter than this one, whose
    packages are unknown here.
    """
    is_certain = runs_in_this_python(spec.environment) and not (spec.environment.modules or spec.environment.setup)
    variables = {**environment, **spec.environment.env}
    paths: list[str] = []
    if is_certain:
        # The order in which the task searches: its own directory last (hpcddp.task.__main__).
        paths = [*filter(None, variables.get("PYTHONPATH", "").split(os.pathsep)), *filter(None, sys.path)]
    for key, name in _named_functions(spec):
        module, function = name.split(":", 1)
        search = _Search(directory=Path.cwd(), paths=paths, is_complete=is_certain)
        why = search.why_not(module, function)
        if why is not None:
            yield Obstacle(sentence=f"{key} is {name}, and {why}", certain=is_certain)


def meant_module(module: str, variables: Mapping[str, str]) -> str | None:
    """Return the module of this directory that ``python -m`` was meant to run; None if there is the one that is named.

    Args:
        module: the module that is named.
        variables: the environment of the command.
    """
    name, dot, rest = module.partition(".")
    paths = [str(Path.cwd()), *filter(None, variables.get("PYTHONPATH", "").split(os.pathsep)), *filter(None, sys.path)]
    if _find(name, paths, is_top=True) is not None:
        return None
    near = nearest(name, _modules_in(paths[:1]))
    if near is None:
        return None
    return f"{near}{dot}{rest}"


def _named_functions(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Yield the keys of the job that hold a function of the user, and the functions."""
    train = spec.train
    values: dict[str, str | None] = {"entrypoint": spec.entrypoint, "batch.group": spec.batch.group}
    if train is not None:
        values |= {"train.model": train.model, "train.dataset": train.dataset, "train.loss": train.loss}
    yield from ((key, name) for key, name in values.items() if name is not None and is_reference(name))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    """The search for a module as the ranks will search for it.

    Args:
        directory: the directory of submission.
        paths: the entries of ``sys.path`` before it.
        is_complete: whether these are all places in which a module can be.
    """

    directory: Path
    paths: Sequence[str]
    is_complete: bool

    def why_not(self, module: str, function: str) -> str | None:
        """Return why a function does not exist; None if it does, or if only an import would show it."""
        spec = self._find(module)
        return _no_function(spec, module, function) if isinstance(spec, ModuleSpec) else spec

    def _find(self, module: str) -> ModuleSpec | str | None:
        """Return where a module is, or why there is none; None if only an import would show it."""
        paths: Sequence[str] = [*self.paths, str(self.directory)]
        name, _, rest = module.partition(".")
        spec = _find(name, paths, is_top=self.is_complete)
        if spec is None:
            return self._no_module(name, paths) if self.is_complete else None
        while rest:
            if spec.submodule_search_locations is None:
                return f"{name} ({spec.origin}) is a module and not a package, so there is no {module}"
            paths = list(spec.submodule_search_locations)
            last, _, rest = rest.partition(".")
            name = f"{name}.{last}"
            # By its last word alone: with the whole name Python would import the packages of a namespace.
            spec = _find(last, paths, is_top=False)
            if spec is None:
                return self._no_module(name, paths)
        return spec

    def _no_module(self, name: str, paths: Sequence[str]) -> str:
        parent, _, last = name.rpartition(".")
        if parent:
            instead = did_you_mean(last, _modules_in(paths), "correct its name")
            return f"package {parent} has no module {last}; {instead}"
        otherwise = "correct its name, or submit from the directory that holds it"
        instead = did_you_mean(last, _modules_in([str(self.directory)]), otherwise)
        return f"neither {self.directory} nor {sys.executable} has a module {last}; {instead}"


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
    """Return why a module has no such function; None if it has, or if its source does not tell."""
    try:
        source = spec.loader.get_source(spec.name) if isinstance(spec.loader, InspectLoader) else None
        names = None if source is None else _names_defined(ast.parse(source).body)
    except (ImportError, OSError, RecursionError, MemoryError):
        return None
    except SyntaxError as error:
        line = f" (line {error.lineno})" if error.lineno else ""
        return f"{spec.origin} is not valid Python{line}: {error.msg}; correct the file"
    except ValueError as error:
        return f"{spec.origin} is not valid Python: {error}; correct the file"
    if names is None or function in names:
        return None
    instead = did_you_mean(function, names, "write the name of a function in it")
    return f"{module} ({spec.origin}) defines no {function}; {instead}"


def _names_defined(body: Sequence[ast.stmt]) -> set[str] | None:
    """Return the names that statements define in their module; None if that cannot be known without running them."""
    names: set[str] = set()
    for statement in body:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(statement.name)
                continue
            case ast.Import() | ast.ImportFrom():
                names |= {(alias.asname or alias.name).partition(".")[0] for alias in statement.names}
                continue
        for part in ast.walk(statement):
            match part:
                case ast.Name(ctx=ast.Store()):
                    names.add(part.id)
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                    names.add(part.name)
                case ast.Import() | ast.ImportFrom():
                    names |= {(alias.asname or alias.name).partition(".")[0] for alias in part.names}
                case ast.Call(func=ast.Name(id=called)) if called in _FREE:
                    return None
    return None if names & {"*", "__getattr__"} else names
