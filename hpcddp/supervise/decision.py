"""What happens after an attempt: a pure function of what is known at its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from hpcddp.stop.reasons import Cause, ExitCode

# Errors that say nothing against the user's code: a peer or a node was lost, or a rank hung.
_INFRASTRUCTURE = frozenset({ExitCode.INFRASTRUCTURE, ExitCode.HANG})
_NAMEABLE = frozenset({Cause.PREEMPTION, Cause.TIME_LIMIT, Cause.NODE_FAILURE})


class Deed(StrEnum):
    """What the supervisor does."""

    FINISH = "finish"
    """Nothing: the run's result is there."""
    FENCED = "fenced"
    """Nothing at all: a newer attempt owns the run."""
    REQUEUE = "requeue"
    """Have Slurm run the job again."""
    LET = "let"
    """Slurm runs the job again by itself; only hurry it."""
    CONTINUE = "continue"
    """Submit another job for the same run."""
    STOP = "stop"
    """End the run where it can be taken up by hand."""
    CANCEL = "cancel"
    """End the run, as its user asked."""
    FAIL = "fail"
    """End the run as failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndFacts:
    """What is known at the end of an attempt.

    Args:
        cause: why it ended, as far as Slurm, the ranks' decision or this machine tells.
        finished: whether the run has a result that says so.
        fenced: whether a newer attempt of the run exists.
        error_code: the exit code that the first error asks for; None without an error that names a cause of its own.
        on_slurm: whether the job is one of Slurm's.
        requeue_allowed: whether Slurm may requeue the job.
        causes: the causes after which the user wants the job requeued.
        requested: whether the run's user has asked to have it saved and started again; no budget counts that.
        stuck: why a run without progress must end, or None.
        used_up: which budget is used up, or None.
        allow_continuation: whether another job may continue the run where requeue is forbidden.
    """

    cause: Cause
    finished: bool = False
    fenced: bool = False
    error_code: int | None = None
    on_slurm: bool = True
    requeue_allowed: bool = True
    causes: frozenset[Cause] = _NAMEABLE
    requested: bool = False
    stuck: str | None = None
    used_up: str | None = None
    allow_continuation: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What to do.

    Args:
        deed: the deed.
        exit_code: what the batch script exits with.
        why: why the run does not go on by itself, in words that follow "because"; empty when it does.
    """

    deed: Deed
    exit_code: int
    why: str = ""


def decide(facts: EndFacts) -> Action:
    """Return what to do at the end of an attempt; the first row that fits wins.

    Args:
        facts: what is known.
    """
    return next(action for row in _ROWS if (action := row(facts)) is not None)


def _is_over(facts: EndFacts) -> Action | None:
    if facts.fenced:
        return Action(deed=Deed.FENCED, exit_code=ExitCode.FENCED)
    if facts.finished:
        return Action(deed=Deed.FINISH, exit_code=ExitCode.FINISHED)
    return None


def _failed_by_itself(facts: EndFacts) -> Action | None:
    """A cause of its own comes before what Slurm did: started again, the job would only fail again."""
    if facts.error_code is None or facts.error_code in _INFRASTRUCTURE:
        return None
    return Action(deed=Deed.FAIL, exit_code=facts.error_code)


def _is_cancelled(facts: EndFacts) -> Action | None:
    return Action(deed=Deed.CANCEL, exit_code=ExitCode.INTERRUPTED) if facts.cause is Cause.CANCELLED else None


def _goes_on_by_itself(facts: EndFacts) -> Action | None:
    """What Slurm has requeued starts again whatever is done here; the budgets are checked there."""
    if facts.cause is not Cause.REQUEUED or facts.requested:
        return None
    return Action(deed=Deed.LET, exit_code=ExitCode.STOPPED)


def _is_over_budget(facts: EndFacts) -> Action | None:
    if facts.requested:
        return None
    if facts.stuck is not None:
        return Action(deed=Deed.FAIL, exit_code=ExitCode.NO_PROGRESS, why=facts.stuck)
    if facts.used_up is None:
        return None
    if facts.cause is Cause.CRASH:
        return Action(deed=Deed.FAIL, exit_code=facts.error_code or ExitCode.INFRASTRUCTURE, why=facts.used_up)
    return Action(deed=Deed.FAIL, exit_code=ExitCode.NO_PROGRESS, why=facts.used_up)


def _is_not_wanted(facts: EndFacts) -> Action | None:
    """The causes that the user can name lead to a requeue only if they are named."""
    if facts.cause not in _NAMEABLE or facts.cause in facts.causes:
        return None
    return Action(deed=Deed.STOP, exit_code=ExitCode.STOPPED, why=f"requeue.causes does not name {facts.cause}")


def _is_forbidden(facts: EndFacts) -> Action | None:
    if not facts.on_slurm and facts.cause is Cause.CRASH:
        return Action(deed=Deed.FAIL, exit_code=facts.error_code or ExitCode.INFRASTRUCTURE)
    if not facts.on_slurm:
        return Action(deed=Deed.STOP, exit_code=ExitCode.STOPPED, why="nothing on this machine starts it again")
    if facts.requeue_allowed:
        return None
    if facts.allow_continuation:
        return Action(deed=Deed.CONTINUE, exit_code=ExitCode.STOPPED)
    return Action(deed=Deed.STOP, exit_code=ExitCode.STOPPED, why="Slurm is not allowed to requeue it (Requeue=0)")


def _goes_on(_: EndFacts) -> Action:
    return Action(deed=Deed.REQUEUE, exit_code=ExitCode.STOPPED)


_ROWS: tuple[Callable[[EndFacts], Action | None], ...] = (
    _is_over,
    _failed_by_itself,
    _is_cancelled,
    _goes_on_by_itself,
    _is_over_budget,
    _is_not_wanted,
    _is_forbidden,
    _goes_on,
)
