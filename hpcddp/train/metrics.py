"""``metrics.jsonl``: one line per optimizer step and per evaluation, written by rank 0 in blocks."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpcddp.run.files import append_line, open_regular, why_unreadable, write_bytes
from hpcddp.run.metrics import lines_until
from hpcddp.run.ownership import raise_if_fenced
from hpcddp.run.record import RecordError
from hpcddp.train.context import TrainContext

FLUSH_EVERY_S = 2.0


class MetricsFile:
    """Collects records and appends them in blocks: at least every 2 s, and whenever it is told to.

    Args:
        path: the file.
        monotonic: seconds on a clock that never goes back.
        before_write: called before each block; raises if this process may no longer write.
        warn: is told once when a block cannot be written; what it holds is kept for the next one.
    """

    def __init__(
        self,
        path: Path,
        *,
        monotonic: Callable[[], float],
        before_write: Callable[[], None],
        warn: Callable[[str], None],
    ) -> None:
        self._path, self._monotonic, self._before_write, self._warn = path, monotonic, before_write, warn
        self._lines: list[str] = []
        self._warned = False
        self._written_at = monotonic()

    def add(self, record: dict[str, Any]) -> None:
        """Take a record; numbers that JSON does not have become null."""
        self._lines.append(json.dumps({name: _json_number(value) for name, value in record.items()}))
        if self._monotonic() - self._written_at >= FLUSH_EVERY_S:
            self.flush()

    def flush(self) -> None:
        """Write what has been collected; a disk that is full or gone holds nothing up."""
        if self._lines:
            try:
                self._before_write()
                append_line(self._path, "\n".join(self._lines))
            except OSError as error:
                self._report(error)
            else:
                self._lines.clear()
                self._warned = False
        self._written_at = self._monotonic()

    def _report(self, error: OSError) -> None:
        if not self._warned:
            self._warn(f"warning: {self._path} cannot be written ({error}); the training goes on, its records wait")
        self._warned = True


def metrics_of(context: TrainContext) -> MetricsFile:
    """Return the metrics file of a run, which an attempt that no longer owns the run must not write."""
    return MetricsFile(
        context.run.metrics,
        monotonic=context.monotonic,
        before_write=lambda: raise_if_fenced(context.run, context.attempt),
        warn=context.tell,
    )


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


def _json_number(value: Any) -> Any:  # noqa: ANN401
    return None if isinstance(value, float) and not math.isfinite(value) else value
