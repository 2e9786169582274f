"""Typed records: files that one process writes and another reads, each a frozen dataclass.

A record's file is a JSON object with the record's fields and ``format``, the version of this layout. Keys that a
version does not know are ignored, so that a version that adds a key need not raise the number.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, Final, Generic, Literal, Self, TypeVar, Union, get_args, get_origin, get_type_hints

from hpcddp.errors import HpcddpError
from hpcddp.run.files import NotRegularError, create_json, open_regular, unreadable_sentence, why_unreadable, write_json
from hpcddp.stop.reasons import ExitCode

FORMAT: Final = 1
"""The newest version that is read, and the one that is written."""
LARGEST_RECORD: Final = 1 << 28
"""Bytes; no writer makes one as large, and a file of a damaged size is not read into memory."""
LATEST_TIME: Final = float(1 << 33)
"""Seconds since the epoch; later is no time at which anything of a run happened."""
_MOST_SEARCHED: Final = 1 << 24
"""Bytes at the end of a log in which a record is looked for behind lines that are none."""
_MOST_DAMAGED: Final = 20
"""Where so many lines are no records, those before them are most likely none either."""
_KEY: Final = "format"


class RecordError(HpcddpError):
    """A record of a run cannot be read.

    Attributes:
        path: its file.
    """

    kind = "record"
    exit_code: ClassVar[int] = ExitCode.INFRASTRUCTURE
    path: Path

    advice = "The file is one of hpcddp's own: restore it, or remove it, and run the command again."

    def __init__(self, message: str, *, path: Path, hint: str | None = None) -> None:
        super().__init__(message, hint=hint, path=path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A record that has a file of its own, or a line of its own in a log.

    A field without a default must be in the file. Its key there is its name, or ``key`` of its metadata. A class with a
    field ``facts`` keeps the other keys there. A member of an enum is written as its name in lower case.
    """

    ADVICE: ClassVar[str]
    """What to do about a damaged one, and what still works: the end of a sentence."""
    IS_VERSIONED: ClassVar[bool] = True
    """Whether ``format`` is the version of the layout; else any name may be one of ``facts``."""

    @classmethod
    def from_document(cls, document: object) -> Self:
        """Return the record that a JSON document holds.

        Raises:
            ValueError: says what is wrong with it.
        """
        if cls.IS_VERSIONED and isinstance(document, dict):
            _check_format(document)
        return _dataclass_from(document, cls)

    def as_document(self) -> dict[str, Any]:
        """Return the document that is written."""
        return {_KEY: FORMAT, **_document_of(self)}


class NewerFormatError(ValueError):
    """A newer version of hpcddp has written the record."""


def _check_format(document: Mapping[str, object]) -> None:
    if _KEY not in document:
        raise ValueError(f"it has no {_KEY}")
    version = document[_KEY]
    if type(version) is not int or version < 1:
        raise ValueError(f"its {_KEY} is {_described(version)}")
    if version > FORMAT:
        raise NewerFormatError(f"it has format {version}, and this version of hpcddp reads formats up to {FORMAT}")


T = TypeVar("T")
RecordT = TypeVar("RecordT", bound=Record)


def read_record(path: Path, kind: type[RecordT]) -> RecordT | None:
    """Return the record in a file, or None if there is no such file.

    Raises:
        RecordError: the file is damaged, cannot be read, or is of a newer version of hpcddp.
    """
    try:
        return kind.from_document(parse_json(_content(path)))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise RecordError(f"{path} cannot be read ({why_unreadable(error)}); {kind.ADVICE}", path=path) from error
    except NewerFormatError as error:
        raise RecordError(f"{path} cannot be read: {error}; use the version that wrote it", path=path) from error
    except ValueError as error:
        raise RecordError(f"{path} is damaged: {error}; {kind.ADVICE}", path=path) from error


def _content(path: Path) -> bytes:
    with open_regular(path) as (stream, size):
        if size > LARGEST_RECORD:
            raise ValueError(f"it has {size} bytes")
        return stream.read()


def write_record(path: Path, record: Record, *, reserves: Iterable[Path] = ()) -> None:
    """Replace a file by a record, in one step.

    Args:
        reserves: reserve files; one of them is used up if the disk is full.
    """
    write_json(path, record.as_document(), reserves=reserves)


def create_record(path: Path, record: Record, *, reserves: Iterable[Path] = ()) -> bool:
    """Write a record, as ``write_record`` does, unless its file exists: the first writer wins, whole or not at all.

    Returns:
        Whether this call created the file.
    """
    return create_json(path, record.as_document(), reserves=reserves)


def parse_json(content: bytes) -> object:
    """Return the document of a JSON file.

    Raises:
        ValueError: says what is wrong with it.
    """
    if not content.strip():
        raise ValueError("it is empty")
    try:
        document: object = json.loads(content.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON, or only the beginning of it ({error.msg}, line {error.lineno})") from error
    except RecursionError as error:
        raise ValueError("its content is nested too deeply") from error
    return document


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines(Generic[RecordT]):
    """The records of a log, one on each line.

    Args:
        records: those that are whole, in their order.
        damaged: how many lines are not.
    """

    records: tuple[RecordT, ...]
    damaged: int

    def sentence(self, path: Path) -> str | None:
        """Return what a person should know of the log, or None if it is whole."""
        if not self.damaged:
            return None
        lines = "1 line is" if self.damaged == 1 else f"{self.damaged} lines are"
        return f"{path}: {lines} damaged, and left out; all others are read"


def parse_lines(content: bytes, kind: type[RecordT], *, begins_within: bool = False) -> Lines[RecordT]:
    """Return the records on the lines of a log; a last line without its end may still be being written.

    Args:
        content: the log, or its end.
        begins_within: whether the content may begin within a line, which is then left out.
    """
    *lines, last = content.split(b"\n")
    records: list[RecordT] = []
    damaged = 0
    for line in filter(bytes.strip, lines[1:] if begins_within else lines):
        try:
            records.append(kind.from_document(parse_json(line)))
        except ValueError:
            damaged += 1
    with suppress(ValueError):
        records.append(kind.from_document(parse_json(last)))
    return Lines(records=tuple(records), damaged=damaged)


def read_last_lines(path: Path, kind: type[RecordT], size: int) -> Lines[RecordT]:
    """Return the records on the last lines of a log; none where it is not there, or is not a regular file.

    Args:
        size: how many bytes are read; more, up to 16 MiB, where they hold no record and only a few lines.

    Raises:
        RecordError: it cannot be read.
    """
    size = min(size, LARGEST_RECORD - 1)
    while True:
        # The byte before says whether the first line is whole.
        content = read_last_bytes(path, size + 1)
        begins_within = len(content) > size
        lines = parse_lines(content, kind, begins_within=begins_within)
        is_searched = size >= _MOST_SEARCHED or lines.damaged >= _MOST_DAMAGED
        if lines.records or not begins_within or is_searched:
            return lines
        # A very long line, or a damaged one, hides no record before it.
        size = min(4 * size, _MOST_SEARCHED)


def read_last_bytes(path: Path, size: int) -> bytes:
    """Return the end of a log; nothing where it is not there, or is not a regular file.

    Args:
        size: how many bytes are read at most.

    Raises:
        RecordError: it cannot be read.
    """
    try:
        with open_regular(path) as (stream, length):
            stream.seek(max(0, length - size))
            return stream.read(size)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, NotRegularError):
        return b""
    except OSError as error:
        raise RecordError(unreadable_sentence(path, error), path=path) from error


_FIELDS: Final[dict[type, Mapping[str, tuple[Field[Any], object]]]] = {}


def _fields_of(kind: type[Any]) -> Mapping[str, tuple[Field[Any], object]]:
    """Return the fields of a dataclass with their types, by their key in a document."""
    if kind not in _FIELDS:
        # Evaluating the annotations takes longer than checking a record.
        hints = get_type_hints(kind)
        _FIELDS[kind] = {field.metadata.get("key", field.name): (field, hints[field.name]) for field in fields(kind)}
    return _FIELDS[kind]


def _dataclass_from(document: object, kind: type[T]) -> T:
    if type(document) is not dict:
        raise ValueError(f"it holds {_described(document)}, not a JSON object")
    fields_by_key = _fields_of(kind)
    keys_of_fields = fields_by_key.keys() - {"facts"}
    if getattr(kind, "IS_VERSIONED", True):
        keys_of_fields = {_KEY, *fields_by_key}
    values: dict[str, object] = {}
    for key, (field, type_) in fields_by_key.items():
        if key == "facts":
            values[key] = {name: value for name, value in document.items() if name not in keys_of_fields}
        elif key in document:
            try:
                values[field.name] = _checked(document[key], type_)
            except TypeError as error:
                raise ValueError(f"its {key} is {error}") from error
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"it has no {key}")
    return kind(**values)


def _checked(value: object, type_: object) -> object:
    """Return a value of a document as its type has it.

    Raises:
        TypeError: the value, in words.
    """
    origin = get_origin(type_)
    if origin in {Union, UnionType}:
        return _checked_union(value, get_args(type_))
    if origin is tuple and isinstance(value, list):
        return tuple(_checked(item, get_args(type_)[0]) for item in value)
    if isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, dict):
        return _checked_items(value, get_args(type_)[1])
    if origin is Literal and isinstance(value, str) and value in get_args(type_):
        return value
    if type_ is Any:
        return value
    if origin is None and isinstance(type_, type):
        return _checked_class(value, type_)
    raise TypeError(_described(value))


def _checked_items(document: Mapping[str, object], type_: object) -> dict[str, object]:
    values: dict[str, object] = {}
    for key, value in document.items():
        try:
            values[key] = _checked(value, type_)
        except TypeError as error:
            # Without the value, which may be a secret.
            raise TypeError(f"an object in which {key!r:.80} has a value of another type") from error
    return values


def _checked_class(value: object, type_: type) -> object:
    if is_dataclass(type_):
        return _dataclass_from(value, type_)
    if type_ is float:
        return _finite(value)
    if issubclass(type_, Enum):
        for member in type_:
            if member.name.lower() == value:
                return member
    if type(value) is not type_:
        raise TypeError(_described(value))
    return value


def _checked_union(value: object, types: Sequence[object]) -> object:
    if value is None and NoneType in types:
        return None
    (type_,) = (type_ for type_ in types if type_ is not NoneType)
    return _checked(value, type_)


def _finite(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(_described(value))
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise TypeError(_described(value))
    return number


_SHOWN: Final = 40
_NAMES: Final[Mapping[type, str]] = {dict: "an object", list: "a list"}


def _described(value: object) -> str:
    if type(value) in _NAMES:
        return _NAMES[type(value)]
    try:
        text = json.dumps(value)
    except ValueError:
        # More digits than Python turns into text (sys.set_int_max_str_digits).
        return "a number of thousands of digits"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."


def _document_of(value: object) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for key, (field, _) in _fields_of(type(value)).items():
        content = getattr(value, field.name)
        if key == "facts":
            document.update(content)
        else:
            document[key] = _plain(content)
    return document


def _plain(value: object) -> object:
    if isinstance(value, Enum):
        return value.name.lower()
    if is_dataclass(value):
        return _document_of(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value
