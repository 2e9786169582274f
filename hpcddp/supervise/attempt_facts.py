"""The facts about the end of an attempt: records are read once, Slurm is asked when it is needed."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from hpcddp.errors import HpcddpError
from hpcddp.jobfile.job import JobSpec
from hpcddp.processes import wait_until
from hpcddp.run.directory import AttemptDirectory
from hpcddp.run.events import Event, first_train_event, read_events
from hpcddp.run.failure import (
    cancelled_in_log,
    cause_in_log,
    lost_peers,
    node_of_first_failure,
    read_failures,
    text_of_first_failure,
)
from hpcddp.run.files import exists, full_disk, open_regular
from hpcddp.run.job_file import read_job_file
from hpcddp.run.job_records import (
    Decision,
    FailureRecord,
    ProgramEnd,
    Start,
    chain_of,
    read_decision,
    read_program_end,
    read_start,
)
from hpcddp.run.lost_peers import UnevenRanks
from hpcddp.run.node_faults import NodeFault, failing_nodes, says_hardware_error
from hpcddp.run.record import RecordError
from hpcddp.run.result import has_finished
from hpcddp.slurm import commands
from hpcddp.slurm.hostlist import expand
from hpcddp.slurm.job import allocation_of, ask_slurm, cause_of, end_time_of, keeps_running, slurm_job_id
from hpcddp.stop.reasons import Cause, ExitCode, StopReason
from hpcddp.supervise.budgets import (
    count_attempts_without_progress,
    count_requeues,
    why_used_up,
    why_without_progress,
)
from hpcddp.supervise.decision import EndFacts
from hpcddp.supervise.nodes import lost_nodes, required_nodes_of
from hpcddp.supervise.requeue_job import PATIENCE_S
from hpcddp.supervise.watch import BEFORE_THE_END_S

_WARNINGS = frozenset({StopReason.WARNED, StopReason.DEADLINE})
# What Slurm shows of these is final; for the others the ranks may know more.
_FINAL_CAUSES = frozenset({Cause.PREEMPTION, Cause.CANCELLED, Cause.REQUEUED, Cause.NODE_FAILURE})
# errno(3): what a file system over a network returns.
_FILE_SERVER_AWAY = frozenset(
    {errno.ESTALE, errno.EIO, errno.EREMOTEIO, errno.ENOTCONN, errno.ESHUTDOWN, errno.ETIMEDOUT, errno.EHOSTDOWN}
)
# Slurm may send a signal up to 60 s earlier than --signal says (sbatch(1)).
_SIGNAL_EARLY_S: Final = 60.0
# srun ends some moments before slurmctld has heard of it from all nodes.
_STEP_PATIENCE_S: Final = 10.0
_POLL_S: Final = 0.5
# A record that is torn has no line end.
_STEP_ID: Final = re.compile(rb"([0-9]+\.[0-9]+)\n")
_LONGEST_STEP_ID: Final = 64


@dataclass(frozen=True, kw_only=True)
class AttemptFacts:
    """The facts about the end of an attempt.

    Args:
        environment: the batch script's environment.
        code: what srun (or the local controller) exited with: the highest exit code of the tasks.
        cancelled: whether the user ended the job on this machine.
        may_restart: whether the batch script can start the tasks again.
    """

    attempt: AttemptDirectory
    environment: Mapping[str, str]
    code: int
    cancelled: bool = False
    may_restart: bool = False

    def read_records(self) -> bool:
        """Read and keep what the ranks have written; return whether the file system of the attempt has answered."""
        records: tuple[Callable[[], object], ...] = (
            lambda: self.start,
            lambda: self.decision,
            lambda: self.failures,
            lambda: self.events,
            lambda: self.program,
            lambda: self.later_jobs,
            lambda: self.damage,
        )
        for read_record in records:
            try:
                record = read_record()
            except (OSError, HpcddpError) as error:
                record = error
            # What else is wrong with a record is raised where it is needed.
            if _is_file_server_away(record):
                return False
        return exists(self.attempt.path)

    def end_facts(self) -> EndFacts:
        """Return the input of the decision."""
        is_finished = self.is_finished
        is_fenced = self.is_fenced
        if is_finished or is_fenced:
            return EndFacts(cause=Cause.UNKNOWN, finished=is_finished, fenced=is_fenced)
        # Read anew: the progress of this attempt was recorded after the other facts were read.
        events = read_events(self.attempt.run.events)
        # As the next attempt sees it: one that was preempted before it could train does not count.
        requeue_event = Event(
            kind="requeue",
            time=time.time(),
            attempt=self.attempt.number,
            by="user" if self.is_requeued_by_user else None,
            cause=str(self.counted_cause),
            facts={"node_faults": self.node_faults},
        )
        events_with_requeue = [*events, requeue_event]
        attempts_without_progress = count_attempts_without_progress(events_with_requeue)
        requeue = self.spec.requeue
        no_progress_text = why_without_progress(attempts_without_progress, self.spec)
        used_up_text = why_used_up(count_requeues(events), requeue, self.cause)
        error_code = self._error_code
        can_restart = False
        if self.cause is Cause.CRASH and no_progress_text is None and used_up_text is None:
            must_leave_node = self._must_leave_failing_node(events_with_requeue)
            can_restart = not must_leave_node and self._can_restart(attempts_without_progress)
        is_requeue_allowed = True
        if requeue.left_to_slurm:
            job_fields = self.job_fields or {}
            is_requeue_allowed = job_fields.get("Requeue") != "0"
        return EndFacts(
            cause=self.cause,
            error_code=error_code,
            on_slurm=self.job_id is not None,
            can_restart=can_restart,
            in_allocation=allocation_of(self.environment) is not None,
            requeue_allowed=is_requeue_allowed,
            causes=frozenset(Cause(cause) for cause in requeue.causes),
            later_jobs=self.later_jobs,
            requested=self.is_requeue_requested,
            why_without_progress=no_progress_text,
            why_used_up=used_up_text,
        )

    def _must_leave_failing_node(self, events: Sequence[Event]) -> bool:
        """Return whether the job is to leave a node on which its run fails: a restart would run there again.

        Args:
            events: the events of the run, with the end of this attempt.
        """
        if not self.spec.requeue.avoid_failed_nodes or self.job_id is None:
            return False
        nodes = expand(self.environment.get("SLURM_JOB_NODELIST", ""))
        required_nodes = set(required_nodes_of(self.job_fields or {}))
        failing = failing_nodes(events, now=time.time())
        return any(node.name in nodes and node.name not in required_nodes for node in failing)

    def _can_restart(self, attempts_without_progress: int) -> bool:
        """Return whether the tasks can be started again in this job, without a requeue."""
        start = self.start
        if not self.may_restart or self.spec.requeue.recovery == "requeue":
            return False
        # Where the ranks could not start and meet, other nodes may do better.
        if start is None or not exists(self.attempt.ranks):
            return False
        if start.start_number > 0 and attempts_without_progress > 0:
            # The last restart did not help; other nodes may.
            return False
        job = self.job_fields
        if self.job_id is None:
            allocation = allocation_of(self.environment)
            if allocation is None:
                # On this machine there is no job that could end.
                return True
            job = ask_slurm(allocation)
        if job is None or not keeps_running(job):
            return False
        lead = self.spec.signal_lead
        lead_s = 0.0 if lead is None else lead.total_seconds()
        number = self.attempt.number
        has_time = _has_time_for_restart(number, start, self.events, job=job, lead_s=lead_s, now=time.time())
        return has_time and _step_has_ended(self.attempt)

    @cached_property
    def cause(self) -> Cause:
        """Why the attempt ended, by all that is known."""
        if self.is_requeue_requested:
            return Cause.REQUEUED
        if self.job_id is None:
            return self._cause_of_local_run()
        return self._cause_of_slurm_job()

    def _cause_of_local_run(self) -> Cause:
        if self.ended_allocation is not None and not self.is_time_limit_near:
            return Cause.UNKNOWN
        if self.cancelled:
            return Cause.CANCELLED
        self._raise_if_damaged()
        if self.decision is None:
            return Cause.CRASH if self.program is None else self._cause_in_program_records(self.program)
        if self.decision.reason in _WARNINGS:
            return Cause.TIME_LIMIT
        if self.decision.reason is StopReason.REQUESTED:
            return Cause.UNKNOWN
        return Cause.CANCELLED

    def _cause_of_slurm_job(self) -> Cause:
        if self._is_cause_in_slurm_final:
            return self._cause_in_slurm
        self._raise_if_damaged()
        if self.decision is None and self.program is not None:
            return self._cause_in_program_records(self.program)
        if self.decision is None:
            return self._cause_without_records()
        if self.decision.reason is StopReason.INTERRUPTED:
            return Cause.CANCELLED
        cause_seen_by_ranks = self.decision.known_cause
        if cause_seen_by_ranks is None or cause_seen_by_ranks in {Cause.UNKNOWN, Cause.CRASH}:
            return self._cause_in_slurm
        return cause_seen_by_ranks

    def _raise_if_damaged(self) -> None:
        """Raise where only the ranks' own records say why they ended, and one of them cannot be read."""
        if self.damage is not None and self.first_failure is None and self.decision is None:
            raise self.damage

    def _cause_in_program_records(self, program: ProgramEnd) -> Cause:
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

    @property
    def _is_cause_in_slurm_final(self) -> bool:
        """Whether the ranks cannot know better than Slurm why the job ended."""
        if self._cause_in_slurm in _FINAL_CAUSES:
            return True
        return self._cause_in_slurm is Cause.TIME_LIMIT and not self.is_time_limit_near

    @cached_property
    def _cause_in_slurm(self) -> Cause:
        """Why the job ended, as far as Slurm shows it: its record of the job, or else its notice in the batch log."""
        cause = cause_of(
            self.job_fields,
            restarts_at_start=self.restart_count,
            warned=self.is_time_limit_near,
            error_seen=self._has_error,
            preempted=self._cause_in_log is Cause.PREEMPTION,
            cancelled=cancelled_in_log(self.attempt),
        )
        if cause in _FINAL_CAUSES or self._cause_in_log is None:
            return cause
        return self._cause_in_log

    @cached_property
    def _cause_in_log(self) -> Cause | None:
        """Why Slurm has ended the job, according to the batch log."""
        return cause_in_log(self.attempt)

    @property
    def is_time_limit_near(self) -> bool:
        """Whether the attempt ended because its time limit was near."""
        if self.decision is not None:
            return self.decision.reason in _WARNINGS
        return self.program is not None and self.program.out_of_time

    @property
    def _has_error(self) -> bool:
        """Whether the ranks did not stop, and left an error record that may say why."""
        if not self.failures or self.decision is not None:
            return False
        # Some programs of a command may only have lost their peers, which received a signal.
        return self.program is None or self.first_failure is not None

    @property
    def counted_cause(self) -> Cause:
        """The cause that a requeue is counted under; Slurm clears the cause once it has requeued a job."""
        if self.cause is not Cause.REQUEUED or self.is_requeue_requested:
            return self.cause
        if self.decision is not None and self.decision.known_cause is Cause.PREEMPTION:
            return Cause.PREEMPTION
        # A program may requeue its job itself before Slurm does, as Lightning does.
        if self.program is not None and self.program.preempted:
            return Cause.PREEMPTION
        if self._cause_in_log is not None:
            return self._cause_in_log
        if self.program is not None and self.program.out_of_time:
            return Cause.TIME_LIMIT
        return Cause.REQUEUED

    @property
    def is_requeue_requested(self) -> bool:
        """Whether the attempt ended because the run's user requested a requeue, and for no other cause."""
        if self.job_id is None or not exists(self.attempt.requeue_request):
            return False
        # The request stops the ranks by the same signal as the end of the time limit.
        is_other_stop = self.decision is not None and self.decision.reason not in _WARNINGS
        return not is_other_stop and not self._is_cause_in_slurm_final

    @property
    def is_requeued_by_user(self) -> bool:
        """Whether the run's user has requested the requeue with hpcddp; no budget counts that."""
        if self.is_requeue_requested:
            return True
        return self.counted_cause is Cause.REQUEUED and exists(self.attempt.requeue_request)

    @property
    def is_cause_unavailable(self) -> bool:
        """Whether tasks received a signal and Slurm does not respond, so the cause is unknown."""
        if self.job_id is None or self.decision is not None or self.first_failure is not None or self.is_finished:
            return False
        was_signalled = self._has_signal_event if self.program is None else self.program.was_signalled
        return was_signalled and self.job_fields is None and self.cause is Cause.CRASH

    @property
    def _has_signal_event(self) -> bool:
        """Whether a task of this attempt has seen a signal."""
        return any(event.kind == "signal" and event.attempt == self.attempt.number for event in self.events)

    @property
    def may_be_preempted(self) -> bool:
        """Whether Slurm may be about to preempt and requeue the job, with the information available."""
        return self.cause is Cause.PREEMPTION or (self.cause is Cause.UNKNOWN and self.job_fields is None)

    @property
    def is_finished(self) -> bool:
        """Whether the run has a result that says so."""
        return has_finished(self.attempt.run)

    @property
    def is_fenced(self) -> bool:
        """Whether a newer attempt of the run has begun; read anew each time."""
        return self.attempt.run.newest_attempt() not in {None, self.attempt.number}

    @cached_property
    def decision(self) -> Decision | None:
        """What the ranks decided; where the record cannot be read, what is known of it, or None."""
        if isinstance(self._decision_or_damage, Decision):
            return self._decision_or_damage
        return self._decision_without_record()

    @cached_property
    def _decision_or_damage(self) -> Decision | RecordError | None:
        try:
            return read_decision(self.attempt)
        except RecordError as error:
            return error

    def _decision_without_record(self) -> Decision | None:
        """Return the decision of ranks that could not write it: the event of the stop, or the exit code, shows one."""
        stop_event = self._stop_event
        if self.first_failure is not None:
            return None
        if stop_event is not None:
            reasons = [stop_event.reason]
        elif self.code == ExitCode.STOPPED:
            # Where they stopped is not known, and the signals are the most likely reason.
            signal_events = [event for event in self.events if event.kind == "signal"]
            reasons = [event.reason for event in signal_events if event.attempt == self.attempt.number]
            stop_event = Event(kind="stop", time=time.time(), attempt=self.attempt.number)
        else:
            return None
        return Decision(
            attempt=stop_event.attempt,
            step=stop_event.step or 0,
            reason=max((reason for reason in StopReason if reason.word in reasons), default=StopReason.NONE),
            cause=stop_event.cause,
            saved=bool(stop_event.saved),
            save_s=0.0,
            time=stop_event.time,
        )

    @property
    def is_stop_recorded(self) -> bool:
        """Whether the ranks themselves have recorded that they stopped."""
        return isinstance(self._decision_or_damage, Decision) or self._stop_event is not None

    @property
    def _stop_event(self) -> Event | None:
        """The event that the ranks write when they have stopped; None if there is none."""
        for event in self.events:
            if event.kind == "stop" and event.attempt == self.attempt.number and event.saved is not None:
                return event
        return None

    @property
    def damage(self) -> RecordError | None:
        """A record of the ranks or their programs that cannot be read; Slurm may show the cause without it."""
        if isinstance(self._decision_or_damage, RecordError):
            return self._decision_or_damage
        return None if self.program is None else self.program.damage

    @cached_property
    def failures(self) -> list[FailureRecord]:
        """The error records, the first cause first."""
        return read_failures(self.attempt)

    @property
    def first_failure(self) -> FailureRecord | None:
        """The first error that names a cause of its own."""
        if not self.failures or self.failures[0].secondary:
            return None
        return self.failures[0]

    @property
    def _error_code(self) -> int | None:
        """The exit code that the first error asks for; None without an error that names a cause."""
        if self.first_failure is not None:
            return self.first_failure.exit_code
        if self.cause is not Cause.CRASH:
            return None
        # All ranks that failed may have only lost others, which had ended or did not come.
        lost = lost_peers(self.attempt, self.failures)
        if lost is None:
            return None
        return ExitCode.USER_CODE if isinstance(lost, UnevenRanks) else ExitCode.HANG

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

    @cached_property
    def full_disk(self) -> str | None:
        """A sentence about the disk of the run if it is full, else None."""
        return full_disk(self.attempt.run.path)

    @cached_property
    def job_id(self) -> str | None:
        """The job's id in Slurm; None for a local run."""
        return slurm_job_id(self.environment)

    @cached_property
    def later_jobs(self) -> Sequence[str] | None:
        """The jobs of its chain that follow this one; None for a job of no chain."""
        chain = chain_of(self.attempt.run)
        return chain[chain.index(self.job_id) + 1 :] if self.job_id in chain else None

    @property
    def job_text(self) -> str:
        """What to call the job in a sentence."""
        return "this run" if self.job_id is None else f"job {self.job_id}"

    @cached_property
    def job_fields(self) -> dict[str, str] | None:
        """Slurm's record of the job now; None if Slurm does not respond."""
        if self.job_id is None:
            return None
        # The ranks' decision is enough to request a requeue, which waits for the controller itself.
        return ask_slurm(self.job_id, patience_s=0.0 if self.decision else PATIENCE_S)

    @property
    def restart_count(self) -> int:
        """The restart count of this attempt, which is smaller now if slurmctld was killed and forgot a requeue."""
        fields = self.job_fields or {}
        count_now = int(fields.get("Restarts", self.restart_count_at_start))
        return min(count_now, self.restart_count_at_start)

    @cached_property
    def restart_count_at_start(self) -> int:
        """The restart count that this attempt was started with."""
        return 0 if self.start is None else self.start.restart_count

    @cached_property
    def start(self) -> Start | None:
        """Who started this attempt; None without a record."""
        return read_start(self.attempt)

    @cached_property
    def ended_allocation(self) -> str | None:
        """Slurm's id of the allocation that a local run had its tasks in, if that has ended or ends; else None."""
        allocation = allocation_of(self.environment)
        if allocation is None:
            return None
        fields = ask_slurm(allocation)
        if fields is None or keeps_running(fields):
            return None
        return allocation

    @cached_property
    def node_faults(self) -> dict[str, NodeFault]:
        """The nodes of the job that may have caused the end of the attempt, with what has happened there."""
        if self.job_id is None:
            return {}
        if self.counted_cause is Cause.NODE_FAILURE:
            return dict.fromkeys(self.lost_nodes, "lost")
        node = node_of_first_failure(self.attempt, self.failures)
        if self.cause is not Cause.CRASH or node is None:
            return {}
        text = text_of_first_failure(self.attempt, self.failures)
        return {node: "hardware" if says_hardware_error(text) else "failure"}

    @cached_property
    def lost_nodes(self) -> list[str]:
        """The nodes whose ranks left no record, and whose slurmd does not answer or which were started anew."""
        has_cause = self.first_failure is not None and not self.first_failure.waiting
        if self.job_id is None or has_cause:
            return []
        recorded_ranks = [failure.rank for failure in self.failures]
        if self.program is not None:
            recorded_ranks += [program_exit.rank for program_exit in self.program.exits]
        return lost_nodes(
            self.environment,
            tasks_per_node=self.spec.tasks_per_node,
            recorded=recorded_ranks,
            started_at=None if self.start is None else self.start.time,
        )


def _is_file_server_away(record: object) -> bool:
    """Return whether a record is instead an error of a file server that does not answer, or has restarted."""
    cause = record.__cause__ if isinstance(record, RecordError) else record
    return isinstance(cause, OSError) and cause.errno in _FILE_SERVER_AWAY


def _has_time_for_restart(
    number: int,
    start: Start,
    events: Sequence[Event],
    *,
    job: Mapping[str, str],
    lead_s: float,
    now: float,
) -> bool:
    """Return whether a job lasts longer than a restart, and then a save before its end.

    Args:
        number: the number of the attempt that has ended.
        events: the events of the run.
        job: Slurm's record of the job.
        lead_s: how long before its end the tasks are warned, in seconds.
        now: seconds since the epoch.
    """
    end_time = end_time_of(job, {}, now=now)
    if end_time is None:
        return True
    train_event = first_train_event(events, number)
    began_work = now if train_event is None else train_event.time
    start_up_s = max(0.0, began_work - start.time)
    return end_time - now > start_up_s + lead_s + _SIGNAL_EARLY_S


def _step_has_ended(attempt: AttemptDirectory) -> bool:
    """Return whether Slurm has ended the step of the tasks: if a slurmstepd was killed, the next one would wait for it.

    It waits some seconds for the end of the step. Where nothing is known of the step, a requeue ends it with the job.
    """
    step_id = _read_step_id(attempt)
    if step_id is None:
        return False
    try:
        return wait_until(
            lambda: not commands.step_exists(step_id, os.environ), timeout_s=_STEP_PATIENCE_S, poll_s=_POLL_S
        )
    except commands.SlurmCommandError:
        return False


def _read_step_id(attempt: AttemptDirectory) -> str | None:
    """Return the id of the step of the tasks; None if it is not recorded, or the record is damaged."""
    try:
        with open_regular(attempt.step) as (stream, _):
            match = _STEP_ID.fullmatch(stream.read(_LONGEST_STEP_ID))
    except OSError:
        return None
    return None if match is None else match[1].decode()
