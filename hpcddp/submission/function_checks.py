"""The checks of the functions that a job names, ``pkg.module:function``: their source is parsed, and never imported."""

from __future__ import annotations

import ast
import copy
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from hpcddp.errors import nearest
from hpcddp.jobfile.cluster import Cluster
from hpcddp.jobfile.fields import is_reference
from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.user_source import Module, ReadModule, collective_in, is_own_source, names_defined
from hpcddp.submission.environment_checks import runs_in_this_python
from hpcddp.submission.request import Obstacle


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
        why = search.why_not(module, function, _use_of(key, spec, search))
        if why is not None:
            yield Obstacle(sentence=f"{key} is {name}, and {why}", certain=is_certain)


# Returns why a function of a module cannot be used; None if it can, or if that is not known.
_Use = Callable[[Module, str], str | None]


def _use_of(key: str, spec: JobSpec, search: _Search) -> _Use | None:
    """Return the check of how a key uses its function; None for one that takes any."""
    train = spec.train
    if key == "entrypoint":
        return _not_called_with_one
    if key == "train.model" and train is not None:
        return partial(_refuses_arguments, passed="num_classes", field="train.model_args", given=train.model_args)
    if key == "train.dataset" and train is not None:
        return partial(_refuses_arguments, passed="split", field="train.dataset_args", given=train.dataset_args)
    if key == "train.loss" and train is not None and train.loss_reduction != "global":
        return partial(_calls_collectives, read_module=search.read_own_module)
    return None


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

    def why_not(self, module: str, function: str, use: _Use | None) -> str | None:
        """Return why a function cannot be used; None if it can, or if only an import would show it."""
        spec = self._find(module)
        return _no_function(spec, module, function, use) if isinstance(spec, ModuleSpec) else spec

    def read_own_module(self, module: str) -> Module | None:
        """Return the source of a module of the user's own; None for another one, or one that cannot be read."""
        spec = self._find(module)
        if not isinstance(spec, ModuleSpec) or not is_own_source(module, spec.origin or ""):
            return None
        with suppress(ImportError, OSError, SyntaxError, ValueError):
            return _parse(spec, module)
        return None

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
            near = nearest(last, _modules_in(paths))
            instead = f"did you mean {parent}.{near}?" if near else "correct its name"
            return f"package {parent} has no module {last}; {instead}"
        near = nearest(last, _modules_in([str(self.directory)]))
        instead = "correct its name, or submit from the directory that holds it"
        if near:
            instead = f"did you mean {near}?"
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


def _no_function(spec: ModuleSpec, module: str, function: str, use: _Use | None) -> str | None:
    """Return why a module has no such function, or why the function cannot be used."""
    try:
        parsed = _parse(spec, module)
    except (ImportError, OSError):
        return None
    except SyntaxError as error:
        line = f" (line {error.lineno})" if error.lineno else ""
        return f"{spec.origin} is not valid Python{line}: {error.msg}; correct the file"
    except ValueError as error:
        return f"{spec.origin} is not valid Python: {error}; correct the file"
    if parsed is None:
        return None
    names = names_defined(parsed.body)
    if names is not None and function not in names:
        near = nearest(function, names)
        instead = f"did you mean {module}:{near}?" if near else "write the name of a function in it"
        return f"{module} ({spec.origin}) defines no {function}; {instead}"
    why_not = None if use is None else use(parsed, function)
    return None if why_not is None else f"in {spec.origin} {function} {why_not}"


def _parse(spec: ModuleSpec, module: str) -> Module | None:
    """Return the source of a module; None for a compiled one, and for one that is nested too deeply for ``ast``."""
    source = spec.loader.get_source(spec.name) if isinstance(spec.loader, InspectLoader) else None
    if source is None:
        return None
    is_package = spec.submodule_search_locations is not None
    try:
        body = ast.parse(source).body
    except (RecursionError, MemoryError):
        return None
    return Module(name=module, is_package=is_package, body=body)


def _calls_collectives(module: Module, name: str, *, read_module: ReadModule) -> str | None:
    """Return which collective a loss of shares calls; None if none is seen."""
    collective = collective_in(module, name, read_module)
    if collective is None:
        return None
    return (
        f"calls {collective}, in which every rank must take part, and a rank without samples does not call a loss of "
        "shares; write train.loss_reduction: global, and check the loss with hpcddp doctor ddp"
    )


def _not_called_with_one(module: Module, name: str) -> str | None:
    """Return why a module's function cannot be called with one argument; None if it can, or if that is not known."""
    arguments = _arguments_not_one(module.body, name)
    if arguments is None:
        return None
    return f"{arguments}, but an entrypoint is called with one argument, the context; write def {name}(context)"


def _refuses_arguments(
    module: Module, name: str, *, passed: str, field: str, given: Mapping[str, object]
) -> str | None:
    """Return why a module's function cannot be called with the arguments of a job; None if it can, or is not known.

    Args:
        passed: the argument that hpcddp passes itself.
        field: the field of the job with the other arguments.
        given: these arguments.
    """
    parameters = _parameters_of(_definitions_of(module.body, name))
    # An argument without a name is none that hpcddp could pass.
    if parameters is None or parameters.posonlyargs:
        return None
    names = [arg.arg for arg in (*parameters.args, *parameters.kwonlyargs)]
    if parameters.kwarg is None:
        if passed not in names:
            return f"takes no argument {passed}, which hpcddp passes; add it"
        for argument in given:
            if argument not in names:
                near = nearest(argument, names)
                instead = f"did you mean {near}?" if near else "remove it"
                return f"takes no argument {argument}, which {field} gives; {instead}"
    needed = [arg.arg for arg in parameters.args[: len(parameters.args) - len(parameters.defaults)]]
    needed += _needed_names(parameters)
    missing = [argument for argument in needed if argument not in {passed, *given}]
    return f"needs the argument {missing[0]}; write it into {field}" if missing else None


def _needed_names(parameters: ast.arguments) -> list[str]:
    """Return the arguments that a function takes by name alone, and cannot do without."""
    defaults = zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True)
    return [arg.arg for arg, default in defaults if default is None]


def _parameters_of(definitions: Sequence[ast.stmt]) -> ast.arguments | None:
    """Return the parameters of a function, or of a class; None if its source alone does not tell them."""
    match definitions:
        case [ast.FunctionDef(args=parameters, decorator_list=[])]:
            return parameters
        case [ast.ClassDef(body=body, decorator_list=[], keywords=[])]:
            methods = [statement for statement in body if isinstance(statement, ast.FunctionDef)]
            makers = [method for method in methods if method.name in {"__init__", "__new__"}]
            if len(makers) != 1 or makers[0].decorator_list or not makers[0].args.args:
                return None
            parameters = copy.copy(makers[0].args)
            # Without self.
            parameters.args = parameters.args[1:]
            return parameters
    return None


def _definitions_of(body: Sequence[ast.stmt], name: str) -> list[ast.stmt]:
    """Return the statements that define a name; none where any statement may do so."""
    if names_defined(body) is None:
        return []
    return [statement for statement in body if name in (names_defined([statement]) or ())]


def _arguments_not_one(body: Sequence[ast.stmt], name: str) -> str | None:
    match _definitions_of(body, name):
        case [ast.ClassDef(decorator_list=[])]:
            return "is a class"
        case [ast.FunctionDef(args=args, decorator_list=[]) | ast.AsyncFunctionDef(args=args, decorator_list=[])]:
            places = len(args.posonlyargs) + len(args.args)
            if not places and args.vararg is None:
                return "takes no argument"
            if (needed := places - len(args.defaults)) > 1:
                return f"needs {needed} arguments"
            named = _needed_names(args)
            return f"needs the argument {named[0]}" if named else None
    return None
