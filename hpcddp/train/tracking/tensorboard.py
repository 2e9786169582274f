"""TensorBoard: event files in the run directory."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Final

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
        self._file = _create(folder, subject.attempt)
        head = [Event(file_version=_VERSION)]
        if not is_first:
            head.append(Event(step=kept + 1, session_log=SessionLog(status=SessionLog.START)))
        self._append(head)

    def write(self, points: Sequence[Point]) -> None:
        """Append a block in one piece."""
        self._append([_event(point) for point in points])

    def close(self, ending: Ending) -> None:  # noqa: ARG002  TensorBoard knows of no end
        """Close the file."""
        self._file.close()

    def _append(self, events: Sequence[Event]) -> None:
        block = io.BytesIO()
        records = RecordWriter(block)
        for event in events:
            records.write(event.SerializeToString())
        self._file.write(block.getvalue())
        self._file.flush()


def connect(subject: Subject, first_step: int) -> TensorBoard:
    """Open a new event file, in which the steps after ``first_step`` count in place of earlier ones."""
    subject.memory.forget_after(first_step)
    return TensorBoard(subject, subject.memory.step)


def _create(folder: Path, attempt: int) -> IO[bytes]:
    part = 0
    while True:
        try:
            return (folder / f"events.out.tfevents.{attempt:06d}.{part}").open("xb")
        except FileExistsError:
            part += 1


def _event(point: Point) -> Event:
    values = [Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
    return Event(step=point.step, wall_time=point.time, summary=Summary(value=values))
