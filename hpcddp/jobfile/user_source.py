"""What the source of a user's module defines and calls; it is parsed, and never imported."""

from __future__ import annotations

import ast
import importlib.util
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePath
from typing import Final

_FREE = frozenset({"exec", "globals", "vars", "setattr"})
"""Calls that may define any name."""


def names_defined(body: Sequence[ast.stmt]) -> set[str] | None:
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


# Collectives of torch.distributed by names that nothing else has, and hpcddp's helpers, which call them.
_COLLECTIVES: Final = frozenset(
    {
        "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single",
        "reduce_scatter", "reduce_scatter_tensor", "accumulate_additive", "accumulate_gathered", "additive_loss",
        "gather_with_grad", "sum_statistics", "weighted_mean",
    }
)  # fmt: skip
# Tensors have methods of the same names.
_IN_DISTRIBUTED: Final = frozenset({"barrier", "broadcast", "gather", "reduce", "scatter"})
_DISTRIBUTED: Final = frozenset({"dist", "distributed"})


_INSTALLED: Final = frozenset({"site-packages", "dist-packages"})
# They may be installed from a checkout, in a directory like one of the user's.
_NOT_OWN: Final = frozenset({"hpcddp", "torch"})


@dataclass(frozen=True, kw_only=True)
class Module:
    """The source of a module.

    Args:
        is_package: whether it is the ``__init__`` of a package.
    """

    name: str
    is_package: bool
    body: Sequence[ast.stmt]

    @cached_property
    def by_name(self) -> Mapping[str, ast.stmt]:
        """The statement that defines each name; the last one if there are several."""
        return {name: statement for statement in self.body for name in names_defined([statement]) or ()}

    def absolute_name(self, statement: ast.ImportFrom) -> str | None:
        """Return the full name of the module that a statement ``from ... import`` names; None if it names none."""
        package = self.name if self.is_package else self.name.rpartition(".")[0]
        try:
            return importlib.util.resolve_name("." * statement.level + (statement.module or ""), package)
        except ImportError:
            # A relative name outside of a package.
            return None


ReadModule = Callable[[str], Module | None]
"""Returns the source of a module by its full name; None for one that is not the user's own, or that has none."""


def is_own_source(module: str, file: str) -> bool:
    """Return whether a module is the user's own, and neither of the standard library nor of an installed package."""
    is_standard = file.startswith(sysconfig.get_path("stdlib") + "/")
    return module.partition(".")[0] not in _NOT_OWN and not is_standard and not _INSTALLED & set(PurePath(file).parts)


def collective_in(module: Module, name: str, read_module: ReadModule) -> str | None:
    """Return which collective a function or class calls, itself or in another that it names; None if none is seen.

    Args:
        module: the module that defines it.
        read_module: how the modules that it imports are read.
    """
    seen: set[tuple[str, str]] = set()
    left = [(module, name)]
    while left:
        where, current = left.pop()
        statement = where.by_name.get(current)
        if statement is None or (where.name, current) in seen:
            continue
        seen.add((where.name, current))
        if isinstance(statement, ast.Import | ast.ImportFrom):
            left += _imported(where, [current], read_module)
            continue
        for part in ast.walk(statement):
            if isinstance(part, ast.Call) and (called := _collective(part.func)) is not None:
                return called if where is module else f"{called} (in module {where.name})"
            if isinstance(part, ast.Name):
                left.append((where, part.id))
            elif isinstance(part, ast.Attribute):
                left += _imported(where, _dotted_name(part), read_module)
    return None


def _imported(where: Module, dotted_name: Sequence[str], read_module: ReadModule) -> Iterator[tuple[Module, str]]:
    """Yield the module and the name in it that a name such as ``losses.dice`` may stand for.

    Args:
        where: the module that has the name.
        dotted_name: the words of the name; its first one is imported, or nothing is yielded.
        read_module: how modules are read.
    """
    statement = where.by_name.get(dotted_name[0]) if dotted_name else None
    if not isinstance(statement, ast.Import | ast.ImportFrom):
        return
    for alias in statement.names:
        is_whole = isinstance(statement, ast.Import) and alias.asname is None
        bound = alias.name.partition(".")[0] if is_whole else alias.asname or alias.name
        if bound != dotted_name[0]:
            continue
        if isinstance(statement, ast.ImportFrom):
            full_name = f"{where.absolute_name(statement)}.{alias.name}"
        else:
            # "import pkg.losses" binds pkg.
            full_name = bound if is_whole else alias.name
        module_name, _, name = ".".join([full_name, *dotted_name[1:]]).rpartition(".")
        module = read_module(module_name) if module_name else None
        if module is not None:
            yield module, name


def _dotted_name(attribute: ast.Attribute) -> list[str]:
    """Return the words of ``losses.dice``; none for an attribute of anything but a name."""
    words: list[str] = []
    part: ast.expr = attribute
    while isinstance(part, ast.Attribute):
        words.insert(0, part.attr)
        part = part.value
    return [part.id, *words] if isinstance(part, ast.Name) else []


def _collective(function: ast.expr) -> str | None:
    """Return the name of the collective that a call starts; None if it starts none."""
    match function:
        case ast.Name(id=name) | ast.Attribute(attr=name) if name in _COLLECTIVES:
            return name
        case ast.Attribute(attr=name, value=ast.Name(id=owner) | ast.Attribute(attr=owner)):
            return name if name in _IN_DISTRIBUTED and owner in _DISTRIBUTED else None
    return None
