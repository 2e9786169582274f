"""Stop a training loop on all ranks after the same step: ``hpcddp.Stopper``, and the stopper of a run of hpcddp.

Both measure the steps and vote in the same way. They differ in where a request to stop comes from, and in how the ranks
agree: the public class and an ``entrypoint`` by an all-reduce in a group of its own, the built-in loop in the sum of
each step.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor

from hpcddp.errors import UserError
from hpcddp.run.events import append_event, newest_saved_step, read_events
from hpcddp.run.job_records import Decision, write_decision
from hpcddp.run.metrics_log import MetricsFile
from hpcddp.run.ownership import raise_if_fenced
from hpcddp.slurm.job import ask_end, slurm_job_id
from hpcddp.stop.deadline import Deadline, Durations, EndTime, KnownEnd, moved_sentence, short_lead_sentence
from hpcddp.stop.listener import LISTENER
from hpcddp.stop.reasons import Cause, ExitCode, StopReason
from hpcddp.train import distributed
from hpcddp.train.checkpoint.checkpointer import Checkpointer
from hpcddp.train.context import TrainContext
from hpcddp.train.data.workers import start_worker
from hpcddp.train.tracking.opening import Tracking

# How often rank 0 checks the deadline; each check sorts some hundred numbers.
_CHECK_EVERY_S: Final = 0.5
# Fewer steps say little about the slowest ones.
_ENOUGH_STEPS: Final = 20

REQUEUE_FILE: Final = "HPCDDP_REQUEUE_FILE"
"""The environment variable with the path of a file whose presence asks for a requeue of the job."""

# hpcddp sets the first one for the commands that it runs.
_END_TIMES: Final = ("HPCDDP_END_TIME", "SLURM_JOB_END_TIME")
_START_TIME: Final = "SLURM_JOB_START_TIME"


class StopperError(UserError):
    """The stopper is used in a way in which it cannot work."""

    kind = "stopper"


class Stopper:
    """Tells a loop when to stop: on every rank after the same step, even if only one rank got the signal.

    Create it as early as possible, in the main thread: from then on SIGTERM (the job must leave its nodes), SIGUSR2
    (the time limit is near) and SIGINT (Ctrl-C) no longer end the process, but request a stop. Call ``should_stop``
    once after every step, on every rank. The ranks agree by a small all-reduce in a process group of its own, which is
    read one step later, so that no step waits for it::

        stopper = hpcddp.Stopper()
        for step in range(checkpointer.restore().step, 1000):
            train_one_step(step)
            if stopper.should_stop():
                checkpointer.save(step + 1)
                checkpointer.wait()
                stopper.exit()

    It works with the default process group of any backend, and without one in a single process. Rank 0 also compares
    the end of the job with its clock. It asks Slurm for it, every three minutes and before it stops; until the first
    answer the end is ``HPCDDP_END_TIME`` (in a command of hpcddp) or ``SLURM_JOB_END_TIME`` (Slurm 23.02 and later).

    Args:
        save_s: how long a save takes, in seconds; None = 2 % of the job's time, a minute at most.
        environment: environment variables of the job.

    Raises:
        StopperError: this is not the main thread.
        NoGroupError: several processes have been started, and no process group is open when the ranks must agree.
    """

    def __init__(self, *, save_s: float | None = None, environment: Mapping[str, str] = os.environ) -> None:
        self._environment = environment
        self._save_s = save_s
        self._now = time.time
        self._monotonic = time.monotonic
        self._deadline = _deadline_in(environment)
        self._end = _end_in(environment, self._deadline)
        self._requested = False
        self._reason = StopReason.NONE
        self._steps = Durations()
        self._last_call: float | None = None
        # The last check of the clock, and its result.
        self._checked_at = -math.inf
        self._end_is_near = False
        # The agreement that the last call has started: the tensor that holds its result when the work is done.
        self._group: dist.ProcessGroup | None = None
        self._pending: tuple[Tensor, dist.Work] | None = None
        self._listen()

    @property
    def reason(self) -> str:
        """Why the ranks stop, one of ``requested``, ``deadline``, ``warned``, ``terminated`` or ``interrupted``.

        ``none`` while they do not stop.
        """
        return self._reason.word

    def request(self) -> None:
        """Request a stop from this rank; all ranks agree on it one step later."""
        self._requested = True

    def should_stop(self) -> bool:
        """Return whether to stop now: the same answer on every rank. A collective, called once after every step.

        Raises:
            NoGroupError: several processes have been started, and no process group is open.
        """
        if not self._reason:
            self._measure()
            distributed.refuse_without_group(self._environment)
            self._reason = self._agree(self.vote())
        return bool(self._reason)

    def vote(self) -> StopReason:
        """Return why this rank alone wants to stop: a signal, ``request``, or on rank 0 the clock."""
        reason = self._signal_reason()
        if reason is not StopReason.NONE:
            return reason
        if self._requested:
            return StopReason.REQUESTED
        if distributed.rank() == 0 and self._is_near_the_end():
            return StopReason.DEADLINE
        return StopReason.NONE

    @staticmethod
    def worker_init(worker: int) -> None:
        """Make a loader process ignore the signals and end with this process: ``DataLoader(worker_init_fn=...)``.

        Slurm may send signals to every process of a job. Without this, a signal kills loader processes before the loop
        has saved.
        """
        start_worker(worker)

    def exit(self) -> NoReturn:
        """End the process on all ranks with exit code 75: the state is saved, and the job asks to be requeued.

        Neither ``finally`` blocks nor ``atexit`` functions run. Save first, and wait until the checkpoint is written.
        """
        requeue_file = self._environment.get(REQUEUE_FILE)
        if distributed.rank() == 0 and requeue_file:
            Path(requeue_file).touch(mode=0o600)
        if dist.is_initialized():
            # The launcher may end the other ranks as soon as one has exited.
            dist.barrier(group=self._group)
        sys.stdout.flush()
        sys.stderr.flush()
        # Freeing DDP can deadlock after another rank has exited.
        os._exit(ExitCode.STOPPED)

    def _listen(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise StopperError(
                "hpcddp.Stopper is made in another thread than the main one, which alone may set signal handlers; make "
                "it in the main thread"
            )
        LISTENER.install()

    def _signal_reason(self) -> StopReason:
        return LISTENER.reason()

    def _measure(self) -> None:
        """Take the time between two calls as the duration of a step; the first step, which may compile, is left out."""
        now = self._monotonic()
        if self._last_call is not None:
            self._steps.add(now - self._last_call)
        self._last_call = now

    def _is_near_the_end(self) -> bool:
        now = self._monotonic()
        if now - self._checked_at >= _CHECK_EVERY_S:
            self._checked_at = now
            step_s = self._steps.p95()
            save_s = self._p95_of_saves()
            need_s = replace(self._deadline, end_time=self._end.end_time).need_s(step_s, save_s)
            left_s = self._end.left_s(self._now(), lead_s=need_s, pause_s=step_s or 0.0)
            self._end_is_near = left_s <= need_s
            self._warn(step_s, save_s)
        return self._end_is_near

    def _p95_of_saves(self) -> float | None:
        return self._save_s

    def _warn(self, step_s: float | None, save_s: float | None) -> None:
        """Warn if the signal lead is too short for the measured durations; only ``RunStopper`` knows the job."""

    def _agree(self, vote: StopReason) -> StopReason:
        """Return the result of the agreement that the last call started, and start the next one.

        A single process has nobody to agree with.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return vote
        if self._group is None:
            # A separate group keeps these collectives independent of the loop's, and on the CPU.
            self._group = cast("dist.ProcessGroup", dist.new_group(backend="gloo"))
        if self._pending is not None:
            largest_vote, work = self._pending
            work.wait()
            agreed = StopReason(int(largest_vote.item()))
            if agreed is not StopReason.NONE:
                return agreed
        largest_vote = torch.tensor(int(vote))
        work = dist.all_reduce(largest_vote, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._pending = (largest_vote, work)
        return StopReason.NONE


def agree_on_stop(vote: StopReason, device: torch.device) -> StopReason:
    """Return the largest of the ranks' reasons to stop; a collective.

    Args:
        device: where the default process group reduces tensors.
    """
    largest_vote = torch.tensor(int(vote), device=device)
    dist.all_reduce(largest_vote, op=dist.ReduceOp.MAX)
    return StopReason(int(largest_vote.item()))


class RunStopper(Stopper):
    """The stopper of a run of hpcddp: the built-in training, or an ``entrypoint``.

    The context gives it the signals and the end of the job. It knows how long saves take, and records where and why the
    ranks have stopped.

    Args:
        context: the run and this rank.
        checkpointer: its past saves show how long a save takes; None = unknown.
        metrics: flushed by ``exit``; None on other ranks than 0.
        tracking: stopped by ``exit``.
    """

    def __init__(
        self,
        context: TrainContext,
        checkpointer: Checkpointer | None = None,
        *,
        metrics: MetricsFile | None = None,
        tracking: Tracking | None = None,
    ) -> None:
        super().__init__(environment={})
        self._context = context
        self.checkpointer = checkpointer
        self._metrics = metrics
        self._tracking = tracking
        self._now = context.now
        self._monotonic = context.monotonic
        self._deadline = context.deadline
        end = KnownEnd(end_time=context.deadline.end_time, time=context.deadline.start_time)
        self._end = EndTime(end, context.ask_end, on_move=lambda end: context.print_on_rank_0(moved_sentence(end)))
        self._first_step_is_over = False
        self._has_warned = False

    @property
    def agreed(self) -> StopReason:
        """Why all ranks stop; ``NONE`` while they do not."""
        return self._reason

    def set_agreed(self, reason: StopReason) -> None:
        """Set the reason on which the ranks have agreed in the sum of a step; of several reasons the largest counts."""
        self._reason = max(self._reason, reason)

    def add_step(self, seconds: float) -> None:
        """Add the duration of a step; the first one of an attempt is left out, because it may compile."""
        if self._first_step_is_over:
            self._steps.add(seconds)
        self._first_step_is_over = True

    def exit(self) -> NoReturn:
        """Write the decision, flush the metrics and stop the trackers; then exit like ``Stopper.exit``."""
        if self._metrics is not None:
            self._metrics.flush()
            events = read_events(self._context.run.events)
            saves = [event for event in events if event.kind == "save" and event.step]
            saved = any(event.attempt == self._context.attempt for event in saves)
            self.record(step=newest_saved_step(saves), saved=saved, save_s=None)
        if self._tracking is not None:
            self._tracking.stop()
        super().exit()

    def record(self, *, step: int, saved: bool, save_s: float | None) -> None:
        """Write the stop to the event log and to ``decision.json``, on rank 0; disk errors are warnings.

        Args:
            step: optimizer steps done.
            saved: whether a checkpoint of this step exists.
            save_s: how long its save took, in seconds; 0 if it existed before, None if that is not known.

        Raises:
            FencedError: another attempt owns the run.
        """
        context = self._context
        if not context.is_main:
            return
        # A loop of the user's own may exit before the ranks have agreed.
        reason = self._reason or StopReason.REQUESTED
        if reason is StopReason.DEADLINE:
            cause: str | None = Cause.TIME_LIMIT.value
        else:
            cause = context.cause()
        raise_if_fenced(context.run, context.attempt)
        decision = Decision(
            attempt=context.attempt,
            step=step,
            reason=reason,
            cause=cause,
            saved=saved,
            save_s=round(save_s or 0.0, 3),
            time=context.now(),
        )
        with self._disk_errors_as_warnings(context.run.events):
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
        with self._disk_errors_as_warnings(attempt.decision):
            write_decision(attempt, decision)
        if save_s is not None:
            saved_text = "not saved"
            if saved:
                saved_text = f"saved in {save_s:.1f} s"
            context.print_on_rank_0(
                f"all ranks stopped after step {step} ({reason.word}, cause {cause or 'unknown'}), {saved_text}"
            )

    def _listen(self) -> None:
        """Do nothing: the task has installed the listener, and the context passes on what it receives."""

    def _signal_reason(self) -> StopReason:
        """Return what the task's own function says: ``_begin_and_get_stop_reason`` of ``hpcddp.task.work``."""
        return self._context.stop_reason()

    def _p95_of_saves(self) -> float | None:
        saves = Durations()
        if self.checkpointer is not None:
            for seconds in self.checkpointer.seconds:
                saves.add(seconds)
        return saves.p95()

    def _warn(self, step_s: float | None, save_s: float | None) -> None:
        """Warn once if ``requeue.signal_lead`` is too short for a step and a save."""
        if self._has_warned or len(self._steps) < _ENOUGH_STEPS:
            return
        context = self._context
        lead = context.spec.signal_lead
        lead_s = None if lead is None else lead.total_seconds()
        sentence = short_lead_sentence(lead_s, step_s, save_s)
        if sentence is None:
            return
        self._has_warned = True
        context.print_on_rank_0(f"warning: {sentence}")
        with self._disk_errors_as_warnings(context.run.events):
            append_event(
                context.run.events, kind="warning", time=context.now(), attempt=context.attempt, reason=sentence
            )

    @contextlib.contextmanager
    def _disk_errors_as_warnings(self, path: Path) -> Iterator[None]:
        """Turn an OSError of the block into a warning: the training must stop in the same way with a full disk."""
        try:
            yield
        except OSError as error:
            self._context.print_on_rank_0(f"warning: {path} cannot be written ({error})")


def _deadline_in(environment: Mapping[str, str]) -> Deadline:
    end_time = None
    for name in _END_TIMES:
        if name in environment:
            end_time = _seconds(environment[name])
            break
    start_time = _seconds(environment.get(_START_TIME, ""))
    if start_time is None:
        start_time = time.time()
    return Deadline(end_time=end_time, start_time=start_time)


def _seconds(text: str) -> float | None:
    """Return the value of a variable; None if it is no whole number."""
    return float(text) if text.isdecimal() else None


def _end_in(environment: Mapping[str, str], deadline: Deadline) -> EndTime:
    # Slurm wrote the variable when the job began, which may be long ago.
    end = KnownEnd(end_time=deadline.end_time, time=0.0)
    job_id = slurm_job_id(environment)
    if job_id is None:
        return EndTime(end)
    return EndTime(end, lambda: ask_end(job_id))
