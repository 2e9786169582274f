"""Values of job file fields from the command line: ``--set key.path=value`` and options of their own."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcddp.jobfile.document import DocumentError, Path, read_value
from hpcddp.jobfile.field_tree import find_place
from hpcddp.jobfile.merge import COMMAND_LINE, OVERRIDE, Source
from hpcddp.jobfile.messages import unknown_key
from hpcddp.jobfile.problems import Problem

# Fields whose options take any text as it is: a partition may be named 010.
_TEXTS: frozenset[Path] = frozenset(
    {("name",), ("run_root",)}
    | {
        ("resources", name)
        for name in (
            "gpu_type", "partition", "account", "qos", "constraint", "reservation", "nodelist", "exclude", "licenses",
        )
    }
)  # fmt: skip
_VARIABLES = ("environment", "env")
_NULL = re.compile(r"null|Null|NULL|~|", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """A new value for one field.

    Args:
        path: its key path.
        value: the new value; None is null.
        source: its name in errors.
    """

    path: Path
    value: Any
    source: Source


def read_override(text: str) -> Override | Problem:
    """Read one ``--set``.

    Args:
        text: ``key.path=value``, the value a YAML 1.2 scalar or flow collection.

    Returns:
        The override, or the problem with it.
    """
    key, equals, value = text.partition("=")
    key = key.strip()
    path = tuple(key.split("."))
    file = f"{OVERRIDE} {key}"
    if not equals or not all(path):
        # Without an equals sign the text may be a secret, and is not shown.
        return Problem(file=OVERRIDE, sentence="is not KEY.PATH=VALUE; write for example --set train.epochs=5")
    if find_place(path) is None:
        return Problem(file=file, key=key, sentence=unknown_key(path))
    try:
        return _read(path, value, file)
    except DocumentError as error:
        return Problem(file=file, key=key, sentence=error.sentence)


def read_options(options: Mapping[str, tuple[str, str]], command: Sequence[str] | None) -> list[Override | Problem]:
    """Read the options that set single fields, and the command.

    Args:
        options: by key path, the option's name and its value as it was written.
        command: the words after ``--``; None if there are none.

    Returns:
        The overrides, or the problems with them.
    """
    results = [_read_option(tuple(key.split(".")), option, text) for key, (option, text) in options.items()]
    if command is not None:
        source = Source(origin=COMMAND_LINE, file=f"the {COMMAND_LINE}")
        results.append(Override(path=("command",), value=list(command), source=source))
    return results


def _read_option(path: Path, option: str, text: str) -> Override | Problem:
    if path in _TEXTS:
        return Override(path=path, value=text, source=Source(origin=option, file=option))
    try:
        return _read(path, text, option, origin=option)
    except DocumentError as error:
        return Problem(file=option, key=".".join(path), sentence=error.sentence)


def _read(path: Path, text: str, file: str, *, origin: str = OVERRIDE) -> Override:
    if "\0" in text:
        raise DocumentError("holds a NUL character; remove it")
    document = read_value(text)
    word = text.strip()
    written = document.written.get(())
    if document.value is None and not _NULL.fullmatch(word):
        raise DocumentError("holds a comment and no value; put double quotes around the value")
    if isinstance(document.value, str) and document.value != word and word[:1] not in {'"', "'"}:
        raise DocumentError("holds more than one plain value; put double quotes around the value")
    if isinstance(document.value, dict | list) and word[:1] not in {"{", "["}:
        raise DocumentError("is a mapping or list without brackets; write {...} or [...], or quote the value")
    scalars = {(*path, *below): spelling for below, spelling in document.written.items()}
    if written is not None:
        scalars[path] = written
    value = document.value
    if path[: len(_VARIABLES)] == _VARIABLES and len(path) > len(_VARIABLES) and isinstance(value, bool | int | float):
        # Environment variables are texts, so that 4 needs no quotes; --sweep does the same.
        value = word
    return Override(path=path, value=value, source=Source(origin=origin, file=file, written=scalars))
