"""Tracker for TensorBoard, which writes event files in the run directory."""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from hpcddp.run.files import open_to_append
from hpcddp.train.tracking.protocol import AttemptEnding, Point, TrackerInputs

# TensorBoard honours purges from this version on (tensorboard/backend/event_processing/event_accumulator.py).
_VERSION: Final = "brain.Event:2"


class TensorBoard:
    """The event file of one attempt; TensorBoard reads all files of the folder in the order of their names.

    Args:
        kept: the last valid step of earlier files; TensorBoard drops their later steps.
    """

    def __init__(self, inputs: TrackerInputs, kept: int) -> None:
        folder = inputs.run.tensorboard
        folder.mkdir(mode=0o700, exist_ok=True)
        is_first = not any(folder.iterdir())
        self._file = _new_file(folder, inputs.attempt)
        self._file.touch(mode=0o600)
        head = [Event(file_version=_VERSION)]
        if not is_first:
            head.append(_purge(kept + 1))
        self._kept: int | None = kept
        self._append(head)

    def write(self, points: Sequence[Point]) -> None:
        """Append the points in one write."""
        self._append([event for point in points for event in self._events(point)])

    def _events(self, point: Point) -> Iterator[Event]:
        if self._kept is not None and not point.evaluated:
            if not point.appended:
                self._kept = max(point.step, self._kept)
            else:
                # The first step of this attempt: it shows where code of the user's own has resumed.
                if point.step <= self._kept:
                    yield _purge(point.step)
                self._kept = None
        yield _event(point)

    def close(self, ending: AttemptEnding) -> None:
        """Do nothing: all points have been written."""

    def _append(self, events: Sequence[Event]) -> None:
        block = io.BytesIO()
        records = RecordWriter(block)
        for event in events:
            records.write(event.SerializeToString())
        with os.fdopen(open_to_append(self._file), "ab") as stream:
            stream.write(block.getvalue())


def connect(inputs: TrackerInputs) -> TensorBoard:
    """Open a new event file, which replaces the steps after ``first_step`` in earlier files."""
    if inputs.first_step is not None:
        inputs.state.rewind(inputs.first_step)
    return TensorBoard(inputs, inputs.state.step)


def _new_file(folder: Path, attempt: int) -> Path:
    """Return a name that sorts after all existing ones; after a failure an attempt opens another file."""
    names = (folder / f"events.out.tfevents.{attempt:06d}.{part}" for part in itertools.count())
    return next(path for path in names if not path.exists())


def _purge(step: int) -> Event:
    """Return the event after which TensorBoard drops earlier points from ``step`` on."""
    return Event(step=step, session_log=SessionLog(status=SessionLog.START))


def _event(point: Point) -> Event:
    values = [Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
    return Event(step=point.step, wall_time=point.time, summary=Summary(value=values))
