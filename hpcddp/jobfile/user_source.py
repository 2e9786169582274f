"""What the source of a user's module defines and calls; it is parsed, and never imported."""

from __future__ import annotations

import ast
from collections.abc import Sequence
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


def collective_in(body: Sequence[ast.stmt], name: str) -> str | None:
    """Return which collective a function or class calls, itself or in another of its module; None if none is seen."""
    by_name = {defined: statement for statement in body for defined in names_defined([statement]) or ()}
    seen, left = {name}, [name]
    while left:
        statement = by_name.get(left.pop())
        if statement is None or isinstance(statement, ast.Import | ast.ImportFrom):
            continue
        for part in ast.walk(statement):
            if isinstance(part, ast.Call) and (called := _collective(part.func)) is not None:
                return called
            if isinstance(part, ast.Name) and part.id not in seen:
                seen.add(part.id)
                left.append(part.id)
    return None


def _collective(function: ast.expr) -> str | None:
    """Return the name of the collective that a call is of; None if it is none."""
    match function:
        case ast.Name(id=name) | ast.Attribute(attr=name) if name in _COLLECTIVES:
            return name
        case ast.Attribute(attr=name, value=ast.Name(id=owner) | ast.Attribute(attr=owner)):
            return name if name in _IN_DISTRIBUTED and owner in _DISTRIBUTED else None
    return None
