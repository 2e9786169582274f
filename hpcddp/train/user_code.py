"""Import and call the user's functions, ``pkg.module:function``; errors name the function that failed."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch

from hpcddp.errors import HpcddpError
from hpcddp.train.errors import UserCodeError


def load_function(key: str, name: str) -> Callable[..., Any]:
    """Import ``pkg.module:function``.

    Args:
        key: the key of the job file that holds the name, such as ``train.model``.
        name: the module's dotted name, a colon, the function's name.

    Raises:
        UserCodeError: the module cannot be imported, or has no such function.
    """
    module_name, _, function_name = name.partition(":")
    with as_user_error(f"{key} is {name}, and importing {module_name} failed"):
        module = importlib.import_module(module_name)
    function = getattr(module, function_name, None)
    if not callable(function):
        given = (
            "no such name" if function is None else f"a {type(function).__name__} of that name, which is no function"
        )
        raise UserCodeError(
            f"{key} is {name}, but {module_name} ({module.__file__}) has {given}; write the name of a function in it"
        )
    return cast("Callable[..., Any]", function)


def call_function(key: str, name: str, arguments: Mapping[str, Any]) -> object:
    """Import and call a function of the user, and return its result.

    Raises:
        UserCodeError: the function cannot be imported, or raises.
    """
    function = load_function(key, name)
    given = ", ".join(f"{argument}={value!r}" for argument, value in arguments.items())
    with as_user_error(f"{key} is {name}, and {name.partition(':')[2]}({given}) failed"):
        return function(**arguments)


@contextmanager
def as_user_error(sentence: str) -> Iterator[None]:
    """Turn any failure of the block into a ``UserCodeError`` that begins with ``sentence`` and keeps the traceback."""
    try:
        yield
    except (HpcddpError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UserCodeError(f"{sentence}: {describe(error)}", traceback=traceback.format_exc()) from error


def describe(error: BaseException) -> str:
    """Return an exception's type and the first line of its text."""
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    # The text of an error from a loader process is its traceback, whose last line is the error.
    if "Original Traceback" in str(error):
        return lines[-1]
    return f"{type(error).__name__}: {lines[0]}"
