"""Ending runs, as their user asks."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence

from hpcddp.errors import HpcddpError
from hpcddp.manage.format import ranks_text
from hpcddp.manage.states import State
from hpcddp.manage.status import RunStatus
from hpcddp.manage.sweeps import SweepStatus
from hpcddp.run.directory import RunDirectory
from hpcddp.run.events import append_event, newest_saved_step, read_events
from hpcddp.run.result import Result, resume_command, write_result
from hpcddp.run.sweep import index_of, sweep_of
from hpcddp.stop.reasons import Cause, ExitCode
from hpcddp.submit.sweep_element import begin_element

End = Callable[[Sequence[str]], None]
"""Ends jobs of Slurm's."""

_REASON = "cancelled by its user before it ran again"
_NEVER_RAN = "cancelled by its user before it started"


class CancelError(HpcddpError):
    """The run could not be cancelled."""

    kind = "cancel"


def cancel(status: RunStatus, *, end: End) -> str:
    """End a run, and return what happens now, in a sentence.

    Args:
        status: the run.
        end: ends jobs of Slurm's.

    Raises:
        CancelError: nobody knows whether the job that would be ended is the run's, also where a record is damaged.
    """
    run, job = status.run, status.traces.job
    if not status.traces.is_job_known and status.traces.result is None:
        raise CancelError(f"nothing was cancelled: {status.traces.damaged[0]}")
    if status.state is State.UNKNOWN or (status.state.is_alive and job is None):
        raise CancelError(
            f"nothing was cancelled: nobody can say whether the run {run.run_id} is alive; try again where Slurm, or "
            "the machine that it was started on, can be asked"
        )
    if not status.state.is_alive or job is None:
        return f"run {run.run_id} has ended already ({status.state}); there is nothing to cancel"
    if job.local:
        os.kill(int(job.job_id), signal.SIGTERM)
        return f"run {run.run_id} is told to save and to end. To go on later: {resume_command(run)}"
    end([job.job_id])
    if not status.state.has_nodes:
        saved = _conclude(run, status)
        kept = f"step {saved} is saved. To go on later" if saved else "it had not saved a step. To start it again"
        return f"run {run.run_id} is cancelled (job {job.job_id}); {kept}: {resume_command(run)}"
    return (
        f"run {run.run_id} is being cancelled (job {job.job_id}): its tasks are told to end, and it is saved if that "
        f"fits into the seconds that Slurm gives them. To go on later: {resume_command(run)}"
    )


def _conclude(run: RunDirectory, status: RunStatus) -> int | None:
    """Write the result of a run that nothing of runs that could write it; return the step that it would go on from."""
    attempt = status.traces.attempt
    if (sweep := None if run.path.exists() else sweep_of(run)) is not None:
        begin_element(sweep, index_of(run))
    saved = newest_saved_step(read_events(run.events)) or None
    reason = _NEVER_RAN if attempt is None else _REASON
    result = Result(
        status="cancelled",
        reason=reason,
        exit_code=int(ExitCode.INTERRUPTED),
        attempts=(attempt or 0) + 1,
        saved_step=saved,
        resume=resume_command(run),
    )
    write_result(run, result)
    _tell(run, attempt or 0, reason, now=status.now)
    return saved


def _tell(run: RunDirectory, attempt: int, reason: str, *, now: float) -> None:
    cause = str(Cause.CANCELLED)
    append_event(run.events, kind="stop", time=now, attempt=attempt, reason=reason, cause=cause)


def cancel_sweep(status: SweepStatus, *, end: End, now: float) -> str:
    """End all elements of a sweep, and return what happens now, in a sentence.

    Args:
        status: the sweep.
        end: ends jobs of Slurm's.
        now: seconds since the epoch.

    Raises:
        CancelError: nobody knows whether the jobs that would be ended are the sweep's.
    """
    sweep = status.sweep
    if State.UNKNOWN in status.counts:
        raise CancelError(
            f"nothing was cancelled: Slurm cannot say which elements of {sweep.sweep_id} are alive; try later"
        )
    alive = [element for element in status.elements if element.state.is_alive and element.traces.job is not None]
    if not alive:
        return f"sweep {sweep.sweep_id} has ended already ({status.sentence}); there is nothing to cancel"
    end(_jobs(alive))
    for element in alive:
        if not element.state.has_nodes and element.run.path.is_dir():
            _conclude(element.run, element)
    # Elements that have not begun have no directory to say so in.
    _tell(sweep.directory, 0, _NEVER_RAN, now=now)
    on_nodes = sum(element.state.has_nodes for element in alive)
    return (
        f"{len(alive)} elements of sweep {sweep.sweep_id} are being cancelled; the {on_nodes} that run are saved if "
        "that fits into the seconds that Slurm gives them"
    )


def _jobs(alive: Sequence[RunStatus]) -> list[str]:
    """Return the names of the jobs, few enough for a command line: those of an array as one list of indices."""
    single: list[str] = []
    found: dict[str, list[int]] = {}
    for element in alive:
        job_id = element.traces.job.job_id if element.traces.job else ""
        array, _, index = job_id.partition("_")
        if index:
            found.setdefault(array, []).append(int(index))
        else:
            single.append(job_id)
    return [*single, *(f"{array}_[{ranks_text(indices).replace(' ', '')}]" for array, indices in found.items())]
