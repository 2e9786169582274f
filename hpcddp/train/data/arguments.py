"""Read and check ``train.dataset_args`` of the built-in data sets."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from hpcddp.train.errors import DataError


def refuse_unknown(dataset: str, arguments: Mapping[str, Any], known: Sequence[str]) -> None:
    """Refuse an argument that the data set does not have.

    Raises:
        DataError: names it, and the closest argument or all of them.
    """
    for name in arguments:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            advice = (
                f"did you mean {near[0]}" if near else f"write one of {', '.join(known)}" if known else "leave it out"
            )
            raise DataError(f"train.dataset_args.{name} is given, but dataset {dataset} has no such argument; {advice}")


def take_flag(arguments: Mapping[str, Any], name: str, *, default: bool) -> bool:
    """Return a boolean argument.

    Raises:
        DataError: the value is not a boolean.
    """
    value = arguments.get(name, default)
    if not isinstance(value, bool):
        raise DataError(f"train.dataset_args.{name} is {value!r}, which is neither true nor false; write one of them")
    return value


def take_size(arguments: Mapping[str, Any], name: str, default: int) -> int:
    """Return an integer argument >= 1.

    Raises:
        DataError: the value is not such an integer.
    """
    value = arguments.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise DataError(f"train.dataset_args.{name} is {value!r}, which is no whole number from 1 on; write one")
    return value
