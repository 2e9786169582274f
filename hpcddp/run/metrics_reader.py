"""The lines of a log of metrics, read in blocks, so that a log of any length takes little memory and time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import IO, Any, Final

from hpcddp.run.files import LONGEST_LINE, NotRegularError, open_regular, unreadable_sentence
from hpcddp.run.metrics import LARGEST_INTEGER
from hpcddp.run.record import LARGEST_RECORD, RecordError

_BLOCK_BYTES: Final = 1 << 16
# Of each kind of line in a log.
_LINES_READ: Final = 1 << 15
_KINDS: Final = 16
# Lines that are equal without them are of one kind.
_OF_NUMBERS: Final = b"0123456789+-.eE"


def blocks_of_lines(stream: IO[bytes]) -> Iterator[bytes]:
    """Yield the content in blocks of whole lines; of a line that is longer than a block, its end is a line."""
    rest = b""
    while part := stream.read(_BLOCK_BYTES):
        head, end, tail = part.rpartition(b"\n")
        if end:
            yield rest + head
        rest = tail if end or len(rest) > LONGEST_LINE else rest + tail
    yield rest


class ThinnedMetrics:
    """Reads the lines of a log of metrics; of a long log, some lines of each kind in each block.

    Lines of one kind differ in their numbers only: an evaluation is not hidden by the steps around it. A log of up to
    32,768 lines is read whole.

    Args:
        path: the run's ``metrics.jsonl``; it need not exist. Of a file over 256 MiB the end is read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.damaged = 0
        """How many lines so far are left out, because they are not lines of metrics."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the lines in their order, each with a valid step.

        Raises:
            RecordError: the log cannot be read.
        """
        try:
            with open_regular(self._path) as (stream, size):
                if size > LARGEST_RECORD:
                    # The line that begins before is left out.
                    stream.seek(size - LARGEST_RECORD)
                    stream.readline(LONGEST_LINE)
                blocks = min(size, LARGEST_RECORD) // _BLOCK_BYTES + 1
                yield from self._documents(stream, lines_of_a_kind=_LINES_READ // blocks + 1)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, NotRegularError):
            return
        except OSError as error:
            raise RecordError(unreadable_sentence(self._path, error), path=self._path) from error

    def _documents(self, stream: IO[bytes], *, lines_of_a_kind: int) -> Iterator[dict[str, Any]]:
        damaged_before_last_block = 0
        for block in blocks_of_lines(stream):
            damaged_before_last_block = self.damaged
            for line in _some_of_each_kind(block, lines_of_a_kind):
                document = _document(line)
                if document is not None:
                    yield document
                elif line.strip():
                    self.damaged += 1
        # The last line may still be being written.
        self.damaged = damaged_before_last_block


def _some_of_each_kind(block: bytes, most: int) -> Sequence[bytes]:
    """Return the first lines of each kind in a block, and the last one."""
    lines = block.split(b"\n")
    if len(lines) <= most:
        return lines
    kinds = block.translate(None, _OF_NUMBERS).split(b"\n")
    last_places = dict(zip(kinds, range(len(kinds)), strict=True))
    places = []
    # Lines with texts may all differ.
    for kind, last_place in islice(last_places.items(), _KINDS):
        place = -1
        for _ in range(most):
            place = kinds.index(kind, place + 1)
            places.append(place)
            if place == last_place:
                break
        else:
            places.append(last_place)
    return [lines[place] for place in sorted(places)]


def _document(line: bytes) -> dict[str, Any] | None:
    """Return the line as a document; None if it is no line of metrics."""
    if len(line) > LONGEST_LINE:
        return None
    with suppress(ValueError, RecursionError):
        document = json.loads(line.decode())
        if type(document) is dict:
            step = document.get("step")
            if type(step) is int and 0 <= step <= LARGEST_INTEGER:
                return document
    return None
