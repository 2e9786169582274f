"""Read the lines of ``metrics.jsonl`` as points of curves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final

from hpcddp.run.metrics import MetricsLine
from hpcddp.run.record import parse_lines
from hpcddp.train.tracking.protocol import Point

_VAL: Final = "val_"
# Entries that give the position of a point, or are constant.
_NO_CURVES: Final = frozenset({"step", "time", "val_samples"})


class MetricsReader:
    """Reads the lines of a metrics file as they are written.

    It keeps the opened file; a later attempt replaces the file at the path.

    Args:
        path: the file; it need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stream: IO[bytes] | None = None
        self._torn = b""
        self._time = 0.0

    def read(self, most: int) -> list[Point]:
        """Return the next points, at most ``most``; an empty list if there are no new records."""
        if self._stream is None:
            try:
                self._stream = self._path.open("rb")
            except FileNotFoundError:
                return []
        return list(self._points(self._stream, most))

    def close(self) -> None:
        """Close the file."""
        if self._stream is not None:
            self._stream.close()

    def _points(self, stream: IO[bytes], most: int) -> Iterator[Point]:
        for _ in range(most):
            line = self._torn + stream.readline()
            if not line.endswith(b"\n"):
                self._torn = line
                return
            self._torn = b""
            # A damaged line is left out.
            for record in parse_lines(line, MetricsLine).records:
                # An evaluation has no time of its own.
                self._time = self._time if record.time is None else record.time
                evaluated = any(name.startswith(_VAL) for name in record.facts)
                values = dict(_values(record.facts, evaluated=evaluated))
                yield Point(record.step, self._time, values, evaluated)


def _values(record: Mapping[str, Any], *, evaluated: bool) -> Iterator[tuple[str, float]]:
    for name, value in record.items():
        if name in _NO_CURVES or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if name.startswith(_VAL):
            yield f"val/{name.removeprefix(_VAL)}", value
        elif not (evaluated and name == "epoch"):
            yield f"train/{name}", value
