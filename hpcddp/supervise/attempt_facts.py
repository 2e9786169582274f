"""The facts about the end of an attempt: records are read once, Slurm is asked when it is needed."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from hpcddp.errors import HpcddpError
from hpcddp.jobfile.job import JobSpec
from hpcddp.run.directory import AttemptDirectory
from hpcddp.run.events import Event, read_events
from hpcddp.run.failure import FailureRecord, cancelled_in_log, cause_in_log, lost_peers, read_failures
from hpcddp.run.files import exists, full_disk
from hpcddp.run.job_file import read_job_file
from hpcddp.run.job_records import Decision, ProgramEnd, read_decision, read_program_end, read_start
from hpcddp.run.lost_peers import UnevenRanks
from hpcddp.run.record import RecordError
from hpcddp.run.result import has_finished
from hpcddp.slurm import commands
from hpcddp.slurm.hostlist import expand
from hpcddp.slurm.job import allocation_of, ask_slurm, cause_of, end_time_of, moment_of, slurm_job_id
from hpcddp.stop.reasons import Cause, ExitCode, StopReason
from hpcddp.supervise.budgets import count_attempts_without_progress, count_requeues, why_used_up, why_without_progress
from hpcddp.supervise.decision import EndFacts
from hpcddp.supervise.slurm_requeue import PATIENCE_S
from hpcddp.supervise.watch import BEFORE_THE_END_S

_WARNINGS = frozenset({StopReason.WARNED, StopReason.DEADLINE})
# What Slurm shows of these is final; for the others the ranks may know more.
_CERTAIN = frozenset({Cause.PREEMPTION, Cause.CANCELLED, Cause.REQUEUED, Cause.NODE_FAILURE})
# errno(3): what a file system over a network returns.
_FILE_SERVER_AWAY = frozenset(
    {errno.ESTALE, errno.EIO, errno.EREMOTEIO, errno.ENOTCONN, errno.ESHUTDOWN, errno.ETIMEDOUT, errno.EHOSTDOWN}
)


@dataclass(frozen=True, kw_only=True)
class AttemptFacts:
    """The facts about the end of an attempt.

    Args:
        attempt: the attempt.
        environment: the batch script's environment.
        code: what srun (or the local controller) exited with: the highest exit code of the tasks.
        cancelled: whether the user ended the job on this machine.
    """

    attempt: AttemptDirectory
    environment: Mapping[str, str]
    code: int
    cancelled: bool = False

    def read_records(self) -> bool:
        """Read and keep what the ranks have written; return whether the file system of the attempt has answered."""
        for name in ("restarts_at_start", "decision", "failures", "events", "program", "damage"):
            try:
                found = getattr(self, name)
            except (OSError, HpcddpError) as error:
                found = error
            # What else is wrong with a record is raised where it is needed.
            if _is_away(found):
                return False
        return exists(self.attempt.path)

    @cached_property
    def job_id(self) -> str | None:
        """The job's id in Slurm; None for a local run."""
        return slurm_job_id(self.environment)

    @cached_property
    def ended_allocation(self) -> str | None:
        """Slurm's id of the allocation that a local run had its tasks in, if that has ended or ends; else None."""
        allocation = allocation_of(self.environment)
        job = None if allocation is None else ask_slurm(allocation)
        if job is None:
            return None
        is_over = job.get("JobState") != "RUNNING" or job.get("PreemptTime", "None") != "None"
        return allocation if is_over else None

    @property
    def job(self) -> str:
        """What to call the job in a sentence."""
        return "this run" if self.job_id is None else f"job {self.job_id}"

    @cached_property
    def job_fields(self) -> dict[str, str] | None:
        """Slurm's record of the job now; None if Slurm does not respond."""
        if self.job_id is None:
            return None
        # The ranks' decision is enough to request a requeue, which waits for the controller itself.
        return ask_slurm(self.job_id, patience_s=0.0 if self.decision else PATIENCE_S)

    @cached_property
    def restarts_at_start(self) -> int:
        """The restart count that this attempt was started with."""
        start = read_start(self.attempt)
        return 0 if start is None else start.restart_count

    @property
    def restarts(self) -> int:
        """The restart count of this attempt, which is smaller now if slurmctld was killed and forgot a requeue."""
        shown = (self.job_fields or {}).get("Restarts", str(self.restarts_at_start))
        return min(int(shown), self.restarts_at_start)

    @cached_property
    def decision(self) -> Decision | None:
        """What the ranks decided; where the record cannot be read, what is known of it, or None."""
        if isinstance(self._decision_or_damage, Decision):
            return self._decision_or_damage
        return self._decision_without_record()

    def _decision_without_record(self) -> Decision | None:
        """Return the decision of ranks that could not write it: the event of the stop, or the exit code, shows one."""
        stop = self._stop_event
        if self.first_failure is not None or (stop is None and self.code != ExitCode.STOPPED):
            return None
        if stop is None:
            # Where they stopped is not known, and the signals are the most likely reason.
            events = [event for event in self.events if event.attempt == self.attempt.number]
            words = [event.reason for event in events if event.kind == "signal"]
            stop = Event(kind="stop", time=time.time(), attempt=self.attempt.number)
        else:
            words = [stop.reason]
        return Decision(
            attempt=stop.attempt,
            step=stop.step or 0,
            reason=max((reason for reason in StopReason if reason.word in words), default=StopReason.NONE),
            cause=stop.cause,
            saved=bool(stop.saved),
            save_s=0.0,
            time=stop.time,
        )

    @property
    def stop_is_recorded(self) -> bool:
        """Whether the ranks themselves have recorded that they stopped."""
        return isinstance(self._decision_or_damage, Decision) or self._stop_event is not None

    @property
    def _stop_event(self) -> Event | None:
        """The event that the ranks write when they have stopped; None if there is none."""
        stops = (event for event in self.events if event.kind == "stop" and event.attempt == self.attempt.number)
        return next((event for event in stops if event.saved is not None), None)

    @cached_property
    def full_disk(self) -> str | None:
        """A sentence about the disk of the run if it is full, else None."""
        return full_disk(self.attempt.run.path)

    @cached_property
    def _decision_or_damage(self) -> Decision | RecordError | None:
        try:
            return read_decision(self.attempt)
        except RecordError as error:
            return error

    @property
    def damage(self) -> RecordError | None:
        """A record of the ranks or their programs that cannot be read; Slurm may show the cause without it."""
        if isinstance(self._decision_or_damage, RecordError):
            return self._decision_or_damage
        return None if self.program is None else self.program.damage

    def _raise_if_damaged(self) -> None:
        """Raise where only the ranks' own records say why they ended, and one of them cannot be read."""
        if self.damage is not None and self.first_failure is None and self.decision is None:
            raise self.damage

    @cached_property
    def failures(self) -> list[FailureRecord]:
        """The error records, the first cause first."""
        return read_failures(self.attempt)

    @cached_property
    def events(self) -> list[Event]:
        """The run's events so far."""
        return read_events(self.attempt.run.events)

    @cached_property
    def spec(self) -> JobSpec:
        """The job."""
        return read_job_file(self.attempt.run)

    @cached_property
    def program(self) -> ProgramEnd | None:
        """How the programs of a command ended; None where the job runs something else."""
        if self.spec.command is None:
            return None
        return read_program_end(self.attempt, tasks=self.spec.tasks)

    @property
    def first_failure(self) -> FailureRecord | None:
        """The first error that names a cause of its own."""
        return self.failures[0] if self.failures and not self.failures[0].secondary else None

    @property
    def _code_of_lost_ranks(self) -> ExitCode | None:
        """The exit code where all ranks that failed have only lost others, which had ended or did not come."""
        lost = lost_peers(self.attempt, self.failures) if self.cause is Cause.CRASH else None
        if lost is None:
            return None
        return ExitCode.USER_CODE if isinstance(lost, UnevenRanks) else ExitCode.HANG

    @property
    def signalled(self) -> bool:
        """Whether a task of this attempt has seen a signal."""
        return any(event.kind == "signal" and event.attempt == self.attempt.number for event in self.events)

    @property
    def finished(self) -> bool:
        """Whether the run has a result that says so."""
        return has_finished(self.attempt.run)

    @property
    def cause_unavailable(self) -> bool:
        """Whether tasks received a signal and Slurm does not respond, so the cause is unknown."""
        if self.job_id is None or self.decision is not None or self.first_failure is not None or self.finished:
            return False
        signalled = self.signalled if self.program is None else self.program.was_signalled
        return signalled and self.job_fields is None and self.cause is Cause.CRASH

    @property
    def may_be_preempted(self) -> bool:
        """Whether Slurm may be about to preempt and requeue the job, with the information available."""
        return self.cause is Cause.PREEMPTION or (self.cause is Cause.UNKNOWN and self.job_fields is None)

    @property
    def counted_cause(self) -> Cause:
        """The cause that a requeue is counted under; Slurm clears the cause once it has requeued a job."""
        if self.cause is not Cause.REQUEUED or self.requested:
            return self.cause
        if self.decision is not None and self.decision.known_cause is Cause.PREEMPTION:
            return Cause.PREEMPTION
        # A program may requeue its job itself before Slurm does, as Lightning does.
        if self.program is not None and self.program.preempted:
            return Cause.PREEMPTION
        out_of_time = self.program is not None and self.program.out_of_time
        return self._logged or (Cause.TIME_LIMIT if out_of_time else Cause.REQUEUED)

    @property
    def by_user(self) -> bool:
        """Whether the run's user has requested the requeue with hpcddp; no budget counts that."""
        return self.requested or (self.counted_cause is Cause.REQUEUED and exists(self.attempt.requeue_request))

    @cached_property
    def _logged(self) -> Cause | None:
        """Why Slurm has ended the job, according to the batch log."""
        return cause_in_log(self.attempt)

    @cached_property
    def cause(self) -> Cause:
        """Why the attempt ended, by all that is known."""
        if self.requested:
            return Cause.REQUEUED
        return self._local_cause() if self.job_id is None else self._slurm_cause()

    def _local_cause(self) -> Cause:
        if self.ended_allocation is not None and not self._warned:
            return Cause.UNKNOWN
        if self.cancelled:
            return Cause.CANCELLED
        self._raise_if_damaged()
        if self.decision is None and self.program is not None:
            return self._program_cause(self.program)
        if self.decision is None:
            return Cause.CRASH
        if self.decision.reason in _WARNINGS:
            return Cause.TIME_LIMIT
        return Cause.UNKNOWN if self.decision.reason is StopReason.REQUESTED else Cause.CANCELLED

    @property
    def requested(self) -> bool:
        """Whether the attempt ended because the run's user requested a requeue, and for no other cause."""
        if self.job_id is None or not exists(self.attempt.requeue_request):
            return False
        stopped = self.decision is None or self.decision.reason in _WARNINGS
        return stopped and not self._is_certain

    @property
    def _is_certain(self) -> bool:
        """Whether the cause that Slurm shows is final."""
        seen = self._seen_by_slurm
        return seen in _CERTAIN or (seen is Cause.TIME_LIMIT and not self._warned)

    @cached_property
    def _seen_by_slurm(self) -> Cause:
        """Why the job ended, as far as Slurm shows it."""
        program = None if self.decision is not None else self.program
        # Some programs of a command may only have lost their peers, which received a signal.
        errors = self.failures if program is None else [self.first_failure] if self.first_failure else []
        seen = cause_of(
            self.job_fields,
            restarts_at_start=self.restarts,
            warned=self._warned,
            error_seen=self.decision is None and bool(errors),
            preempted=self._logged is Cause.PREEMPTION,
            cancelled=cancelled_in_log(self.attempt),
        )
        return seen if seen in _CERTAIN else self._logged or seen

    @property
    def _warned(self) -> bool:
        """Whether the attempt ended because its time limit was near."""
        if self.decision is not None:
            return self.decision.reason in _WARNINGS
        return self.program is not None and self.program.out_of_time

    def _slurm_cause(self) -> Cause:
        decision, now = self.decision, self._seen_by_slurm
        program = None if decision is not None else self.program
        if self._is_certain:
            return now
        self._raise_if_damaged()
        if program is not None:
            return self._program_cause(program)
        if decision is None:
            return self._cause_without_records()
        if decision.reason is StopReason.INTERRUPTED:
            return Cause.CANCELLED
        seen = decision.known_cause or now
        return now if seen in {Cause.UNKNOWN, Cause.CRASH} else seen

    def _cause_without_records(self) -> Cause:
        """Return why ranks ended that did not stop, and left at most records of failures."""
        if self.lost_nodes:
            return Cause.NODE_FAILURE
        if not self.failures and self._is_out_of_time:
            return Cause.TIME_LIMIT
        return Cause.CRASH

    @property
    def _is_out_of_time(self) -> bool:
        """Whether the time of a job that still runs is over, but for the seconds in which ``watch`` ends srun."""
        fields = self.job_fields
        if fields is None or fields.get("JobState") != "RUNNING":
            return False
        now = time.time()
        end_time = end_time_of(fields, self.environment, now=now)
        return end_time is not None and now >= end_time - BEFORE_THE_END_S

    def _program_cause(self, program: ProgramEnd) -> Cause:
        """Return the cause that the programs' own records show.

        SIGTERM alone does not show the cause: srun also sends it when one task fails.
        """
        if self.first_failure is not None:
            return Cause.CRASH
        if not program.is_complete:
            return Cause.NODE_FAILURE if self.lost_nodes else Cause.CRASH
        if program.out_of_time:
            return Cause.TIME_LIMIT
        return Cause.UNKNOWN if program.requeue_requested else Cause.CRASH

    @cached_property
    def lost_nodes(self) -> list[str]:
        """The nodes whose ranks left no record, and whose slurmd does not answer or which were started anew."""
        first = self.first_failure
        has_a_cause = first is not None and not first.waiting
        if self.job_id is None or has_a_cause:
            return []
        recorded = [record.rank for record in self.failures]
        if self.program is not None:
            recorded += [exit_.rank for exit_ in self.program.exits]
        start = read_start(self.attempt)
        return lost_nodes(
            self.environment,
            tasks_per_node=self.spec.tasks_per_node,
            recorded=recorded,
            started_at=None if start is None else start.time,
        )

    @property
    def is_fenced(self) -> bool:
        """Whether a newer attempt of the run has begun; read anew each time."""
        return self.attempt.run.newest_attempt() not in {None, self.attempt.number}

    def end_facts(self) -> EndFacts:
        """Return the input of the decision."""
        finished, fenced = self.finished, self.is_fenced
        if finished or fenced:
            return EndFacts(cause=Cause.UNKNOWN, finished=finished, fenced=fenced)
        # Read anew: the progress of this attempt was recorded after the other facts were read.
        events = read_events(self.attempt.run.events)
        requeue = self.spec.requeue
        # As the next attempt sees it: one that was preempted before it could train does not count.
        by = "user" if self.by_user else None
        request = Event(kind="requeue", time=0.0, attempt=self.attempt.number, cause=str(self.counted_cause), by=by)
        first = self.first_failure
        return EndFacts(
            cause=self.cause,
            error_code=first.exit_code if first else self._code_of_lost_ranks,
            on_slurm=self.job_id is not None,
            in_allocation=allocation_of(self.environment) is not None,
            requeue_allowed=not requeue.left_to_slurm or (self.job_fields or {}).get("Requeue") != "0",
            causes=frozenset(Cause(cause) for cause in requeue.causes),
            requested=self.requested,
            why_without_progress=why_without_progress(count_attempts_without_progress([*events, request]), self.spec),
            why_used_up=why_used_up(count_requeues(events), requeue, self.cause),
            allow_continuation=requeue.allow_continuation,
        )


def _is_away(found: object) -> bool:
    """Return whether what was found is an error of a file server that does not answer, or has restarted."""
    cause = found.__cause__ if isinstance(found, RecordError) else found
    return isinstance(cause, OSError) and cause.errno in _FILE_SERVER_AWAY


_CONNECT_TIMEOUT_S = 3.0


def nodes_without_records(nodes: list[str], *, tasks_per_node: int, recorded: Iterable[int]) -> list[str]:
    """Return the nodes without a record of any rank; ranks are laid out in blocks.

    Args:
        nodes: the job's nodes in their order.
        tasks_per_node: ranks on each of them.
        recorded: the ranks that left a record of why they ended.
    """
    with_a_record = {rank // tasks_per_node for rank in recorded}
    return [node for index, node in enumerate(nodes) if index not in with_a_record]


def lost_nodes(
    environment: Mapping[str, str], *, tasks_per_node: int, recorded: Iterable[int], started_at: float | None
) -> list[str]:
    """Return the nodes without records whose slurmd does not answer either, or which were started anew meanwhile.

    Args:
        environment: the batch script's environment, which names the job's nodes.
        tasks_per_node: ranks on each of them.
        recorded: the ranks that left a record of why they ended.
        started_at: when the attempt began, in seconds since the epoch; None if that is not known.
    """
    nodes = expand(environment.get("SLURM_JOB_NODELIST", ""))
    silent = nodes_without_records(nodes, tasks_per_node=tasks_per_node, recorded=recorded)
    restarted = _restarted_since(silent, started_at, environment)
    return [node for node in silent if node in restarted or not _slurmd_answers(node)]


def _restarted_since(nodes: list[str], started_at: float | None, environment: Mapping[str, str]) -> set[str]:
    """Return the nodes that were started after a moment; none where that is not known."""
    if not nodes or started_at is None:
        return set()
    try:
        boot_times = commands.boot_times(nodes, environment)
    except commands.SlurmCommandError:
        return set()
    moments = {node: moment_of(text) for node, text in boot_times.items()}
    return {node for node, moment in moments.items() if moment is not None and moment > started_at}


def _slurmd_answers(node: str) -> bool:
    """Return whether a connection to the node's slurmd opens; a node with an unknown address counts as answering."""
    try:
        address = commands.slurmd_address(node)
    except commands.SlurmCommandError:
        return True
    try:
        socket.create_connection(address, timeout=_CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True
