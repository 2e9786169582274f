"""What a task knows of itself while it works, for whoever must say where and how far it was. One per process."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final, NoReturn

from hpcddp.run.failure import FailureRecord
from hpcddp.stop.heartbeat import Heartbeat


def own_host(environment: Mapping[str, str] = os.environ) -> str:
    """Return the name that Slurm has for this host, or its own."""
    return environment.get("SLURMD_NODENAME") or socket.gethostname()


def own_rank(environment: Mapping[str, str] = os.environ) -> int:
    """Return the rank for a record even where the rank environment as a whole is wrong."""
    names = ("SUBMITIT_LOCAL_GLOBALID", "SLURM_PROCID", "RANK")
    return next((int(environment[name]) for name in names if environment.get(name, "").isdecimal()), 0)


def _nobody_knows() -> str | None:
    return None


class Lifeline:
    """Where this process stands.

    Attributes:
        rank: the rank.
        host: its host.
        device: its device, once it is chosen.
        heartbeat: its signs of life, once it trains.
        cause: says why the job must go: a ``Cause``'s word, or None.
        saves_alone: whether what runs here may be saving although its peers have gone: a program of the user's own.
    """

    def __init__(self) -> None:
        self.rank, self.host = own_rank(), own_host()
        self.device: str | None = None
        self.heartbeat = Heartbeat()
        self.cause: Callable[[], str | None] = _nobody_knows
        self.saves_alone = False
        self._first_step = threading.Lock()
        self._trains = False

    def train(self) -> None:
        """Say that the first step begins; does not return in a process that is leaving before it."""
        if not self._trains:
            self._first_step.acquire()
            self._trains = True

    def give_up_training(self) -> bool:
        """Return whether no step has begun, and see to it that none ever will."""
        return self._first_step.acquire(blocking=False)

    def record(
        self,
        *,
        kind: str,
        message: str,
        traceback: str,
        exit_code: int,
        secondary: bool = False,
        waiting: bool = False,
    ) -> FailureRecord:
        """Return the record of this rank's failure; arguments as ``FailureRecord`` has them."""
        return FailureRecord(
            rank=self.rank,
            host=self.host,
            time=time.time(),
            kind=kind,
            message=message,
            traceback=traceback,
            exit_code=int(exit_code),
            secondary=secondary,
            waiting=waiting,
            device=self.device,
            step=self.heartbeat.step,
        )


LIFELINE: Final = Lifeline()
"""The one of this process."""


def leave(exit_code: int) -> NoReturn:
    """End this process at once: freeing DDP's reducer can deadlock, and all that matters has been written."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
