"""Stopping a loop of one's own: ``hpcddp.Stopper``."""

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
from hpcddp.stop.exit_codes import ExitCode
from hpcddp.stop.reasons import StopReason
from hpcddp.stop.signals import LISTENER, SignalListener
from hpcddp.train import callers
from hpcddp.train.data.workers import start_worker

REQUEUE_FILE: Final = "HPCDDP_REQUEUE_FILE"
"""The environment variable that names a file whose presence says that the command wants to go on."""

# The first is what hpcddp tells a command.
_END_TIMES: Final = ("HPCDDP_END_TIME", "SLURM_JOB_END_TIME")
_START_TIME: Final = "SLURM_JOB_START_TIME"


class StopperError(UserError):
    """The stopper is used in a way that it cannot work."""

    kind = "stopper"


class Stopper:
    """Tells a loop when to stop: on every rank after the same step, also when only one rank was told.

    Make one as early as you can, in the main thread: from then on SIGTERM (the job must leave its nodes), SIGUSR2 (the
    time limit is near) and SIGINT (Ctrl-C) no longer end the process, but are heard. Ask once after every step, on
    every rank. The ranks agree in one small sum of their own group, which is read one step later, so that no step waits
    for it::

        stopper = hpcddp.Stopper()
        for step in range(checkpointer.restore().step, 1000):
            train_one_step(step)
            if stopper.should_stop():
                checkpointer.save(step + 1)
                checkpointer.wait()
                stopper.exit()

    It works with the default process group of any backend, and without one in a single process. Where the job's end is
    known (``SLURM_JOB_END_TIME``, Slurm 23.02 and later), rank 0 also looks at its clock.

    Args:
        save_s: how long a save takes, in seconds; None = 2 % of the job's time, a minute at most.
        environment: where the job's end stands.

    Raises:
        StopperError: this is not the main thread.
        NoGroupError: several processes have been started, and no process group is open when the ranks are to agree.
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
        self._asked: float | None = None
        self._reason = StopReason.NONE

    @property
    def reason(self) -> str:
        """Why the ranks stop, in a word: ``requested``, ``deadline``, ``warned``, ``terminated``, ``interrupted``.

        ``none`` as long as they do not.
        """
        return self._reason.word

    def request(self) -> None:
        """Ask for a stop from this rank; every rank is told one step later."""
        self._requested = True

    def should_stop(self) -> bool:
        """Return whether to stop now: the same answer on every rank. A collective, called once after every step.

        Raises:
            NoGroupError: several processes have been started, and no process group is open.
        """
        if self._reason is not StopReason.NONE:
            return True
        self._measure()
        callers.refuse_without_group(self._environment)
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._reason = self._agree(self._vote())
        else:
            self._reason = self._vote()
        return self._reason is not StopReason.NONE

    @staticmethod
    def worker_init(worker: int) -> None:
        """Let a loader process outlive the signals, and end with this one: ``DataLoader(worker_init_fn=...)``.

        Slurm may send signals to every process of a job; without this a loader process dies of them before the loop has
        saved.
        """
        start_worker(worker)

    def exit(self) -> NoReturn:
        """End the process on every rank together, with exit code 75: it has saved, and wants to go on.

        Nothing runs after it, neither ``finally`` nor ``atexit``. Save before, and wait until it is written.
        """
        if callers.rank() == 0 and (path := self._environment.get(REQUEUE_FILE)):
            Path(path).touch()
        if dist.is_initialized():
            # Whoever started the ranks may end all of them when the first has gone.
            dist.barrier(group=self._group)
        sys.stdout.flush()
        sys.stderr.flush()
        # Freeing DDP can deadlock once a peer has gone.
        os._exit(ExitCode.STOPPED)

    def _measure(self) -> None:
        now = time.monotonic()
        if self._asked is not None:
            self._steps.add(now - self._asked)
        self._asked = now

    def _vote(self) -> StopReason:
        told = self._listener.reason()
        if told is StopReason.NONE and self._requested:
            told = StopReason.REQUESTED
        if told is StopReason.NONE and callers.rank() == 0 and self._is_near_the_end():
            told = StopReason.DEADLINE
        return told

    def _is_near_the_end(self) -> bool:
        if self._deadline.end_time is None:
            return False
        return self._deadline.is_near(time.time(), step_s=self._steps.p95(), save_s=self._save_s)

    def _agree(self, vote: StopReason) -> StopReason:
        """Return what the ranks agreed on one call before, and start the next agreement."""
        agreed = StopReason.NONE
        if self._group is None:
            # A group of its own: its sums stay out of the order of the loop's, and lie on the CPU whatever trains.
            self._group = cast("dist.ProcessGroup", dist.new_group(backend="gloo"))
        if self._pending is not None:
            weightiest, work = self._pending
            work.wait()
            agreed = StopReason(int(weightiest.item()))
        if agreed is StopReason.NONE:
            mine = torch.tensor(int(vote))
            work = dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
            self._pending = mine, work
        return agreed


def _deadline_in(environment: Mapping[str, str]) -> Deadline:
    end = next((environment[name] for name in _END_TIMES if name in environment), "")
    start = environment.get(_START_TIME, "")
    return Deadline(
        end_time=float(end) if end.isdecimal() else None, start_time=float(start) if start.isdecimal() else time.time()
    )
