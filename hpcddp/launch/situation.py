"""What is known at the end of an attempt, gathered once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hpcddp.launch.cause import ask_slurm, facts_of, slurm_job_id
from hpcddp.launch.lost_node import lost_nodes
from hpcddp.launch.requeue import PATIENCE_S
from hpcddp.run.decision import Decision, read_decision
from hpcddp.run.directory import AttemptDirectory
from hpcddp.run.events import read_events
from hpcddp.run.failure import FailureRecord, read_failures
from hpcddp.run.files import read_json
from hpcddp.run.programs import ProgramEnd, read_program_end
from hpcddp.spec.job import JobSpec
from hpcddp.spec.write import parse_resolved
from hpcddp.stop.budgets import Limits, spent_of, stuck, used_up
from hpcddp.stop.cause import Cause, cause_of
from hpcddp.stop.decision import EndFacts
from hpcddp.stop.reasons import StopReason

_WARNINGS = frozenset({StopReason.WARNED.word, StopReason.DEADLINE.word})
# What Slurm shows of these it shows for good; of the others the ranks may have seen more.
_CERTAIN = frozenset({Cause.PREEMPTION, Cause.CANCELLED, Cause.REQUEUED, Cause.NODE_FAILURE})


@dataclass(frozen=True, kw_only=True)
class Situation:
    """The end of an attempt.

    Args:
        attempt: the attempt.
        environment: the batch script's environment.
        cancelled: whether the user ended the job on this machine.
    """

    attempt: AttemptDirectory
    environment: Mapping[str, str]
    cancelled: bool = False

    @cached_property
    def job_id(self) -> str | None:
        """What Slurm calls the job; None for a local run."""
        return slurm_job_id(self.environment)

    @property
    def job(self) -> str:
        """What to call the job in a sentence."""
        return "this run" if self.job_id is None else f"job {self.job_id}"

    @cached_property
    def job_fields(self) -> dict[str, str] | None:
        """What Slurm says about the job now; None without an answer."""
        if self.job_id is None:
            return None
        # What the ranks have decided is enough to ask for a requeue, which has its own patience.
        return ask_slurm(self.job_id, patience_s=0.0 if self.decision else PATIENCE_S)

    @cached_property
    def restarts(self) -> int:
        """The restart count that this attempt was started with."""
        start = read_json(self.attempt.start) or {}
        return int(start.get("restart_count", 0))

    @cached_property
    def decision(self) -> Decision | None:
        """What the ranks decided."""
        return read_decision(self.attempt)

    @cached_property
    def failures(self) -> list[FailureRecord]:
        """The error records, the first cause first."""
        return read_failures(self.attempt)

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """The run's events so far."""
        return read_events(self.attempt.run.events)

    @cached_property
    def spec(self) -> JobSpec:
        """The job."""
        return parse_resolved(self.attempt.run.job_file.read_text(encoding="utf-8"))

    @cached_property
    def program(self) -> ProgramEnd | None:
        """How the programs of a command ended; None where the job runs something else."""
        if self.spec.command is None:
            return None
        return read_program_end(self.attempt, world_size=self.spec.world_size)

    @property
    def first_failure(self) -> FailureRecord | None:
        """The first error that names a cause of its own."""
        return self.failures[0] if self.failures and not self.failures[0].secondary else None

    @property
    def signalled(self) -> bool:
        """Whether a task of this attempt has seen a signal."""
        return any(event["event"] == "signal" and event["attempt"] == self.attempt.number for event in self.events)

    @property
    def is_being_taken_away(self) -> bool:
        """Whether Slurm may be about to requeue the job by itself, as far as anybody can tell."""
        return self.cause is Cause.PREEMPTION or (self.cause is Cause.UNKNOWN and self.job_fields is None)

    @property
    def counted_cause(self) -> Cause:
        """The cause that a requeue is counted under: the ranks may have seen a preemption that Slurm shows no more."""
        seen = self.decision.cause if self.decision is not None else None
        return Cause(seen) if self.cause is Cause.REQUEUED and seen == Cause.PREEMPTION else self.cause

    @cached_property
    def cause(self) -> Cause:
        """Why the attempt ended, by all that is known."""
        if self.requested:
            return Cause.REQUEUED
        return self._local_cause() if self.job_id is None else self._slurm_cause()

    def _local_cause(self) -> Cause:
        if self.cancelled:
            return Cause.CANCELLED
        if self.decision is None and self.program is not None:
            return self._program_cause(self.program)
        if self.decision is None:
            return Cause.CRASH
        if self.decision.reason in _WARNINGS:
            return Cause.TIME_LIMIT
        return Cause.UNKNOWN if self.decision.reason == StopReason.REQUESTED.word else Cause.CANCELLED

    @property
    def requested(self) -> bool:
        """Whether the run's user has asked to have it saved and started again, and nothing else has happened to it."""
        if self.job_id is None or not self.attempt.requeue_request.exists():
            return False
        stopped = self.decision is None or self.decision.reason in _WARNINGS
        return stopped and not self._is_certain

    @property
    def _is_certain(self) -> bool:
        """Whether what Slurm shows is all that there is to know."""
        seen = self._seen_by_slurm
        return seen in _CERTAIN or (seen is Cause.TIME_LIMIT and not self._warned)

    @cached_property
    def _seen_by_slurm(self) -> Cause:
        """Why the job ended, as far as Slurm shows it."""
        program = None if self.decision is not None else self.program
        # Of the programs of a command, some may only have lost their peers, which were told to end.
        errors = self.failures if program is None else [self.first_failure] if self.first_failure else []
        return cause_of(
            facts_of(
                self.job_fields,
                restarts_at_start=self.restarts,
                warned=self._warned,
                error_seen=self.decision is None and bool(errors),
            )
        )

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
        if program is not None and (known := self._program_cause(program)) is not Cause.CRASH:
            return known
        if decision is None and self.job_fields is None and self.signalled:
            return Cause.UNKNOWN
        if decision is None:
            return Cause.NODE_FAILURE if self.lost_nodes else Cause.CRASH
        if decision.reason == StopReason.INTERRUPTED.word:
            return Cause.CANCELLED
        seen = Cause(decision.cause) if decision.cause else now
        return now if seen in {Cause.UNKNOWN, Cause.CRASH} else seen

    def _program_cause(self, program: ProgramEnd) -> Cause:
        """Return what the programs themselves know of why they ended."""
        if self.first_failure is not None:
            return Cause.CRASH
        if program.out_of_time:
            return Cause.TIME_LIMIT
        return Cause.UNKNOWN if program.was_told or program.wants_to_go_on else Cause.CRASH

    @cached_property
    def lost_nodes(self) -> list[str]:
        """The nodes that have gone without a word."""
        if self.job_id is None or self.first_failure is not None:
            return []
        heard = [record.rank for record in self.failures]
        return lost_nodes(self.environment, tasks_per_node=self.spec.tasks_per_node, heard=heard)

    @property
    def is_overtaken(self) -> bool:
        """Whether a newer attempt of the run has begun by now; asked anew each time."""
        return self.attempt.run.newest_attempt() != self.attempt.number

    def facts(self) -> EndFacts:
        """Return what the decision is made from."""
        run = self.attempt.run
        result = read_json(run.result)
        finished = result is not None and result.get("status") == "finished"
        fenced = self.is_overtaken
        if finished or fenced:
            return EndFacts(cause=Cause.UNKNOWN, finished=finished, fenced=fenced)
        requeue, spent = self.spec.requeue, spent_of(self.events)
        limits = limits_of(self.spec)
        first = self.first_failure
        return EndFacts(
            cause=self.cause,
            error_code=first.exit_code if first else None,
            on_slurm=self.job_id is not None,
            requeue_allowed=not requeue.left_to_slurm or (self.job_fields or {}).get("Requeue") != "0",
            causes=frozenset(Cause(cause) for cause in requeue.causes),
            requested=self.requested,
            stuck=stuck(spent, limits),
            used_up=used_up(spent, limits, self.cause),
            allow_continuation=requeue.allow_continuation,
        )


def limits_of(spec: JobSpec) -> Limits:
    """Return how often a job may be started again."""
    requeue = spec.requeue
    return Limits(
        preemptions=requeue.max_preemptions,
        time_limits=requeue.max_time_limits,
        failures=requeue.max_failures,
        attempts_without_progress=requeue.max_attempts_without_progress,
        of_program=spec.command is not None,
    )
