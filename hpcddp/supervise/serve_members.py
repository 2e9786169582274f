"""Run the membership service beside srun: it learns from srun how a task has ended, and starts new processes."""

from __future__ import annotations

import math
import signal
import subprocess
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from hpcddp.errors import counted, write_message
from hpcddp.processes import Process, find
from hpcddp.run.directory import AttemptDirectory
from hpcddp.run.events import append_event, read_events
from hpcddp.run.failure import exits_of_tasks, failed_nodes
from hpcddp.run.files import TAIL_BYTES
from hpcddp.run.job_file import read_job_file
from hpcddp.run.job_records import PublishedAddress, known_hosts, publish_members_address, read_start
from hpcddp.slurm import commands
from hpcddp.slurm.controller import ask_controller
from hpcddp.slurm.hostlist import expand
from hpcddp.slurm.rank_env import own_host
from hpcddp.stop.reasons import Cause
from hpcddp.supervise.budgets import count_requeues
from hpcddp.supervise.generations import LastGeneration, NewGeneration
from hpcddp.supervise.job_nodes import JobNodes
from hpcddp.supervise.members import NODE_LOST, MemberService
from hpcddp.supervise.watch import JobEnd, end_step
from hpcddp.task.process_state import NEWCOMER
from hpcddp.task.rendezvous import bind_port, reachable_addresses

# Exit codes of srun of a task that a signal has ended: 128 plus the signal.
_SIGNALS: Final[Mapping[int, str]] = {134: "Aborted", 135: "Bus error", 137: "Killed", 139: "Segmentation fault"}
# How long ranks that were told to end may save, and how long one may take to answer.
_END_PATIENCE_S: Final = 60.0
_ANSWER_PATIENCE_S: Final = 15.0
# What the batch log says of tasks that have ended may be on a file system that many jobs share.
_LOOK_EVERY_S: Final = 2.0
# What srun says where Slurm refuses the step of a process, or slurmctld does not answer (22.05 to 26.05).
_NO_STEP: Final = b"Unable to create step"
_START_AGAIN_AFTER_S: Final = 30.0
_MOST_STARTS_AGAIN: Final = 10
_LAUNCHER: Final = 'trap "" USR2; exec "$0" "$@" >>"$HPCDDP_ATTEMPT_DIR/rank-$SLURM_PROCID.log" 2>&1'


@dataclass(slots=True, kw_only=True)
class _Newcomer:
    """The newest process that was started in the place of a rank that has died.

    Attributes:
        task: the variables of srun of the rank's task.
        srun: what has started the process; None if nothing could.
        started_at: when it was started, in seconds on a clock that never goes back.
        log_begins: where its part of the log of its srun begins, in bytes.
        starts_again: how often the start was tried again.
        may_join: whether the process may still join.
        not_started: why it could not be started; None if it was.
        refused: why it is not taken in; None if it may be.
        told_end: the end that ``Newcomers.without_success`` has returned last; None without one.
    """

    task: Mapping[str, str]
    srun: subprocess.Popen[bytes] | None = None
    started_at: float = -math.inf
    log_begins: int = 0
    starts_again: int = 0
    may_join: bool = False
    not_started: str | None = None
    refused: str | None = None
    told_end: str | None = None


class Newcomers:
    """Processes that take the places of ranks that have died.

    Args:
        command: what starts a task.
        environment: the batch script's environment.
    """

    def __init__(
        self, attempt: AttemptDirectory, command: Sequence[str], cpus_per_task: int, environment: Mapping[str, str]
    ) -> None:
        self._attempt = attempt
        self._command = command
        self._environment = environment
        self._cpus_per_task = cpus_per_task
        self._newcomers: dict[int, _Newcomer] = {}

    def start(self, number: int, task: Mapping[str, str]) -> None:
        """Start a process for a rank on the node where it has been; the others go on without it if that is impossible.

        Args:
            number: the number of the rank.
            task: the variables of srun of its task.
        """
        self._newcomers[number] = _Newcomer(task=task)
        self._start(number)

    def start_again(self, members: Collection[int]) -> None:
        """Start those again that could not be started, as while slurmctld or the run directory is away.

        Ten times, 30 s apart.
        """
        now = time.monotonic()
        for number in self._newcomers.keys() - members:
            newcomer = self._newcomers[number]
            is_due = now - newcomer.started_at >= _START_AGAIN_AFTER_S
            if is_due and newcomer.starts_again < _MOST_STARTS_AGAIN and self._could_not_be_started(number):
                newcomer.starts_again += 1
                self._start(number)

    def _could_not_be_started(self, number: int) -> bool:
        newcomer = self._newcomers[number]
        if newcomer.not_started is not None:
            return True
        if self.exit_of(number) in {None, NODE_LOST}:
            return False
        with suppress(OSError), self._attempt.newcomer_log(number).open("rb") as log:
            log.seek(newcomer.log_begins)
            return _NO_STEP in log.read(TAIL_BYTES)
        return False

    def _start(self, number: int) -> None:
        newcomer = self._newcomers[number]
        variables = [f"{name}={value}" for name, value in newcomer.task.items()]
        words = [
            "srun",
            "--overlap",
            "--nodes=1",
            "--ntasks=1",
            f"--nodelist={newcomer.task['SLURMD_NODENAME']}",
            f"--cpus-per-task={self._cpus_per_task}",
            "--unbuffered",
            "env",
            f"{NEWCOMER}=yes",
            *variables,
            "sh",
            "-c",
            _LAUNCHER,
            *self._command,
        ]
        newcomer.started_at = time.monotonic()
        newcomer.may_join = True
        newcomer.not_started = None
        try:
            with self._attempt.newcomer_log(number).open("ab") as log:
                newcomer.log_begins = log.tell()
                newcomer.srun = subprocess.Popen(
                    words, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )
        except OSError as error:
            newcomer.not_started = f"it could not be started: {error}"

    def refuse(self, number: int, why: str) -> None:
        """Note why the newest process of a rank is not taken in; it ends by itself."""
        self._newcomers[number].refused = why

    def exit_of(self, number: int) -> str | None:
        """Return how the newest process of a rank has ended, in srun's words, or None while it is not known."""
        newcomer = self._newcomers.get(number)
        if newcomer is None:
            if _host_of(self._attempt, number) in failed_nodes(self._attempt):
                return NODE_LOST
            return exits_of_tasks(self._attempt).get(number)
        if newcomer.refused is not None:
            return newcomer.refused
        if newcomer.not_started is not None:
            return newcomer.not_started
        # Slurm ends the tasks of a node that it has given up.
        if newcomer.task["SLURMD_NODENAME"] in failed_nodes(self._attempt):
            return NODE_LOST
        return None if newcomer.srun is None else _exit_text(newcomer.srun)

    def without_success(self, members: Collection[int]) -> dict[int, str]:
        """Return how new processes have ended that have not joined, by number.

        Each is returned once; one that was started again only if it has ended in another way.
        """
        ended: dict[int, str] = {}
        for number, newcomer in sorted(self._newcomers.items()):
            if number in members:
                newcomer.may_join = False
            if not newcomer.may_join:
                continue
            how = self.exit_of(number)
            if how is None:
                continue
            newcomer.may_join = False
            if how != newcomer.told_end:
                ended[number] = how
                newcomer.told_end = how
        return ended

    def end(self) -> None:
        """End those that still run."""
        for newcomer in self._newcomers.values():
            if newcomer.srun is not None:
                with suppress(ProcessLookupError):
                    newcomer.srun.terminate()


class Events:
    """The events of the service in the event log of the run; one that cannot be written waits until it can.

    Args:
        attempt: the attempt that they are of.
    """

    def __init__(self, attempt: AttemptDirectory) -> None:
        self.attempt = attempt
        self._unwritten: deque[Mapping[str, Any]] = deque()

    def append(self, reason: str, *, step: int | None = None, cause: str | None = None, **facts: object) -> None:
        """Write an event, or say in the batch log what it is."""
        event = {"time": time.time(), "step": step, "reason": reason, "cause": cause, **facts}
        self._unwritten.append(event)
        error = self.write()
        if error is not None:
            write_message(f"{reason}; {self.attempt.run.events} cannot be written ({error})")

    def write(self) -> OSError | None:
        """Write the events that wait; return why one cannot be written, None if all are."""
        while self._unwritten:
            try:
                append_event(
                    self.attempt.run.events, kind="recovery", attempt=self.attempt.number, **self._unwritten[0]
                )
            except OSError as error:
                return error
            self._unwritten.popleft()
        return None


def _exit_text(srun: subprocess.Popen[bytes]) -> str | None:
    """Return how the task of an srun has ended, in srun's words; None while it runs."""
    code = srun.poll()
    if code is None:
        return None
    if code < 0:
        # When a signal ends srun, a process that srun has forked lives on, and kills the task.
        return signal.strsignal(-code) or f"signal {-code}"
    return _SIGNALS.get(code, f"Exited with exit code {code}")


def serve_members(
    attempt: AttemptDirectory, pid: int, command: Sequence[str], *, environment: Mapping[str, str]
) -> None:
    """Serve the ranks of an attempt until srun and all members have ended.

    Members that are left when srun has ended are served until the job's time is over, and no longer than a minute after
    the end of the run.

    Args:
        pid: the process id of srun.
        command: what starts a task.
        environment: the batch script's environment.
    """
    srun = find(pid)
    spec = read_job_file(attempt.run)
    start = read_start(attempt)
    if srun is None or start is None or not start.token:
        return
    failures_before = count_requeues(read_events(attempt.run.events)).get(Cause.CRASH, 0)
    newcomers = Newcomers(attempt, command, spec.cpus_per_task, environment)
    events = Events(attempt)
    nodes = JobNodes(
        expand(environment.get("SLURM_JOB_NODELIST", "")),
        min_nodes=spec.resources.min_nodes or spec.nodes,
        slurm_answers=partial(_slurm_answers, environment),
    )
    single_host = spec.nodes == 1
    host = own_host(environment)
    with bind_port(single_host=single_host) as listener:
        service = MemberService(
            listener,
            start.token.encode(),
            world_size=spec.world_size,
            most_failures=max(0, spec.requeue.max_failures - failures_before),
            nodes=nodes,
            newcomers=newcomers,
            on_new_generation=partial(_record_generation, events),
            on_last_generation=partial(_record_last, events),
        )
        service.start()
        addresses = reachable_addresses([host], [], single_host=single_host)
        port = int(listener.getsockname()[1])
        publish_members_address(attempt, PublishedAddress(host=host, addresses=tuple(addresses), port=port))
        _serve(srun, service, newcomers, events, JobEnd(start, environment))


def _slurm_answers(environment: Mapping[str, str]) -> bool:
    try:
        ask_controller(environment)
    except commands.SlurmCommandError:
        return False
    return True


def _serve(srun: Process, service: MemberService, newcomers: Newcomers, events: Events, job_end: JobEnd) -> None:
    next_look = time.monotonic()
    ended_at: float | None = None
    while True:
        service.handle()
        srun_runs = find(srun.pid) == srun
        # srun ends with the last of the first processes; the new ones are members still.
        if not srun_runs and not service.members:
            break
        now = time.monotonic()
        if service.has_ended and ended_at is None:
            ended_at = now
        if now < next_look:
            continue
        next_look = now + _LOOK_EVERY_S
        events.write()
        patience_s = _ANSWER_PATIENCE_S if service.only_stuck_ranks_are_left else _END_PATIENCE_S
        is_patience_over = ended_at is not None and now > ended_at + patience_s
        if srun_runs:
            _end_srun_if_it_waits(srun, service, is_patience_over=is_patience_over)
        elif job_end.has_come():
            # watch may have killed srun for it. A new process that still saves has until KillWait, as the others have.
            write_message("the job's time is over, and some ranks have not ended; this script decides what is next")
            return
        elif is_patience_over:
            write_message("the run has ended, and some new processes have not; they are ended")
            break
        if not service.has_ended:
            _end_after_an_exit(events.attempt, service)
        if service.is_training:
            _look_after_newcomers(events, service, newcomers)
    events.write()
    newcomers.end()


def _end_srun_if_it_waits(srun: Process, service: MemberService, *, is_patience_over: bool) -> None:
    """End srun if it waits for ranks that were told to end and do not, or for those of a lost node."""
    if is_patience_over and service.must_end:
        write_message("the ranks were told to end, and some have not; srun is ended")
        end_step(srun)
    if service.srun_waits_in_vain:
        end_step(srun)


def _look_after_newcomers(events: Events, service: MemberService, newcomers: Newcomers) -> None:
    """Record which new processes have not joined, and start those again that could not be started."""
    for number, how in newcomers.without_success(service.members).items():
        _record_without_success(events, number, how, len(service.members))
    newcomers.start_again(service.members)


def _end_after_an_exit(attempt: AttemptDirectory, service: MemberService) -> None:
    """Tell the ranks to end if a task has ended by itself, or before all were members: srun does not end them here."""
    for number, how in exits_of_tasks(attempt).items():
        if how.startswith("Exited"):
            service.end(f"rank {number} has ended by itself ({how})")
            return
        if service.is_gathering:
            service.end(f"rank {number} was lost while the ranks met ({how})")
            return


def _host_of(attempt: AttemptDirectory, number: int) -> str | None:
    """Return the host on which a rank began; None if that is not known."""
    hosts = known_hosts(attempt) or []
    return hosts[number] if number < len(hosts) else None


def _rank_text(attempt: AttemptDirectory, number: int) -> str:
    host = _host_of(attempt, number)
    return f"rank {number}" if host is None else f"rank {number} on {host}"


def _record_generation(events: Events, generation: NewGeneration) -> None:
    """Write to the event log that the ranks train again."""
    attempt = events.attempt
    for dead in generation.failures[:-1]:
        events.append(
            f"{_death_text(attempt, dead)}; before the others had gone on, another process was lost",
            step=generation.step,
            cause=_cause(dead),
            dead=sorted(dead),
        )
    newest_dead: Mapping[int, str] = {}
    if generation.failures:
        newest_dead = generation.failures[-1]
    events.append(
        _generation_text(generation, _death_text(attempt, newest_dead)),
        step=generation.step,
        cause=_cause(newest_dead),
        dead=sorted(newest_dead),
        seconds=round(generation.seconds, 3),
        world_size=generation.world_size,
    )


def _generation_text(generation: NewGeneration, death_text: str) -> str:
    """Return how the ranks came to train again.

    Args:
        death_text: what has happened to those that died; empty for a join.
    """
    ranks = counted(generation.world_size, "rank")
    joined = ", ".join(f"rank {number} on {node}" for number, node in sorted(generation.joined.items()))
    seconds = f"{generation.seconds:.1f} s"
    if not death_text:
        return f"a new process of {joined} joined, after a pause of {seconds}: {ranks}"
    if not joined:
        return f"{death_text}; the others went on after {seconds} with {ranks}"
    return f"{death_text}; the others waited {seconds} for a new process of {joined}: {ranks}"


def _death_text(attempt: AttemptDirectory, dead: Mapping[int, str]) -> str:
    return "; ".join(_death_texts(attempt, dead))


def _death_texts(attempt: AttemptDirectory, dead: Mapping[int, str]) -> Iterator[str]:
    """Yield what has happened to each rank that has died, or to its node."""
    on_lost_nodes: dict[str, list[str]] = {}
    for number, how in sorted(dead.items()):
        if how != NODE_LOST:
            yield f"{_rank_text(attempt, number)} was lost ({how})"
        else:
            host = _host_of(attempt, number) or "of unknown name"
            on_lost_nodes.setdefault(host, []).append(str(number))
    for host, numbers in on_lost_nodes.items():
        ranks = "rank" if len(numbers) == 1 else "ranks"
        yield f"node {host} was lost ({ranks} {', '.join(numbers)})"


def _cause(dead: Mapping[int, str]) -> str | None:
    """Return the cause of a change of generation, as the budgets count it; None for a join, which has no dead."""
    if not dead:
        return None
    is_node_failure = all(how == NODE_LOST for how in dead.values())
    return str(Cause.NODE_FAILURE if is_node_failure else Cause.CRASH)


def _record_without_success(events: Events, number: int, how: str, world_size: int) -> None:
    """Write to the event log that a new process has not joined."""
    ranks = counted(world_size, "rank")
    place = _rank_text(events.attempt, number)
    reason = f"a new process of {place} did not join ({how}); the training goes on with {ranks}"
    events.append(reason, world_size=world_size)


def _record_last(events: Events, last: LastGeneration) -> None:
    """Write to the event log why the ranks do not go on, and which samples may be the cause."""
    events.append(last.reason, step=last.step, samples=list(last.samples), is_cascade=last.is_cascade)
