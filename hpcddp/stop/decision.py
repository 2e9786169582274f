"""What happens after an attempt: a pure function of what is known at its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from hpcddp.stop.cause import Cause
from hpcddp.stop.exit_codes import ExitCode


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
        finished: whether the run has a result that says so.
        fenced: whether a newer attempt of the run exists.
        cause: why the job must go, as far as Slurm or this machine tells.
        decided: whether the ranks stopped together and left a decision.
        error_code: the exit code that the first error asks for; None without an error that names a cause of its own.
        requeue_allowed: ``Requeue`` of the job; None where there is no Slurm to requeue it, or none that answers.
        on_slurm: whether the job is one of Slurm's.
        causes: the causes after which the user wants the job requeued.
        stuck: why the run makes no progress, or None.
        used_up: the budget of this cause that is used up, or None.
        allow_continuation: whether another job may continue the run where requeue is forbidden.
    """

    cause: Cause
    finished: bool = False
    fenced: bool = False
    decided: bool = False
    error_code: int | None = None
    requeue_allowed: bool | None = True
    on_slurm: bool = True
    causes: frozenset[Cause] = frozenset({Cause.PREEMPTION, Cause.TIME_LIMIT, Cause.NODE_FAILURE})
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
    """A cause of its own comes first: who is preempted while the user's code fails would only fail again."""
    if facts.error_code is None or facts.error_code == ExitCode.INFRASTRUCTURE:
        return None
    return Action(deed=Deed.FAIL, exit_code=facts.error_code)


def _cancelled(facts: EndFacts) -> Action | None:
    return Action(deed=Deed.CANCEL, exit_code=ExitCode.INTERRUPTED) if facts.cause is Cause.CANCELLED else None


def _over_budget(facts: EndFacts) -> Action | None:
    if (why := facts.stuck or facts.used_up) is None:
        return None
    if not facts.decided and _is_failure(facts) and facts.stuck is None:
        return Action(deed=Deed.FAIL, exit_code=ExitCode.INFRASTRUCTURE, why=why)
    return Action(deed=Deed.FAIL, exit_code=ExitCode.NO_PROGRESS, why=why)


def _is_failure(facts: EndFacts) -> bool:
    return facts.cause in {Cause.CRASH, Cause.NODE_FAILURE} or (facts.cause is Cause.UNKNOWN and not facts.decided)


def _goes_on_by_itself(facts: EndFacts) -> Action | None:
    return Action(deed=Deed.LET, exit_code=ExitCode.STOPPED) if facts.cause is Cause.REQUEUED else None


def _not_wanted(facts: EndFacts) -> Action | None:
    """The three causes that the user can name are requeued only if named."""
    if facts.cause in {Cause.PREEMPTION, Cause.TIME_LIMIT, Cause.NODE_FAILURE} and facts.cause not in facts.causes:
        return Action(
            deed=Deed.STOP, exit_code=ExitCode.STOPPED, why=f"requeue.causes does not name {facts.cause}"
        )
    return None


def _not_possible(facts: EndFacts) -> Action | None:
    if not facts.on_slurm:
        return Action(deed=Deed.STOP, exit_code=ExitCode.STOPPED, why="nothing on this machine starts it again")
    if facts.requeue_allowed is False:
        if facts.allow_continuation:
            return Action(deed=Deed.CONTINUE, exit_code=ExitCode.STOPPED)
        return Action(deed=Deed.STOP, exit_code=ExitCode.STOPPED, why="Slurm may not requeue this job (Requeue=0)")
    return None


def _requeue(_: EndFacts) -> Action:
    return Action(deed=Deed.REQUEUE, exit_code=ExitCode.STOPPED)


_ROWS: tuple[Callable[[EndFacts], Action | None], ...] = (
    _is_over,
    _failed_by_itself,
    _cancelled,
    _over_budget,
    _goes_on_by_itself,
    _not_wanted,
    _not_possible,
    _requeue,
)
