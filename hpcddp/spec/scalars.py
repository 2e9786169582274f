"""Unquoted scalars in the core schema of YAML 1.2 (YAML 1.2.2, section 10.3.2)."""

from __future__ import annotations

import math
import re

LONGEST_NUMBER = 300

_NULL = re.compile(r"null|Null|NULL|~|")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INTEGER = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", re.ASCII)
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", re.ASCII)
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


class ScalarError(ValueError):
    """A scalar has no value that a job file can hold; the message is the sentence."""


def read_scalar(text: str) -> bool | int | float | str | None:
    """Return what an unquoted scalar means.

    Args:
        text: the scalar, without quotes around it.

    Returns:
        Its value: ``on`` and ``no`` are texts, ``1e-3`` is a float, ``010`` is 10.

    Raises:
        ScalarError: it is infinity, not a number, or too long for a number.
    """
    if _NULL.fullmatch(text):
        return None
    if _BOOL.fullmatch(text):
        return text.lower() == "true"
    if _NOT_FINITE.fullmatch(text):
        raise ScalarError("is not a finite number, and no field takes one; write a number")
    if not (_INTEGER.fullmatch(text) or _FLOAT.fullmatch(text)):
        return text
    if len(text) > LONGEST_NUMBER:
        raise ScalarError(f"is a number of {len(text)} characters; quote it if it is a text")
    return _read_number(text)


def _read_number(text: str) -> int | float:
    if _INTEGER.fullmatch(text):
        return int(text, 0) if text[:2] in {"0o", "0x"} else int(text)
    number = float(text)
    if not math.isfinite(number):
        raise ScalarError("is too large for a number; quote it if it is a text")
    return number
