"""All metrics of a run as columns of numbers, read in blocks."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any, Final, Self

from hpcddp.run.files import LONGEST_LINE, NotRegularError, open_regular, unreadable_sentence
from hpcddp.run.metrics import LARGEST_INTEGER
from hpcddp.run.record import LARGEST_RECORD, RecordError

_BLOCK_BYTES: Final = 1 << 16


def blocks_of_lines(stream: IO[bytes]) -> Iterator[bytes]:
    """Yield the content in blocks of whole lines; of a line that is longer than a block, its end is a line."""
    rest = b""
    while part := stream.read(_BLOCK_BYTES):
        head, end, tail = part.rpartition(b"\n")
        if end:
            yield rest + head
        rest = tail if end or len(rest) > LONGEST_LINE else rest + tail
    yield rest


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsBlock:
    """Some lines of a log of metrics that follow each other.

    Args:
        steps: optimizer steps done, for each line.
        numbers: all else, by name; NaN where a line has no such number, or one that is not finite.
    """

    steps: Sequence[int]
    numbers: Mapping[str, Sequence[float]]

    @classmethod
    def of(cls, documents: Sequence[Mapping[str, Any]], *, may_have_booleans: bool) -> Self:
        """Return the block of lines, of which each has a valid step."""
        columns = _columns(documents)
        steps = columns.pop("step")
        numbers = {name: _numbers(column, may_have_booleans) for name, column in columns.items()}
        return cls(steps=steps, numbers=numbers)


def _columns(documents: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    first = documents[0]
    # Mostly all lines have the same names.
    with suppress(KeyError):
        if set(map(len, documents)) == {len(first)}:
            return {name: list(map(operator.itemgetter(name), documents)) for name in first}
    names = dict.fromkeys(chain.from_iterable(documents))
    return {name: [document.get(name, math.nan) for document in documents] for name in names}


def _numbers(column: list[Any], may_have_booleans: bool) -> list[float]:  # noqa: FBT001
    """Return a number for each value; NaN for one that is none, is not finite, or is an integer of 2^53 or more."""
    with suppress(TypeError, ValueError, OverflowError):
        # The sum tells of a value that is no number, is not finite or has hundreds of digits, in a tenth of the time.
        if not may_have_booleans and -LARGEST_INTEGER < math.fsum(column) < LARGEST_INTEGER:
            return column
        # A NaN hides no other value from min and max, unless it is the first one, which fails the comparison.
        if set(map(type, column)) <= {int, float} and min(column) > -LARGEST_INTEGER and max(column) < LARGEST_INTEGER:
            return column
    return [_number(value) for value in column]


class MetricsReader:
    """Reads a log of metrics in blocks, so that a log of any length takes little memory.

    Args:
        path: the run's ``metrics.jsonl``; it need not exist. Of a file over 256 MiB the end is read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.damaged = 0
        """How many lines so far are left out, because they are not lines of metrics."""

    def __iter__(self) -> Iterator[MetricsBlock]:
        """Yield the lines in their order.

        Raises:
            RecordError: the log cannot be read.
        """
        try:
            with open_regular(self._path) as (stream, size):
                if size > LARGEST_RECORD:
                    # The line that begins before is left out.
                    stream.seek(size - LARGEST_RECORD)
                    stream.readline(LONGEST_LINE)
                yield from self._blocks(stream)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, NotRegularError):
            return
        except OSError as error:
            raise RecordError(unreadable_sentence(self._path, error), path=self._path) from error

    def _blocks(self, stream: IO[bytes]) -> Iterator[MetricsBlock]:
        """Yield the lines of a stream, and count the damaged ones; the last block's do not count in the end."""
        damaged_before_last_block = 0
        for content in blocks_of_lines(stream):
            lines = [line for line in content.split(b"\n") if line]
            documents = _documents(lines)
            damaged_before_last_block = self.damaged
            if len(documents) < len(lines):
                lines_with_text = sum(1 for line in lines if line.strip())
                self.damaged += lines_with_text - len(documents)
            if documents:
                may_have_booleans = b"true" in content or b"false" in content
                yield MetricsBlock.of(documents, may_have_booleans=may_have_booleans)
        # The last line may still be being written.
        self.damaged = damaged_before_last_block


def _documents(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """Return the lines that are lines of metrics."""
    # Parsing a block of lines at once takes a third of the time, but one damaged line fails the block.
    from pydantic_core import from_json

    with suppress(ValueError, TypeError, KeyError):
        documents = from_json(b"[" + b",".join(lines) + b"]", allow_inf_nan=False)
        if len(documents) == len(lines) and max(map(len, lines)) <= LONGEST_LINE and _are_metrics(documents):
            return list(documents)
    found = []
    for line in lines:
        if len(line) <= LONGEST_LINE:
            with suppress(ValueError, TypeError, KeyError, RecursionError):
                document = json.loads(line.decode(), parse_constant=lambda _: None)
                if _are_metrics([document]):
                    found.append(document)
    return found


def _are_metrics(documents: Sequence[Any]) -> bool:
    """Return whether all of some JSON values are lines of metrics.

    Raises:
        TypeError: one is not an object.
        KeyError: one has no step.
    """
    steps = list(map(operator.itemgetter("step"), documents))
    return set(map(type, steps)) == {int} and min(steps) >= 0 and max(steps) <= LARGEST_INTEGER


def _number(value: object) -> float:
    """Return a finite number of a line, NaN for everything else."""
    if type(value) is float:
        return value if math.isfinite(value) else math.nan
    return float(value) if type(value) is int and abs(value) < LARGEST_INTEGER else math.nan
