"""Whether a program of the user's own came further in an attempt: it says so, or nobody can tell."""

from __future__ import annotations

from hpcddp.run.directory import AttemptDirectory
from hpcddp.run.events import append_event, read_events


def tell_progress(attempt: AttemptDirectory, *, now: float, asked: bool) -> None:
    """Write down that an attempt of a command made progress, unless it is known that it made none.

    A program that touches ``HPCDDP_PROGRESS_FILE`` is taken at its word from then on. One that never does may well have
    checkpoints of its own: what took its nodes from it says nothing against it. If it asked by itself to be run again,
    it could have said how far it is, and the attempt counts as one without progress.

    Args:
        attempt: the attempt that has ended.
        now: seconds since the epoch.
        asked: whether the program asked to be run again without having been told to end.
    """
    run = attempt.run
    events = read_events(run.events)
    stamps = [event["stamp"] for event in events if event["event"] == "progress" and event.get("stamp")]
    try:
        # Compared with what it was before, never with a clock: the file server has its own.
        stamp = run.progress.stat().st_mtime_ns
    except FileNotFoundError:
        speaks = asked or any(event["event"] == "save" for event in events)
        if not speaks:
            reason = "the program does not say how far it is"
            append_event(run.events, kind="progress", time=now, attempt=attempt.number, reason=reason)
        return
    if stamp not in stamps:
        reason = "the program has come further"
        append_event(run.events, kind="progress", time=now, attempt=attempt.number, reason=reason, stamp=stamp)
