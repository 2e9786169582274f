"""YAML 1.2 as a tree in which every key path knows its line; what could surprise is refused.

ruamel.yaml splits the text into events. The tree is built here, because the core schema of YAML 1.2 is small, and
because tags, anchors, aliases and duplicate keys are errors of a job file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError, YAMLStreamError

Value = Any
"""None, bool, int, float, str, or a list or a dict of such values."""

Path = tuple[str, ...]

DEEPEST = 20
LONGEST_NUMBER = 300

_NULL = re.compile(r"null|Null|NULL|~|")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INTEGER = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", re.ASCII)
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", re.ASCII)
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


class DocumentError(ValueError):
    """A text is no document that hpcddp reads.

    Args:
        sentence: why, and what to write instead.
        line: where, counted from 1; None where no line is to blame.
        key: the key path at fault, if one is known.
    """

    def __init__(self, sentence: str, *, line: int | None = None, key: str = "") -> None:
        super().__init__(sentence)
        self.sentence, self.line, self.key = sentence, line, key


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A mapping that was read.

    Args:
        value: the mapping.
        lines: the line, counted from 1, of every key path.
        written: the scalars that were not text, as they were written.
        faults: what is wrong with single keys; the rest of the mapping stands.
    """

    value: dict[str, Value]
    lines: dict[Path, int] = field(default_factory=dict)
    written: dict[Path, str] = field(default_factory=dict)
    faults: tuple[DocumentError, ...] = ()


def read_document(text: str) -> Document:
    """Read one YAML mapping.

    Args:
        text: the whole file.

    Returns:
        The mapping, with the lines of its keys and the faults of single keys.

    Raises:
        DocumentError: the text is not YAML, not one document, or no mapping.
    """
    return _Builder(text).document()


def read_value(text: str) -> Value:
    """Read one YAML value: a scalar or a flow collection, as ``--set`` takes it.

    Args:
        text: what stands after the equals sign.

    Returns:
        The value; an empty text is null.

    Raises:
        DocumentError: the text is not one YAML value.
    """
    return _Builder(text).value()


def plain_scalar(text: str) -> Value:
    """Return what an unquoted scalar means in the core schema (YAML 1.2.2, section 10.3.2).

    Raises:
        DocumentError: it is infinity, not a number, or too long for a number.
    """
    if _NULL.fullmatch(text):
        return None
    if _BOOL.fullmatch(text):
        return text.lower() == "true"
    if _NOT_FINITE.fullmatch(text):
        raise DocumentError("is not a finite number, and no field takes one; write a number")
    if not (_INTEGER.fullmatch(text) or _FLOAT.fullmatch(text)):
        return text
    if len(text) > LONGEST_NUMBER:
        raise DocumentError(f"is a number of {len(text)} digits; quote it if it is a text")
    if _INTEGER.fullmatch(text):
        return int(text, 0) if text[:2] in {"0o", "0x"} else int(text)
    number = float(text)
    if not math.isfinite(number):
        raise DocumentError("is too large for a number; quote it if it is a text")
    return number


class _Builder:
    """Builds the tree from the parser's events."""

    def __init__(self, text: str) -> None:
        self._events = _events(text)
        self._lines: dict[Path, int] = {}
        self._written: dict[Path, str] = {}
        self._faults: list[DocumentError] = []

    def document(self) -> Document:
        root = self._root()
        if root is None:
            raise DocumentError("is empty; write at least name, batch.global_batch_size and train")
        if not isinstance(root, dict):
            raise DocumentError("holds no mapping at its top level; write keys with values, as in name: my-job", line=1)
        return Document(value=root, lines=self._lines, written=self._written, faults=tuple(self._faults))

    def value(self) -> Value:
        root = self._root()
        if self._faults:
            raise self._faults[0]
        return root

    def _root(self) -> Value:
        next(self._events)  # the stream begins
        start = next(self._events)
        if not hasattr(start, "explicit"):
            return None
        if getattr(start, "version", None) not in {None, (1, 2)}:
            raise DocumentError("asks for another YAML version; remove the %YAML line: job files are YAML 1.2", line=1)
        root = self._node(next(self._events), ())
        next(self._events)  # the document ends
        after = next(self._events)
        if hasattr(after, "explicit"):
            raise DocumentError(
                "begins a second document; write one job in a file and remove the '---' line", line=_line(after)
            )
        return root

    def _node(self, event: Any, path: Path) -> Value:  # noqa: ANN401
        self._refuse_extras(event, path)
        if len(path) > DEEPEST:
            raise DocumentError(f"is nested more than {DEEPEST} levels deep; write it flatter", line=_line(event))
        match type(event).__name__:
            case "MappingStartEvent":
                return dict(self._pairs(path))
            case "SequenceStartEvent":
                return list(self._items(path))
        return self._scalar(event, path)

    def _scalar(self, event: Any, path: Path) -> Value:  # noqa: ANN401
        if event.style is not None:
            return event.value
        try:
            value = plain_scalar(event.value)
        except DocumentError as error:
            self._fault(error.sentence, event, path)
            return None
        if not isinstance(value, str):
            self._written[path] = event.value
        return value

    def _pairs(self, path: Path) -> Iterator[tuple[str, Value]]:
        seen: dict[str, int] = {}
        while type(event := next(self._events)).__name__ != "MappingEndEvent":
            key = self._key(event, path)
            line = _line(event)
            repeated = seen.get(key)
            here = (*path, key)
            if repeated is None:
                seen[key] = self._lines[here] = line
                yield key, self._node(next(self._events), here)
                continue
            kept = dict(self._lines), dict(self._written), list(self._faults)
            self._node(next(self._events), here)
            self._lines, self._written, self._faults = kept
            self._fault(f"stands here again after line {repeated}; remove one of the two", event, here)

    def _key(self, event: Any, path: Path) -> str:  # noqa: ANN401
        self._refuse_extras(event, path)
        if type(event).__name__ != "ScalarEvent":
            raise DocumentError("has a key that is a list or a mapping; write a text", line=_line(event), key=dotted(path))
        if event.style is None and event.value == "<<":
            raise DocumentError("holds a merge key (<<); write the keys out", line=_line(event), key=dotted(path))
        return str(event.value)

    def _items(self, path: Path) -> Iterator[Value]:
        index = 0
        while type(event := next(self._events)).__name__ != "SequenceEndEvent":
            here = (*path, str(index))
            self._lines[here] = _line(event)
            yield self._node(event, here)
            index += 1

    def _refuse_extras(self, event: Any, path: Path) -> None:  # noqa: ANN401
        if type(event).__name__ == "AliasEvent":
            raise DocumentError(
                f"refers to *{event.anchor}; job files have no aliases: write the value out",
                line=_line(event),
                key=dotted(path),
            )
        if event.anchor is not None:
            self._fault(f"has the anchor &{event.anchor}; job files have no anchors: remove it", event, path)
        if event.tag is not None:
            self._fault(
                f"has the tag {event.tag}; job files have no tags: remove it, and quote the value if it is a text",
                event,
                path,
            )

    def _fault(self, sentence: str, event: Any, path: Path) -> None:  # noqa: ANN401
        self._faults.append(DocumentError(sentence, line=_line(event), key=dotted(path)))


def dotted(path: Path) -> str:
    """Return the key path as it is written: ``train.model``."""
    return ".".join(path)


def _line(event: Any) -> int:  # noqa: ANN401
    return int(event.start_mark.line) + 1


def _events(text: str) -> Iterator[Any]:
    try:
        yield from YAML(typ="safe", pure=True).parse(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise DocumentError(_explain(error), line=mark.line + 1 if mark else None) from None
    except YAMLStreamError as error:
        raise DocumentError(f"holds a character that YAML does not allow ({error})") from None
    except YAMLError as error:
        raise DocumentError(f"is no YAML: {error}") from None


def _explain(error: MarkedYAMLError) -> str:
    problem = str(error.problem or error.context or "it cannot be read")
    if "'\\t'" in problem:
        return "begins with a tab; YAML indents with spaces: replace the tab"
    if "mapping values are not allowed" in problem:
        return "has a ':' where none can be; quote the value, or check the indentation"
    return f"is no YAML ({problem}); check indentation, quotes and brackets"
