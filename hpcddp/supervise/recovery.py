"""Run the membership service beside srun: it learns from srun how a task has ended, and starts new processes."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

from hpcddp.errors import counted, write_message
from hpcddp.processes import find
from hpcddp.run.directory import AttemptDirectory
from hpcddp.run.events import append_event, read_events
from hpcddp.run.failure import exits_of_tasks
from hpcddp.run.job_file import read_job_file
from hpcddp.run.job_records import PublishedAddress, known_hosts, publish_members_address, read_start
from hpcddp.slurm.rank_env import own_host
from hpcddp.stop.reasons import Cause
from hpcddp.supervise.budgets import count_requeues
from hpcddp.supervise.members import MemberService, Recovery
from hpcddp.supervise.watch import end_step
from hpcddp.task.rendezvous import bind_port, reachable_addresses

# Exit codes of srun of a task that a signal has ended: 128 plus the signal.
_SIGNALS: Final[Mapping[int, str]] = {134: "Aborted", 135: "Bus error", 137: "Killed", 139: "Segmentation fault"}
# How long ranks that were told to end may save.
_END_PATIENCE_S: Final = 60.0
_LAUNCHER: Final = 'trap "" USR2; exec "$0" "$@" >>"$HPCDDP_ATTEMPT_DIR/rank-$SLURM_PROCID.log" 2>&1'


class _Newcomers:
    """Processes that take the places of ranks that have died.

    Args:
        attempt: the attempt.
        command: what starts a task.
        cpus_per_task: CPUs of a task.
        environment: the batch script's environment.
    """

    def __init__(
        self, attempt: AttemptDirectory, command: Sequence[str], cpus_per_task: int, environment: Mapping[str, str]
    ) -> None:
        self._attempt, self._command, self._environment = attempt, command, environment
        self._cpus_per_task = cpus_per_task
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, number: int, place: Mapping[str, str]) -> None:
        """Start a process for a rank where it has been."""
        words = [
            "srun",
            "--overlap",
            "--nodes=1",
            "--ntasks=1",
            f"--nodelist={place['SLURMD_NODENAME']}",
            f"--cpus-per-task={self._cpus_per_task}",
            "--unbuffered",
            "env",
            "HPCDDP_NEWCOMER=yes",
            *(f"{name}={value}" for name, value in place.items()),
            "sh",
            "-c",
            _LAUNCHER,
            *self._command,
        ]
        with self._attempt.newcomer_log(number).open("ab") as log:
            self._processes[number] = subprocess.Popen(
                words, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def exit_of(self, number: int) -> str | None:
        """Return how the newest process of a rank has ended, in srun's words, or None while it is not known."""
        process = self._processes.get(number)
        if process is None:
            return exits_of_tasks(self._attempt).get(number)
        code = process.poll()
        if code is None:
            return None
        return _SIGNALS.get(code, f"Exited with exit code {code}")

    def end(self) -> None:
        """End those that still run."""
        for process in self._processes.values():
            with suppress(ProcessLookupError):
                process.terminate()


def serve_members(
    attempt: AttemptDirectory, pid: int, command: Sequence[str], *, environment: Mapping[str, str]
) -> None:
    """Serve the ranks of an attempt until srun has ended.

    Args:
        attempt: the attempt.
        pid: the process id of srun.
        command: what starts a task.
        environment: the batch script's environment.
    """
    srun = find(pid)
    spec, start = read_job_file(attempt.run), read_start(attempt)
    if srun is None or start is None or not start.token:
        return
    events = read_events(attempt.run.events)
    newcomers = _Newcomers(attempt, command, spec.cpus_per_task, environment)
    single_host = spec.resources.nodes == 1
    host = own_host(environment)
    with bind_port(single_host=single_host) as listener:
        service = MemberService(
            listener,
            start.token.encode(),
            world_size=spec.world_size,
            most_failures=spec.requeue.max_failures - count_requeues(events).get(Cause.CRASH, 0),
            exit_of=newcomers.exit_of,
            start_newcomer=newcomers.start,
            on_recovery=lambda recovery: _record(attempt, recovery),
        )
        service.start()
        addresses = reachable_addresses([host], [], single_host=single_host)
        port = int(listener.getsockname()[1])
        publish_members_address(attempt, PublishedAddress(host=host, addresses=tuple(addresses), port=port))
        ended_at: float | None = None
        while find(pid) == srun:
            service.step()
            _end_after_a_failure(attempt, service)
            if ended_at is None and service.has_ended:
                ended_at = time.monotonic()
            if ended_at is not None and time.monotonic() > ended_at + _END_PATIENCE_S and service.must_end:
                write_message("the ranks were told to end, and some have not; srun is ended")
                end_step(srun)
    newcomers.end()


def _end_after_a_failure(attempt: AttemptDirectory, service: MemberService) -> None:
    """Tell the ranks to end if a task has ended by itself, which srun does not do here."""
    if service.has_ended:
        return
    for number, how in exits_of_tasks(attempt).items():
        if how.startswith("Exited"):
            service.end(f"rank {number} has ended by itself ({how})")


def _place(number: int, hosts: Sequence[str]) -> str:
    return f"rank {number} on {hosts[number]}" if number < len(hosts) else f"rank {number}"


def _record(attempt: AttemptDirectory, recovery: Recovery) -> None:
    """Write a recovery to the event log."""
    hosts = known_hosts(attempt) or []
    ranks = counted(recovery.world_size, "rank")
    if recovery.dead:
        dead = ", ".join(f"{_place(number, hosts)} was lost ({how})" for number, how in recovery.dead.items())
        reason = f"{dead}; the others went on after {recovery.seconds:.1f} s with {ranks}"
    else:
        joined = ", ".join(_place(number, hosts) for number in recovery.joined)
        reason = f"a new process of {joined} joined, after a pause of {recovery.seconds:.1f} s: {ranks}"
    append_event(
        attempt.run.events,
        kind="recovery",
        time=time.time(),
        attempt=attempt.number,
        step=recovery.step,
        reason=reason,
        cause="crash" if recovery.dead else None,
        seconds=round(recovery.seconds, 3),
        world_size=recovery.world_size,
    )
