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
from hpcddp.manage.run_files import Job
from hpcddp.manage.status import RunStatus, left_behind
from hpcddp.run.directory import AttemptDirectory, RunDirectory
from hpcddp.run.events import append_event, newest_saved_step, read_events
from hpcddp.run.files import write_errors_printed
from hpcddp.run.job_file import read_job_file
from hpcddp.run.job_records import chain_of
from hpcddp.run.record import RecordError
from hpcddp.run.result import resume_command, unfinished_result, write_result
from hpcddp.run.sweep import Sweep, index_of, sweep_of
from hpcddp.slurm import commands as slurm
from hpcddp.slurm.hostlist import ranges_text
from hpcddp.slurm.job import State
from hpcddp.stop.reasons import Cause, ExitCode
from hpcddp.submission.sweep_element import begin_element

End = Callable[[Sequence[str]], None]
"""Cancels Slurm jobs, by id, or by the option of scancel that selects them."""

_CANCELLED_BETWEEN_ATTEMPTS = "cancelled by its user before it ran again"
_NEVER_RAN = "cancelled by its user before it started"


class CancelError(HpcddpError):
    """The run could not be cancelled."""

    kind = "cancel"


class DamagedRunError(CancelError):
    """A record that names the job or the result of the run is damaged."""

    exit_code = UserError.exit_code


def cancel(status: RunStatus, *, end: End) -> str:
    """Cancel a run, and return what happens now, in a sentence.

    Raises:
        CancelError: it is unknown whether the job that would be cancelled is the run's.
        DamagedRunError: a record of the job or the result is damaged.
    """
    job = status.files.job
    # All jobs that are left, whichever those are.
    chain = "" if job is None else job.chain_option
    if not status.files.is_job_known and status.files.result is None:
        raise DamagedRunError(f"nothing was cancelled: {status.files.damaged[0]}")
    has_ended = not status.state.is_alive and status.state is not State.UNKNOWN
    if has_ended:
        what = _signal_left_behind([status]) or "there is nothing to cancel"
        if chain:
            end([chain])
            what = "the jobs of its chain that were left are cancelled"
        return f"run {status.run.run_id} has ended already ({status.state}); {what}"
    if status.state is State.UNKNOWN or job is None:
        raise CancelError(
            f"nothing was cancelled: the state of the run {status.run.run_id} is unknown; try again where Slurm, or "
            "the machine that it was started on, can be queried"
        )
    if job.local:
        return _cancel_on_this_machine(status, job)
    end([chain or job.job_id])
    _append_cancel_event(status)
    if status.state.has_nodes:
        return _sentence_about_ending(status, job.job_id)
    saved_step = _conclude(status)
    rest = "it had not saved a step. To start it again"
    if saved_step:
        rest = f"step {saved_step} is saved. To resume later"
    elif _is_command(status.run) and status.files.attempt is not None:
        rest = "what its program has saved is not known. To resume later"
    return f"run {status.run.run_id} is cancelled (job {job.job_id}); {rest}: {resume_command(status.run)}"


def _cancel_on_this_machine(status: RunStatus, job: Job) -> str:
    """End a run on this machine, and return what happens now, in a sentence."""
    run = status.run
    still_ran = _signal_batch_script(job)
    _append_cancel_event(status)
    if not status.state.has_nodes:
        _conclude(status)
        return f"run {run.run_id} is cancelled before its turn; to start it: {resume_command(run)}"
    if not still_ran:
        return f"run {run.run_id} has ended meanwhile; there is nothing to cancel"
    reaction = "its program receives SIGTERM" if _is_command(run) else "it saves and exits"
    return f"run {run.run_id} was signalled; {reaction}. To resume later: {resume_command(run)}"


def _signal_batch_script(job: Job) -> bool:
    """Send SIGTERM to the batch script of a run on this machine; return whether it still ran."""
    try:
        os.kill(int(job.job_id), signal.SIGTERM)
    except ProcessLookupError:
        return False
    return True


def _sentence_about_ending(status: RunStatus, job_id: str) -> str:
    """Return what happens to a run whose job has nodes of Slurm."""
    run = status.run
    beginning = f"run {run.run_id} is being cancelled (job {job_id})"
    if status.state is State.SUSPENDED:
        return (
            f"{beginning}: it is suspended, so Slurm kills it without a signal, and what was not saved before is lost. "
            f"To resume later: {resume_command(run)}"
        )
    reaction = "its tasks are signalled, and it is saved if"
    if _is_command(run):
        reaction = "its program receives SIGTERM, and saves if"
    return (
        f"{beginning}: {reaction} that fits into the seconds that Slurm gives them. To resume later: "
        f"{resume_command(run)}"
    )


def _signal_left_behind(runs: Sequence[RunStatus]) -> str | None:
    """Send SIGTERM to what killed batch scripts have left on this machine; return a phrase, None if nothing is left."""
    processes: list[int] = []
    for status in runs:
        processes += left_behind(status)
    if not processes:
        return None
    # All processes, as Slurm does in a step.
    for process_id in processes:
        with suppress(ProcessLookupError):
            os.kill(process_id, signal.SIGTERM)
    return f"SIGTERM was sent to what a killed batch script has left ({processes_text(processes)})"


def _is_command(run: RunDirectory) -> bool:
    """Return whether a run is one of a program that saves its state itself; not if its job file cannot be read."""
    with suppress(RecordError):
        return read_job_file(run).command is not None
    return False


def _append_cancel_event(status: RunStatus) -> None:
    """Record who ends a running attempt: Slurm shows only that its job was signalled.

    Only a request that has reached the job is recorded: a requeue soon after it is refused as the program's own.
    """
    if status.files.attempt is not None and status.state.has_nodes:
        with suppress(OSError):
            append_event(status.run.events, kind="cancel", time=status.now, attempt=status.files.attempt)


def _conclude(status: RunStatus) -> int:
    """Write the result of a run that has no live process to write it; return the newest saved step, 0 without one."""
    run = status.run
    attempt = status.files.attempt
    sweep = None if run.path.exists() else sweep_of(run)
    saved_step = newest_saved_step(read_events(run.events))
    reason = _NEVER_RAN if attempt is None else _CANCELLED_BETWEEN_ATTEMPTS
    result = unfinished_result(run, "cancelled", reason, ExitCode.INTERRUPTED, attempt=attempt, saved_step=saved_step)
    # Its job or its process has been ended already.
    with write_errors_printed(run.result):
        if sweep is not None:
            begin_element(sweep, index_of(run))
        write_result(run, result)
        _append_stop_event(run, attempt or 0, reason, now=status.now)
    return saved_step


def _append_stop_event(run: RunDirectory, attempt: int, reason: str, *, now: float) -> None:
    cause = str(Cause.CANCELLED)
    append_event(run.events, kind="stop", time=now, attempt=attempt, reason=reason, cause=cause)


def cancel_sweep(status: SweepStatus, *, end: End, now: float) -> str:
    """Cancel all elements of a sweep, and return what happens now, in a sentence.

    Args:
        now: seconds since the epoch.

    Raises:
        CancelError: it is unknown whether the jobs that would be cancelled are the sweep's.
    """
    sweep = status.sweep
    if State.UNKNOWN in status.counts:
        raise CancelError(
            f"nothing was cancelled: Slurm cannot say which elements of {sweep.sweep_id} are alive; try later"
        )
    signalled = _signal_left_behind(status.elements)
    alive = [element for element in status.elements if element.state.is_alive and element.files.job is not None]
    if not alive:
        what = signalled or "there is nothing to cancel"
        return f"sweep {sweep.sweep_id} has ended already ({status.sentence}); {what}"
    jobs_in_slurm = []
    # Those that wait come first: the end of one that runs is the turn of another.
    waiting_first = sorted(alive, key=lambda element: element.state.has_nodes)
    jobs = [element.files.job for element in waiting_first if element.files.job is not None]
    for job in jobs:
        if job.local:
            _signal_batch_script(job)
        elif job.chain_option:
            end([job.chain_option])
        else:
            jobs_in_slurm.append(job.job_id)
    if jobs_in_slurm:
        end(_joined_by_array(jobs_in_slurm))
    for element in alive:
        _append_cancel_event(element)
        if not element.state.has_nodes and element.run.path.is_dir():
            _conclude(element)
    # Elements that have not begun have no directory of their own.
    with write_errors_printed(sweep.directory.events):
        _append_stop_event(sweep.directory, 0, _NEVER_RAN, now=now)
    return _sentence_about_sweep(sweep, alive, is_local=all(job.local for job in jobs), signalled=signalled)


def _sentence_about_sweep(sweep: Sweep, alive: Sequence[RunStatus], *, is_local: bool, signalled: str | None) -> str:
    """Return what happens to the elements of a sweep.

    Args:
        alive: the elements that are being cancelled.
        is_local: whether they run on this machine.
        signalled: what else was signalled, a phrase; None if nothing was.
    """
    suspended = sum(element.state is State.SUSPENDED for element in alive)
    running = sum(element.state.has_nodes for element in alive) - suspended
    subject = "1 element" if len(alive) == 1 else f"{len(alive)} elements"
    verb = "is" if len(alive) == 1 else "are"
    sentence = f"{subject} of sweep {sweep.sweep_id} {verb} being cancelled, {running} running; what runs is saved"
    if not is_local:
        sentence += " if that fits into the seconds that Slurm gives it"
    if suspended:
        sentence += f"; Slurm kills the {suspended} suspended without a signal"
    if signalled is not None:
        sentence += f"; {signalled}"
    return sentence


def _joined_by_array(job_ids: Sequence[str]) -> list[str]:
    """Return names of jobs that are few enough for a command line: those of an array become one list of indices."""
    single_jobs = []
    indices_by_array: dict[str, list[int]] = {}
    for job_id in job_ids:
        array_id, _, index = job_id.partition("_")
        if index:
            indices_by_array.setdefault(array_id, []).append(int(index))
        else:
            single_jobs.append(job_id)
    arrays = [f"{array_id}_[{ranges_text(indices)}]" for array_id, indices in indices_by_array.items()]
    return [*single_jobs, *arrays]


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
        sleep: waits so many seconds.

    Raises:
        RequeueError: the run is not one that runs on Slurm, or it does not answer.
    """
    run = status.run
    job_id = _live_job(status)
    spec = read_job_file(run)
    if (spec.requeue.left_to_slurm or chain_of(run)) and not commands.may_requeue(job_id):
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
    # No budget counts a requeue that the run's user has requested.
    attempt.requeue_request.touch(mode=0o600)
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
        attempt.requeue_request.touch(mode=0o600)
    try:
        if not spec.requeue.left_to_slurm:
            commands.allow(job_id)
        commands.requeue(job_id)
    except HpcddpError:
        attempt.requeue_request.unlink(missing_ok=True)
        raise


def _live_job(status: RunStatus) -> str:
    """Return the id of the job that runs."""
    run = status.run
    job = status.files.job
    state = status.state
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
