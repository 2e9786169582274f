"""The faults that a rehearsal causes, one row for each, and the ways to cause them on this machine."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from hpcddp.processes import environment_of, own_processes
from hpcddp.run.directory import AttemptDirectory

Target = Literal["tasks", "one rank", "script"]
"""Who gets a signal: every task, as from Slurm; one rank alone; or the batch script, as from ``hpcddp cancel``."""
SlurmAct = Literal["requeue", "preemption", "lost node"]
_KILL_WAIT_S: Final = 30.0
"""Seconds from SIGTERM to SIGKILL: the default of KillWait (slurm.conf(5))."""
_WARNING_S: Final = 1.0
"""Seconds from the warning of the time limit to SIGTERM; shorter than on a cluster, because the tasks are small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SentSignal:
    """A signal of a fault.

    Args:
        after_s: seconds after the fault began; it is not sent if the attempt has ended by then.
    """

    signum: signal.Signals
    target: Target
    after_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault.

    Args:
        name: what the command line and the table call it.
        what: what happens, in a phrase.
        signals: the signals that end the first attempt, in the order of their times; none for a fault of Slurm.
        by_slurm: what Slurm does to the job in place of signals; it then runs the job again by itself.
        damages_newest: whether the newest saved file is cut in half before the resumption.
        changes_world_size: whether the resumption has another number of ranks. Sums then have another order, so the
            result is not expected to be equal bit for bit.
    """

    name: str
    what: str
    signals: tuple[SentSignal, ...] = ()
    by_slurm: SlurmAct | None = None
    damages_newest: bool = False
    changes_world_size: bool = False


_PREEMPTION: Final = (
    SentSignal(signum=signal.SIGTERM, target="tasks"),
    SentSignal(signum=signal.SIGKILL, target="tasks", after_s=_KILL_WAIT_S),
)
FAULTS: Final = (
    Fault(name="preemption", what="SIGTERM to every task, SIGKILL 30 s later", signals=_PREEMPTION),
    Fault(
        name="time-limit",
        what="SIGUSR2 to every task, SIGTERM 1 s later, SIGKILL 31 s later",
        signals=(
            SentSignal(signum=signal.SIGUSR2, target="tasks"),
            SentSignal(signum=signal.SIGTERM, target="tasks", after_s=_WARNING_S),
            SentSignal(signum=signal.SIGKILL, target="tasks", after_s=_WARNING_S + _KILL_WAIT_S),
        ),
    ),
    Fault(
        name="kill",
        what="SIGKILL to the last rank",
        signals=(
            SentSignal(signum=signal.SIGKILL, target="one rank"),
            # The others may wait for the dead rank until their own timeout, which is half an hour for gloo.
            SentSignal(signum=signal.SIGKILL, target="tasks", after_s=_KILL_WAIT_S),
        ),
    ),
    Fault(
        name="damaged-checkpoint",
        what="as preemption, and half of the newest saved file is lost",
        signals=_PREEMPTION,
        damages_newest=True,
    ),
    Fault(
        name="world-size",
        what="as preemption, and the run resumes with another number of ranks",
        signals=_PREEMPTION,
        changes_world_size=True,
    ),
    Fault(
        name="cancel",
        what="hpcddp cancel, then submit --resume",
        signals=(
            SentSignal(signum=signal.SIGTERM, target="script"),
            # The script kills its tasks at the second one.
            SentSignal(signum=signal.SIGTERM, target="script", after_s=_KILL_WAIT_S),
        ),
    ),
)
REQUEUE: Final = Fault(name="requeue", what="hpcddp requeue", by_slurm="requeue")
SANDBOX_FAULTS: Final = (
    REQUEUE,
    Fault(name="slurm-preemption", what="a job of higher priority takes both hosts", by_slurm="preemption"),
    Fault(name="lost-node", what="Slurm takes the second host for lost", by_slurm="lost node"),
)
"""The faults that ``--sandbox`` adds, on two hosts."""


TASK: Final = "SUBMITIT_LOCAL_GLOBALID"


def processes_of(attempt: AttemptDirectory, variable: str) -> dict[int, int]:
    """Return the process ids of an attempt on this machine, by the number that a variable of theirs holds."""
    pids: dict[int, int] = {}
    for process in own_processes():
        variables = environment_of(process.pid)
        number = variables.get(variable, "")
        if variables.get("HPCDDP_ATTEMPT_DIR") == str(attempt.path) and number.isdecimal():
            # What a process has started has its variables too, and a later process id unless the ids began anew.
            pids[int(number)] = min(process.pid, pids.get(int(number), process.pid))
    return pids


def send(sent: SentSignal, attempt: AttemptDirectory, *, job_id: int) -> None:
    """Send a signal of a fault; a process that has ended meanwhile gets none.

    Args:
        attempt: the attempt that gets it.
        job_id: the process id of its batch script.
    """
    if sent.target == "script":
        pids = {0: job_id}
    elif sent.target == "one rank":
        # The ranks of a command are what its tasks have started; those of a training are its tasks.
        ranks = processes_of(attempt, "RANK") or processes_of(attempt, TASK)
        pids = dict(sorted(ranks.items())[-1:])
    else:
        pids = processes_of(attempt, TASK)
    for pid in pids.values():
        with suppress(ProcessLookupError):
            os.kill(pid, sent.signum)


def cut_in_half(path: Path) -> None:
    """Keep the first half of a file and its time, as a process that is killed while it writes may leave it."""
    status = path.stat()
    os.truncate(path, status.st_size // 2)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
