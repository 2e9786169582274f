"""``metrics.jsonl`` as its writers see it: the training, and ``hpcddp.log`` in a command or an ``entrypoint``."""

from __future__ import annotations

import json
import math
import operator
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from hpcddp.run.directory import RunDirectory
from hpcddp.run.files import open_lines, write_lines

METRICS_OPEN_S: Final = 2.0


class MetricsFile:
    """Appends each record to a file at once, so that a process that aborts or is killed loses none.

    The file stays open for 2 s at most: other hosts see what was written when it is closed (nfs(5), close-to-open).

    Args:
        before_open: called before the file is opened; raises if this process may no longer write.
        warn: called once when records cannot be written; they are kept, and written when the file can be.
        monotonic: seconds on a clock that never goes back.
        open_s: how long the file stays open, in seconds; 0 closes it after each record.
    """

    def __init__(
        self,
        path: Path,
        *,
        before_open: Callable[[], None],
        warn: Callable[[str], None],
        monotonic: Callable[[], float] = time.monotonic,
        open_s: float = METRICS_OPEN_S,
    ) -> None:
        self._path = path
        self._monotonic = monotonic
        self._before_open = before_open
        self._warn = warn
        self._open_s = open_s
        self._descriptor: int | None = None
        # The lines since the file was opened; a disk over the network says only at its end that it did not take them.
        self._lines: list[str] = []
        self._written = 0
        self._warned = False
        self._flushed_at = monotonic()

    def add(self, record: Mapping[str, Any]) -> None:
        """Write a record; numbers that JSON does not have become null."""
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in record.items()
        }
        self._lines.append(json.dumps(finite))
        # What a full disk did not take is written again after a while, not at each record.
        open_s = METRICS_OPEN_S if self._warned else self._open_s
        if self._monotonic() - self._flushed_at >= open_s:
            self.flush()
        elif not self._warned:
            self._write()

    def flush(self) -> None:
        """Write what could not be written before, and show it to other hosts.

        A disk that is full or missing does not delay the training.
        """
        self._write()
        self._close()
        self._flushed_at = self._monotonic()

    def _write(self) -> None:
        if self._written == len(self._lines):
            return
        try:
            if self._descriptor is None:
                self._before_open()
                self._descriptor = open_lines(self._path)
            write_lines(self._descriptor, self._lines[self._written :])
        except OSError as error:
            self._report(error)
            self._close()
        else:
            self._written = len(self._lines)
            self._warned = False

    def _close(self) -> None:
        if self._descriptor is None:
            return
        descriptor = self._descriptor
        self._descriptor = None
        try:
            os.close(descriptor)
        except OSError as error:
            self._report(error)
        else:
            del self._lines[: self._written]
        self._written = 0

    def _report(self, error: OSError) -> None:
        if not self._warned:
            self._warn(
                f"warning: {self._path} cannot be written ({error}); the training goes on, records stay in memory"
            )
        self._warned = True


METRICS_FILE: Final = "HPCDDP_METRICS_FILE"
"""The variable that names the metrics file to a program and to an ``entrypoint``."""
_CHECK_OWNER_EVERY_S: Final = 2.0


class _NotOwnerError(Exception):
    """A later attempt owns the run."""


class _OwnLog:
    """The lines that this process writes with ``log``.

    Args:
        path: the metrics file of the run.
        attempt: the attempt that this process belongs to; None if unknown.
    """

    def __init__(self, path: Path, attempt: int | None) -> None:
        self._run = RunDirectory(path.parent)
        self._attempt = attempt
        self._file: MetricsFile | None = MetricsFile(
            path, before_open=self._check_owner, warn=_write_warning, open_s=0.0
        )
        self._checked_at = -math.inf

    def add(self, record: Mapping[str, Any]) -> None:
        if self._file is not None:
            try:
                self._file.add(record)
            except _NotOwnerError:
                self._file = None
                _write_warning(f"warning: another attempt owns the run {self._run.run_id}; metrics are not logged")

    def _check_owner(self) -> None:
        """Raise if a later attempt owns the run; the node of this one may be cut off from Slurm."""
        now = time.monotonic()
        if self._attempt is None or now - self._checked_at < _CHECK_OWNER_EVERY_S:
            return
        self._checked_at = now
        newest = self._run.newest_attempt()
        if newest is not None and newest > self._attempt:
            raise _NotOwnerError


_own_logs: Final[dict[str, _OwnLog]] = {}


def log(metrics: Mapping[str, Any], *, step: int) -> None:
    """Report metrics of a run: ``hpcddp.log({"loss": 0.3}, step=100)``.

    For a script that is the ``command`` of a job, and for an ``entrypoint``. ``hpcddp status``, ``submit --follow`` and
    the trackers of the job show what is reported. Rank 0 appends one line to the metrics file of the run; on other
    ranks, and outside of hpcddp, nothing happens. A file that cannot be written is a warning. Metrics of an evaluation
    begin with ``val_``, ``eval_``, ``dev_`` or ``test_``.

    Args:
        metrics: numbers by name: of Python or numpy, or tensors of one element. Reading a number from a GPU makes the
            loop wait for it. NaN and infinity are written as null.
        step: optimizer steps done, >= 0. In a later attempt it may go back; the later lines count.

    Raises:
        TypeError: a metric is not a number, or the step is not an integer.
        ValueError: the step is negative.
    """
    if not isinstance(metrics, Mapping):
        raise TypeError(f"metrics is {metrics!r:.80}; give numbers by name, as in {{'loss': 0.3}}")
    try:
        done = operator.index(step)
    except TypeError as error:
        raise TypeError(f"step is {step!r:.80}, which is no integer; give the optimizer steps done") from error
    if done < 0:
        raise ValueError(f"step is {done}, and it counts the optimizer steps done; give 0 or more")
    path = os.environ.get(METRICS_FILE)
    if not path or os.environ.get("RANK", "0") != "0":
        return
    if path not in _own_logs:
        attempt = os.environ.get("HPCDDP_ATTEMPT", "")
        _own_logs[path] = _OwnLog(Path(path), int(attempt) if attempt.isascii() and attempt.isdigit() else None)
    _own_logs[path].add({"step": done, "time": time.time(), **plain_numbers(metrics)})


def plain_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics as numbers that JSON can hold; a tensor of one element or a number of numpy becomes a float.

    Raises:
        TypeError: a metric is not a number, or its name is taken.
    """
    plain: dict[str, float] = {}
    for name, value in metrics.items():
        if name in {"step", "time"}:
            raise TypeError(f"a metric is called {name}, which every line has already; give it another name")
        plain[name] = _plain_number(name, value)
    return plain


def _plain_number(name: str, value: Any) -> float:  # noqa: ANN401  of any library
    number: float | None = None
    # RuntimeError: a tensor of several elements, of complex numbers, or without data.
    with suppress(TypeError, ValueError, OverflowError, RuntimeError):
        # torch warns of a tensor that requires a gradient. A text is not converted, although float() would.
        if not isinstance(value, str | bytes):
            number = float(value.detach() if hasattr(value, "detach") else value)
    if number is None:
        raise TypeError(f"the metric {name} is {value!r:.80}, which is not a number; give one number, or leave it out")
    return value if type(value) is int else number


def _write_warning(text: str) -> None:
    # The output of the program may be closed, and a metric must not end it.
    with suppress(OSError, ValueError):
        sys.stderr.write(f"hpcddp: {text}\n")
        sys.stderr.flush()
