"""YAML 1.2 as a tree in which every key path knows its line; what could surprise is refused.

ruamel.yaml splits the text into events. The tree is built here, because the core schema of YAML 1.2 is small, and
because tags, anchors, aliases and duplicate keys are errors of a job file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml import YAML, events
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from hpcddp.spec.scalars import ScalarError, read_scalar

Path = tuple[str, ...]
"""A key path: ``("train", "model")``; the items of a list count as "0", "1", ..."""

DEEPEST = 20

_SURROGATE = re.compile("[\ud800-\udfff]")


class DocumentError(ValueError):
    """A text is no document that hpcddp reads.

    Args:
        sentence: why, and what to write instead.
        line: where, counted from 1; None where no line is to blame.
        path: the key path at fault, if one is known.
    """

    def __init__(self, sentence: str, *, line: int | None = None, path: Path = ()) -> None:
        super().__init__(sentence)
        self.sentence, self.line, self.path = sentence, line, path


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A value that was read.

    Args:
        value: None, a bool, an int, a float, a str, or a list or dict of such values.
        lines: the line, counted from 1, of every key path.
        written: the numbers, booleans and nulls as they were written, by key path.
        faults: what is wrong with single keys; the rest stands.
    """

    value: Any
    lines: dict[Path, int] = field(default_factory=dict)
    written: dict[Path, str] = field(default_factory=dict)
    faults: tuple[DocumentError, ...] = ()


def read_document(text: str) -> Document:
    """Read one YAML mapping, such as a job file.

    Args:
        text: the whole file.

    Returns:
        The mapping, with the lines of its keys and the faults of single keys.

    Raises:
        DocumentError: the text is not YAML, not one document, or no mapping.
    """
    document = _Builder(text).build()
    if document.value is None:
        raise DocumentError("is empty; write at least name, batch.global_batch_size and train")
    if not isinstance(document.value, dict):
        raise DocumentError("holds no mapping at its top level; write keys with values, as in name: my-job", line=1)
    return document


def read_value(text: str) -> Document:
    """Read one YAML value, a scalar or a flow collection, as ``--set`` takes it.

    Args:
        text: what stands after the equals sign; empty is null.

    Raises:
        DocumentError: the text is not one YAML value.
    """
    document = _Builder(text).build()
    if document.faults:
        raise document.faults[0]
    return document


class _Builder:
    """Builds the tree from the parser's events."""

    def __init__(self, text: str) -> None:
        self._events = _parse(text)
        self._lines: dict[Path, int] = {}
        self._written: dict[Path, str] = {}
        self._faults: list[DocumentError] = []

    def build(self) -> Document:
        next(self._events)  # the stream begins
        start = next(self._events)
        if not isinstance(start, events.DocumentStartEvent):
            return Document(value=None)
        if start.version not in {None, (1, 2)}:
            raise DocumentError("asks for another YAML version; remove the %YAML line: job files are YAML 1.2", line=1)
        root = self._node(next(self._events), ())
        next(self._events)  # the document ends
        after = next(self._events)
        if isinstance(after, events.DocumentStartEvent):
            raise DocumentError("begins a second document; write one job in one file", line=_line(after))
        return Document(value=root, lines=self._lines, written=self._written, faults=tuple(self._faults))

    def _node(self, event: Any, path: Path) -> Any:  # noqa: ANN401
        self._refuse_extras(event, path)
        if len(path) > DEEPEST:
            raise DocumentError(f"is nested more than {DEEPEST} levels deep; write it flatter", line=_line(event))
        if isinstance(event, events.MappingStartEvent):
            return dict(self._pairs(path))
        if isinstance(event, events.SequenceStartEvent):
            return list(self._items(path))
        return self._scalar(event, path)

    def _scalar(self, event: Any, path: Path) -> Any:  # noqa: ANN401
        if _SURROGATE.search(event.value):
            self._fault("holds half of a character (\\ud800 to \\udfff); write the character itself", event, path)
            return None
        if event.style is not None:
            return str(event.value)
        try:
            value = read_scalar(event.value)
        except ScalarError as error:
            self._fault(str(error), event, path)
            return None
        if not isinstance(value, str):
            self._written[path] = event.value
        return value

    def _pairs(self, path: Path) -> Iterator[tuple[str, Any]]:
        while not isinstance(event := next(self._events), events.MappingEndEvent):
            key = self._key(event, path)
            here = (*path, key)
            if here in self._lines:
                self._fault(f"stands here again after line {self._lines[here]}; remove one of the two", event, here)
                self._skip_value(here)
                continue
            self._lines[here] = _line(event)
            yield key, self._node(next(self._events), here)

    def _skip_value(self, path: Path) -> None:
        kept = dict(self._lines), dict(self._written), list(self._faults)
        self._node(next(self._events), path)
        self._lines, self._written, self._faults = kept

    def _key(self, event: Any, path: Path) -> str:  # noqa: ANN401
        self._refuse_extras(event, path)
        if not isinstance(event, events.ScalarEvent):
            raise DocumentError("has a key that is a list or a mapping; write a text", line=_line(event), path=path)
        if event.style is None and event.value == "<<":
            raise DocumentError("holds a merge key (<<); write its keys out", line=_line(event), path=path)
        if _SURROGATE.search(event.value):
            raise DocumentError("has a key with half of a character; write it whole", line=_line(event), path=path)
        return str(event.value)

    def _items(self, path: Path) -> Iterator[Any]:
        index = 0
        while not isinstance(event := next(self._events), events.SequenceEndEvent):
            here = (*path, str(index))
            self._lines[here] = _line(event)
            yield self._node(event, here)
            index += 1

    def _refuse_extras(self, event: Any, path: Path) -> None:  # noqa: ANN401
        # Their names are not repeated: a value such as *secret or !secret may be a password without quotes.
        if isinstance(event, events.AliasEvent):
            sentence = "is an alias (*), and job files have none; write the value out, or quote a text"
            raise DocumentError(sentence, line=_line(event), path=path)
        if event.anchor is not None:
            self._fault("has an anchor (&), and job files have none; remove it, or quote a text", event, path)
        if event.tag is not None:
            self._fault("has a tag (!), and job files have none; remove it, or quote a text", event, path)

    def _fault(self, sentence: str, event: Any, path: Path) -> None:  # noqa: ANN401
        self._faults.append(DocumentError(sentence, line=_line(event), path=path))


def dotted(path: Path) -> str:
    """Return the key path as it is written: ``train.model``."""
    return ".".join(path)


def _line(event: Any) -> int:  # noqa: ANN401
    return int(event.start_mark.line) + 1


def _parse(text: str) -> Iterator[Any]:
    try:
        yield from YAML(typ="safe", pure=True).parse(text)
    except MarkedYAMLError as error:
        # What is never closed is missed at the end of the file, and belongs where it was opened.
        unclosed = "stream" in str(error.problem) and error.context_mark is not None
        mark = error.context_mark if unclosed else error.problem_mark or error.context_mark
        raise DocumentError(_explain(error), line=int(mark.line) + 1 if mark else None) from None
    except YAMLError as error:
        # Characters outside YAML's set; ruamel's text goes on with a second line that says where.
        raise DocumentError(f"is no YAML ({str(error).splitlines()[0]}); write it as an escape in quotes") from None


def _explain(error: MarkedYAMLError) -> str:
    problem = str(error.problem or error.context or "it cannot be read")
    if "'\\t'" in problem:
        return "holds a tab where YAML wants spaces; replace the tab"
    if "mapping values are not allowed" in problem:
        return "has a ':' where none can be; quote the value, or check the indentation"
    return f"is no YAML ({problem}); check indentation, quotes and brackets"
