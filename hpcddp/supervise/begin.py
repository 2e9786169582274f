"""Begin an attempt: claim the run directory, check the budgets, record the start."""

from __future__ import annotations

import errno
import re
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, Final, get_args

from hpcddp.errors import HpcddpError, UserError, printable, write_message
from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.write import parse_resolved
from hpcddp.polling import wait_until
from hpcddp.run.directory import AttemptDirectory, ReservedRecord, RunDirectory
from hpcddp.run.events import Event, append_event, newest_saved_step, read_events
from hpcddp.run.failure import cancelled_at, cause_in_log
from hpcddp.run.files import exists, full_disk_sentence, is_full, make_reserves, write_text
from hpcddp.run.job_records import Start, newest_start, read_program_end, read_refusal, write_refusal, write_start
from hpcddp.run.moved import refuse_other_script
from hpcddp.run.ownership import (
    RunDirectoryError,
    check_run_directory,
    conflict,
    identity,
    is_alive,
    make_private_directory,
    refuse_another_training,
)
from hpcddp.run.result import BY_USER, has_finished, read_result, resume_command, unfinished_result, write_result
from hpcddp.slurm import commands
from hpcddp.slurm.job import allocation_of, ask_slurm, end_time_of, is_being_requeued, moment_of, slurm_job_id
from hpcddp.slurm.job_environment import PICKLE_DIGEST, runs_before
from hpcddp.slurm.rank_env import own_host
from hpcddp.stop.reasons import Cause, ExitCode
from hpcddp.submission.sweep_element import complete_directory, element_of
from hpcddp.supervise.budgets import is_interruption, record_progress, why_exceeded
from hpcddp.supervise.predecessors import PredecessorError, why_unfinished
from hpcddp.supervise.slurm_requeue import forbid_requeue

# Quotas are raised, and old files removed, by a person; nodes are not held for longer than that.
PATIENCE_S: Final = 600.0
"""How long a start waits for space on a full disk, or for a run directory that is away, in seconds."""
_POLL_S: Final = 5.0
# A cancelled job has ended after KillWait (slurm.conf(5)), which is 30 s by default. Later requeues are a person's.
_OWN_REQUEUE_S: Final = 90.0
# Slurm signals the tasks, and kills those that have not ended some seconds later.
_SIGNALLED: Final = frozenset({Cause.REQUEUED, Cause.PREEMPTION})


class BudgetError(HpcddpError):
    """The run has been started as often as it may."""

    kind = "budget"
    exit_code: ClassVar[int] = ExitCode.NO_PROGRESS


class CancelledError(HpcddpError):
    """The job was cancelled, and its program has requeued it nevertheless."""

    kind = "cancelled"
    exit_code: ClassVar[int] = ExitCode.INTERRUPTED


class BeingRequeuedError(HpcddpError):
    """Slurm already ends this start of the job, and will start it again."""

    kind = "being_requeued"
    exit_code: ClassVar[int] = ExitCode.STOPPED


class EndedError(HpcddpError):
    """The run has ended for good, and Slurm has run its job again all the same."""

    kind = "ended"
    exit_code: ClassVar[int] = ExitCode.INTERRUPTED


class DirectoryAwayError(HpcddpError):
    """The directory that the run has used is not there."""

    kind = "directory_away"
    exit_code: ClassVar[int] = ExitCode.INFRASTRUCTURE


class DiskFullError(HpcddpError):
    """An attempt cannot begin, because the disk of the run is full."""

    kind = "disk_full"
    exit_code: ClassVar[int] = ExitCode.INFRASTRUCTURE


def begin(
    *,
    run_root: str,
    name: str,
    run_id: str | None,
    job_text: str,
    environment: Mapping[str, str],
    element: int | None = None,
    warnings: Sequence[str] = (),
) -> str:
    """Claim the run directory for one more attempt; wait for space if the disk is full.

    Args:
        run_root: where runs live; relative to the working directory.
        name: the job's name.
        run_id: the run's id; None derives ``<cluster name>-<job id>``.
        job_text: the resolved job file.
        environment: the batch script's environment.
        element: which element of a sweep it is, whose id and job these are; None is a run of its own.
        warnings: what the script has noticed before; it goes into the event log.

    Returns:
        The attempt's directory, or an empty text if the run has finished already and nothing is left to do.

    Raises:
        RunDirectoryError: the directory belongs to another job, or is not safe.
        BudgetError: the run was started often enough.
        CancelledError: the job was cancelled, and its program has requeued it.
        BeingRequeuedError: Slurm already ends this start of the job, and will start it again.
        EndedError: the run has ended for good, and Slurm has run its job again by itself.
        PredecessorError: a run that must finish before has ended in another way.
        DirectoryAwayError: the directory that the run had before is not there after ten minutes.
        DiskFullError: the disk is still full after ten minutes.
    """
    job_id = slurm_job_id(environment)
    job = ask_slurm(job_id) if job_id else None
    _refuse_being_requeued(job_id, job)
    directory, own_id = Path(run_root).absolute() / name, run_id or _derived_run_id(environment)
    run = RunDirectory(directory / own_id)
    of_sweep = None
    if element is not None:
        sweep_id = run_id or own_id.rpartition("_")[0]
        of_sweep = element_of(directory, sweep_id, element, job_text, environment)
        run, job_text = of_sweep.run, of_sweep.job_text
    submitted = run.path if of_sweep is None else of_sweep.sweep.path
    refuse_other_script((job or {}).get("Command"), submitted)
    if _restart_count(job, environment) or environment.get(PICKLE_DIGEST):
        _wait_for_directory(submitted)

    def claim() -> str | None:
        make_private_directory(run.path)
        check_run_directory(run.path)
        newest = run.newest_attempt()
        start = _observe(job_id, job, run, environment)
        _refuse_second_job(run, start)
        if has_finished(run):
            return ""
        previous, spec = newest_start(run), parse_resolved(job_text)
        _refuse_ended(run, previous, start)
        # The job may have moved to other resources, never to other training.
        refuse_another_training(run, spec)
        write_text(run.job_file, job_text)
        if run_id is None:
            _link_log(run)
        if of_sweep is not None:
            complete_directory(of_sweep, start.job_id or "", environment.get(PICKLE_DIGEST))
        _refuse_before_others(run, previous, start, environment)
        if previous is not None:
            _record_requeue_and_check_budgets(run, previous, start, spec)
        # A result is written when a run has ended for good; this one is being continued.
        run.result.unlink(missing_ok=True)
        attempt = _create_attempt(run, start, 0 if newest is None else newest + 1)
        if attempt is None:
            return None
        for warning in warnings:
            append_event(run.events, kind="warning", time=start.time, attempt=attempt.number, reason=printable(warning))
        return str(attempt.path)

    return _when_there_is_space(run, claim)


def _refuse_being_requeued(job_id: str | None, job: Mapping[str, str] | None) -> None:
    """Refuse a start that Slurm already ends: a slurmctld that was killed just after the start has forgotten it.

    Raises:
        BeingRequeuedError: Slurm starts the job again by itself.
    """
    if job is not None and is_being_requeued(job):
        raise BeingRequeuedError(f"Slurm already ends this start of job {job_id}, and starts the job again")


def _wait_for_directory(path: Path) -> None:
    """Wait for a directory that ``hpcddp submit`` or an earlier attempt has made: a new one would begin at step 0.

    Raises:
        DirectoryAwayError: it is not there after ten minutes.
    """
    if exists(path):
        return
    minutes = f"{PATIENCE_S / 60:g} minutes"
    write_message(f"{path} is not there; waiting up to {minutes} for it")
    if not wait_until(lambda: exists(path), timeout_s=PATIENCE_S, poll_s=_POLL_S):
        raise DirectoryAwayError(
            f"{path} is not there after {minutes}, and a new one would begin the training anew; mount its file system "
            "again, then submit the job again"
        )


def _when_there_is_space(run: RunDirectory, claim: Callable[[], str | None]) -> str:
    """Call ``claim``, and again while it gives None or the disk is full: others use the run, so it checks all anew."""
    deadline = time.monotonic() + PATIENCE_S
    is_first = True
    while True:
        try:
            if (claimed := claim()) is not None:
                return claimed
            continue
        except OSError as error:
            if not is_full(error):
                raise
            full = full_disk_sentence(run.path, error)
            if time.monotonic() >= deadline:
                raise _given_up(run, full) from error
        if is_first:
            write_message(f"{full}; waiting up to {PATIENCE_S / 60:g} minutes for space")
        is_first = False
        time.sleep(_POLL_S)


def _given_up(run: RunDirectory, full: str) -> DiskFullError:
    """Return the error about a disk that stays full, and write it as the result of the run."""
    why = f"{full}, and no space became free in {PATIENCE_S / 60:g} minutes"
    with suppress(OSError):
        _write_unfinished(run, "stopped", f"it was not started again: {why}", ExitCode.INFRASTRUCTURE)
    return DiskFullError(f"run {run.run_id} is not started: {why}; make room, and resume: {resume_command(run)}")


def _refuse_second_job(run: RunDirectory, start: Start) -> None:
    """Refuse a job whose run directory belongs to another job.

    Raises:
        RunDirectoryError: names the other job.
    """
    previous = newest_start(run)
    alive = previous is not None and previous.job_id != start.job_id and _is_alive(run, previous)
    # A job that was refused once stays refused: after a requeue it would look like a requeue of the run's own job.
    why = read_refusal(run, start.job_id) or conflict(previous, start, previous_alive=alive)
    if why is None:
        return
    if previous is not None and previous.job_id == start.job_id:
        # A full disk must not keep this job waiting beside the other one.
        with suppress(OSError):
            write_refusal(run, start.job_id, why)
    raise RunDirectoryError(f"the run directory {run.path} is taken: {why}; use another run id or run_root")


def _is_alive(run: RunDirectory, previous: Start) -> bool:
    """Return whether the job that used a run directory is alive; wait for Slurm, since it may still train there.

    Raises:
        RunDirectoryError: Slurm does not answer.
    """
    try:
        return is_alive(previous, patience_s=PATIENCE_S)
    except commands.SlurmUnavailableError as error:
        raise RunDirectoryError(
            f"the run directory {run.path} was used by job {previous.job_id}, and Slurm did not say in "
            f"{PATIENCE_S / 60:g} minutes whether that job has ended ({error.message}); submit this job again later"
        ) from error


def _observe(
    job_id: str | None, job: Mapping[str, str] | None, run: RunDirectory, environment: Mapping[str, str]
) -> Start:
    """Return who starts now, with the submit time that Slurm knows."""
    now, allocation = time.time(), allocation_of(environment)
    return Start(
        job_id=job_id or environment.get("HPCDDP_LOCAL_JOB_ID"),
        restart_count=_restart_count(job, environment) if job_id else 0,
        submit_time=job.get("SubmitTime") if job else None,
        host=own_host(environment),
        token=secrets.token_hex(16),
        time=now,
        end_time=end_time_of(ask_slurm(allocation) if allocation else job, environment, now=now),
        is_local=job_id is None,
        allocation=allocation,
        **identity(run.path),
    )


def _restart_count(job: Mapping[str, str] | None, environment: Mapping[str, str]) -> int:
    """Return how often Slurm has requeued the job before this start.

    A job that another job submits inherits the variable, and Slurm sets it for a requeued job only. The record of a
    job that is requeued right now is ahead of it.
    """
    count = int(environment.get("SLURM_RESTART_COUNT") or 0)
    return count if job is None else min(count, int(job.get("Restarts", count)))


def _record_requeue_and_check_budgets(run: RunDirectory, previous: Start, start: Start, spec: JobSpec) -> None:
    """Record a requeue that Slurm made on its own, and refuse a start that the budgets do not allow.

    They are checked here because Slurm's own requeues do not check them, and before torch is imported.
    """
    events = read_events(run.events)
    number = run.newest_attempt() or 0
    if _is_requeue(previous, start):
        attempt = run.attempt(number)
        recorded = next((event for event in events if event.kind == "requeue" and event.attempt == number), None)
        cause = _cause_of_requeue(attempt, events, tasks=spec.tasks) if recorded is None else recorded.known_cause
        _refuse_cancelled(attempt, start, events, cause)
        if recorded is None:
            if spec.command is not None:
                record_progress(attempt, now=start.time, interrupted=is_interruption(cause))
            after = max((event.time for event in events), default=0.0)
            killed = cause in _SIGNALLED and not _has_ended_by_itself(attempt, events, spec)
            _append_requeue_event(attempt, start, cause, after=after, killed=killed)
            events = read_events(run.events)
        if not spec.requeue.left_to_slurm:
            # Requeue=1 was set for this one requeue only.
            forbid_requeue(start.job_id or "")
    why = why_exceeded(events, spec)
    if why is None:
        return
    code = int(ExitCode.NO_PROGRESS)
    _write_unfinished(run, "failed", why, code)
    append_event(run.events, kind="failure", time=start.time, attempt=number, reason=why, exit_code=code)
    raise BudgetError(f"run {run.run_id} is not started again: {why}. To resume: {resume_command(run)}")


def _write_unfinished(run: RunDirectory, status: str, reason: str, exit_code: int, resume: str | None = None) -> None:
    saved, newest = newest_saved_step(read_events(run.events)), run.newest_attempt()
    result = unfinished_result(run, status, reason, exit_code, attempt=newest, saved_step=saved, resume=resume)
    write_result(run, result)


def _refuse_ended(run: RunDirectory, previous: Start | None, start: Start) -> None:
    """Refuse a run that has ended for good, and whose job Slurm has run again because it was preempted before.

    Args:
        run: the run.
        previous: the start of its newest attempt; None before the first.
        start: this start.

    Raises:
        EndedError: says how to resume.
    """
    result = read_result(run)
    if result is None or not result.final or not _is_requeue(previous, start):
        return
    events = read_events(run.events)
    was_preempted = any(event.known_cause is Cause.PREEMPTION for event in events)
    ends = [event.kind for event in events if event.kind in {"failure", "stop", "requeue", "resume"}]
    is_requested = bool(ends) and ends[-1] in {"requeue", "resume"}
    number = run.newest_attempt() or 0
    request = run.attempt(number).requeue_request
    if exists(request) and request.stat().st_mtime > run.result.stat().st_mtime:
        is_requested = True
    if not was_preempted or is_requested:
        return
    why = f"Slurm ran job {start.job_id} again after the run had ended, and the job was not started"
    append_event(run.events, kind="refusal", time=start.time, attempt=number, reason=why)
    raise EndedError(
        f"run {run.run_id} is not started again: it has {result.status} ({result.reason}), and Slurm ran its job "
        f"{start.job_id} again by itself, as some versions do after a preemption. To resume: {resume_command(run)}"
    )


def _is_requeue(previous: Start | None, start: Start) -> bool:
    """Return whether Slurm has requeued the job of the newest attempt for this start."""
    return previous is not None and previous.job_id == start.job_id and start.restart_count > 0


def _refuse_before_others(
    run: RunDirectory, previous: Start | None, start: Start, environment: Mapping[str, str]
) -> None:
    """Refuse a run that must wait for others to finish (``--after``), if one of them has ended in another way.

    Raises:
        PredecessorError: says which one, and how to resume.
    """
    # They had finished at the first start, and may have been deleted since.
    if _is_requeue(previous, start):
        return
    predecessors = runs_before(environment)
    why = why_unfinished(predecessors)
    if why is None:
        return
    resume = resume_command(run, after=predecessors)
    _write_unfinished(run, "stopped", why, PredecessorError.exit_code, resume=resume)
    raise PredecessorError(f"run {run.run_id} is not started: {why}. Then resume this one: {resume}")


def _refuse_cancelled(attempt: AttemptDirectory, start: Start, events: Sequence[Event], cause: Cause) -> None:
    """Refuse the start of a job that its program has requeued while it was being cancelled.

    Lightning and many scripts requeue their job when they get a signal. Slurm accepts that until the job has ended.

    Args:
        attempt: the attempt before.
        start: the start.
        events: the events of the run.
        cause: why the attempt before ended. With some versions of Slurm, the notice of a preemption is like that of
            ``scancel``.

    Raises:
        CancelledError: says how to resume.
    """
    run, number, requeued = attempt.run, attempt.number, moment_of(start.submit_time)
    noticed = None if cause in {Cause.PREEMPTION, Cause.NODE_FAILURE} else moment_of(cancelled_at(attempt))
    asked = [event.time for event in events if event.kind == "cancel" and event.attempt == number]
    cancelled = max(asked, default=noticed)
    if requeued is None or cancelled is None or abs(requeued - cancelled) > _OWN_REQUEUE_S:
        return
    if exists(attempt.requeue_request) and attempt.requeue_request.stat().st_mtime > cancelled:
        return
    _write_unfinished(run, "cancelled", BY_USER, ExitCode.INTERRUPTED)
    append_event(run.events, kind="stop", time=start.time, attempt=number, reason=BY_USER, cause=str(Cause.CANCELLED))
    raise CancelledError(
        f"run {run.run_id} is not started again: its job {start.job_id} was cancelled, and then its program requeued "
        f"it. To resume: {resume_command(run)}"
    )


def _cause_of_requeue(attempt: AttemptDirectory, events: Sequence[Event], *, tasks: int) -> Cause:
    """Return why Slurm has requeued the job on its own, as the records of the attempt before show it."""
    # A program can requeue its job itself, after which Slurm no longer shows the preemption.
    if read_program_end(attempt, tasks=tasks).preempted:
        return Cause.PREEMPTION
    shown = [event.known_cause for event in events if event.attempt == attempt.number and event.cause]
    cause = shown[-1] if shown else Cause.REQUEUED
    return cause_in_log(attempt) or cause if cause is Cause.REQUEUED else cause


def _has_ended_by_itself(attempt: AttemptDirectory, events: Sequence[Event], spec: JobSpec) -> bool:
    """Return whether the tasks of an attempt have recorded their end, as far as that can be read."""
    if spec.command is not None:
        return read_program_end(attempt, tasks=spec.tasks).is_complete
    return any(event.attempt == attempt.number and event.kind in {"stop", "failure"} for event in events)


def _append_requeue_event(attempt: AttemptDirectory, start: Start, cause: Cause, *, after: float, killed: bool) -> None:
    # Slurm renews the submit time when it requeues a job, and may start the job minutes later.
    requeued = moment_of(start.submit_time)
    time_ = start.time if requeued is None else min(start.time, max(after, requeued))
    asked = cause is Cause.REQUEUED and exists(attempt.requeue_request)
    append_event(
        attempt.run.events,
        kind="requeue",
        time=time_,
        attempt=attempt.number,
        reason="Slurm requeued the job on its own",
        cause=str(cause),
        job_id=start.job_id,
        by="user" if asked else "slurm",
        found_at_start=True,
        **({"killed": True} if killed else {}),
    )


def _link_log(run: RunDirectory) -> None:
    """Link ``batch.log`` to the output of a script that was submitted by hand; Slurm's notices are in it."""
    printed = Path("/proc/self/fd/2").resolve()
    if printed.is_file() and not run.batch_log.exists():
        run.batch_log.symlink_to(printed)


def _derived_run_id(environment: Mapping[str, str]) -> str:
    job_id = slurm_job_id(environment)
    if job_id is None:
        raise UserError("this script was rendered for sbatch; run it with sbatch, or use hpcddp submit --cluster local")
    cluster = re.sub(r"[^A-Za-z0-9._-]", "-", environment.get("SLURM_CLUSTER_NAME") or "cluster")
    return f"{cluster}-{job_id}"


def _create_attempt(run: RunDirectory, start: Start, number: int) -> AttemptDirectory | None:
    """Create an attempt with its start, as a whole or not at all; None if another script has taken its number."""
    for record in get_args(ReservedRecord):
        make_reserves(run.reserves(record))
    run.attempts.mkdir(mode=0o700, exist_ok=True)
    attempt, unfinished = run.attempt(number), run.attempts / f".{start.token}"
    unfinished.mkdir(mode=0o700)
    try:
        write_start(AttemptDirectory(unfinished), start)
        # Atomic, also over NFS; a directory that holds a start is not replaced (rename(2), ENOTEMPTY).
        unfinished.rename(attempt.path)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        if error.errno in {errno.EEXIST, errno.ENOTEMPTY}:
            return None
        raise
    try:
        append_event(
            run.events, kind="start", time=start.time, attempt=attempt.number, job_id=start.job_id, host=start.host
        )
    except OSError:
        # An attempt without a start would hide whose run it is.
        shutil.rmtree(attempt.path, ignore_errors=True)
        raise
    return attempt
