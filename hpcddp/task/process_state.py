"""Process-wide state of a rank (rank, host, step, device), read by the failure record and the watchdog."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NoReturn

from hpcddp.run.directory import AttemptDirectory
from hpcddp.run.job_records import Binding, FailureRecord
from hpcddp.slurm.rank_env import RankEnv, own_host, own_rank
from hpcddp.stop.heartbeat import Heartbeat
from hpcddp.stop.reasons import Cause

if TYPE_CHECKING:
    from hpcddp.jobfile.job import JobSpec


def _unknown_cause() -> Cause | None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskInputs:
    """What a task reads once, when it starts.

    Args:
        environment: the environment of this process; the rendezvous adds its variables to it.
        attempt: the attempt that the task belongs to.
        job_text: the text of the resolved job file.
        binding: to what srun has bound it; None if to nothing.
    """

    environment: MutableMapping[str, str]
    env: RankEnv
    attempt: AttemptDirectory
    job_text: str
    spec: JobSpec
    binding: Binding | None = None


class ProcessState:
    """State of this process.

    Attributes:
        rank: the rank.
        host: its host.
        has_srun: whether srun ends the other tasks of the job when this one fails; a local run has none.
        inputs: what the task read when it started; None until it has read the job file.
        device: its device; None until it is chosen.
        heartbeat: the progress of the training.
        cause: returns why the job ends; None if that is not known.
        collective_trace: returns the trace of the newest collectives as JSON, None without one; None before the process
            group is open.
        saves_alone: whether this rank can save after other ranks have gone; true for a ``command``.
    """

    def __init__(self, *, rank: int = 0, host: str = "") -> None:
        self.rank = rank
        self.host = host
        self.has_srun = True
        self.inputs: TaskInputs | None = None
        self.device: str | None = None
        self.heartbeat = Heartbeat()
        self.cause: Callable[[], Cause | None] = _unknown_cause
        self.collective_trace: Callable[[], str | None] | None = None
        self.saves_alone = False
        self._training_begins = threading.Lock()
        self._training = False

    def read_environment(self, environment: Mapping[str, str]) -> None:
        """Set rank and host from the environment of the process, even if the rank environment as a whole is wrong."""
        self.rank = own_rank(environment)
        self.host = own_host(environment)
        self.has_srun = "SUBMITIT_LOCAL_GLOBALID" not in environment

    def start_training(self) -> None:
        """Record that the training has begun: at the first vote of this rank, or as its program or function is called.

        Blocks forever if ``prevent_training`` came first.
        """
        if not self._training:
            self._training_begins.acquire()
            self._training = True

    def prevent_training(self) -> bool:
        """Prevent the training, and return whether it had not begun."""
        return self._training_begins.acquire(blocking=False)

    def record(
        self,
        *,
        kind: str,
        message: str,
        traceback: str,
        exit_code: int,
        secondary: bool = False,
        waiting: bool = False,
        who: str | None = None,
    ) -> FailureRecord:
        """Return the failure record of this rank; the arguments are those of ``FailureRecord``."""
        if who is None and self.inputs is not None and self.inputs.spec.launcher_command is not None:
            who = f"task {self.rank}"
        return FailureRecord(
            rank=self.rank,
            host=self.host,
            time=time.time(),
            kind=kind,
            message=_utf_8(message),
            traceback=_utf_8(traceback),
            exit_code=int(exit_code),
            secondary=secondary,
            waiting=waiting,
            device=self.device,
            step=self.heartbeat.step,
            who=who,
        )


def _utf_8(text: str) -> str:
    """Return a text that can be written: the name of a file need not be UTF-8, and an exception may quote it."""
    return text.encode(errors="backslashreplace").decode()


PROCESS_STATE: Final = ProcessState()
"""The state of this process."""


def exit_process(exit_code: int) -> NoReturn:
    """End this process without cleaning up: freeing DDP's reducer can deadlock, and all records are written."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
