"""Watch srun while the tasks run: end it where it waits for tasks that have ended, and warn the tasks of their end.

srun learns from a slurmstepd on each node that its tasks have ended. If a slurmstepd was killed, srun waits until the
time limit of the job (measured with Slurm 22.05.8), and the nodes stay taken. At the limit Slurm kills the batch script
before srun gives up, so that nobody would decide about a requeue.

In an allocation that salloc has made, no Slurm sends the signal that comes some time before the end.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

from hpcddp.errors import write_message
from hpcddp.processes import Process, find, wait_until
from hpcddp.run.directory import AttemptDirectory
from hpcddp.run.files import exists
from hpcddp.run.job_records import Start, read_start
from hpcddp.run.record import RecordError
from hpcddp.run.result import read_result
from hpcddp.slurm import commands
from hpcddp.slurm.controller import DEFAULT_KILL_WAIT_S, ask_controller
from hpcddp.slurm.hostlist import HostListError, expand
from hpcddp.slurm.job import allocation_of, ask_slurm, end_time_of, moment_of, slurm_job_id
from hpcddp.slurm.rank_env import own_host
from hpcddp.stop.deadline import ASK_EVERY_S

if TYPE_CHECKING:
    from hpcddp.jobfile.job import JobSpec

STEP_PATIENCE_S: Final = 60.0
"""How long srun may wait after the last record of the tasks; they wait up to 30 s for their trackers."""
# The records may be on a file system that many jobs share.
_POLL_S: Final = 10.0
# How long srun gets to end the step before it is killed.
_SRUN_PATIENCE_S: Final = 15.0
_SRUN_POLL_S: Final = 0.5
BEFORE_THE_END_S: Final = 3.0
"""How long before the end of the job srun is ended, whatever its tasks do, in seconds.

A training has stopped before that. A command is killed 8 s before the end, or a quarter of the signal lead if that is
less, but not later than 2.5 s before it. Slurm looks twice a minute for jobs that are over their limit.
"""
# In the last minute of a job it is looked once a second.
_NEAR_THE_END_S: Final = 60.0
_POLL_NEAR_THE_END_S: Final = 1.0
# How often Slurm is asked when the hosts were started.
_ASK_BOOT_TIMES_EVERY_S: Final = 300.0
# slurmctld reckons a boot time anew each time a slurmd registers, to a second or two.
_BOOT_TIME_TOLERANCE_S: Final = 60.0


def watch(
    attempt: AttemptDirectory,
    pid: int,
    *,
    environment: Mapping[str, str],
    warn: bool = False,
    patience_s: float = STEP_PATIENCE_S,
    poll_s: float = _POLL_S,
) -> None:
    """Return when srun has ended; end it if it waits too long for tasks that have ended, or if the job's time is over.

    Args:
        attempt: the attempt that the tasks belong to.
        pid: the process id of srun.
        environment: the batch script's environment.
        warn: whether to send srun USR2, which it passes on to the tasks, ``requeue.signal_lead`` before the end.
        patience_s: how long it may wait after the last record of the tasks, in seconds.
        poll_s: seconds between two looks.
    """
    srun = find(pid)
    start = _start_of(attempt)
    job_end = JobEnd(start, environment)
    signs = Signs(attempt, HostBoots(start, environment), environment, patience_s=patience_s)
    warn_at = _warn_at(start, signs.lead_s) if warn else math.inf
    while srun is not None and find(pid) == srun:
        if time.time() >= warn_at:
            warn_at = math.inf
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR2)
        if job_end.has_come():
            _end_before_the_job(srun)
            return
        sign = signs.first_overdue()
        if sign is not None:
            write_message(
                f"{sign.sentence}, and srun still waits {sign.patience_s:.0f} s later; it is ended, for a slurmstepd "
                "was probably killed"
            )
            end_step(srun)
            return
        pause_s = poll_s
        if job_end.left_s() < _NEAR_THE_END_S:
            pause_s = min(poll_s, _POLL_NEAR_THE_END_S)
        until_warning_s = max(0.0, warn_at - time.time())
        pause_s = min(pause_s, until_warning_s)
        # On the host of an interactive shell no other process ends this one when srun has ended.
        wait_until(lambda: find(pid) != srun, timeout_s=pause_s, poll_s=min(_SRUN_POLL_S, poll_s))


def _start_of(attempt: AttemptDirectory) -> Start | None:
    """Return who started an attempt; None, with a message, if the record cannot be read."""
    try:
        return read_start(attempt)
    except RecordError as error:
        write_message(error.message)
        return None


def _warn_at(start: Start | None, lead_s: float) -> float:
    """Return when the tasks are warned of their end, in seconds since the epoch; infinity if they are not."""
    if start is None or start.end_time is None or lead_s == 0:
        return math.inf
    return start.end_time - lead_s


class JobEnd:
    """The end of the job, or of the allocation, by Slurm's newest answer.

    Nothing is done at an end that was known before: Slurm moves the end of a job that was suspended, or whose time
    limit was changed.

    Args:
        start: the start of the attempt; None if that cannot be read.
        environment: the batch script's environment.
    """

    def __init__(self, start: Start | None, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._job_id = slurm_job_id(environment) or allocation_of(environment)
        self._end_time: float | None = None
        self._asked_at = -math.inf
        # The recorded end of a run in an allocation may be its own limit, at which nobody ends it.
        if start is not None and not start.is_local:
            self._end_time = start.end_time
            self._asked_at = time.monotonic()

    def left_s(self) -> float:
        """Return how long the job still has, by what is known, in seconds; infinity without a limit."""
        if self._end_time is None:
            return math.inf
        return self._end_time - time.time()

    def has_come(self) -> bool:
        """Return whether the job ends within some seconds, or is being ended; ask Slurm if it is time."""
        if self._job_id is None:
            return False
        seems_near = self.left_s() <= BEFORE_THE_END_S
        if not seems_near and time.monotonic() - self._asked_at < ASK_EVERY_S:
            return False
        self._asked_at = time.monotonic()
        fields = ask_slurm(self._job_id)
        if fields is None:
            # Without an answer nobody ends the job either, unless it is only this host that cannot ask.
            return seems_near and shutil.which("scontrol") is None
        if fields.get("JobState") not in {"RUNNING", "SUSPENDED"}:
            return seems_near
        self._end_time = end_time_of(fields, self._environment, now=time.time())
        return self.left_s() <= BEFORE_THE_END_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """A sign that srun may be waiting for tasks that have ended.

    Args:
        patience_s: how long srun may wait after it, in seconds.
    """

    sentence: str
    patience_s: float


class Signs:
    """Looks for signs that tasks have ended.

    Args:
        attempt: the attempt that the tasks belong to.
        hosts: when its hosts were started.
        environment: the batch script's environment.
        patience_s: how long srun may wait after a sign, in seconds.
    """

    def __init__(
        self,
        attempt: AttemptDirectory,
        hosts: HostBoots,
        environment: Mapping[str, str],
        *,
        patience_s: float,
    ) -> None:
        self._attempt = attempt
        self._hosts = hosts
        self._environment = environment
        self._patience_s = patience_s
        self._kill_wait_s: float | None = None
        # When each sign was first seen, by its sentence, on the monotonic clock.
        self._first_seen: dict[str, float] = {}

    def first_overdue(self) -> Sign | None:
        """Look for signs; return the first one after which srun has waited for longer than it may, None without one."""
        now = time.monotonic()
        current_signs = list(self._look())
        # A sign that has gone, as with a directory that is away for a while, begins anew.
        self._first_seen = {sign.sentence: self._first_seen.get(sign.sentence, now) for sign in current_signs}
        for sign in current_signs:
            if now - self._first_seen[sign.sentence] >= sign.patience_s:
                return sign
        return None

    def _look(self) -> Iterator[Sign]:
        """Yield the signs that are there now."""
        attempt = self._attempt
        if tasks_have_ended(attempt, self._count_tasks):
            yield Sign(sentence="all tasks have ended", patience_s=self._patience_s)
        if exists(attempt.decision):
            # Rank 0 has saved. In a loop of the user's own, others may still do so.
            patience_s = max(self._patience_s, self.lead_s)
            yield Sign(sentence="the ranks have stopped", patience_s=patience_s)
        has_failed_task = any(attempt.path.glob("error-rank-*.json"))
        kill_wait_s = self._read_kill_wait_s() if has_failed_task else None
        if kill_wait_s is not None:
            # srun ends the others: by SIGTERM, and by SIGKILL when KillWait is over.
            yield Sign(sentence="a task has failed", patience_s=kill_wait_s + self._patience_s)
        for host in self._hosts.restarted():
            yield Sign(sentence=f"{host} was started anew while the tasks ran", patience_s=self._patience_s)

    @cached_property
    def _spec(self) -> JobSpec | None:
        """The job; None, with a message, if it cannot be read: srun is watched all the same."""
        # Not above: this import takes three times as long as all the others, and most runs end without it.
        from hpcddp.run.job_file import read_job_file

        try:
            return read_job_file(self._attempt.run)
        except RecordError as error:
            write_message(error.message)
            return None

    def _count_tasks(self) -> int:
        """Return how many tasks the job has; 0 if that is not known."""
        return 0 if self._spec is None else self._spec.tasks

    @property
    def lead_s(self) -> float:
        """How long before the end of the job its tasks are warned, and how long a save may take, in seconds."""
        lead = None if self._spec is None else self._spec.signal_lead
        return 0.0 if lead is None else lead.total_seconds()

    def _read_kill_wait_s(self) -> float | None:
        """Return KillWait; None while Slurm does not say it."""
        if self._kill_wait_s is None:
            try:
                self._kill_wait_s = ask_controller(self._environment).kill_wait_s
            except commands.SlurmMissingError:
                self._kill_wait_s = DEFAULT_KILL_WAIT_S
            except commands.SlurmCommandError as error:
                write_message(error.message)
        return self._kill_wait_s


def tasks_have_ended(attempt: AttemptDirectory, count_tasks: Callable[[], int]) -> bool:
    """Return whether the records of an attempt show that all of its tasks have ended, or are about to.

    They do if rank 0 has written the result, which it does last, or if each rank has written how its program ended or
    why it failed.

    Args:
        count_tasks: returns how many tasks it has, 0 if that is not known; called when one has ended.
    """
    if _is_concluded(attempt):
        return True
    # Records of exits and of errors.
    if not any(attempt.path.glob("e*-rank-*.json")):
        return False
    tasks = count_tasks()
    return tasks > 0 and all(
        attempt.rank_exit(rank).exists() or attempt.rank_error(rank).exists() for rank in range(tasks)
    )


def _is_concluded(attempt: AttemptDirectory) -> bool:
    """Return whether this attempt, not an earlier one that ended late, has written the result of the run."""
    try:
        result = read_result(attempt.run)
    except RecordError:
        return False
    return result is not None and result.attempts == attempt.number + 1


class HostBoots:
    """Asks Slurm now and then whether a host of the tasks was started anew while they ran.

    A host that is back before Slurm has missed it, with ``ReturnToService=2``, takes jobs again, and srun waits for its
    tasks. The host of the batch script is left out: if it goes, this process goes too.

    Args:
        start: the start of the attempt; None if that cannot be read.
        environment: the batch script's environment, which names the hosts.
    """

    def __init__(self, start: Start | None, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._hosts = [] if start is None else _other_hosts(environment)
        self._started_at = math.inf if start is None else start.time
        self._first_known: dict[str, float] = {}
        self._restarted: list[str] = []
        self._asked_at = -math.inf

    def restarted(self) -> Sequence[str]:
        """Return the hosts that were started anew, as far as Slurm has been asked."""
        if self._hosts and time.monotonic() - self._asked_at >= _ASK_BOOT_TIMES_EVERY_S:
            self._asked_at = time.monotonic()
            self._ask()
        return self._restarted

    def _ask(self) -> None:
        try:
            boot_times = commands.boot_times(self._hosts, self._environment)
        except commands.SlurmCommandError:
            return
        for host, text in boot_times.items():
            boot_time = moment_of(text)
            if boot_time is None:
                continue
            first_boot_time = self._first_known.setdefault(host, boot_time)
            is_newer = boot_time > first_boot_time + _BOOT_TIME_TOLERANCE_S
            if is_newer and boot_time > self._started_at and host not in self._restarted:
                self._restarted.append(host)


def _other_hosts(environment: Mapping[str, str]) -> list[str]:
    """Return the hosts of the job without this one."""
    try:
        hosts = expand(environment.get("SLURM_JOB_NODELIST", ""))
    except HostListError as error:
        write_message(error.message)
        return []
    return [host for host in hosts if host != own_host(environment)]


def end_step(srun: Process) -> None:
    """Let srun end its step; kill it if it does not."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.kill(srun.pid, signum)
        if wait_until(lambda: find(srun.pid) != srun, timeout_s=_SRUN_PATIENCE_S, poll_s=_SRUN_POLL_S):
            return


def _end_before_the_job(srun: Process) -> None:
    """Kill srun alone, so that the batch script can decide in time: a task that still saves has until KillWait."""
    write_message(
        "the job's time is over, and srun still waits for its tasks; it is ended, so that this script can decide what "
        "happens next"
    )
    with suppress(ProcessLookupError):
        os.kill(srun.pid, signal.SIGKILL)
