"""Divide the time of each attempt of a run into phases, from its records: pure functions of values.

Goodput is the share of the time on the nodes that went into training steps which count, which are those that no later
attempt has repeated or will have to repeat.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from hpcddp.manage.run_metrics import AttemptStart, Stretch
from hpcddp.run.attempt_end import AttemptEnd, NextStart, attempt_end, own_events
from hpcddp.run.events import Event, newest_saved_step
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
    """Steps that are not saved and are, or will be, repeated; a hang; a wait for ranks that have failed."""
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
class AttemptRecords:
    """What the records say of one attempt.

    Args:
        number: its number.
        began: when its batch script began, in seconds since the epoch.
        queued: when its job was queued; None if that is not known.
        submit_time: Slurm's SubmitTime of its start, renewed at every requeue.
        ranks: its ranks, or None if they are not known.
        seen: other times at which it was alive: its records of failures and exits.
        failed_at: when its first failure was recorded; None if none was.
        step: the last step that these records name.
    """

    number: int
    began: float
    queued: float | None = None
    submit_time: str | None = None
    ranks: int | None = None
    seen: tuple[float, ...] = ()
    failed_at: float | None = None
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A part of the timeline.

    Args:
        phase: what happened.
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
        number: its number.
        began: when its batch script began, in seconds since the epoch.
        ended: when it ended; now for one that runs.
        is_end_known: whether its end was recorded.
        is_running: whether it runs.
        ranks: its ranks, or None.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecords:
    """What the records say of a run.

    Args:
        attempts: its attempts, in their order.
        events: its event log.
        stretches: the lines of metrics of each attempt.
        is_alive: whether its newest attempt runs.
        is_finished: whether it has come to its own end.
        now: seconds since the epoch.
    """

    attempts: Sequence[AttemptRecords]
    events: Sequence[Event]
    stretches: Sequence[Sequence[Stretch]] = ()
    is_alive: bool = False
    is_finished: bool = False
    now: float = 0.0


def attempt_times(records: RunRecords) -> tuple[AttemptTimes, ...]:
    """Return the time of each attempt of a run."""
    has_durations = any(stretch.step_s for stretches in records.stretches for stretch in stretches)
    parts = [
        _Part(
            records=records,
            place=place,
            events=[event for event in records.events if event.attempt == attempt.number],
            stretches=records.stretches[place] if records.stretches else (),
            has_durations=has_durations,
        )
        for place, attempt in enumerate(records.attempts)
    ]
    limits = [part.resumed_from for part in parts]
    found = []
    for place, part in enumerate(parts):
        later = [limit for limit in limits[place + 1 :] if limit is not None]
        found.append(part.result(min([*later, *part.kept_at_end], default=None)))
    return tuple(found)


def attempt_start(attempt: AttemptRecords, events: Sequence[Event]) -> AttemptStart:
    """Return when an attempt began, and when its first step began.

    A built-in training records that with the step; a program of the user's own only records when it was started.
    """
    trains = (event for event in events if event.kind == "train" and event.attempt == attempt.number)
    train = next(trains, None)
    if train is None or train.step is None:
        return AttemptStart(began=attempt.began)
    return AttemptStart(began=attempt.began, trained=train.time)


@dataclass(frozen=True, kw_only=True)
class _Part:
    """One attempt among the others.

    Args:
        records: the run.
        place: its place among the attempts.
        events: its own events.
        stretches: its lines of metrics.
        has_durations: whether the duration of any step of the run is known.
    """

    records: RunRecords
    place: int
    events: Sequence[Event]
    stretches: Sequence[Stretch]
    has_durations: bool

    @property
    def _attempt(self) -> AttemptRecords:
        return self.records.attempts[self.place]

    @property
    def _next(self) -> AttemptRecords | None:
        return next(iter(self.records.attempts[self.place + 1 : self.place + 2]), None)

    def _first(self, kind: str) -> Event | None:
        return next((event for event in self.events if event.kind == kind), None)

    @property
    def _trained_from(self) -> int | None:
        """The step that a built-in training went on from; None in a program of the user's own."""
        train = self._first("train")
        return None if train is None else train.step

    @property
    def resumed_from(self) -> int | None:
        """The step that it went on from: the last one of attempts before that counts."""
        if self._trained_from is not None or not self.stretches:
            return self._trained_from
        first = self.stretches[0].first_step
        saved = newest_saved_step(event for event in self.records.events if event.attempt < self._attempt.number)
        # A program may record every tenth step only: what it saved, and that a run begins at 0, is more exact.
        if saved < first and (saved or not any(self.records.stretches[: self.place])):
            return saved
        return max(0, first - 1)

    @property
    def kept_at_end(self) -> list[int]:
        """The last step that counts in the last attempt of a run that has ended before its work was done."""
        records = self.records
        if self._next is not None or records.is_alive or records.is_finished:
            return []
        saved = any(event.kind == "save" for event in records.events)
        return [newest_saved_step(records.events)] if saved or self._trained_from is not None else []

    @property
    def _is_running(self) -> bool:
        return self._next is None and self.records.is_alive

    @property
    def _next_start(self) -> NextStart | None:
        if self._next is None:
            return None
        return NextStart(time=self._next.began, submit_time=self._next.submit_time)

    @property
    def _own_events(self) -> list[Event]:
        return own_events(self.events, self._attempt.number, self._next_start)

    def _end(self) -> AttemptEnd:
        line_times = [stretch.ended for stretch in self.stretches[-1:]]
        return attempt_end(
            self.events,
            self._attempt.number,
            last_sign=max([self._attempt.began, *self._attempt.seen, *line_times]),
            next_start=self._next_start,
        )

    def _reached(self) -> int | None:
        lines = [stretch.highest_step for stretch in self.stretches]
        steps = [event.step for event in self._own_events if event.step is not None]
        steps += [] if self._attempt.step is None else [self._attempt.step]
        return max([*steps, *lines], default=None)

    def result(self, limit: int | None) -> AttemptTimes:
        """Return its times.

        Args:
            limit: the last of its steps that counts; None if all count, or that is not known.
        """
        attempt = self._attempt
        end = self._end()
        ended, is_end_known = end.time, end.is_time_known
        if self._is_running:
            ended, is_end_known = max(self.records.now, attempt.began), True
        counted = list(self.stretches)
        if limit is not None:
            parts = (stretch.until(limit) for stretch in self.stretches)
            counted = [part for part in parts if part is not None]
        began = self._trained_at()
        seconds: dict[Phase, float] = {}
        if attempt.queued is not None:
            seconds[Phase.QUEUE] = max(0.0, attempt.began - attempt.queued)
        trained = ended if began is None else min(max(began, attempt.began), ended)
        seconds[Phase.START_UP] = trained - attempt.began
        reached = self._reached()
        lost_steps: int | None = None
        training_ended = trained
        if began is not None:
            training_ended = min(max(self._training_end(ended), trained), ended)
            seconds[Phase.STOP] = ended - training_ended
            if limit is not None or reached is not None:
                lost_steps = 0 if limit is None or reached is None else max(0, reached - limit)
            is_lost = bool(lost_steps) or (self._is_recording_program and attempt.failed_at is not None)
            seconds.update(self._body(training_ended - trained, training_ended, counted, is_lost=is_lost))
        return AttemptTimes(
            number=attempt.number,
            began=attempt.began,
            ended=ended,
            is_end_known=is_end_known,
            is_running=self._is_running,
            ranks=attempt.ranks,
            resumed_from=self.resumed_from,
            last_step=max((stretch.highest_step for stretch in counted), default=None),
            lost_steps=lost_steps if is_end_known else None,
            outcome="running" if self._is_running else _outcome(end),
            seconds={phase: seconds[phase] for phase in Phase if seconds.get(phase)},
            spans=tuple(self._spans(trained, training_ended, ended, counted, seconds)),
        )

    def _trained_at(self) -> float | None:
        """Return when it began to train; None if it did not."""
        train = self._first("train")
        if train is not None and not self._is_recording_program:
            return train.time
        started = -math.inf if train is None else train.time
        return next((max(started, stretch.began) for stretch in self.stretches if stretch.began > -math.inf), None)

    @property
    def _is_recording_program(self) -> bool:
        """Whether it is a program of the user's own, in a run whose steps are known."""
        return self._trained_from is None and self.has_durations

    def _training_end(self, ended: float) -> float:
        stop = next((event for event in self._own_events if event.kind == "stop" and event.saved is not None), None)
        if stop is not None:
            return stop.time
        if self._is_recording_program and not self._is_running and self._attempt.failed_at is None:
            # What a program does after its last record is not known; most of it is its exit.
            return self.stretches[-1].ended if self.stretches else ended
        finish = next((event for event in self._own_events if event.kind == "finish"), None)
        if finish is not None:
            return finish.time
        return ended if self._attempt.failed_at is None else self._attempt.failed_at

    def _saves(self, training_ended: float) -> list[Event]:
        """Return the saves of the training; those of a program after its last record are a part of its end."""
        saves = [event for event in self._own_events if event.kind == "save"]
        if not self._is_recording_program:
            return saves
        return [event for event in saves if event.time - _fact(event, "seconds") < training_ended]

    def _saved_s(self, training_ended: float) -> float:
        """Return how long the training waited for saves."""
        own = self._own_events
        stop = next((event for event in own if event.kind == "stop" and event.saved is not None), None)
        last = max((event.step or 0 for event in own if event.kind == "finish"), default=0)
        total = 0.0 if stop is None else _fact(stop, "save_s")
        for event in self._saves(training_ended):
            if not (stop is not None and event.step == stop.step and _fact(stop, "save_s")):
                # After the last step nothing else is left to do meanwhile.
                total += _fact(event, "seconds" if last and event.step == last else "blocked_s")
        return total

    def _body(
        self, length: float, training_ended: float, counted: Sequence[Stretch], *, is_lost: bool
    ) -> dict[Phase, float]:
        """Return what the time from the first step to the last went into.

        Args:
            length: that time, in seconds.
            training_ended: when it was over.
            counted: the lines that count.
            is_lost: whether steps after them do not count.
        """
        if self._trained_from is None and not self.has_durations:
            return {Phase.PROGRAM: length}
        training = sum(stretch.step_s for stretch in counted)
        evaluation = sum(stretch.eval_s for stretch in counted)
        save = min(self._saved_s(training_ended), length)
        lost = 0.0
        if is_lost:
            stop_save = sum(_fact(event, "save_s") for event in self._own_events if event.kind == "stop")
            last = counted[-1].ended if counted else training_ended - length
            after = counted[-1].eval_s if counted and counted[-1].lines == 1 else 0.0
            kept = max((stretch.highest_step for stretch in counted), default=math.inf)
            after += sum(_fact(event, "blocked_s") for event in self._own_events if event.step == kept)
            lost = min(max(0.0, training_ended - max(last, training_ended - length) - after - stop_save), length)
        other = length - training - evaluation - save - lost
        # The clock of the steps and that of the events differ a little.
        training = training if other >= 0 else max(0.0, training + other)
        return {
            Phase.TRAINING: training,
            Phase.LOST: lost,
            Phase.EVALUATION: evaluation,
            Phase.SAVE: save,
            Phase.OTHER: max(0.0, other),
        }

    def _spans(
        self,
        trained: float,
        training_ended: float,
        ended: float,
        counted: Sequence[Stretch],
        seconds: Mapping[Phase, float],
    ) -> Iterator[Span]:
        attempt = self._attempt
        if attempt.queued is not None:
            yield Span(phase=Phase.QUEUE, began=min(attempt.queued, attempt.began), ended=attempt.began)
        yield Span(phase=Phase.START_UP, began=attempt.began, ended=trained)
        if training_ended > trained:
            body = Phase.PROGRAM if seconds.get(Phase.PROGRAM) else Phase.TRAINING
            yield Span(phase=body, began=trained, ended=training_ended)
            if body is Phase.TRAINING:
                yield from self._gaps(trained, training_ended, counted, _SHOWN_GAP * (ended - attempt.began))
            if seconds.get(Phase.LOST):
                yield Span(phase=Phase.LOST, began=training_ended - seconds[Phase.LOST], ended=training_ended)
            for event in self._saves(training_ended):
                if _fact(event, "blocked_s"):
                    began = event.time - _fact(event, "seconds")
                    yield Span(phase=Phase.SAVE, began=began, ended=began + _fact(event, "blocked_s"))
            for event in self._own_events:
                if event.kind == "stop" and _fact(event, "save_s"):
                    yield Span(phase=Phase.SAVE, began=event.time - _fact(event, "save_s"), ended=event.time)
        yield Span(phase=Phase.STOP, began=training_ended, ended=ended)

    def _gaps(self, began: float, training_ended: float, counted: Sequence[Stretch], shortest: float) -> Iterator[Span]:
        """Return the evaluations, and what is longer than ``shortest`` seconds and neither in them nor in steps."""
        for stretch in counted:
            if stretch.eval_s and stretch.lines == 1:
                # No time is known before the first line that has one.
                began = max(began, stretch.ended)
                evaluated = began + stretch.eval_s
                yield Span(phase=Phase.EVALUATION, began=began, ended=min(evaluated, training_ended))
                began = evaluated
            elif stretch.began - began > shortest:
                yield Span(phase=Phase.OTHER, began=began, ended=stretch.began)
            began = max(began, stretch.ended)
        if self._is_running and training_ended - began > shortest:
            yield Span(phase=Phase.OTHER, began=began, ended=training_ended)


def _outcome(end: AttemptEnd) -> str:
    """Return how an attempt ended, in a few words."""
    if not end.kinds:
        return "ended without a record"
    if "finish" in end.kinds:
        return "finished"
    if end.cause is Cause.REQUEUED:
        return str(end.cause)
    if end.cause is not Cause.UNKNOWN:
        cause = str(end.cause).replace("_", " ")
        return f"{cause}, requeued" if end.is_requeued else cause
    if end.is_requeued:
        return "requeued"
    return "failed" if end.kinds[-1] == "failure" else "stopped"


def _fact(event: Event, name: str) -> float:
    value = event.facts.get(name)
    is_duration = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
    return float(value) if is_duration and value is not None else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Where the time on the nodes went.

    Args:
        attempts: the times of all attempts.
        missing: which record is missing, a sentence; None if none is.
    """

    attempts: Sequence[AttemptTimes]
    missing: str | None = None

    @property
    def seconds(self) -> dict[Phase, float]:
        """The duration of each phase over all attempts."""
        return self._sum(lambda _: 1.0)

    @property
    def device_hours(self) -> dict[Phase, float] | None:
        """The same on all devices together, in hours; None if the ranks of an attempt are not known."""
        if any(attempt.ranks is None for attempt in self.attempts):
            return None
        return self._sum(lambda attempt: (attempt.ranks or 0) / 3600)

    @property
    def total_device_hours(self) -> float | None:
        """Hours of all devices together, without the queue; None as above, and before the first attempt."""
        if not self.attempts or any(attempt.ranks is None for attempt in self.attempts):
            return None
        return sum(attempt.on_nodes_s * (attempt.ranks or 0) for attempt in self.attempts) / 3600

    @property
    def unknown(self) -> str | None:
        """Why the goodput is not known; None if it is."""
        if self.missing is not None:
            return self.missing
        if not self.attempts:
            return "no attempt has begun"
        endless = [attempt.number for attempt in self.attempts if not attempt.is_end_known]
        if endless:
            return f"the end of attempt {endless[0]} was not recorded"
        if self.seconds.get(Phase.PROGRAM):
            return "the program records no steps"
        if not any(attempt.seconds.get(phase) for attempt in self.attempts for phase in (Phase.TRAINING, Phase.LOST)):
            return "no step was recorded"
        return None

    @property
    def value(self) -> float | None:
        """The goodput, from 0 to 1; None if it is not known."""
        if self.unknown is not None:
            return None
        weights = [attempt.ranks or 0 for attempt in self.attempts]
        if any(attempt.ranks is None for attempt in self.attempts):
            weights = [1 for _ in self.attempts]
        total = sum(weight * attempt.on_nodes_s for weight, attempt in zip(weights, self.attempts, strict=True))
        useful = sum(
            weight * attempt.seconds.get(Phase.TRAINING, 0.0)
            for weight, attempt in zip(weights, self.attempts, strict=True)
        )
        return useful / total if total > 0 else None

    def _sum(self, weight: Callable[[AttemptTimes], float]) -> dict[Phase, float]:
        sums: dict[Phase, float] = {}
        for attempt in self.attempts:
            for phase, seconds in attempt.seconds.items():
                sums[phase] = sums.get(phase, 0.0) + seconds * weight(attempt)
        return {phase: sums[phase] for phase in Phase if phase in sums}
