"""TOML that a person likes to read: the standard library reads it only."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from hpcddp.spec.write import quote

_BARE = re.compile("[A-Za-z0-9_-]+", re.ASCII)
_COMMENT_COLUMN = 34


def entry(key: str, value: Any, comment: str = "", *, active: bool = True) -> str:  # noqa: ANN401
    """Return one line ``key = value  # comment``.

    Args:
        key: the key.
        value: a text, number, truth value, list or mapping of such.
        comment: what stands behind it.
        active: whether the line counts; if not, it is a comment as a whole.
    """
    line = f"{'' if active else '# '}{_key(key)} = {literal(value)}"
    return f"{line:<{_COMMENT_COLUMN}}  # {_one_line(comment)}" if comment else line


def header(*path: str) -> str:
    """Return the line that begins a table."""
    return f"[{'.'.join(_key(key) for key in path)}]"


def comment(text: str) -> str:
    """Return a line that is a comment."""
    return f"# {_one_line(text)}"


def rows(key: str, mappings: list[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a list of mappings, a line each."""
    yield f"{_key(key)} = ["
    yield from (f"  {literal(mapping)}," for mapping in mappings)
    yield "]"


def literal(value: Any) -> str:  # noqa: ANN401
    """Return a value as TOML writes it on one line."""
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return str(value)
        case Mapping():
            return "{" + ", ".join(f"{_key(key)} = {literal(item)}" for key, item in value.items()) + "}"
        case list() | tuple():
            return "[" + ", ".join(literal(item) for item in value) + "]"
        case _:
            return _text(str(value))


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _text(key)


def _text(text: str) -> str:
    return quote(_encodable(text))


def _one_line(text: str) -> str:
    return "".join(sign if sign.isprintable() else " " for sign in _encodable(text))


def _encodable(text: str) -> str:
    # Names in Slurm need not be UTF-8; a TOML file must.
    return text.encode("utf-8", "replace").decode("utf-8")
