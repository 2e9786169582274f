"""Process of the trackers: read ``metrics.jsonl`` until the attempt has ended, in a thread for each tracker.

The first line of its standard input is the message of ``start_trackers``, the second one the name of the ending. If the
second line is missing, rank 0 was killed, and the ending is not known.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any, Final

from hpcddp.jobfile.sections import Trackers
from hpcddp.run.directory import RunDirectory
from hpcddp.run.files import LONGEST_LINE, open_regular
from hpcddp.run.metrics import EVALUATION_PREFIXES, MetricsLine, curve_name
from hpcddp.run.ownership import FencedError, raise_if_fenced
from hpcddp.run.record import parse_lines
from hpcddp.train.tracking.protocol import AttemptEnding, Point, Tracker, TrackerInputs, TrackerState

# Rank 0 waits for less time. On a cluster no process outlives the job step.
_LONGEST_END_S: Final = 120.0
_LOOK_EVERY_S: Final = 2.0
_BLOCK: Final = 500
# Entries that give the position of a point, or are constant.
_NO_CURVES: Final = frozenset({"step", "time", "eval_s", *(f"{prefix}_samples" for prefix in EVALUATION_PREFIXES)})


class MetricsReader:
    """Reads the lines of a metrics file as they are written.

    It keeps the opened file; a later attempt replaces the file at the path.

    Args:
        path: the file; it need not exist yet.
        appended_from: the offset of the first line whose step may go back; None = there is none.

    Attributes:
        offset: the offset behind the last line that was read.
        damaged: how many lines were left out.
    """

    def __init__(self, path: Path, appended_from: int | None = None) -> None:
        self._path = path
        self._appended_from = appended_from
        self._stream: IO[bytes] | None = None
        self._opened = ExitStack()
        self._torn = b""
        self._time = 0.0
        self.offset = 0
        self.damaged = 0

    def read(self, most: int) -> list[Point]:
        """Return the points of the next ``most`` lines; an empty list if there are no new records."""
        if self._stream is None:
            try:
                self._stream, _ = self._opened.enter_context(open_regular(self._path))
            except FileNotFoundError:
                return []
        points: list[Point] = []
        # Damaged lines have no points, and there may be good ones after them.
        while not points and (lines := self._next_lines(self._stream, most)):
            points = [point for line, behind in lines for point in self._points(line, behind)]
        return points

    def close(self) -> None:
        """Close the file."""
        self._opened.close()

    def _next_lines(self, stream: IO[bytes], most: int) -> list[tuple[bytes, int]]:
        """Return lines, each with the offset behind it."""
        lines: list[tuple[bytes, int]] = []
        while len(lines) < most and (part := stream.readline(LONGEST_LINE)):
            # Of a line that is too long only the beginning is kept, which is no record.
            self._torn += part if len(self._torn) < LONGEST_LINE else part[-1:]
            if part.endswith(b"\n"):
                lines.append((self._torn, stream.tell()))
                self._torn = b""
        return lines

    def _points(self, line: bytes, behind: int) -> Iterator[Point]:
        appended = self._appended_from is not None and self.offset >= self._appended_from
        self.offset = behind
        lines = parse_lines(line, MetricsLine)
        self.damaged += lines.damaged
        for record in lines.records:
            # An evaluation has no time of its own.
            if record.time is not None:
                self._time = record.time
            evaluations = record.evaluations()
            left_out = {*_NO_CURVES, *evaluations}
            if evaluations:
                left_out.add("epoch")
            training = {name: value for name, value in record.numbers().items() if name not in left_out}
            if training or not evaluations:
                values = {f"train/{_without_prefix(name)}": value for name, value in training.items()}
                yield Point(record.step, self._time, values, evaluated=False, appended=appended)
            if evaluations:
                values = {curve_name(name): value for name, value in evaluations.items()}
                yield Point(record.step, self._time, values, evaluated=True, appended=appended)


def _without_prefix(name: str) -> str:
    return name.removeprefix("train/").removeprefix("train_") or name


class TrackerThread(threading.Thread):
    """Passes new records to one tracker until the attempt ends.

    The failure of a tracker is a warning. At the end the tracker is tried once more with the records that it misses:
    the network may work again, or a signal to the job may have ended the tracker's own process.

    Args:
        name: name of the tracker.
        inputs: the run, and what the tracker has got of it.
    """

    def __init__(self, name: str, inputs: TrackerInputs) -> None:
        super().__init__(name=f"hpcddp-{name}", daemon=True)
        self._tracker_name = name
        self._inputs = inputs
        self._appended_from = inputs.appended_from
        self._ended = threading.Event()
        self._ending: AttemptEnding | None = None
        self._warned = ""
        self._warned_of_damage = False

    def end(self, ending: AttemptEnding | None) -> None:
        """Let the thread pass the last records and, if the ending is known, close the tracker; ``join`` waits."""
        self._ending = ending
        self._ended.set()

    def run(self) -> None:
        """Pass records until the attempt has ended."""
        try:
            if not self._pass_records(is_last=False):
                self._ended.wait()
                self._pass_records(is_last=True)
        except FencedError:
            # Another attempt owns the run and passes the remaining records itself.
            return

    def _pass_records(self, *, is_last: bool) -> bool:
        """Return whether the tracker got all records."""
        reader = MetricsReader(self._inputs.run.metrics, self._appended_from)
        self._inputs.state.load()
        try:
            raise_if_fenced(self._inputs.run, self._inputs.attempt)
            tracker: Tracker = importlib.import_module(f"hpcddp.train.tracking.{self._tracker_name}").connect(
                self._inputs
            )
            while not self._ended.wait(_LOOK_EVERY_S):
                self._write_new(tracker, reader)
            self._write_new(tracker, reader)
            if self._ending is not None:
                raise_if_fenced(self._inputs.run, self._inputs.attempt)
                tracker.close(self._ending)
        except FencedError:
            raise
        except Exception as error:  # noqa: BLE001  trackers may raise anything; it is a warning
            self._report(error, is_last=is_last)
            return False
        finally:
            reader.close()
        return True

    def _write_new(self, tracker: Tracker, reader: MetricsReader) -> None:
        state = self._inputs.state
        while points := reader.read(_BLOCK):
            raise_if_fenced(self._inputs.run, self._inputs.attempt)
            new = [point for point in points if self._is_new(point)]
            if new:
                tracker.write(new)
                state.save()
            if self._appended_from is not None:
                # If the tracker is tried again, it has the records before.
                self._appended_from = max(reader.offset, self._appended_from)
        if reader.damaged and not self._warned_of_damage:
            self._warned_of_damage = True
            _warn(f"warning: {self._inputs.run.metrics} has damaged lines, which {self._tracker_name} leaves out")

    def _is_new(self, point: Point) -> bool:
        state = self._inputs.state
        if not point.appended:
            return state.mark_if_new(point.step, evaluated=point.evaluated)
        state.mark_sent(point.step, evaluated=point.evaluated)
        return True

    def _report(self, error: Exception, *, is_last: bool) -> None:
        if self._ended.is_set() and not is_last:
            # A signal to the job may have ended the tracker's process; it is tried again at once.
            return
        reason = f"{type(error).__name__}: {' '.join(str(error).split()) or 'no reason given'}"
        later = "what it misses is in metrics.jsonl, and the next attempt tries again"
        if reason != self._warned:
            consequence = later if is_last else "it is tried again at the end"
            _warn(f"warning: {self._tracker_name} failed ({reason}); the training goes on, {consequence}")
        self._warned = reason


def main() -> None:
    """Run the trackers to the end of the attempt."""
    message = json.loads(sys.stdin.readline())
    # Without numpy, W&B puts a module in its place that is loaded when it is first used. That fails while the thread of
    # another tracker imports numpy.
    with suppress(ImportError):
        importlib.import_module("numpy")
    threads = [TrackerThread(name, _inputs_of(name, message)) for name in message["names"]]
    for thread in threads:
        thread.start()
    word = sys.stdin.readline().strip()
    for thread in threads:
        thread.end(AttemptEnding[word] if word else None)
    for thread in threads:
        thread.join(_LONGEST_END_S)
    sys.stderr.flush()
    # Do not wait for threads and exit hooks of the trackers' libraries.
    os._exit(0)


def _inputs_of(name: str, message: Mapping[str, Any]) -> TrackerInputs:
    run = RunDirectory(Path(message["run"]))
    return TrackerInputs(
        run=run,
        attempt=message["attempt"],
        settings=Trackers.model_validate(message["settings"]),
        config=message["config"],
        state=TrackerState(run.tracker(name)),
        first_step=message["first_step"],
        appended_from=message["appended_from"],
    )


def _warn(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    main()
