"""The history of a run in lines: how each attempt began and ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from types import MappingProxyType
from typing import Final

from hpcddp.manage.run_files import recent_events
from hpcddp.run.directory import RunDirectory
from hpcddp.run.events import CONTINUATIONS, Event
from hpcddp.stop.reasons import Cause

_LINES_SHOWN: Final = 6
_CAUSES_IN_HISTORY: Final[Mapping[str, str]] = MappingProxyType(
    {
        "preemption": "preempted",
        "time_limit": "the time limit",
        "node_failure": "a node was lost",
        "crash": "a task failed",
        "requeued": "requeued by Slurm or by hand",
    }
)


def history_of(run: RunDirectory) -> tuple[str, ...]:
    """Return how each attempt of a run began and ended, a line each; of many lines the last."""
    lines = list(_lines(recent_events(run)))
    left_out = len(lines) - _LINES_SHOWN
    # The line about one line that is left out would be as long.
    if left_out <= 1:
        return tuple(lines)
    return (f"... {left_out} earlier lines in {run.events}", *lines[-_LINES_SHOWN:])


def _lines(events: Sequence[Event]) -> Iterator[str]:
    explained = {(event.attempt, event.cause) for event in events if event.kind in {"stop", *CONTINUATIONS}}
    for event, next_event in zip_longest(events, events[1:]):
        if event.kind == "cause":
            # Of an attempt that was killed, this may be all that is known.
            cause = _CAUSES_IN_HISTORY.get(str(event.cause))
            text = None
            if cause is not None and (event.attempt, event.cause) not in explained:
                text = f"attempt {event.attempt} ends: {cause}"
        elif event.kind == "stop" and _is_told_by_continuation(event, next_event):
            text = None
        else:
            text = event_text(event)
        if text is not None:
            moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.time))
            yield f"{moment}  {text}"


def event_text(event: Event) -> str | None:
    """Return what an event says about its attempt; None if it says nothing."""
    return _TEXTS[event.kind](event) if event.kind in _TEXTS else None


def _is_told_by_continuation(stop: Event, next_event: Event | None) -> bool:
    if next_event is None or next_event.attempt != stop.attempt:
        return False
    return next_event.kind in CONTINUATIONS


def _resume_text(event: Event) -> str:
    changes = event.facts.get("changes")
    if not isinstance(changes, list):
        return str(event.reason)
    return ", ".join([str(event.reason), *map(str, changes)])


def _requeue_text(event: Event) -> str:
    cause = _CAUSES_IN_HISTORY.get(str(event.cause), event.cause)
    if event.by == "user":
        cause = "its user requested it"
    next_step = "to be requeued"
    if event.by == "chain":
        next_step = "the next job of its chain goes on"
        if event.known_cause in {Cause.REQUEUED, Cause.CANCELLED}:
            cause = "its job was killed"
    text = f"attempt {event.attempt} stopped{_step_text(event)}, {next_step}: {cause}"
    if event.facts.get("killed") is True:
        text += "; Slurm killed its tasks, which had not ended"
    return text + _error_text(event)


def _stop_text(event: Event) -> str | None:
    if event.saved is not None:
        # An event of the ranks; the supervisor writes another one for the same stop, which says why.
        return None
    return f"attempt {event.attempt} stopped{_step_text(event)}: {event.reason}{_error_text(event)}"


def _warning_text(event: Event) -> str | None:
    is_about_setup = (event.reason or "").startswith("environment.setup")
    return event.reason if is_about_setup else None


def _step_text(event: Event) -> str:
    return "" if event.step is None else f" after step {event.step}"


def _error_text(event: Event) -> str:
    return f"; {event.facts['error']}" if "error" in event.facts else ""


_TEXTS: Final[Mapping[str, Callable[[Event], str | None]]] = MappingProxyType(
    {
        "start": lambda event: f"attempt {event.attempt} began on {event.host}",
        "resume": _resume_text,
        "requeue": _requeue_text,
        "exclusion": lambda event: event.reason,
        "restart": lambda event: (
            f"attempt {event.attempt} ended, and its tasks are started again in the same job: {event.reason}"
            f"{_error_text(event)}"
        ),
        "stop": _stop_text,
        "failure": lambda event: f"attempt {event.attempt} failed{_step_text(event)}{_error_text(event)}",
        "finish": lambda event: f"attempt {event.attempt} finished{_step_text(event)}{_error_text(event)}",
        "refusal": lambda event: str(event.reason),
        "warning": _warning_text,
        "code": lambda event: f"attempt {event.attempt}: {event.reason}",
    }
)
"""What each kind of event says about an attempt; the other kinds say nothing about it."""
