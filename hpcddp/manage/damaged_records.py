"""Read records of a run of which some may be damaged: what can be read, and a sentence about the rest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from hpcddp.run.directory import RunDirectory
from hpcddp.run.events import RECENT_BYTES, Event, read_events
from hpcddp.run.files import exists, why_unreadable
from hpcddp.run.record import Lines, RecordError, RecordT

T = TypeVar("T")


def record_or_damage(read: Callable[[], T | None]) -> tuple[T | None, str | None]:
    """Return a record, or None and why it cannot be read: the other files must still be shown."""
    try:
        return read(), None
    except RecordError as error:
        return None, error.message


def lines_or_damage(path: Path, read: Callable[[], Lines[RecordT]]) -> tuple[tuple[RecordT, ...], str | None]:
    """Return the lines of a log that can be read, and a sentence about the others, or None."""
    lines, damage = record_or_damage(read)
    if lines is None:
        return (), damage
    if exists(path) and not path.is_file():
        return (), f"{path} is not a regular file, so nothing is read from it; move it away"
    return lines.records, lines.sentence(path)


def recent_events(run: RunDirectory) -> list[Event]:
    """Return the end of the event log of a run; nothing where it cannot be read, which its remarks tell."""
    events, _ = record_or_damage(lambda: read_events(run.events, RECENT_BYTES))
    return events or []


def closed_directory_sentence(run: RunDirectory, error: OSError) -> str:
    """Return a sentence about a run directory, or a part of it, that is closed to this user."""
    return f"{error.filename or run.path} cannot be read ({why_unreadable(error)})"
