"""Divide the time of each attempt of a run into phases, from its records, and compute its goodput.

An attempt has up to five moments: its job was queued, its batch script began, its first step began, its training
ended, it ended. What the time from the first step to a save went into, rank 0 of the built-in training has recorded at
the save (``Account``); a program of the user's own has one account, which follows from its lines of metrics and its
saves. What comes after the account counts if the run goes on from there, and is lost otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from hpcddp.manage.run_metrics import AttemptLog, RunMetrics
from hpcddp.run.events import (
    Account,
    AttemptEnd,
    Event,
    NextStart,
    accounts_of,
    attempt_end,
    events_of_attempt,
    first_train_event,
    newest_saved_step,
)
from hpcddp.run.metrics import finite_number
from hpcddp.stop.reasons import Cause


class Phase(StrEnum):
    """What the time of an attempt went into."""

    QUEUE = "queue"
    """Waiting in Slurm's queue, without nodes."""
    START_UP = "start_up"
    """From the start of the batch script to the first step, or to the first record of a program of the user's own."""
    TRAINING = "training"
    """Steps that count; while an attempt runs, also its time since its last save."""
    LOST = "lost"
    """Steps that are not saved and are, or will be, repeated; a wait for ranks that have failed."""
    EVALUATION = "evaluation"
    SAVE = "save"
    """Saves for which the training waited."""
    STOP = "stop"
    """From the end of the training, or the last record of a program of the user's own, to the end of the attempt."""
    PROGRAM = "program"
    """A program of the user's own that records no steps."""
    OTHER = "other"
    """All else between the first step and the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecords:
    """What the records say of one attempt, but for the event log and the metrics.

    Args:
        began: when its batch script began, in seconds since the epoch.
        queued: when its job was queued; None if that is not known.
        submit_time: Slurm's SubmitTime of its start, renewed at every requeue.
        ranks: how many it has; None if that is not known.
        alive_times: other times at which it was alive: its records of failures and exits.
        failed_at: when its first failure was recorded; None if none was.
        failure_step: the last step that a record of a failure names.
    """

    number: int
    began: float
    queued: float | None = None
    submit_time: str | None = None
    ranks: int | None = None
    alive_times: tuple[float, ...] = ()
    failed_at: float | None = None
    failure_step: int | None = None


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
        account: its last account that counts; None without one.
        seconds: the duration of each phase; a phase that is not there took no time, or is not known.
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
    account: Account | None
    seconds: Mapping[Phase, float]

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
class Goodput:
    """Where the time on the nodes went.

    Goodput is the share of the time on the nodes that went into training steps which count, which are those that no
    later attempt has repeated or will have to repeat.

    Args:
        attempts: the times of all attempts.
        missing: which record is missing, a sentence; None if none is.
    """

    attempts: Sequence[AttemptTimes]
    missing: str | None = None

    @property
    def value(self) -> float | None:
        """The goodput, from 0 to 1; None if it is not known.

        Each attempt weighs as much as it has ranks, or all weigh the same if the ranks of one are not known.
        """
        return None if self.unknown is not None else self.share(Phase.TRAINING)

    @property
    def unknown(self) -> str | None:
        """Why the goodput is not known; None if it is."""
        if self.missing is not None:
            return self.missing
        if not self.attempts:
            return "no attempt has begun"
        for attempt in self.attempts:
            if not attempt.is_end_known:
                return f"the end of attempt {attempt.number} was not recorded"
        seconds = self.seconds
        if seconds.get(Phase.PROGRAM):
            return "the program records no steps"
        if not any(seconds.get(phase) for phase in (Phase.TRAINING, Phase.LOST)):
            return "no step was recorded"
        return None

    @property
    def seconds(self) -> dict[Phase, float]:
        """The duration of each phase over all attempts."""
        return self._weighted_sums([1.0 for _ in self.attempts])

    @property
    def device_hours(self) -> dict[Phase, float] | None:
        """The same on all devices together, in hours; None if the ranks of an attempt are not known."""
        if self._ranks is None:
            return None
        return self._weighted_sums([ranks / 3600 for ranks in self._ranks])

    @property
    def total_device_hours(self) -> float | None:
        """Hours of all devices together, without the queue; None as above, and before the first attempt."""
        if not self.attempts or self._ranks is None:
            return None
        return sum(attempt.on_nodes_s * ranks for attempt, ranks in zip(self.attempts, self._ranks, strict=True)) / 3600

    def share(self, phase: Phase) -> float:
        """Return the part of a phase in the time on the nodes: of all devices, or of the nodes if those are unknown."""
        times = self.device_hours or self.seconds
        on_nodes = sum(times.values()) - times.get(Phase.QUEUE, 0.0)
        return times.get(phase, 0.0) / on_nodes if on_nodes else 0.0

    @property
    def _ranks(self) -> list[int] | None:
        """How many ranks each attempt has; None if those of one are not known."""
        ranks = [attempt.ranks for attempt in self.attempts if attempt.ranks is not None]
        return ranks if len(ranks) == len(self.attempts) else None

    def _weighted_sums(self, weights: Sequence[float]) -> dict[Phase, float]:
        """Return the duration of each phase over all attempts, each multiplied by its weight."""
        sums: dict[Phase, float] = {}
        for weight, attempt in zip(weights, self.attempts, strict=True):
            for phase, seconds in attempt.seconds.items():
                sums[phase] = sums.get(phase, 0.0) + seconds * weight
        return {phase: sums[phase] for phase in Phase if phase in sums}


def attempt_times(
    attempts: Sequence[AttemptRecords],
    events: Sequence[Event],
    metrics: RunMetrics,
    *,
    is_alive: bool,
    is_finished: bool,
    now: float,
) -> tuple[AttemptTimes, ...]:
    """Return the time of each attempt of a run.

    Args:
        attempts: its attempts, in their order.
        is_alive: whether its newest attempt runs.
        is_finished: whether it has come to its own end.
        now: seconds since the epoch.
    """
    logs = metrics.logs([records.began for records in attempts])
    resumed_steps: list[int | None] = []
    for index, records in enumerate(attempts):
        saved_step = newest_saved_step(event for event in events if event.attempt < records.number)
        is_first_training = not any(log.steps for log in logs[:index])
        train_event = first_train_event(events, records.number)
        resumed_steps.append(_resumed_step(train_event, logs[index], saved_step, is_first_training=is_first_training))
    # The duration of a step of a program is the time between two of its lines.
    has_step_durations = any(log.first_time != log.last_time for log in logs)
    times = []
    for index, records in enumerate(attempts):
        train_event = first_train_event(events, records.number)
        next_start = None
        if index + 1 < len(attempts):
            next_attempt = attempts[index + 1]
            next_start = NextStart(time=next_attempt.began, submit_time=next_attempt.submit_time)
            # The steps after the lowest one that a later attempt went on from are repeated.
            later_steps = [step for step in resumed_steps[index + 1 :] if step is not None]
            last_counted_step = min(later_steps, default=None)
        elif is_alive or is_finished:
            last_counted_step = None
        else:
            # The newest step that was saved. A program of which no save is recorded may save by itself.
            has_saves = any(event.kind == "save" for event in events)
            is_built_in = train_event is not None and train_event.step is not None
            last_counted_step = newest_saved_step(events) if has_saves or is_built_in else None
        end = None
        if next_start is not None or not is_alive:
            last_sign = max([records.began, *records.alive_times, logs[index].last_time or 0.0])
            end = attempt_end(events, records.number, last_sign=last_sign, next_start=next_start)
        attempt = _Attempt(
            records=records,
            events=events_of_attempt(events, records.number, next_start),
            log=logs[index],
            train_event=train_event,
            has_step_durations=has_step_durations,
            resumed_from=resumed_steps[index],
            last_counted_step=last_counted_step,
            end=end,
            ended=max(now, records.began) if end is None else end.time,
        )
        times.append(attempt.times())
    return tuple(times)


def _resumed_step(
    train_event: Event | None, log: AttemptLog, saved_step: int, *, is_first_training: bool
) -> int | None:
    """Return the step that an attempt went on from; None if it did not begin to train, or recorded no step.

    Args:
        saved_step: the newest step that was saved before it.
        is_first_training: whether no attempt before it recorded a step.
    """
    if train_event is not None and train_event.step is not None:
        return train_event.step
    if not log.steps:
        return None
    first_step = log.steps[0]
    # A program may record every tenth step only: what it saved, and that a run begins at 0, is more exact.
    if saved_step < first_step and (saved_step or is_first_training):
        return saved_step
    return max(0, first_step - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    """All records of one attempt, and what the other attempts of its run say of it.

    Args:
        records: those in its directory.
        events: what it has written to the event log itself, without what a later start or submission wrote about it.
        log: its lines of metrics.
        train_event: the event with which it began to train; None if there is none.
        has_step_durations: whether the duration of a step is known in any attempt of its run.
        resumed_from: the step that it went on from; None if it did not begin to train, or recorded no step.
        last_counted_step: the last of its steps that counts; None if all count, or that is not known.
        end: how and when it ended; None while it runs.
        ended: when it ended; now for one that runs.
    """

    records: AttemptRecords
    events: Sequence[Event]
    log: AttemptLog
    train_event: Event | None
    has_step_durations: bool
    resumed_from: int | None
    last_counted_step: int | None
    end: AttemptEnd | None
    ended: float

    @property
    def is_built_in(self) -> bool:
        """Whether the built-in training ran, which records the step that it went on from."""
        return self.train_event is not None and self.train_event.step is not None

    def times(self) -> AttemptTimes:
        """Return its times."""
        began = self.records.began
        is_end_known = self.end is None or self.end.is_time_known
        seconds: dict[Phase, float] = {}
        trained = self.ended
        training_ended = self.ended
        account = None
        lost_steps = None
        first_step_began = self._first_step_began()
        if first_step_began is not None:
            # The ranks and the batch script may run on hosts whose clocks differ a little.
            trained = _within(first_step_began, began, self.ended)
            training_ended = _within(self._training_ended(), trained, self.ended)
            if is_end_known:
                lost_steps = self._count_lost_steps()
            if self.is_built_in or self.has_step_durations:
                account = self._newest_account() if self.is_built_in else self._account_of_program(trained)
                seconds = self._phases_of_training(trained, training_ended, account)
            else:
                seconds = {Phase.PROGRAM: training_ended - trained}
        if self.records.queued is not None:
            seconds[Phase.QUEUE] = max(0.0, began - self.records.queued)
        seconds[Phase.START_UP] = trained - began
        seconds[Phase.STOP] = self.ended - training_ended
        last_step = None if account is None else account.step
        if self.end is None and self.log.steps:
            last_step = max(self.log.steps)
        return AttemptTimes(
            number=self.records.number,
            began=began,
            ended=self.ended,
            is_end_known=is_end_known,
            is_running=self.end is None,
            ranks=self.records.ranks,
            resumed_from=self.resumed_from,
            last_step=last_step,
            lost_steps=lost_steps,
            outcome="running" if self.end is None else _outcome(self.end),
            account=account if self.is_built_in else None,
            seconds={phase: seconds[phase] for phase in Phase if seconds.get(phase)},
        )

    def _first_step_began(self) -> float | None:
        """Return when the first step began; None if it did not begin to train."""
        if self.train_event is not None and (self.is_built_in or not self.has_step_durations):
            return self.train_event.time
        # A program starts up until its first line; it records no other moment before.
        first_time = self.log.first_time
        if first_time is None or self.train_event is None:
            return first_time
        return max(self.train_event.time, first_time)

    def _end_of_ranks(self) -> Event | None:
        """Return the event that the ranks wrote when they finished or stopped; None if they did not."""
        return next((event for event in self.events if event.kind == "finish" or event.saved is not None), None)

    def _training_ended(self) -> float:
        """Return when the training of an attempt that began to train ended."""
        failed_at = self.records.failed_at
        if self.end is not None and self.has_step_durations and not self.is_built_in:
            # What a program does after its last record is not known; most of it is its exit.
            return failed_at or self.log.last_time or self.ended
        end_of_ranks = self._end_of_ranks()
        if end_of_ranks is not None:
            return end_of_ranks.time
        return failed_at or self.ended

    def _newest_account(self) -> Account | None:
        """Return the last account that counts of the built-in training; None without one."""
        newest = None
        for account in accounts_of(self.events):
            if self.last_counted_step is None or account.step <= self.last_counted_step:
                newest = account
        return newest

    def _account_of_program(self, trained: float) -> Account | None:
        """Return the account of a program that records its steps, at the last of its lines that counts."""
        counted = self.log.until(self.last_counted_step)
        if not counted.steps:
            return None
        time = _within(counted.last_time or trained, trained, self.ended)
        save_s = 0.0
        for event in self.events:
            if event.kind == "save" and event.time <= time:
                save_s += max(0.0, finite_number(event.facts.get("blocked_s")) or 0.0)
        save_s = min(save_s, time - trained)
        return _account(max(counted.steps), time, train_s=time - trained - save_s, save_s=save_s)

    def _phases_of_training(self, trained: float, ended: float, account: Account | None) -> dict[Phase, float]:
        """Return the duration of each phase between the first step and the end of the training."""
        account = account or _account(self.resumed_from or 0, trained)
        account_ended = _within(account.time, trained, ended)
        # The clock of the steps and that of the events differ a little.
        training_s = max(0.0, min(account.train_s, account_ended - trained - account.eval_s - account.save_s))
        seconds = {Phase.TRAINING: training_s, Phase.EVALUATION: account.eval_s, Phase.SAVE: account.save_s}
        seconds[Phase.OTHER] = max(0.0, account_ended - trained - sum(seconds.values()))
        end_of_ranks = self._end_of_ranks()
        phase_of_rest = Phase.LOST
        if self.end is None:
            phase_of_rest = Phase.TRAINING
        elif end_of_ranks is not None and end_of_ranks.step == account.step:
            # After the last step, the ranks wait until it is saved.
            phase_of_rest = Phase.SAVE
        seconds[phase_of_rest] = seconds.get(phase_of_rest, 0.0) + ended - account_ended
        return seconds

    def _count_lost_steps(self) -> int | None:
        """Return how many of its steps do not count; None if nothing is known of its steps."""
        steps = [*self.log.steps, *(event.step for event in self.events if event.step is not None)]
        if self.records.failure_step is not None:
            steps.append(self.records.failure_step)
        highest_step = max(steps, default=None)
        if highest_step is None and self.last_counted_step is None:
            return None
        if highest_step is None or self.last_counted_step is None:
            return 0
        return max(0, highest_step - self.last_counted_step)


def _account(step: int, time: float, *, train_s: float = 0.0, save_s: float = 0.0) -> Account:
    return Account(step=step, time=time, train_s=train_s, eval_s=0.0, save_s=save_s, wait_s=0.0)


def _within(value: float, lowest: float, highest: float) -> float:
    return min(max(value, lowest), highest)


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
