"""Divide the time of each attempt of a run into phases, from its records: pure functions of values.

An attempt has up to five moments: its job was queued, its batch script began, its first step began, its training
ended, it ended. The phases are what lies between them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from hpcddp.manage.attempt_records import RunRecords
from hpcddp.manage.attempt_steps import Attempt, Recorder, attempts_of, count_lost_steps
from hpcddp.run.attempt_end import AttemptEnd
from hpcddp.run.events import Event
from hpcddp.stop.reasons import Cause


class Phase(StrEnum):
    """What the time of an attempt went into."""

    QUEUE = "queue"
    """Waiting in Slurm's queue, without nodes."""
    START_UP = "start_up"
    """From the start of the batch script to the first step, or to the first record of a program of the user's own."""
    TRAINING = "training"
    """Steps that count."""
    LOST = "lost"
    """Steps that are not saved and are, or will be, repeated; a wait for ranks that have failed."""
    HANG = "hang"
    """From the last recorded step to the end of an attempt whose ranks hung."""
    EVALUATION = "evaluation"
    SAVE = "save"
    """Saves for which the training waited."""
    STOP = "stop"
    """From the end of the training, or the last record of a program of the user's own, to the end of the attempt."""
    PROGRAM = "program"
    """A program of the user's own that records no steps."""
    OTHER = "other"
    """All else between the first step and the last: evaluations and saves whose duration was not recorded."""


ON_NODES: Final = tuple(phase for phase in Phase if phase is not Phase.QUEUE)
# A gap in the records is shown if it is at least this part of the attempt.
_SHOWN_GAP: Final = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A part of the timeline.

    Args:
        began: seconds since the epoch.
        ended: seconds since the epoch.
    """

    phase: Phase
    began: float
    ended: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptTimes:
    """The time of one attempt.

    Args:
        began: when its batch script began, in seconds since the epoch.
        ended: when it ended; now for one that runs.
        is_end_known: whether its end was recorded.
        ranks: how many it has; None if that is not known.
        resumed_from: the step that it went on from; None if it did not begin to train, or recorded no step.
        last_step: the last of its steps that counts; None without one.
        lost_steps: how many of its steps do not count; None if that is not known.
        outcome: how it ended, in a few words.
        seconds: the duration of each phase; a phase that is not there took no time, or is not known.
        spans: the phases in the order of time, for a picture.
    """

    number: int
    began: float
    ended: float
    is_end_known: bool
    is_running: bool
    ranks: int | None
    resumed_from: int | None
    last_step: int | None
    lost_steps: int | None
    outcome: str
    seconds: Mapping[Phase, float]
    spans: tuple[Span, ...]

    @property
    def on_nodes_s(self) -> float:
        """How long it had its nodes."""
        return self.ended - self.began

    def as_json(self) -> dict[str, Any]:
        """Return the document of ``--json``."""
        return {
            "attempt": self.number,
            "began": self.began,
            "ended": None if self.is_running else self.ended,
            "is_end_known": self.is_end_known,
            "ranks": self.ranks,
            "resumed_from": self.resumed_from,
            "last_step": self.last_step,
            "lost_steps": self.lost_steps,
            "outcome": self.outcome,
            "seconds": {str(phase): round(seconds, 3) for phase, seconds in self.seconds.items()},
        }


def attempt_times(run: RunRecords) -> tuple[AttemptTimes, ...]:
    """Return the time of each attempt of a run."""
    return tuple(_times_of(attempt, run.now) for attempt in attempts_of(run))


def _times_of(attempt: Attempt, now: float) -> AttemptTimes:
    moments = _moments(attempt, now)
    lost_steps = count_lost_steps(attempt) if moments.has_trained else None
    seconds = _phases(attempt, moments, lost_steps)
    spans = _spans(attempt, moments, seconds)
    is_end_known = attempt.end is None or attempt.end.is_time_known
    return AttemptTimes(
        number=attempt.records.number,
        began=moments.began,
        ended=moments.ended,
        is_end_known=is_end_known,
        is_running=attempt.end is None,
        ranks=attempt.records.ranks,
        resumed_from=attempt.resumed_from,
        last_step=max((stretch.highest_step for stretch in attempt.counted_stretches), default=None),
        lost_steps=lost_steps if is_end_known else None,
        outcome="running" if attempt.end is None else _outcome(attempt.end),
        seconds=seconds,
        spans=tuple(spans),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moments:
    """The moments between the phases of an attempt, in seconds since the epoch, in the order of time.

    Args:
        queued: when its job was queued, which may seem to be later than its begin; None if that is not known.
        began: when its batch script began.
        trained: when its first step began; its end if it did not begin to train.
        training_ended: when its training ended; its end if it did not begin to train.
        ended: when it ended; now for one that runs.
        has_trained: whether it began to train.
    """

    queued: float | None
    began: float
    trained: float
    training_ended: float
    ended: float
    has_trained: bool


def _moments(attempt: Attempt, now: float) -> _Moments:
    queued = attempt.records.queued
    began = attempt.records.began
    ended = max(now, began) if attempt.end is None else attempt.end.time
    first_step_began = _first_step_began(attempt)
    if first_step_began is None:
        trained = ended
        training_ended = ended
    else:
        # The ranks and the batch script may run on hosts whose clocks differ a little.
        trained = _within(first_step_began, began, ended)
        training_ended = _within(_training_ended(attempt, ended), trained, ended)
    return _Moments(
        queued=queued,
        began=began,
        trained=trained,
        training_ended=training_ended,
        ended=ended,
        has_trained=first_step_began is not None,
    )


def _first_step_began(attempt: Attempt) -> float | None:
    """Return when the first step of an attempt began; None if it did not begin to train."""
    train_event = attempt.train_event
    if train_event is not None and attempt.recorder is not Recorder.PROGRAM_WITH_STEPS:
        return train_event.time
    # A program starts up until its first step whose duration is known; it records no other moment before.
    program_began = -math.inf if train_event is None else train_event.time
    for stretch in attempt.stretches:
        if stretch.began > -math.inf:
            return max(program_began, stretch.began)
    return None


def _training_ended(attempt: Attempt, ended: float) -> float:
    """Return when the training of an attempt that began to train ended; ``ended`` is when the attempt did."""
    stop_event = _stop_event_of_ranks(attempt)
    if stop_event is not None:
        return stop_event.time
    failed_at = attempt.records.failed_at
    has_ended_well = attempt.end is not None and failed_at is None
    if has_ended_well and attempt.recorder is Recorder.PROGRAM_WITH_STEPS:
        # What a program does after its last record is not known; most of it is its exit.
        return attempt.stretches[-1].ended
    for event in attempt.events:
        if event.kind == "finish":
            return event.time
    return ended if failed_at is None else failed_at


def _stop_event_of_ranks(attempt: Attempt) -> Event | None:
    """Return the event that the ranks wrote when they stopped; None if they did not."""
    for event in attempt.events:
        if event.kind == "stop" and event.saved is not None:
            return event
    return None


def _phases(attempt: Attempt, moments: _Moments, lost_steps: int | None) -> dict[Phase, float]:
    """Return the duration of each phase in seconds, without those that took no time."""
    seconds: dict[Phase, float] = {}
    if moments.queued is not None:
        seconds[Phase.QUEUE] = max(0.0, moments.began - moments.queued)
    seconds[Phase.START_UP] = moments.trained - moments.began
    if moments.has_trained and attempt.recorder is Recorder.PROGRAM_WITHOUT_STEPS:
        seconds[Phase.PROGRAM] = moments.training_ended - moments.trained
    elif moments.has_trained:
        seconds.update(_phases_of_training(attempt, moments, lost_steps))
    seconds[Phase.STOP] = moments.ended - moments.training_ended
    return {phase: seconds[phase] for phase in Phase if seconds.get(phase)}


def _phases_of_training(attempt: Attempt, moments: _Moments, lost_steps: int | None) -> dict[Phase, float]:
    """Return what the time from the first step to the last went into, in seconds."""
    length = moments.training_ended - moments.trained
    training = sum(stretch.step_s for stretch in attempt.counted_stretches)
    evaluation = sum(stretch.eval_s for stretch in attempt.counted_stretches)
    save = min(_save_s(attempt, moments.training_ended), length)
    lost = 0.0
    hang = 0.0
    has_hung = _has_hung(attempt)
    if lost_steps or has_hung or _is_failed_program(attempt):
        lost = _within(_lost_s(attempt, moments), 0.0, length)
    if has_hung:
        last_step_ended = moments.trained
        if attempt.stretches:
            last_step_ended = max(last_step_ended, attempt.stretches[-1].ended)
        hang = _within(moments.training_ended - last_step_ended, 0.0, lost)
        lost -= hang
    other = length - training - evaluation - save - lost - hang
    if other < 0:
        # The clock of the steps and that of the events differ a little.
        training = max(0.0, training + other)
        other = 0.0
    return {
        Phase.TRAINING: training,
        Phase.LOST: lost,
        Phase.HANG: hang,
        Phase.EVALUATION: evaluation,
        Phase.SAVE: save,
        Phase.OTHER: other,
    }


def _has_hung(attempt: Attempt) -> bool:
    """Whether its training ended with a hang: not if a later stop, or the end of the run, was recorded."""
    has_finished = any(event.kind == "finish" for event in attempt.events)
    has_stopped = _stop_event_of_ranks(attempt) is not None
    return attempt.records.is_hang and not has_finished and not has_stopped


def _is_failed_program(attempt: Attempt) -> bool:
    """Whether it is a program that failed: it has lost its time since its last record, whose steps are not known."""
    return attempt.recorder is Recorder.PROGRAM_WITH_STEPS and attempt.records.failed_at is not None


def _lost_s(attempt: Attempt, moments: _Moments) -> float:
    """Return the time from the last step that counts to the end of the training, without evaluations and saves."""
    last_step_ended = moments.trained
    pause_s = 0.0
    if attempt.counted_stretches:
        last_stretch = attempt.counted_stretches[-1]
        last_step_ended = max(last_stretch.ended, moments.trained)
        if last_stretch.lines == 1:
            # The evaluation after the step of this line; those of several lines lie before their end.
            pause_s = last_stretch.eval_s
        last_step = max(stretch.highest_step for stretch in attempt.counted_stretches)
        pause_s += sum(_recorded_s(event, "blocked_s") for event in attempt.events if event.step == last_step)
    stop_save_s = sum(_recorded_s(event, "save_s") for event in attempt.events if event.kind == "stop")
    return moments.training_ended - last_step_ended - pause_s - stop_save_s


def _save_s(attempt: Attempt, training_ended: float) -> float:
    """Return how long the training waited for saves, in seconds."""
    stop_event = _stop_event_of_ranks(attempt)
    stop_save_s = 0.0 if stop_event is None else _recorded_s(stop_event, "save_s")
    last_step = max((event.step or 0 for event in attempt.events if event.kind == "finish"), default=0)
    total = stop_save_s
    for save_event in _save_events(attempt, training_ended):
        if stop_event is not None and stop_save_s and save_event.step == stop_event.step:
            # The stop has counted it.
            continue
        if last_step and save_event.step == last_step:
            # After the last step nothing else is left to do meanwhile.
            total += _recorded_s(save_event, "seconds")
        else:
            total += _recorded_s(save_event, "blocked_s")
    return total


def _save_events(attempt: Attempt, training_ended: float) -> list[Event]:
    """Return the saves of the training; those of a program after its last record are a part of its end."""
    save_events = [event for event in attempt.events if event.kind == "save"]
    if attempt.recorder is not Recorder.PROGRAM_WITH_STEPS:
        return save_events
    return [event for event in save_events if event.time - _recorded_s(event, "seconds") < training_ended]


def _recorded_s(event: Event, name: str) -> float:
    """Return a duration that an event records, in seconds; 0 if it records none, or one that cannot be."""
    value = event.facts.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0.0
    return float(value) if 0 < value < math.inf else 0.0


def _within(value: float, lowest: float, highest: float) -> float:
    return min(max(value, lowest), highest)


def _spans(attempt: Attempt, moments: _Moments, seconds: Mapping[Phase, float]) -> Iterator[Span]:
    """Return the phases in the order of time; what interrupts the training follows it, to be drawn over it."""
    if moments.queued is not None:
        yield Span(phase=Phase.QUEUE, began=min(moments.queued, moments.began), ended=moments.began)
    yield Span(phase=Phase.START_UP, began=moments.began, ended=moments.trained)
    if moments.training_ended > moments.trained:
        if Phase.PROGRAM in seconds:
            yield Span(phase=Phase.PROGRAM, began=moments.trained, ended=moments.training_ended)
        else:
            yield Span(phase=Phase.TRAINING, began=moments.trained, ended=moments.training_ended)
            yield from _spans_between_steps(attempt, moments)
        ended = moments.training_ended
        for phase in (Phase.HANG, Phase.LOST):
            began = ended - seconds.get(phase, 0.0)
            if began < ended:
                yield Span(phase=phase, began=began, ended=ended)
            ended = began
        yield from _save_spans(attempt, moments.training_ended)
    yield Span(phase=Phase.STOP, began=moments.training_ended, ended=moments.ended)


def _spans_between_steps(attempt: Attempt, moments: _Moments) -> Iterator[Span]:
    """Return the evaluations, and the gaps that are neither in them nor in steps and long enough to be seen."""
    shortest_gap_s = _SHOWN_GAP * (moments.ended - moments.began)
    covered_until = moments.trained
    for stretch in attempt.counted_stretches:
        if stretch.eval_s and stretch.lines == 1:
            # No time is known before the first line that has one.
            evaluation_began = max(covered_until, stretch.ended)
            covered_until = evaluation_began + stretch.eval_s
            evaluation_ended = min(covered_until, moments.training_ended)
            yield Span(phase=Phase.EVALUATION, began=evaluation_began, ended=evaluation_ended)
        elif stretch.began - covered_until > shortest_gap_s:
            yield Span(phase=Phase.OTHER, began=covered_until, ended=stretch.began)
        covered_until = max(covered_until, stretch.ended)
    # Once the attempt has ended, lost time, a last save or the stop fills the rest.
    is_running = attempt.end is None
    if is_running and moments.training_ended - covered_until > shortest_gap_s:
        yield Span(phase=Phase.OTHER, began=covered_until, ended=moments.training_ended)


def _save_spans(attempt: Attempt, training_ended: float) -> Iterator[Span]:
    """Return when the training waited for saves: the beginning of each save, and the saves at a stop."""
    for event in _save_events(attempt, training_ended):
        blocked_s = _recorded_s(event, "blocked_s")
        if blocked_s:
            began = event.time - _recorded_s(event, "seconds")
            yield Span(phase=Phase.SAVE, began=began, ended=began + blocked_s)
    for event in attempt.events:
        stop_save_s = _recorded_s(event, "save_s")
        if event.kind == "stop" and stop_save_s:
            yield Span(phase=Phase.SAVE, began=event.time - stop_save_s, ended=event.time)


def _outcome(end: AttemptEnd) -> str:
    """Return how an attempt ended, in a few words."""
    if not end.kinds:
        return "ended without a record"
    if "finish" in end.kinds:
        return "finished"
    if end.cause is Cause.REQUEUED:
        return "requeued"
    if end.cause is not Cause.UNKNOWN:
        cause = str(end.cause).replace("_", " ")
        return f"{cause}, {end.continuation}" if end.continuation else cause
    if end.continuation:
        return end.continuation
    return "failed" if end.kinds[-1] == "failure" else "stopped"
