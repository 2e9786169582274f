"""Sweeps from the command line: ``--sweep KEY=VALUES`` for each field, or ``--sweep-file FILE``."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import StringIO
from pathlib import Path as FilePath
from typing import Any

from hpcddp.jobfile.document import Document, DocumentError, ScalarError, read_scalar, read_value
from hpcddp.jobfile.merge import SWEEP_OPTION, Source
from hpcddp.jobfile.overrides import Override
from hpcddp.jobfile.problems import JobFileError, Problem
from hpcddp.jobfile.sweep import expand
from hpcddp.jobfile.sweep_fields import ENVIRONMENT, path_of
from hpcddp.jobfile.text_file import read_text

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
        sentence = f"stands beside {SWEEP_OPTION}; write the values of both into the file"
        raise JobFileError.of([Problem(file=_FILE_OPTION, sentence=sentence)])
    if axes:
        overrides += _of_axes(axes)
    if file is not None:
        source = Source(origin=_FILE_OPTION, file=str(file))
        overrides.append(Override(path=("sweep",), value=_read_file(file), source=source))
    if max_parallel is not None:
        source = Source(origin=_PARALLEL_OPTION, file=_PARALLEL_OPTION)
        overrides.append(Override(path=("max_parallel",), value=max_parallel, source=source))
    return tuple(overrides)


def _of_axes(axes: Sequence[str]) -> Iterator[Override]:
    problems: list[Problem] = []
    # The options replace the sweep of the job file.
    found = [Override(path=("sweep",), value={}, source=Source(origin=SWEEP_OPTION, file=SWEEP_OPTION))]
    for text in axes:
        key, equals, values = text.partition("=")
        key = key.strip()
        file = f"{SWEEP_OPTION} {key}"
        if not equals or not key:
            sentence = "is not KEY.PATH=VALUES; write for example --sweep train.seed=0..4"
            problems.append(Problem(file=SWEEP_OPTION, sentence=sentence))
        elif any(override.path == ("sweep", key) for override in found):
            problems.append(Problem(file=file, key=key, sentence="is given twice; write all values behind one"))
        else:
            try:
                value = _read_axis(key, values)
            except DocumentError as error:
                problems.append(Problem(file=file, key=key, sentence=error.sentence))
            else:
                found.append(Override(path=("sweep", key), value=value, source=Source(origin=SWEEP_OPTION, file=file)))
    if problems:
        raise JobFileError.of(problems)
    return iter(found)


def _read_axis(key: str, text: str) -> list[Any]:
    """Return the values of ``0.1,0.2`` or ``0..4``; each is written as for ``--set``."""
    if "\0" in text:
        raise DocumentError("holds a NUL character; remove it")
    try:
        document = read_value(f"[{text}]")
    except DocumentError:
        document = Document(value=None)
    if not isinstance(document.value, list):
        raise DocumentError("is no list of values; write them with commas between them, and quote a text with commas")
    values = list(expand(document.value))
    return _as_written(values, document) if _is_variable(key) else values


def _is_variable(key: str) -> bool:
    return path_of(key)[: len(ENVIRONMENT)] == ENVIRONMENT


def _as_written(values: Sequence[Any], document: Document) -> list[Any]:
    """Return the values of an environment variable as texts, numbers as they were written."""
    if len(values) != len(document.value):
        return [str(value) for value in values]
    return [document.written.get((str(index),), value) for index, value in enumerate(values)]


def _read_file(path: FilePath) -> object:
    text = read_text(path)
    if isinstance(text, Problem):
        raise JobFileError.of([text])
    readers: Mapping[str, Callable[[str], Any]] = {".csv": _read_csv, ".json": json.loads}
    try:
        value = readers.get(path.suffix.lower(), _read_yaml)(text)
    except DocumentError as error:
        raise JobFileError.of([Problem(file=str(path), line=error.line, sentence=error.sentence)]) from None
    except json.JSONDecodeError as error:
        sentence = f"is no JSON ({error.msg}); write a list of mappings, or YAML in a file that ends in .yaml"
        raise JobFileError.of([Problem(file=str(path), line=error.lineno, sentence=sentence)]) from None
    if not value:
        sentence = "holds no element; write a list of mappings from key paths to values"
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
            raise DocumentError(
                "has a first line with a key path that is empty or stands twice; name each once", line=1
            )
        return [_read_row(keys, row, rows.line_num) for row in rows if any(row)]
    except csv.Error as error:
        raise DocumentError(f"is no CSV ({error}); check quotes and commas", line=rows.line_num) from None


def _read_row(keys: Sequence[str], row: Sequence[str], line: int) -> dict[str, Any]:
    if len(row) != len(keys):
        raise DocumentError(f"has {len(row)} cells here, and {len(keys)} in its first line; write as many", line=line)
    return {key: _read_cell(key, cell.strip(), line) for key, cell in zip(keys, row, strict=True) if cell.strip()}


def _read_cell(key: str, cell: str, line: int) -> object:
    if _is_variable(key):
        return cell
    try:
        return _read_yaml(cell) if cell[0] in _OPENING else read_scalar(cell)
    except (DocumentError, ScalarError) as error:
        raise DocumentError(f"has a cell for {key} that {error}", line=line) from None
