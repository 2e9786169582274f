"""The lines of ``metrics.jsonl``: what a run has measured.

A command and an ``entrypoint`` write lines of their own, by ``hpcddp.log`` or into the file that
``HPCDDP_METRICS_FILE`` names. Such a line may hold anything, and the step goes back where a later attempt has resumed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Any, ClassVar, Final

from hpcddp.run.files import (
    LONGEST_LINE,
    NotRegularError,
    open_regular,
    unreadable_sentence,
    why_unreadable,
    write_bytes,
)
from hpcddp.run.record import LARGEST_RECORD, LATEST_TIME, Lines, Record, RecordError, read_last_lines

LARGEST_INTEGER: Final = 1 << 53
_LONGEST_NAME: Final = 100
EVALUATION_PREFIXES: Final = ("val", "valid", "validation", "eval", "evaluation", "dev", "test")
"""The first words of the names of metrics of an evaluation."""
_EVALUATION: Final = re.compile(rf"({'|'.join(EVALUATION_PREFIXES)})[_/.-](?!samples$|s$)")


def is_evaluation(name: str) -> bool:
    """Return whether a name is that of a metric of an evaluation: ``val_accuracy``, ``eval/f1``."""
    return _EVALUATION.match(name) is not None


def curve_name(name: str) -> str:
    """Return the name under which trackers show a metric of an evaluation: ``val/accuracy`` for ``val_accuracy``."""
    match = _EVALUATION.match(name)
    return name if match is None else f"{match[1]}/{name[match.end() :]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsLine(Record):
    """What was measured at a step. Code of the user's own may log what it likes.

    Args:
        step: optimizer steps done.
        time: when, in seconds since the epoch; an evaluation has no time of its own.
        facts: what was measured, by name.
    """

    ADVICE: ClassVar[str] = "its line is left out"
    IS_VERSIONED: ClassVar[bool] = False

    step: int
    time: float | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 <= self.step <= LARGEST_INTEGER:
            raise ValueError(f"its step is not between 0 and {LARGEST_INTEGER}")
        if self.time is not None and not 0 <= self.time < LATEST_TIME:
            raise ValueError("its time is out of range")

    def number(self, name: str) -> float | None:
        """Return a measured number; None if it was not measured, or is not a finite number."""
        return finite_number(self.facts.get(name))

    def numbers(self) -> dict[str, float]:
        """Return all finite numbers whose names can be shown, by name."""
        values = ((name, finite_number(value)) for name, value in self.facts.items())
        return {
            name: value
            for name, value in values
            if value is not None and 0 < len(name) <= _LONGEST_NAME and name.isprintable()
        }

    def evaluations(self) -> dict[str, float]:
        """Return the metrics of an evaluation, by name; empty for a line of the training."""
        return {name: value for name, value in self.numbers().items() if is_evaluation(name)}

    def as_json(self) -> dict[str, Any]:
        """Return the line as a JSON object."""
        return {"step": self.step, **({} if self.time is None else {"time": self.time}), **self.facts}


def finite_number(value: object) -> float | None:
    """Return a value of a file if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:
        # An integer may have too many digits for a float.
        return None


def lines_until(content: bytes, *, step: int, evaluated_step: int) -> bytes:
    """Return the lines of a log of metrics up to a step; damaged lines and a torn last one are left out.

    A resumed run may have a million lines, so each is only parsed; ``MetricsLine`` checks the rest where it is read.

    Args:
        content: the whole log.
        step: the last step that is kept.
        evaluated_step: the step of the last evaluation that is kept.
    """
    kept = []
    for line in content.split(b"\n"):
        try:
            record = json.loads(line.decode())
            last = evaluated_step if "val_samples" in record else step
            is_kept = type(record) is dict and type(record["step"]) is int and record["step"] <= last
        except (ValueError, TypeError, KeyError, RecursionError):
            continue
        if is_kept:
            kept.append(line + b"\n")
    return b"".join(kept)


def read_metrics(path: Path, size: int) -> Lines[MetricsLine]:
    """Return the last lines of a run's metrics.

    Args:
        path: its ``metrics.jsonl``; it need not exist.
        size: how many bytes are read; more where they hold no record and only a few lines.

    Raises:
        RecordError: it cannot be read.
    """
    return read_last_lines(path, MetricsLine, size)


def keep_until(path: Path, step: int, evaluated_step: int | None) -> None:
    """Drop what a resumed run will write again, and a torn last line, so that no record is there twice.

    Args:
        path: the metrics file; need not exist.
        step: optimizer steps done at the checkpoint; 0 drops every step.
        evaluated_step: optimizer steps done at the last evaluation that the checkpoint knows; None drops them all.

    Raises:
        RecordError: it cannot be read.
    """
    try:
        with open_regular(path) as (stream, _):
            content = stream.read()
    except FileNotFoundError:
        return
    except OSError as error:
        raise RecordError(
            f"{path} cannot be read ({why_unreadable(error)}); move it away to go on without its lines", path=path
        ) from error
    last_evaluation = -1 if evaluated_step is None else evaluated_step
    write_bytes(path, lines_until(content, step=step, evaluated_step=last_evaluation))


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
