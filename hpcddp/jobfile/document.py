"""YAML 1.2 reader that keeps the line of every key path and rejects what is ambiguous.

ruamel.yaml splits the text into events. This module builds the tree, because job files use only the core schema of
YAML 1.2, and because tags, anchors, aliases and duplicate keys are errors.
"""

from __future__ import annotations

import errno
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath
from typing import Any, TypeAlias

from ruamel.yaml import YAML, events
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from hpcddp.errors import nearest
from hpcddp.jobfile.problems import MOST_PROBLEMS, JobFileError, Problem

Event: TypeAlias = Any
"""An event of ruamel.yaml, whose classes have no types for their attributes."""
Path = tuple[str, ...]
"""A key path: ``("train", "model")``; the items of a list count as "0", "1", ..."""


def dotted(path: Path) -> str:
    """Return the key path as it is written: ``train.model``."""
    return ".".join(path)


def path_of(key: str) -> Path:
    """Return a key path as its parts: ``("train", "model")``."""
    return tuple(key.split("."))


class DocumentError(ValueError):
    """A text is not a valid document.

    Args:
        sentence: why, and what to write instead.
        line: the line of the error, counted from 1; None if there is none.
        path: the key path of the error, if it is known.
    """

    def __init__(self, sentence: str, *, line: int | None = None, path: Path = ()) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.line = line
        self.path = path

    def problem(self, file: str) -> Problem:
        """Return the problem of a file."""
        return Problem(file=file, line=self.line, key=dotted(self.path), sentence=self.sentence)


LARGEST_BYTES = 1_000_000
MOST_VALUES = 20_000
"""Of a job file that a person writes; reading one takes some 50 us."""

# Characters that YAML 1.2 forbids (YAML 1.2.2, rule c-printable).
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ufffe\uffff]")


BYTE_ORDER_MARK = "\ufeff"
"""What some editors write in front of a text."""


def read_text(path: FilePath, *, keeps_mark: bool = False) -> str | Problem:
    """Return the text of a file of at most 1 MB, or the problem with it.

    Args:
        keeps_mark: whether a byte order mark in front of the text is part of it.
    """
    try:
        _refuse_named_pipe(path)
        with path.open("rb") as file:
            content = file.read(LARGEST_BYTES + 1)
    except (OSError, ValueError) as error:
        return Problem(file=str(path), sentence=_unreadable(path, error))
    if len(content) > LARGEST_BYTES:
        return Problem(
            file=str(path), sentence="is larger than 1 MB; a job file or a script is a short text: check the path"
        )
    if b"\0" in content:
        return Problem(file=str(path), sentence="contains NUL bytes, so it is not a text file; check the path")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        sentence = f"is not UTF-8 (byte 0x{content[error.start]:02x}); save it as UTF-8"
        return Problem(file=str(path), line=line, sentence=sentence)
    control = _CONTROL.search(text)
    if control is not None:
        line = text.count("\n", 0, control.start()) + 1
        sentence = f"contains the control character U+{ord(control[0]):04X}; remove it"
        return Problem(file=str(path), line=line, sentence=sentence)
    return text if keeps_mark else text.removeprefix(BYTE_ORDER_MARK)


def _refuse_named_pipe(path: FilePath) -> None:
    """Raise for a pipe whose opening may wait for ever; a shell has the other end of ``/dev/stdin`` and ``<(...)``."""
    if path.is_fifo() and path.absolute().parts[1] not in {"dev", "proc"}:
        raise OSError(errno.EINVAL, "it is a named pipe", str(path))


def _unreadable(path: FilePath, error: OSError | ValueError) -> str:
    match error:
        case FileNotFoundError():
            near = neighbour(path)
            return f"does not exist; {f'did you mean {near}?' if near else 'check the path'}"
        case IsADirectoryError():
            return "is a directory; name a file in it"
        case PermissionError():
            return "cannot be read by you; change its permissions"
        case OSError():
            return f"cannot be read ({error.strerror}); check the path"
        case _:
            return f"is not a valid path ({error}); check it"


def neighbour(path: FilePath) -> FilePath | None:
    """Return the file in the same directory, of the same suffix (.yml is .yaml), that was probably meant, or None."""
    try:
        suffixes = {".yaml", ".yml"} if path.suffix in {".yaml", ".yml"} else {path.suffix}
        names = [entry.name for entry in path.parent.iterdir() if entry.suffix in suffixes]
    except (OSError, ValueError):
        return None
    near = nearest(path.name, names)
    return path.parent / near if near else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A source of values: a file, an option or the command line.

    Args:
        origin: its name in ``render --json``: "job file", "--set", an option's name, "command line" or "profile NAME".
        file: its name in errors: a path, ``--set key.path``, or an option's name.
        lines: the line of each key path, for a file.
        written: numbers, booleans and nulls as they were written.
    """

    origin: str = ""
    file: str = ""
    lines: Mapping[Path, int] = field(default_factory=dict)
    written: Mapping[Path, str] = field(default_factory=dict)

    def line_of(self, path: Path) -> int | None:
        """Return the line of a key path, or of the nearest key above it that has one."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.lines:
                return self.lines[path[:length]]
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """The values of one source.

    Args:
        faults: errors of single keys; the other keys are valid.
    """

    value: Any
    source: Source
    faults: tuple[DocumentError, ...] = ()

    @property
    def problems(self) -> list[Problem]:
        """The problems of the faults."""
        return [fault.problem(self.source.file) for fault in self.faults]


def read_document(
    text: str, *, origin: str = "", file: str = "", most_values: int | None = None, may_be_empty: bool = False
) -> Document:
    """Read one YAML mapping: a job file, a profile, or a project's file.

    Args:
        origin: the origin of its values in ``render --json``.
        file: its name in errors.
        most_values: how many values it may hold; None for any number.
        may_be_empty: whether a text without a value is an empty mapping.

    Raises:
        JobFileError: the text is not YAML, not one document, not a mapping, or has too many values.
    """
    try:
        document = _Builder(text, Source(origin=origin, file=file), most_values=most_values).build()
    except DocumentError as error:
        raise JobFileError.of([error.problem(file)]) from None
    if document.value is None and may_be_empty:
        return replace(document, value={})
    if document.value is None:
        sentence = "is empty; write at least name, batch.global_batch_size and train"
        raise JobFileError.of([Problem(file=file, sentence=sentence)])
    if not isinstance(document.value, dict):
        sentence = "is not a mapping at its top level; write keys with values, as in name: my-job"
        raise JobFileError.of([Problem(file=file, line=1, sentence=sentence)])
    return document


def read_value(text: str) -> Document:
    """Read one YAML value, a scalar or a flow collection, as ``--set`` takes it.

    Args:
        text: the text after the equals sign; empty is null.

    Raises:
        DocumentError: the text is not one YAML value.
    """
    document = _Builder(text, Source()).build()
    if document.faults:
        raise document.faults[0]
    return document


DEEPEST = 20
_SURROGATE = re.compile("[\ud800-\udfff]")


class _Builder:
    """Builds the tree from the events of the parser."""

    def __init__(self, text: str, source: Source, *, most_values: int | None = None) -> None:
        self._events = _parse(text)
        self._source = source
        self._values = 0
        self._most_values = most_values
        self._lines: dict[Path, int] = {}
        self._written: dict[Path, str] = {}
        self._faults: list[DocumentError] = []

    def build(self) -> Document:
        next(self._events)  # the stream begins
        start = next(self._events)
        if not isinstance(start, events.DocumentStartEvent):
            return Document(value=None, source=self._source)
        if start.version not in {None, (1, 2)}:
            raise DocumentError("requires another YAML version; remove the %YAML line: job files are YAML 1.2", line=1)
        root = self._node(next(self._events), ())
        next(self._events)  # the document ends
        after = next(self._events)
        if isinstance(after, events.DocumentStartEvent):
            raise DocumentError("begins a second document; write one job in one file", line=_line(after))
        source = replace(self._source, lines=self._lines, written=self._written)
        return Document(value=root, source=source, faults=tuple(self._faults))

    def _node(self, event: Event, path: Path) -> object:
        self._refuse_extras(event, path)
        self._values += 1
        if self._most_values is not None and self._values > self._most_values:
            raise DocumentError(f"has over {self._most_values} values, too many for a job; check the path")
        if len(path) > DEEPEST:
            raise DocumentError(f"is nested more than {DEEPEST} levels deep; write it flatter", line=_line(event))
        if isinstance(event, events.MappingStartEvent):
            return dict(self._pairs(path))
        if isinstance(event, events.SequenceStartEvent):
            return list(self._items(path))
        return self._scalar(event, path)

    def _scalar(self, event: Event, path: Path) -> object:
        if _SURROGATE.search(event.value):
            self._fault("contains a lone surrogate (\\ud800 to \\udfff); write the character itself", event, path)
            return None
        if event.style is not None:
            return str(event.value)
        try:
            value = read_scalar(event.value)
        except DocumentError as error:
            self._fault(str(error), event, path)
            return None
        if not isinstance(value, str):
            self._written[path] = event.value
        return value

    def _pairs(self, path: Path) -> Iterator[tuple[str, object]]:
        while not isinstance(event := next(self._events), events.MappingEndEvent):
            key = self._key(event, path)
            here = (*path, key)
            if here in self._lines:
                self._fault(f"is a duplicate of line {self._lines[here]}; remove one of the two", event, here)
                self._skip_value(here)
                continue
            self._lines[here] = _line(event)
            yield key, self._node(next(self._events), here)

    def _skip_value(self, path: Path) -> None:
        kept = dict(self._lines), dict(self._written), list(self._faults)
        self._node(next(self._events), path)
        self._lines, self._written, self._faults = kept

    def _key(self, event: Event, path: Path) -> str:
        self._refuse_extras(event, path)
        if not isinstance(event, events.ScalarEvent):
            raise DocumentError("has a key that is a list or a mapping; write a text", line=_line(event), path=path)
        if event.style is None and event.value == "<<":
            raise DocumentError("contains a merge key (<<); write its keys out", line=_line(event), path=path)
        if _SURROGATE.search(event.value):
            raise DocumentError(
                "has a key with a lone surrogate; write the whole character", line=_line(event), path=path
            )
        return str(event.value)

    def _items(self, path: Path) -> Iterator[object]:
        index = 0
        while not isinstance(event := next(self._events), events.SequenceEndEvent):
            here = (*path, str(index))
            self._lines[here] = _line(event)
            yield self._node(event, here)
            index += 1

    def _refuse_extras(self, event: Event, path: Path) -> None:
        # The message does not repeat their names: *secret or !secret may be a password without quotes.
        if isinstance(event, events.AliasEvent):
            sentence = "is an alias (*), which job files do not support; write the value out, or quote a string"
            raise DocumentError(sentence, line=_line(event), path=path)
        if event.anchor is not None:
            self._fault("has an anchor (&), which job files do not support; remove it, or quote a string", event, path)
        if event.tag is not None:
            self._fault("has a tag (!), which job files do not support; remove it, or quote a string", event, path)

    def _fault(self, sentence: str, event: Event, path: Path) -> None:
        if len(self._faults) >= MOST_PROBLEMS:
            first = self._faults[0]
            sentence = f"{first.sentence}; the file has over {MOST_PROBLEMS} errors, of which this is the first"
            raise DocumentError(sentence, line=first.line, path=first.path)
        self._faults.append(DocumentError(sentence, line=_line(event), path=path))


def _line(event: Event) -> int:
    return int(event.start_mark.line) + 1


def _parse(text: str) -> Iterator[Event]:
    try:
        yield from YAML(typ="safe", pure=True).parse(text)
    except MarkedYAMLError as error:
        # An unclosed bracket or quote is found at the end of the file; report the line where it was opened.
        unclosed = "stream" in str(error.problem) and error.context_mark is not None
        mark = error.context_mark if unclosed else error.problem_mark or error.context_mark
        raise DocumentError(_explain(error), line=int(mark.line) + 1 if mark else None) from None
    except YAMLError as error:
        # Characters that YAML does not allow; the second line of ruamel's message is a position in the stream.
        raise DocumentError(
            f"is not valid YAML ({str(error).splitlines()[0]}); write it as an escape in quotes"
        ) from None


def _explain(error: MarkedYAMLError) -> str:
    problem = str(error.problem or error.context or "it cannot be read")
    if "'\\t'" in problem:
        return "contains a tab where YAML requires spaces; replace the tab"
    if "mapping values are not allowed" in problem:
        return "has a ':' where YAML allows none; quote the value, or check the indentation"
    return f"is not valid YAML ({problem}); check indentation, quotes and brackets"


LONGEST_NUMBER = 300
_NULL = re.compile(r"null|Null|NULL|~|")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INTEGER = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", re.ASCII)
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", re.ASCII)
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


def read_scalar(text: str) -> bool | int | float | str | None:
    """Return the value of an unquoted scalar: ``on`` and ``no`` are texts, ``1e-3`` is a float, ``010`` is 10.

    Raises:
        DocumentError: it is infinite, not a number, or too long for a number.
    """
    if _NULL.fullmatch(text):
        return None
    if _BOOL.fullmatch(text):
        return text.lower() == "true"
    if _NOT_FINITE.fullmatch(text):
        raise DocumentError("is not a finite number, and no field accepts that; write a number")
    if not (_INTEGER.fullmatch(text) or _FLOAT.fullmatch(text)):
        return text
    if len(text) > LONGEST_NUMBER:
        raise DocumentError(f"is a number of {len(text)} characters; quote it if it is a string")
    return _read_number(text)


def _read_number(text: str) -> int | float:
    if _INTEGER.fullmatch(text):
        return int(text, 0) if text[:2] in {"0o", "0x"} else int(text)
    number = float(text)
    if not math.isfinite(number):
        raise DocumentError("is too large for a number; quote it if it is a string")
    return number
