"""TensorBoard: event files in the run directory."""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from hpcddp.train.tracking.protocol import Ending, Point, Subject

# TensorBoard believes purges from this version on (tensorboard/backend/event_processing/event_accumulator.py).
_VERSION: Final = "brain.Event:2"


class TensorBoard:
    """An event file of one attempt; TensorBoard reads all files of the folder in the order of their names.

    Args:
        subject: what it shows.
        kept: the last step of earlier files that counts; TensorBoard drops what they hold of later ones.
    """

    def __init__(self, subject: Subject, kept: int) -> None:
        folder = subject.run.tensorboard
        folder.mkdir(mode=0o700, exist_ok=True)
        is_first = not any(folder.iterdir())
        self._file = _new_file(folder, subject.attempt)
        head = [Event(file_version=_VERSION)]
        if not is_first:
            head.append(Event(step=kept + 1, session_log=SessionLog(status=SessionLog.START)))
        self._append(head)

    def write(self, points: Sequence[Point]) -> None:
        """Append a block in one piece."""
        self._append([_event(point) for point in points])

    def close(self, ending: Ending) -> None:
        """Do nothing: every block has been written."""

    def _append(self, events: Sequence[Event]) -> None:
        block = io.BytesIO()
        records = RecordWriter(block)
        for event in events:
            records.write(event.SerializeToString())
        with self._file.open("ab") as stream:
            stream.write(block.getvalue())


def connect(subject: Subject, first_step: int | None) -> TensorBoard:
    """Open a new event file, in which the steps after ``first_step`` count in place of earlier ones."""
    if first_step is not None:
        subject.memory.forget_after(first_step)
    return TensorBoard(subject, subject.memory.step)


def _new_file(folder: Path, attempt: int) -> Path:
    """Return a name after all that are there: an attempt that opens a second file was in trouble with the first."""
    names = (folder / f"events.out.tfevents.{attempt:06d}.{part}" for part in itertools.count())
    return next(path for path in names if not path.exists())


def _event(point: Point) -> Event:
    values = [Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
    return Event(step=point.step, wall_time=point.time, summary=Summary(value=values))
