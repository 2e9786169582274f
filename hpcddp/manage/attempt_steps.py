"""Which steps of each attempt of a run count: those that no later attempt has repeated, or will have to repeat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from hpcddp.manage.attempt_records import AttemptRecords, RunRecords
from hpcddp.manage.run_metrics import Stretch
from hpcddp.run.attempt_end import AttemptEnd, NextStart, attempt_end, events_of_attempt
from hpcddp.run.events import Event, first_train_event, newest_saved_step


class Recorder(Enum):
    """Who records the steps of an attempt."""

    BUILT_IN = auto()
    """The built-in training, which also records when its first step begins."""
    PROGRAM_WITH_STEPS = auto()
    """A program of the user's own, in a run in which the duration of a step is known."""
    PROGRAM_WITHOUT_STEPS = auto()
    """A program of the user's own, in a run in which no duration of a step is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """All records of one attempt, and what the other attempts of its run say of it.

    Args:
        records: those in its directory.
        events: what it has written to the event log itself, without what a later start or submission wrote about it.
        train_event: the event with which it began to train; None if there is none.
        resumed_from: the step that it went on from; None if it did not begin to train, or recorded no step.
        last_counted_step: the last of its steps that counts; None if all count, or that is not known.
        counted_stretches: its lines of metrics whose steps count.
        end: how and when it ended; None while it runs.
    """

    records: AttemptRecords
    events: Sequence[Event]
    stretches: Sequence[Stretch]
    recorder: Recorder
    train_event: Event | None
    resumed_from: int | None
    last_counted_step: int | None
    counted_stretches: Sequence[Stretch]
    end: AttemptEnd | None


def attempts_of(run: RunRecords) -> list[Attempt]:
    """Return the attempts of a run, in their order."""
    train_events = [first_train_event(run.events, records.number) for records in run.attempts]
    recorders = _recorders(run, train_events)
    resumed_steps = [_resumed_step(run, index, train_event) for index, train_event in enumerate(train_events)]
    attempts = []
    for index, records in enumerate(run.attempts):
        events = [event for event in run.events if event.attempt == records.number]
        stretches = _stretches_of(run, index)
        next_start = _next_start(run, index)
        if next_start is None:
            last_counted_step = _step_kept_at_end(run, recorders[index])
        else:
            last_counted_step = _lowest_step(resumed_steps[index + 1 :])
        is_running = next_start is None and run.is_alive
        end = None
        if not is_running:
            end = _end_of(records, events, stretches, next_start)
        attempt = Attempt(
            records=records,
            events=events_of_attempt(events, records.number, next_start),
            stretches=stretches,
            recorder=recorders[index],
            train_event=train_events[index],
            resumed_from=resumed_steps[index],
            last_counted_step=last_counted_step,
            counted_stretches=_stretches_until(last_counted_step, stretches),
            end=end,
        )
        attempts.append(attempt)
    return attempts


def _recorders(run: RunRecords, train_events: Sequence[Event | None]) -> list[Recorder]:
    """Return who records the steps of each attempt."""
    has_step_durations = any(stretch.step_s for stretches in run.stretches for stretch in stretches)
    recorder_of_programs = Recorder.PROGRAM_WITH_STEPS if has_step_durations else Recorder.PROGRAM_WITHOUT_STEPS
    recorders = []
    for train_event in train_events:
        is_built_in = train_event is not None and train_event.step is not None
        recorders.append(Recorder.BUILT_IN if is_built_in else recorder_of_programs)
    return recorders


def _resumed_step(run: RunRecords, index: int, train_event: Event | None) -> int | None:
    """Return the step that an attempt went on from; None if it did not begin to train, or recorded no step."""
    if train_event is not None and train_event.step is not None:
        return train_event.step
    stretches = _stretches_of(run, index)
    if not stretches:
        return None
    first_step = stretches[0].first_step
    number = run.attempts[index].number
    saved_step = newest_saved_step(event for event in run.events if event.attempt < number)
    is_first_training = not any(run.stretches[:index])
    # A program may record every tenth step only: what it saved, and that a run begins at 0, is more exact.
    if saved_step < first_step and (saved_step or is_first_training):
        return saved_step
    return max(0, first_step - 1)


def _stretches_of(run: RunRecords, index: int) -> Sequence[Stretch]:
    return run.stretches[index] if run.stretches else ()


def _next_start(run: RunRecords, index: int) -> NextStart | None:
    """Return the start that followed an attempt; None for the newest one."""
    if index + 1 == len(run.attempts):
        return None
    next_attempt = run.attempts[index + 1]
    return NextStart(time=next_attempt.began, submit_time=next_attempt.submit_time)


def _step_kept_at_end(run: RunRecords, recorder: Recorder) -> int | None:
    """Return the last step that counts in the newest attempt of a run; None if all count, or that is not known.

    If the run has ended before its work was done, that is the newest step that was saved. A program of which no save
    is recorded may save by itself.
    """
    if run.is_alive or run.is_finished:
        return None
    has_saves = any(event.kind == "save" for event in run.events)
    if has_saves or recorder is Recorder.BUILT_IN:
        return newest_saved_step(run.events)
    return None


def _lowest_step(resumed_steps: Sequence[int | None]) -> int | None:
    """Return the lowest step that an attempt went on from: the steps after it are repeated; None without one."""
    return min((step for step in resumed_steps if step is not None), default=None)


def _stretches_until(last_counted_step: int | None, stretches: Sequence[Stretch]) -> Sequence[Stretch]:
    """Return the lines of metrics whose steps count."""
    if last_counted_step is None:
        return stretches
    parts = [stretch.until(last_counted_step) for stretch in stretches]
    return [part for part in parts if part is not None]


def _end_of(
    records: AttemptRecords, events: Sequence[Event], stretches: Sequence[Stretch], next_start: NextStart | None
) -> AttemptEnd:
    line_times = [stretch.ended for stretch in stretches[-1:]]
    last_sign = max([records.began, *records.alive_times, *line_times])
    return attempt_end(events, records.number, last_sign=last_sign, next_start=next_start)


def count_lost_steps(attempt: Attempt) -> int | None:
    """Return how many steps of an attempt do not count; None if nothing is known of its steps."""
    highest_step = _highest_step(attempt)
    if highest_step is None and attempt.last_counted_step is None:
        return None
    if highest_step is None or attempt.last_counted_step is None:
        return 0
    return max(0, highest_step - attempt.last_counted_step)


def _highest_step(attempt: Attempt) -> int | None:
    """Return the highest step that a record of an attempt names; None if none names one."""
    steps = [stretch.highest_step for stretch in attempt.stretches]
    steps += [event.step for event in attempt.events if event.step is not None]
    if attempt.records.failure_step is not None:
        steps.append(attempt.records.failure_step)
    return max(steps, default=None)
