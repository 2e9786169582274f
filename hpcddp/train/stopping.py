"""Request a stop of the built-in training on this rank, and record the stop that all ranks agreed on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from hpcddp.run.events import append_event
from hpcddp.run.job_records import Decision, write_decision
from hpcddp.run.ownership import raise_if_fenced
from hpcddp.stop.deadline import Durations, short_lead_sentence
from hpcddp.stop.reasons import Cause, StopReason
from hpcddp.train.checkpoint.save import Saver
from hpcddp.train.checkpoint.writer import SaveOutcome
from hpcddp.train.context import TrainContext
from hpcddp.train.errors import StoppedError

# How often rank 0 checks the deadline; each check sorts some hundred numbers.
_CHECK_EVERY_S: Final = 0.5
# Fewer steps say little about the slowest ones.
_ENOUGH_STEPS: Final = 20


class Stopping:
    """Decides whether this rank requests a stop, and records the stop of all ranks.

    Args:
        context: the run and this rank.
        saver: its past saves tell how long a save takes.
    """

    def __init__(self, context: TrainContext, saver: Saver) -> None:
        self._context, self._saver = context, saver
        self._steps = Durations()
        self._first_step_seen = self._warned = self._is_near = False
        self._checked_at = float("-inf")

    def add_step(self, seconds: float) -> None:
        """Add the duration of a step; the first one of an attempt is left out, because it may compile."""
        if self._first_step_seen:
            self._steps.add(seconds)
        self._first_step_seen = True

    def vote(self) -> StopReason:
        """Return why this rank wants to stop: what its process was told, or its clock. Only rank 0 looks at its own."""
        told = self._context.should_stop()
        if told or not self._context.is_main:
            return told
        return StopReason.DEADLINE if self._deadline_is_near() else StopReason.NONE

    def _deadline_is_near(self) -> bool:
        now = self._context.monotonic()
        if now - self._checked_at >= _CHECK_EVERY_S:
            self._checked_at = now
            step_s, save_s = self._steps.p95(), self._p95_of_saves()
            deadline = self._context.deadline
            self._is_near = deadline.is_near(self._context.now(), step_s=step_s, save_s=save_s)
            self._warn_once(step_s, save_s)
        return self._is_near

    def _p95_of_saves(self) -> float | None:
        saves = Durations()
        for seconds in self._saver.seconds:
            saves.add(seconds)
        return saves.p95()

    def _warn_once(self, step_s: float | None, save_s: float | None) -> None:
        context = self._context
        if self._warned or context.deadline.end_time is None or len(self._steps) < _ENOUGH_STEPS:
            return
        lead = context.spec.signal_lead
        sentence = short_lead_sentence(None if lead is None else lead.total_seconds(), step_s, save_s)
        if sentence is not None:
            self._warned = True
            context.tell(f"warning: {sentence}")
            with _disk_errors_as_warnings(context, context.run.events):
                append_event(
                    context.run.events, kind="warning", time=context.now(), attempt=context.attempt, reason=sentence
                )

    def leave(
        self, reason: StopReason, *, step: int, outcome: SaveOutcome | None, has_checkpoint: bool
    ) -> StoppedError:
        """Record the decision on rank 0, and return the error that ends the loop on every rank.

        Args:
            reason: the reason that the ranks agreed on.
            step: optimizer steps done.
            outcome: result of the save of this step; None on other ranks than 0, and if no save was needed.
            has_checkpoint: whether a checkpoint of this step existed before.

        Raises:
            FencedError: another attempt owns the run.
        """
        saved = has_checkpoint or (outcome is not None and outcome.saved)
        if self._context.is_main:
            self._write(reason, step=step, saved=saved, save_s=outcome.seconds if outcome else 0.0)
        told = "saved" if saved or not self._context.is_main else "not saved"
        return StoppedError(
            f"all ranks stopped after step {step} ({reason.word}), and the state is {told}",
            step=step,
            reason=reason,
            outcome=outcome,
        )

    def _write(self, reason: StopReason, *, step: int, saved: bool, save_s: float) -> None:
        context = self._context
        cause = Cause.TIME_LIMIT.value if reason is StopReason.DEADLINE else context.cause()
        raise_if_fenced(context.run, context.attempt)
        decision = Decision(
            attempt=context.attempt,
            step=step,
            reason=reason,
            cause=cause,
            saved=saved,
            save_s=round(save_s, 3),
            time=context.now(),
        )
        record_decision(context, decision)
        how = f"saved in {save_s:.1f} s" if saved else "not saved"
        context.tell(f"all ranks stopped after step {step} ({reason.word}, cause {cause or 'unknown'}), {how}")


def record_decision(context: TrainContext, decision: Decision) -> None:
    """Write a decision to the event log and to the attempt's directory, on rank 0; disk errors are warnings."""
    with _disk_errors_as_warnings(context, context.run.events):
        append_event(
            context.run.events,
            kind="stop",
            time=decision.time,
            attempt=decision.attempt,
            step=decision.step,
            reason=decision.reason.word,
            cause=decision.cause,
            saved=decision.saved,
            save_s=decision.save_s,
        )
    attempt = context.run.attempt(context.attempt)
    with _disk_errors_as_warnings(context, attempt.decision):
        write_decision(attempt, decision)


@contextlib.contextmanager
def _disk_errors_as_warnings(context: TrainContext, path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a warning: the training must stop in the same way with a full disk."""
    try:
        yield
    except OSError as error:
        context.tell(f"warning: {path} cannot be written ({error})")
