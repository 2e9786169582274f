"""The end of an attempt, as the event log of its run records it.

``hpcddp.supervise.end`` records what came of an attempt when its script ends. Where that script could not, because
its node was lost for example, ``hpcddp.supervise.begin`` records Slurm's requeue at the next start. The time and the
cause of an end are read here: for the time that a run took, and for a report.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from hpcddp.run.events import Event
from hpcddp.slurm.job import moment_of
from hpcddp.stop.reasons import Cause

_END_KINDS: Final = frozenset({"finish", "failure", "stop", "requeue", "restart"})
# Slurm's times are whole seconds.
_SLURM_CLOCK_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NextStart:
    """The start of the attempt that followed.

    Args:
        time: when its script began, in seconds since the epoch.
        submit_time: Slurm's SubmitTime of it; None without Slurm.
    """

    time: float
    submit_time: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEnd:
    """How and when an attempt ended, as far as it is recorded.

    Args:
        time: when it ended, in seconds since the epoch; its last sign of life where the end is not known.
        is_time_known: whether the end was recorded, or Slurm's requeue of the job shows it.
        kinds: the kinds of the events that recorded it, in their order; empty without a record.
        cause: why it ended; ``UNKNOWN`` where no event says so.
    """

    time: float
    is_time_known: bool
    kinds: tuple[str, ...]
    cause: Cause

    @property
    def continuation(self) -> Literal["requeued", "restarted"] | None:
        """How the run went on: Slurm ran the job again, or another one; or its tasks were started again in its job."""
        if "requeue" in self.kinds:
            return "requeued"
        return "restarted" if "restart" in self.kinds else None


def requeue_event(events: Sequence[Event], number: int) -> Event | None:
    """Return the event of the requeue after an attempt; None if it was not requeued."""
    return next((event for event in events if event.attempt == number and event.kind == "requeue"), None)


def attempt_end(events: Sequence[Event], number: int, *, last_sign: float, next_start: NextStart | None) -> AttemptEnd:
    """Return the end of an attempt that does not run any more.

    Args:
        events: the event log of the run.
        number: the number of the attempt.
        last_sign: when it was seen alive by other records than the event log, in seconds since the epoch; its start at
            least.
        next_start: the start that followed; None if it is the newest attempt.
    """
    ends = _end_events(events, number)
    time, is_time_known = _time_of_end(events, number, last_sign, next_start)
    causes = [event.known_cause for event in ends if event.known_cause is not Cause.UNKNOWN]
    return AttemptEnd(
        time=time,
        is_time_known=is_time_known,
        kinds=tuple(event.kind for event in ends),
        cause=causes[0] if causes else Cause.UNKNOWN,
    )


def events_of_attempt(events: Sequence[Event], number: int, next_start: NextStart | None) -> list[Event]:
    """Return what an attempt recorded itself, without what a later start or submission recorded of it."""
    written = [event for event in events if event.attempt == number and event.kind != "resume"]
    if next_start is None:
        return written
    return [event for event in written if event.time < next_start.time]


def _time_of_end(
    events: Sequence[Event], number: int, last_sign: float, next_start: NextStart | None
) -> tuple[float, bool]:
    """Return when an attempt ended, in seconds since the epoch, and whether that is known."""
    written = events_of_attempt(events, number, next_start)
    script_end = _event_of_script_end(written, number)
    if script_end is not None:
        return script_end.time, True
    last_sign = max([last_sign, *(event.time for event in written)])
    if _end_events(written, number):
        # The ranks recorded that they had finished or stopped, and the script nothing after that.
        return last_sign, True
    # Slurm renews the submit time when it requeues a job, which is when the job has lost its nodes.
    requeue_time = None if next_start is None else moment_of(next_start.submit_time)
    if requeue_time is None or next_start is None:
        return last_sign, False
    if not last_sign - _SLURM_CLOCK_S <= requeue_time <= next_start.time + _SLURM_CLOCK_S:
        return last_sign, False
    return min(max(requeue_time, last_sign), next_start.time), True


def _event_of_script_end(events: Sequence[Event], number: int) -> Event | None:
    """Return the event that the batch script recorded when it ended; None if it recorded none."""
    requeue = requeue_event(events, number)
    if requeue is not None:
        return requeue
    for event in _end_events(events, number):
        is_of_ranks = event.kind == "finish" or event.saved is not None
        if not is_of_ranks:
            # A later one is of a run that was cancelled while it waited to run again.
            return event
    return None


def _end_events(events: Sequence[Event], number: int) -> list[Event]:
    """Return the events that record the end of an attempt, in their order."""
    return [event for event in events if event.attempt == number and event.kind in _END_KINDS]
