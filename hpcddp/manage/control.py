"""Cancel a run, or save and requeue it, at its user's request."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from hpcddp.errors import HpcddpError, UserError
from hpcddp.jobfile.job import JobSpec
from hpcddp.manage.format import processes_text
from hpcddp.manage.overview import SweepStatus
from hpcddp.manage.status import RunStatus, left_behind
from hpcddp.run.directory import AttemptDirectory, RunDirectory
from hpcddp.run.events import append_event, newest_saved_step, read_events
from hpcddp.run.files import user_name
from hpcddp.run.job_file import read_job_file
from hpcddp.run.job_records import RequeueRequest, request_requeue
from hpcddp.run.record import RecordError
from hpcddp.run.result import resume_command, unfinished_result, write_result
from hpcddp.run.sweep import index_of, sweep_of
from hpcddp.slurm import commands as slurm
from hpcddp.slurm.hostlist import ranges_text
from hpcddp.slurm.states import State
from hpcddp.stop.reasons import Cause, ExitCode
from hpcddp.submission.sweep_element import begin_element

End = Callable[[Sequence[str]], None]
"""Cancels Slurm jobs, by id."""

_REASON = "cancelled by its user before it ran again"
_NEVER_RAN = "cancelled by its user before it started"


class CancelError(HpcddpError):
    """The run could not be cancelled."""

    kind = "cancel"


class DamagedRunError(CancelError):
    """A record that names the job or the result of the run is damaged."""

    exit_code = UserError.exit_code


def cancel(status: RunStatus, *, end: End) -> str:
    """Cancel a run, and return what happens now, in a sentence.

    Args:
        status: the run.
        end: cancels Slurm jobs.

    Raises:
        CancelError: it is unknown whether the job that would be cancelled is the run's.
        DamagedRunError: a record of the job or the result is damaged.
    """
    run, job = status.run, status.files.job
    if not status.files.is_job_known and status.files.result is None:
        raise DamagedRunError(f"nothing was cancelled: {status.files.damaged[0]}")
    if status.state is State.UNKNOWN or (status.state.is_alive and job is None):
        raise CancelError(
            f"nothing was cancelled: the state of the run {run.run_id} is unknown; try again where Slurm, or the "
            "machine that it was started on, can be queried"
        )
    if not status.state.is_alive or job is None:
        what = _signal_left_behind([status]) or "there is nothing to cancel"
        return f"run {run.run_id} has ended already ({status.state}); {what}"
    _append_cancel_event(status)
    if job.local:
        os.kill(int(job.job_id), signal.SIGTERM)
        if not status.state.has_nodes:
            _conclude(run, status)
            return f"run {run.run_id} is cancelled before its turn; to start it: {resume_command(run)}"
        saves = "its program receives SIGTERM" if _is_command(run) else "it saves and exits"
        return f"run {run.run_id} was signalled; {saves}. To resume later: {resume_command(run)}"
    end([job.job_id])
    if not status.state.has_nodes:
        saved = _conclude(run, status)
        if saved:
            kept = f"step {saved} is saved. To resume later"
        elif _is_command(run) and status.files.attempt is not None:
            kept = "what its program has saved is not known. To resume later"
        else:
            kept = "it had not saved a step. To start it again"
        return f"run {run.run_id} is cancelled (job {job.job_id}); {kept}: {resume_command(run)}"
    if status.state is State.SUSPENDED:
        return (
            f"run {run.run_id} is being cancelled (job {job.job_id}): it is suspended, so Slurm kills it without a "
            f"signal, and what was not saved before is lost. To resume later: {resume_command(run)}"
        )
    saves = (
        "its program receives SIGTERM, and saves if"
        if _is_command(run)
        else "its tasks are signalled, and it is saved if"
    )
    return (
        f"run {run.run_id} is being cancelled (job {job.job_id}): {saves} that fits into the seconds that Slurm gives "
        f"them. To resume later: {resume_command(run)}"
    )


def _signal_left_behind(runs: Sequence[RunStatus]) -> str | None:
    """Send SIGTERM to what killed batch scripts have left on this machine; return a phrase, None if nothing is left."""
    left = [process for status in runs for process in left_behind(status)]
    # All processes, as Slurm does in a step.
    for process in left:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGTERM)
    return f"SIGTERM was sent to what a killed batch script has left ({processes_text(left)})" if left else None


def _is_command(run: RunDirectory) -> bool:
    """Return whether a run is one of a program that saves its state itself; not if its job file cannot be read."""
    with suppress(RecordError):
        return read_job_file(run).command is not None
    return False


def _append_cancel_event(status: RunStatus) -> None:
    """Record who ends a running attempt: Slurm shows only that its job was signalled."""
    if status.files.attempt is not None and status.state.has_nodes:
        with suppress(OSError):
            append_event(status.run.events, kind="cancel", time=status.now, attempt=status.files.attempt)


def _conclude(run: RunDirectory, status: RunStatus) -> int:
    """Write the result of a run that has no live process to write it; return the newest saved step, 0 without one."""
    attempt = status.files.attempt
    if (sweep := None if run.path.exists() else sweep_of(run)) is not None:
        begin_element(sweep, index_of(run))
    saved = newest_saved_step(read_events(run.events))
    reason = _NEVER_RAN if attempt is None else _REASON
    code = ExitCode.INTERRUPTED
    write_result(run, unfinished_result(run, "cancelled", reason, code, attempt=attempt, saved_step=saved))
    _append_stop_event(run, attempt or 0, reason, now=status.now)
    return saved


def _append_stop_event(run: RunDirectory, attempt: int, reason: str, *, now: float) -> None:
    cause = str(Cause.CANCELLED)
    append_event(run.events, kind="stop", time=now, attempt=attempt, reason=reason, cause=cause)


def cancel_sweep(status: SweepStatus, *, end: End, now: float) -> str:
    """Cancel all elements of a sweep, and return what happens now, in a sentence.

    Args:
        status: the sweep.
        end: cancels Slurm jobs.
        now: seconds since the epoch.

    Raises:
        CancelError: it is unknown whether the jobs that would be cancelled are the sweep's.
    """
    sweep = status.sweep
    if State.UNKNOWN in status.counts:
        raise CancelError(
            f"nothing was cancelled: Slurm cannot say which elements of {sweep.sweep_id} are alive; try later"
        )
    alive = [element for element in status.elements if element.state.is_alive and element.files.job is not None]
    signalled = _signal_left_behind(status.elements)
    if not alive:
        what = signalled or "there is nothing to cancel"
        return f"sweep {sweep.sweep_id} has ended already ({status.sentence}); {what}"
    for element in alive:
        _append_cancel_event(element)
    # Those that wait come first: the end of one that runs is the turn of another.
    local = sorted((one for one in alive if one.files.job and one.files.job.local), key=lambda one: one.state.has_nodes)
    for element in local:
        with suppress(ProcessLookupError):
            os.kill(int(element.files.job.job_id if element.files.job else ""), signal.SIGTERM)
    if jobs := _jobs([element for element in alive if element not in local]):
        end(jobs)
    for element in alive:
        if not element.state.has_nodes and element.run.path.is_dir():
            _conclude(element.run, element)
    # Elements that have not begun have no directory of their own.
    _append_stop_event(sweep.directory, 0, _NEVER_RAN, now=now)
    suspended = sum(element.state is State.SUSPENDED for element in alive)
    on_nodes = sum(element.state.has_nodes for element in alive) - suspended
    killed = f"; Slurm kills the {suspended} suspended without a signal" if suspended else ""
    elements, verb = ("1 element", "is") if len(alive) == 1 else (f"{len(alive)} elements", "are")
    in_time = "" if local else " if that fits into the seconds that Slurm gives it"
    left = f"; {signalled}" if signalled else ""
    what = f"what runs is saved{in_time}{killed}{left}"
    return f"{elements} of sweep {sweep.sweep_id} {verb} being cancelled, {on_nodes} running; {what}"


def _jobs(alive: Sequence[RunStatus]) -> list[str]:
    """Return the names of the jobs, few enough for a command line: those of an array as one list of indices."""
    single: list[str] = []
    found: dict[str, list[int]] = {}
    for element in alive:
        job_id = element.files.job.job_id if element.files.job else ""
        array, _, index = job_id.partition("_")
        if index:
            found.setdefault(array, []).append(int(index))
        else:
            single.append(job_id)
    return [*single, *(f"{array}_[{ranges_text(indices)}]" for array, indices in found.items())]


# A task listens from its first lines on, but srun takes a moment to start it.
_TRIES: Final = 4
_ACKNOWLEDGE_TIMEOUT_S: Final = 4.0
_POLL_S: Final = 0.2


class RequeueError(UserError):
    """The run cannot be requeued."""

    kind = "requeue"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequeueCommands:
    """What a requeue asks of Slurm, each with the job's id.

    Args:
        may_requeue: whether Slurm may requeue the job.
        warn: sends USR2 to its tasks.
        allow: sets Requeue=1, for a job that hpcddp submitted with --no-requeue.
        requeue: has Slurm requeue it at once.
    """

    may_requeue: Callable[[str], bool]
    warn: Callable[[str], None]
    allow: Callable[[str], None]
    requeue: Callable[[str], None]


def commands_of_slurm(environment: Mapping[str, str]) -> RequeueCommands:
    """Return the commands that ask Slurm itself."""
    return RequeueCommands(
        may_requeue=lambda job_id: (slurm.show_job(job_id, environment=environment) or {}).get("Requeue") != "0",
        warn=lambda job_id: slurm.cancel([job_id], environment, signal="USR2"),
        allow=lambda job_id: slurm.update_job(job_id, Requeue="1"),
        requeue=slurm.requeue,
    )


def requeue(status: RunStatus, commands: RequeueCommands, *, sleep: Callable[[float], None] = time.sleep) -> str:
    """Save and requeue a live run, and return what happens now, in a sentence.

    Args:
        status: the run.
        commands: Slurm.
        sleep: waits so many seconds.

    Raises:
        RequeueError: the run is not one that runs on Slurm, or it does not answer.
    """
    run = status.run
    job_id = _live_job(status)
    spec = read_job_file(run)
    forbidden = spec.requeue.left_to_slurm and not spec.requeue.allow_continuation and not commands.may_requeue(job_id)
    if forbidden:
        raise RequeueError(
            f"Slurm is not allowed to requeue job {job_id}; end the run with hpcddp cancel {run.run_id}, then resume "
            f"it with {resume_command(run)}"
        )
    if spec.command is not None:
        _requeue_at_once(status, job_id, spec, commands)
        return (
            f"job {job_id} is requeued: the program of run {run.run_id} receives SIGTERM and is started again; it has "
            "only the seconds that Slurm gives it to save its state"
        )
    attempt = run.attempt(status.files.attempt or 0)
    _record_request(attempt, status)
    for _ in range(_TRIES):
        commands.warn(job_id)
        if _is_acknowledged(attempt, sleep):
            return (
                f"run {run.run_id} stops at the end of a step and saves, however long that takes; then Slurm runs job "
                f"{job_id} again, and the run resumes from that step"
            )
    # A time limit that comes later must not be taken for this request.
    attempt.requeue_request.unlink(missing_ok=True)
    raise RequeueError(
        f"the tasks of run {run.run_id} do not answer; they may not have started yet: try again when hpcddp status "
        "says that it is running"
    )


def _requeue_at_once(status: RunStatus, job_id: str, spec: JobSpec, commands: RequeueCommands) -> None:
    attempt = status.run.attempt(status.files.attempt or 0)
    # Before the batch script has begun, there is no attempt that could count.
    if attempt.path.exists():
        _record_request(attempt, status)
    try:
        if not spec.requeue.left_to_slurm:
            commands.allow(job_id)
        commands.requeue(job_id)
    except HpcddpError:
        attempt.requeue_request.unlink(missing_ok=True)
        raise


def _record_request(attempt: AttemptDirectory, status: RunStatus) -> None:
    """Record in the attempt's directory that the run's user requested the requeue: no budget counts it."""
    request_requeue(attempt, RequeueRequest(time=status.now, by=user_name()))


def _live_job(status: RunStatus) -> str:
    """Return the id of the job that runs."""
    run, job, state = status.run, status.files.job, status.state
    if not status.files.is_job_known and status.files.result is None:
        raise RequeueError(f"nothing was requeued: {status.files.damaged[0]}")
    if state in {State.PENDING, State.HELD, State.REQUEUED}:
        raise RequeueError(f"the run {run.run_id} waits to start ({state}); there is nothing to save or to requeue")
    if state is State.FINISHED:
        raise RequeueError(f"the run {run.run_id} has finished; there is nothing left to run")
    if state in {State.STOPPING, State.SUSPENDED} or state is State.UNKNOWN or job is None:
        raise RequeueError(f"the run {run.run_id} is {state}, and cannot be requeued now; try again later")
    if not state.is_alive:
        raise RequeueError(f"the run {run.run_id} has ended ({state}); to resume: {resume_command(run)}")
    if job.local:
        raise RequeueError(
            f"the run {run.run_id} runs on this machine, where it will not be requeued; end it with hpcddp cancel "
            f"{run.run_id}, then resume it with {resume_command(run)}"
        )
    return job.job_id


def _is_acknowledged(attempt: AttemptDirectory, sleep: Callable[[float], None]) -> bool:
    """Return whether a task logs the signal before the timeout."""
    for _ in range(round(_ACKNOWLEDGE_TIMEOUT_S / _POLL_S)):
        events = read_events(attempt.run.events)
        if any(event.kind == "signal" and event.attempt == attempt.number for event in events):
            return True
        sleep(_POLL_S)
    return False
