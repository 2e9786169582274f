"""``hpcddp.Stopper``: stop the user's own training loop on all ranks after the same step."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor

from hpcddp.errors import UserError
from hpcddp.stop.deadline import Deadline, Durations
from hpcddp.stop.listener import LISTENER, SignalListener
from hpcddp.stop.reasons import ExitCode, StopReason
from hpcddp.train import distributed
from hpcddp.train.data.workers import start_worker

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

    It works with the default process group of any backend, and without one in a single process. If the end of the job
    is known (``SLURM_JOB_END_TIME``, Slurm 23.02 and later), rank 0 also compares it with its clock.

    Args:
        save_s: how long a save takes, in seconds; None = 2 % of the job's time, a minute at most.
        environment: environment variables of the job.

    Raises:
        StopperError: this is not the main thread.
        NoGroupError: several processes have been started, and no process group is open when the ranks must agree.
    """

    def __init__(self, *, save_s: float | None = None, environment: Mapping[str, str] = os.environ) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise StopperError(
                "hpcddp.Stopper is made in another thread than the main one, which alone may set signal handlers; make "
                "it in the main thread"
            )
        self._environment, self._save_s = environment, save_s
        self._deadline = _deadline_in(environment)
        self._listener: SignalListener = LISTENER
        self._listener.install()
        self._group: dist.ProcessGroup | None = None
        self._pending: tuple[Tensor, dist.Work] | None = None
        self._requested = False
        self._steps = Durations()
        self._last_call: float | None = None
        self._reason = StopReason.NONE

    @property
    def reason(self) -> str:
        """Why the ranks stop: ``requested``, ``deadline``, ``warned``, ``terminated`` or ``interrupted``.

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
        if self._reason is not StopReason.NONE:
            return True
        self._measure()
        distributed.refuse_without_group(self._environment)
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._reason = self._agree(self._vote())
        else:
            self._reason = self._vote()
        return self._reason is not StopReason.NONE

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
        if distributed.rank() == 0 and (path := self._environment.get(REQUEUE_FILE)):
            Path(path).touch(mode=0o600)
        if dist.is_initialized():
            # The launcher may end the other ranks as soon as one has exited.
            dist.barrier(group=self._group)
        sys.stdout.flush()
        sys.stderr.flush()
        # Freeing DDP can deadlock after another rank has exited.
        os._exit(ExitCode.STOPPED)

    def _measure(self) -> None:
        now = time.monotonic()
        if self._last_call is not None:
            self._steps.add(now - self._last_call)
        self._last_call = now

    def _vote(self) -> StopReason:
        reason = self._listener.reason()
        if reason is StopReason.NONE and self._requested:
            reason = StopReason.REQUESTED
        if reason is StopReason.NONE and distributed.rank() == 0 and self._is_near_the_end():
            reason = StopReason.DEADLINE
        return reason

    def _is_near_the_end(self) -> bool:
        if self._deadline.end_time is None:
            return False
        return self._deadline.is_near(time.time(), step_s=self._steps.p95(), save_s=self._save_s)

    def _agree(self, vote: StopReason) -> StopReason:
        """Return the result of the agreement that the last call started, and start the next one."""
        agreed = StopReason.NONE
        if self._group is None:
            # A separate group keeps these collectives independent of the loop's, and on the CPU.
            self._group = cast("dist.ProcessGroup", dist.new_group(backend="gloo"))
        if self._pending is not None:
            largest, work = self._pending
            work.wait()
            agreed = StopReason(int(largest.item()))
        if agreed is StopReason.NONE:
            own = torch.tensor(int(vote))
            work = dist.all_reduce(own, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
            self._pending = own, work
        return agreed


def _deadline_in(environment: Mapping[str, str]) -> Deadline:
    end = next((environment[name] for name in _END_TIMES if name in environment), "")
    start = environment.get(_START_TIME, "")
    return Deadline(
        end_time=float(end) if end.isdecimal() else None, start_time=float(start) if start.isdecimal() else time.time()
    )
