"""The paragraph at the end of an attempt: why it stopped, what was saved, what happens next."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from types import MappingProxyType

from hpcddp.run.decision import Decision
from hpcddp.run.directory import RunDirectory
from hpcddp.stop.reasons import Cause, StopReason

_CAUSES: Mapping[Cause, str] = MappingProxyType(
    {
        Cause.PREEMPTION: "{job} was preempted",
        Cause.TIME_LIMIT: "the time limit of {job} is near",
        Cause.CANCELLED: "{job} was cancelled",
        Cause.REQUEUED: "{job} was requeued by Slurm or by its user",
    }
)
_REASONS: Mapping[StopReason, str] = MappingProxyType(
    {
        StopReason.REQUESTED: "the training's own code asked to stop",
        StopReason.TERMINATED: "the tasks of {job} were told to end, and nobody can say why",
    }
)


def resume_command(run: RunDirectory) -> str:
    """Return the one command that continues a run; one whose script was submitted by hand needs its job file."""
    job = [] if run.submission.exists() else ["JOB"]
    return shlex.join(["hpcddp", "submit", *job, "--resume", str(run.path)])


def why_it_stopped(cause: Cause, decision: Decision | None, *, job: str) -> str:
    """Return why the attempt ended, where no error did it.

    Args:
        cause: the cause.
        decision: what the ranks decided, if they did.
        job: what to call the job.
    """
    sentence = _CAUSES.get(cause)
    if sentence is None and decision is not None:
        sentence = _REASONS.get(decision.reason)
    return (sentence or "the tasks of {job} ended before their work was done").format(job=job)


def what_is_saved(decision: Decision | None, newest_step: int) -> str:
    """Return where the run would go on.

    Args:
        decision: what the ranks decided, if they did.
        newest_step: the newest step that was ever saved; 0 if none was.
    """
    if decision is not None and decision.saved:
        took = f" in {decision.save_s:.1f} s" if decision.save_s else ""
        return f"step {decision.step} is saved{took}"
    if decision is not None and decision.step:
        kept = f"the newest checkpoint is of step {newest_step}" if newest_step else "there is no checkpoint"
        return f"step {decision.step} could not be saved, {kept}"
    return f"the newest checkpoint is of step {newest_step}" if newest_step else "no step is saved yet"
