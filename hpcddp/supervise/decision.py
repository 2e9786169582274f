"""Decide what happens after an attempt, by a pure function of what is known about its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from hpcddp.stop.reasons import Cause, ExitCode

# Errors that say nothing against the user's code: a peer or a node was lost, or a rank hung.
_INFRASTRUCTURE = frozenset({ExitCode.INFRASTRUCTURE, ExitCode.HANG})
# The causes that requeue.causes can name.
_NAMEABLE = frozenset({Cause.PREEMPTION, Cause.TIME_LIMIT, Cause.NODE_FAILURE})


class ActionKind(StrEnum):
    """What the supervisor does."""

    FINISH = "finish"
    """Do nothing, because the run has its result."""
    FENCED = "fenced"
    """Do nothing and write nothing, because a newer attempt owns the run."""
    RESTART = "restart"
    """Start the tasks again in this job."""
    REQUEUE = "requeue"
    """Have Slurm run the job again."""
    LEAVE_TO_SLURM = "leave_to_slurm"
    """Slurm has requeued the job already; only set an earlier StartTime."""
    CONTINUE = "continue"
    """Leave the run to the next job of its chain."""
    STOP = "stop"
    """End the run where it can be resumed manually."""
    CANCEL = "cancel"
    """End the run, as its user asked."""
    FAIL = "fail"
    """End the run as failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndFacts:
    """The input of the decision at the end of an attempt.

    Args:
        cause: why it ended, according to Slurm, the ranks' decision or this machine.
        finished: whether the run has a result that says so.
        fenced: whether a newer attempt of the run exists.
        error_code: the exit code that the first error asks for; None without an error that names a cause of its own.
        on_slurm: whether the job is one of Slurm's.
        can_restart: whether the tasks can be started again in this job.
        in_allocation: whether the run is a local one whose tasks are in an allocation.
        requeue_allowed: whether Slurm may requeue the job.
        causes: the causes after which the user wants the job requeued.
        later_jobs: the jobs of its chain that follow; None for a job of no chain.
        requested: whether the run's user has requested a requeue; no budget counts that.
        why_without_progress: why a run without progress must end, or None.
        why_used_up: which budget is used up, or None.
    """

    cause: Cause
    finished: bool = False
    fenced: bool = False
    error_code: int | None = None
    on_slurm: bool = True
    can_restart: bool = False
    in_allocation: bool = False
    requeue_allowed: bool = True
    causes: frozenset[Cause] = _NAMEABLE
    later_jobs: Sequence[str] | None = None
    requested: bool = False
    why_without_progress: str | None = None
    why_used_up: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What to do.

    Args:
        kind: what the supervisor does.
        exit_code: what the batch script exits with.
        why: why the run is not requeued, in words that follow "because"; empty when it is.
    """

    kind: ActionKind
    exit_code: int
    why: str = ""


def decide(facts: EndFacts) -> Action:
    """Return what to do at the end of an attempt: the first rule that applies decides."""
    if facts.fenced:
        return Action(kind=ActionKind.FENCED, exit_code=ExitCode.FENCED)
    if facts.finished:
        return Action(kind=ActionKind.FINISH, exit_code=ExitCode.FINISHED)
    if facts.error_code is not None and facts.error_code not in _INFRASTRUCTURE:
        # Before what Slurm did: a job with an error of its own would fail again.
        return Action(kind=ActionKind.FAIL, exit_code=facts.error_code)
    if facts.cause is Cause.CANCELLED:
        return Action(kind=ActionKind.CANCEL, exit_code=ExitCode.INTERRUPTED)
    return _decide_about_requeue(facts)


def _decide_about_requeue(facts: EndFacts) -> Action:
    if not facts.requested:
        if facts.cause is Cause.REQUEUED:
            # The job starts again in any case; the next start checks the budgets.
            return Action(kind=ActionKind.LEAVE_TO_SLURM, exit_code=ExitCode.STOPPED)
        if facts.why_without_progress is not None:
            return Action(kind=ActionKind.FAIL, exit_code=ExitCode.NO_PROGRESS, why=facts.why_without_progress)
        if facts.why_used_up is not None:
            return Action(kind=ActionKind.FAIL, exit_code=_code_without_budget(facts), why=facts.why_used_up)
    return _decide_how_to_go_on(facts)


def _decide_how_to_go_on(facts: EndFacts) -> Action:
    if facts.cause is Cause.CRASH and facts.can_restart:
        return Action(kind=ActionKind.RESTART, exit_code=ExitCode.STOPPED)
    if facts.later_jobs:
        return Action(kind=ActionKind.CONTINUE, exit_code=ExitCode.STOPPED)
    if facts.later_jobs is not None:
        return Action(kind=ActionKind.STOP, exit_code=ExitCode.STOPPED, why="its job was the last of its chain")
    if facts.cause in _NAMEABLE and facts.cause not in facts.causes:
        why = f"requeue.causes does not name {facts.cause}"
        return Action(kind=ActionKind.STOP, exit_code=ExitCode.STOPPED, why=why)
    if not facts.on_slurm:
        return _end_without_slurm(facts)
    return _requeue_by_slurm(facts)


def _code_without_budget(facts: EndFacts) -> int:
    if facts.cause is Cause.CRASH:
        return _code_of_crash(facts)
    return ExitCode.NO_PROGRESS


def _code_of_crash(facts: EndFacts) -> int:
    return facts.error_code or ExitCode.INFRASTRUCTURE


def _end_without_slurm(facts: EndFacts) -> Action:
    if facts.cause is Cause.CRASH:
        return Action(kind=ActionKind.FAIL, exit_code=_code_of_crash(facts))
    subject = "runs in an allocation" if facts.in_allocation else "runs on this machine"
    return Action(kind=ActionKind.STOP, exit_code=ExitCode.STOPPED, why=f"{subject} are not requeued")


def _requeue_by_slurm(facts: EndFacts) -> Action:
    if facts.requeue_allowed:
        return Action(kind=ActionKind.REQUEUE, exit_code=ExitCode.STOPPED)
    why = "Slurm is not allowed to requeue it (Requeue=0); a chain of jobs needs no requeue (hpcddp submit --chain N)"
    return Action(kind=ActionKind.STOP, exit_code=ExitCode.STOPPED, why=why)
