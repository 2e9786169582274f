"""Values of job file fields from the command line: ``--set key.path=value``, options of their own, and sweeps."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path as FilePath
from typing import Any

from hpcddp.jobfile.document import (
    Document,
    DocumentError,
    Path,
    Source,
    path_of,
    read_scalar,
    read_text,
    read_value,
)
from hpcddp.jobfile.environment import VARIABLES
from hpcddp.jobfile.fields import expand_ranges
from hpcddp.jobfile.job import ValueKind, find_key
from hpcddp.jobfile.merge import COMMAND_LINE, OVERRIDE, SWEEP_OPTION
from hpcddp.jobfile.messages import unknown_key
from hpcddp.jobfile.placeholders import argument_text
from hpcddp.jobfile.problems import JobFileError, Problem, shown
from hpcddp.jobfile.sweep import is_placeholder

_NULL = re.compile(r"null|Null|NULL|~", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """A new value for one field.

    Args:
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
    if find_key(path) is None:
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
    key_type = find_key(path)
    if key_type is not None and key_type.types == {str}:
        # As it is: a partition may be named 010.
        return Override(path=path, value=text, source=Source(origin=option, file=option))
    try:
        return _read(path, text, option, origin=option)
    except DocumentError as error:
        return Problem(file=option, key=".".join(path), sentence=error.sentence)


def _read(path: Path, text: str, file: str, *, origin: str = OVERRIDE) -> Override:
    if "\0" in text:
        raise DocumentError("contains a NUL character; remove it")
    word = text.strip()
    if not word:
        raise DocumentError('has no value; write one, null to leave the field out, or "" for an empty text')
    document = read_value(text)
    written = document.source.written.get(())
    if document.value is None and not _NULL.fullmatch(word):
        raise DocumentError("contains a comment and no value; put double quotes around the value")
    if isinstance(document.value, str) and document.value != word and word[:1] not in {'"', "'"}:
        raise DocumentError("contains more than one value; put double quotes around the value")
    if isinstance(document.value, dict | list) and word[:1] not in {"{", "["}:
        raise DocumentError("is a mapping or list without brackets; write {...} or [...], or quote the value")
    scalars = {(*path, *below): spelling for below, spelling in document.source.written.items()}
    if written is not None:
        scalars[path] = written
    value = document.value
    if _is_variable(path) and isinstance(value, bool | int | float):
        # Environment variables are texts, so that 4 needs no quotes; --sweep does the same.
        value = word
    return Override(path=path, value=value, source=Source(origin=origin, file=file, written=scalars))


def _is_variable(path: Path) -> bool:
    """Return whether a key path is that of one environment variable."""
    return path[:-1] == VARIABLES


_FILE_OPTION = "--sweep-file"
_PARALLEL_OPTION = "--max-parallel"
# First characters of a quoted text, a list or a mapping.
_OPENING = "\"'[{"


def sweep_overrides(axes: Sequence[str], file: FilePath | None, max_parallel: int | None) -> tuple[Override, ...]:
    """Return the values of ``sweep`` and ``max_parallel`` from the command-line options.

    Args:
        axes: ``KEY=VALUES`` each.
        file: a file that lists the elements.
        max_parallel: the most elements that run at once; None is the value of the job file.

    Raises:
        JobFileError: with every problem of the options and of the file.
    """
    overrides: list[Override] = []
    if axes and file is not None:
        sentence = f"cannot be combined with {SWEEP_OPTION}; write the values of both into the file"
        raise JobFileError.of([Problem(file=_FILE_OPTION, sentence=sentence)])
    if axes:
        overrides += _overrides_of_axes(axes)
    if file is not None:
        source = Source(origin=_FILE_OPTION, file=str(file))
        overrides.append(Override(path=("sweep",), value=_read_file(file), source=source))
    if max_parallel is not None:
        source = Source(origin=_PARALLEL_OPTION, file=_PARALLEL_OPTION)
        overrides.append(Override(path=("max_parallel",), value=max_parallel, source=source))
    return tuple(overrides)


def _overrides_of_axes(axes: Sequence[str]) -> list[Override]:
    """Return the values of ``--sweep KEY=VALUES``, which replace the sweep of the job file.

    Raises:
        JobFileError: with every problem of them.
    """
    overrides = [Override(path=("sweep",), value={}, source=Source(origin=SWEEP_OPTION, file=SWEEP_OPTION))]
    problems = []
    for text in axes:
        result = _override_of_axis(text, overrides)
        if isinstance(result, Problem):
            problems.append(result)
        else:
            overrides.append(result)
    if problems:
        raise JobFileError.of(problems)
    return overrides


def _override_of_axis(text: str, earlier_overrides: Sequence[Override]) -> Override | Problem:
    """Return the values of one ``--sweep KEY=VALUES``, or the problem with it."""
    key, equals, values = text.partition("=")
    key = key.strip()
    if not key or not equals:
        sentence = f"is {shown(text)}, expected KEY.PATH=VALUES; write for example --sweep train.seed=0..4"
        return Problem(file=SWEEP_OPTION, sentence=sentence)
    path = ("sweep", key)
    file = f"{SWEEP_OPTION} {key}"
    if any(override.path == path for override in earlier_overrides):
        return Problem(file=file, key=key, sentence="is given twice; write all values behind one")
    try:
        value = _read_axis(key, values)
    except DocumentError as error:
        return Problem(file=file, key=key, sentence=error.sentence)
    return Override(path=path, value=value, source=Source(origin=SWEEP_OPTION, file=file))


def _read_axis(key: str, text: str) -> list[Any]:
    """Return the values of ``0.1,0.2`` or ``0..4``; each is written as for ``--set``."""
    if "\0" in text:
        raise DocumentError("contains a NUL character; remove it")
    try:
        document = read_value(f"[{text}]")
    except DocumentError:
        document = Document(value=None, source=Source())
    values = document.value
    if not isinstance(values, list):
        raise DocumentError(
            "is not a list of values; write them with commas between them, and quote a string with commas"
        )
    if len(values) == 1 and isinstance(values[0], list) and not _takes_lists(key):
        return _read_axis(key, text.strip()[1:-1])
    spellings = [document.source.written.get((str(index),)) for index in range(len(values))]
    if is_placeholder(key):
        return list(expand_ranges(map(_for_command, values, spellings)))
    if _is_variable(path_of(key)):
        # Numbers as they were written.
        texts = [value if spelling is None else spelling for value, spelling in zip(values, spellings, strict=True)]
        return list(expand_ranges(texts, as_texts=True))
    return list(expand_ranges(values))


def _takes_lists(key: str) -> bool:
    """Return whether one value of a key may be a list."""
    key_type = None if is_placeholder(key) or _is_variable(path_of(key)) else find_key(path_of(key))
    return key_type is not None and key_type.kind is not ValueKind.VALUE


def _for_command(value: object, written: str | None) -> object:
    """Return a value of a command; one that the command would spell differently, such as 1e-3 or True, as a text."""
    return value if written is None or argument_text(value) == written else written


def _read_file(path: FilePath) -> object:
    text = read_text(path)
    if isinstance(text, Problem):
        raise JobFileError.of([text])
    # JSON is YAML, too.
    read = _read_csv if path.suffix.lower() == ".csv" else _read_yaml
    try:
        value = read(text)
    except DocumentError as error:
        raise JobFileError.of([Problem(file=str(path), line=error.line, sentence=error.sentence)]) from None
    if not value:
        sentence = "contains no element; write a list of mappings from key paths to values"
        raise JobFileError.of([Problem(file=str(path), sentence=sentence)])
    return value


def _read_yaml(text: str) -> object:
    return read_value(text).value


def _read_csv(text: str) -> list[dict[str, Any]]:
    """Return a mapping for each row; a field with an empty cell keeps the value of the job file."""
    rows = csv.reader(StringIO(text, newline=""), strict=True)
    try:
        keys = [key.strip() for key in next(rows, [])]
        if len(set(keys)) < len(keys) or not all(keys):
            raise DocumentError("has an empty or a duplicate key path in its first line; name each once", line=1)
        return [_read_row(keys, row, rows.line_num) for row in rows if any(row)]
    except csv.Error as error:
        raise DocumentError(f"is not valid CSV ({error}); check quotes and commas", line=rows.line_num) from None


def _read_row(keys: Sequence[str], row: Sequence[str], line: int) -> dict[str, Any]:
    if len(row) != len(keys):
        raise DocumentError(
            f"has {len(row)} cells in this line and {len(keys)} in its first line; write the same number", line=line
        )
    return {key: _read_cell(key, cell.strip(), line) for key, cell in zip(keys, row, strict=True) if cell.strip()}


def _read_cell(key: str, cell: str, line: int) -> object:
    if _is_variable(path_of(key)):
        return cell
    try:
        value = _read_yaml(cell) if cell[0] in _OPENING else read_scalar(cell)
        return _for_command(value, cell) if is_placeholder(key) and not isinstance(value, str | list | dict) else value
    except DocumentError as error:
        raise DocumentError(f"has a cell for {key} that {error}", line=line) from None
