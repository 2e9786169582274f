"""The user's own functions: ``module:function``, found from the working directory."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hpcddp.doctor.errors import DoctorError

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def load_object(name: str, *, what: str) -> Any:  # noqa: ANN401
    """Import ``module:name``.

    Args:
        name: the module's dotted name, a colon, a dotted name in it.
        what: what it should be, for the message: ``a loss``.

    Raises:
        DoctorError: it is not of that form, cannot be imported, or is not there.
    """
    module_name, colon, path = name.partition(":")
    if not (module_name and colon and path):
        raise DoctorError(f"{name!r} does not name {what}; write module:function, for example losses:dice_loss")
    with blame(f"importing {module_name} failed"):
        try:
            found: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise
            raise DoctorError(
                f"{name} is not there: no module {error.name!r} in {Path.cwd()} or among the installed ones; run this "
                "in the folder that holds it"
            ) from error
    for part in path.split("."):
        if not hasattr(found, part):
            where = getattr(found, "__file__", None) or module_name
            raise DoctorError(f"{name} is not there: {where} has no {part!r}; write the name of {what} in it")
        found = getattr(found, part)
    return found


def load_loss(name: str) -> Callable[..., Any]:
    """Import a loss: a function, a class that is made without arguments, or a function that returns the loss.

    Raises:
        DoctorError: it cannot be imported or made, or cannot be called.
    """
    found = load_object(name, what="a loss")
    if isinstance(found, type) and parameters_needed(found):
        raise DoctorError(
            f"{name} is a class that is not made without arguments: {inspect.signature(found)}; name an instance, or a "
            "function without parameters that returns one"
        )
    if isinstance(found, type) or (callable(found) and parameters_needed(found) == 0 and inspect.isfunction(found)):
        with blame(f"{name} is a {'class' if isinstance(found, type) else 'function'}, and {name}() failed"):
            found = found()
    if not callable(found):
        raise DoctorError(f"{name} is a {type(found).__name__}, which cannot be called; write the name of a loss")
    return found.double() if isinstance(found, nn.Module) else found


def parameters_needed(function: Callable[..., Any]) -> int | None:
    """Return how many positional arguments ``function`` cannot do without; None where it does not say."""
    try:
        signature = inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except (TypeError, ValueError):
        return None
    needed = [p for p in signature.parameters.values() if p.kind in _POSITIONAL and p.default is p.empty]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in signature.parameters.values())
    return None if takes_any else len(needed)


@contextlib.contextmanager
def found_first(directory: Path) -> Iterator[None]:
    """Import from ``directory`` before anywhere else; tensors that a module makes are float64 meanwhile."""
    before = torch.get_default_dtype()
    sys.path.insert(0, str(directory))
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
        with contextlib.suppress(ValueError):
            sys.path.remove(str(directory))


@contextlib.contextmanager
def blame(sentence: str, kind: type[DoctorError] = DoctorError) -> Iterator[None]:
    """Turn any failure of the block into an error of ``kind`` that begins with ``sentence``."""
    try:
        yield
    except DoctorError:
        raise
    except (Exception, SystemExit) as error:
        raise kind(f"{sentence}: {describe(error)}") from error


def describe(error: BaseException) -> str:
    """Return an exception's type and the first line of its text."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
