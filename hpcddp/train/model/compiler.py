"""A training that compiles nothing does not load torch's compiler.

The compiler, ``torch._dynamo``, has 900 modules and takes nearly the CPU time of torch itself, in each rank. torch
loads it for ``DistributedDataParallel`` and for the first optimizer, whether something is compiled or not.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any, Final

import torch

_NAME: Final = "torch._dynamo"
# torch keeps some functions of these packages out of its compiler, and asks the compiler what to call in their place.
_NOT_COMPILED: Final = ("torch.optim.", "torch.nn.parallel.")
# ``inspect`` and ``warnings`` ask every module for these, also in the middle of an import, where the compiler would be
# a circular one.
_ASKED_OF_ALL_MODULES: Final = frozenset({"__file__", "__warningregistry__"})


def leave_compiler_out() -> None:
    """Let ``DistributedDataParallel`` and optimizers work without the compiler, unless it is loaded already.

    Code that compiles something loads it, as always.
    """
    if _NAME not in sys.modules:
        sys.modules[_NAME] = _UnusedCompiler()
        # What ``import torch._dynamo`` finds and the attribute must be the same.
        setattr(torch, "_dynamo", sys.modules[_NAME])  # noqa: B010  the name is torch's own


class _UnusedCompiler(ModuleType):
    """Answers what torch asks outside of compiled code; anything else loads the compiler, which takes its place."""

    def __init__(self) -> None:
        super().__init__(_NAME)
        self.utils = _Utilities()
        self.trace_rules = _TraceRules()

    def graph_break(self) -> None:
        """Mark where compiled code ends; there is none."""

    def disable(self, function: object = None, *arguments: object, **options: object) -> object:
        """Return the form of a function that is not compiled."""
        if getattr(function, "__module__", "").startswith(_NOT_COMPILED):
            return function
        return _loaded().disable(function, *arguments, **options)

    def __getattr__(self, name: str) -> object:
        if name in _ASKED_OF_ALL_MODULES:
            raise AttributeError(name)
        return getattr(_loaded(), name)


class _Utilities:
    def get_optimize_ddp_mode(self) -> str:
        """Return torch's default."""
        return "ddp_optimizer"

    def __getattr__(self, name: str) -> object:
        return getattr(_loaded().utils, name)


class _TraceRules:
    def clear_lru_cache(self) -> None:
        """Forget the rules; a process group that opens asks for it, and there are none."""

    def __getattr__(self, name: str) -> object:
        return getattr(_loaded().trace_rules, name)


def _loaded() -> Any:  # noqa: ANN401  the compiler's functions are not typed
    if isinstance(sys.modules.get(_NAME), _UnusedCompiler):
        del sys.modules[_NAME]
    return importlib.import_module(_NAME)
