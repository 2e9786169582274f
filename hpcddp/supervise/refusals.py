"""Refuse a start of a run's job, before torch is imported, and record why; record that its code has changed.

Slurm starts a job again by itself after a preemption or the loss of a node, and so does ``scontrol requeue``. Each
function here is a reason not to train then.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, Final, NoReturn

from hpcddp.errors import HpcddpError, printable, write_message
from hpcddp.jobfile.job import JobSpec
from hpcddp.processes import wait_until
from hpcddp.run.code import CodeError, changes_sentence, changes_since, read_code, read_copy
from hpcddp.run.directory import AttemptDirectory, RunDirectory
from hpcddp.run.events import Event, append_event, newest_saved_step, read_events
from hpcddp.run.failure import cancelled_at
from hpcddp.run.files import exists
from hpcddp.run.job_records import Refusal, Start
from hpcddp.run.ownership import RunDirectoryError, conflict, is_alive
from hpcddp.run.record import RecordError, read_record, write_record
from hpcddp.run.result import BY_USER, FINISHED, read_result, resume_command, unfinished_result, write_result
from hpcddp.run.sweep import ManifestError, read_sweep
from hpcddp.slurm import commands
from hpcddp.slurm.job import is_being_requeued, moment_of
from hpcddp.slurm.job_environment import runs_before
from hpcddp.stop.reasons import Cause, ExitCode

# Quotas are raised, and old files removed, by a person; nodes are not held for longer than that.
PATIENCE_S: Final = 600.0
"""How long a start waits for space on a full disk, or for a run directory that is away, in seconds."""
_POLL_S: Final = 2.0
# A cancelled job has ended after KillWait (slurm.conf(5)), which is 30 s by default. Later requeues are a person's.
_REQUEUE_OF_PROGRAM_S: Final = 90.0


class PredecessorError(HpcddpError):
    """A run that must finish before this one has ended in another way."""

    kind = "predecessor"
    exit_code: ClassVar[int] = ExitCode.INTERRUPTED


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


def refuse_being_requeued(job_id: str | None, job: Mapping[str, str] | None) -> None:
    """Refuse a start that Slurm already ends: a slurmctld that was killed just after the start has forgotten it.

    Raises:
        BeingRequeuedError: Slurm starts the job again by itself.
    """
    if job is not None and is_being_requeued(job):
        raise BeingRequeuedError(f"Slurm already ends this start of job {job_id}, and starts the job again")


def refuse_second_job(run: RunDirectory, previous: Start | None, start: Start, chain: Collection[str] = ()) -> None:
    """Refuse a job whose run directory belongs to another job; wait for the job before it in its chain.

    A singleton starts when the job before it is over its time limit, whose script may still end on another node.

    Args:
        previous: the start of its newest attempt; None before the first.
        chain: the jobs of the chain that the job is one of; empty without one.

    Raises:
        RunDirectoryError: names the other job.
    """
    previous_is_alive = False
    if previous is not None and previous.job_id != start.job_id:
        patience_s = PATIENCE_S if previous.job_id in chain else 0.0
        previous_is_alive = not wait_until(lambda: not _is_alive(run, previous), timeout_s=patience_s, poll_s=_POLL_S)
    # A job that was refused once stays refused: after a requeue it would look like a requeue of the run's own job.
    refusal = read_record(run.refusal(start.job_id), Refusal)
    why = conflict(previous, start, previous_alive=previous_is_alive) if refusal is None else refusal.why
    if why is None:
        return
    if previous is not None and previous.job_id == start.job_id:
        # A full disk must not keep this job waiting beside the other one.
        with suppress(OSError):
            write_record(run.refusal(start.job_id), Refusal(why=why))
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


def refuse_ended(run: RunDirectory, start: Start) -> None:
    """Refuse a requeue of a run that has ended for good: Slurm has run its job again because it was preempted before.

    Raises:
        EndedError: says how to resume.
    """
    result = read_result(run)
    if result is None or not result.final:
        return
    events = read_events(run.events)
    was_preempted = any(event.known_cause is Cause.PREEMPTION for event in events)
    if not was_preempted or _is_requested(run, events):
        return
    number = run.newest_attempt() or 0
    why = f"Slurm ran job {start.job_id} again after the run had ended, and the job was not started"
    append_event(run.events, kind="refusal", time=start.time, attempt=number, reason=why)
    raise EndedError(
        f"run {run.run_id} is not started again: it has {result.status} ({result.reason}), and Slurm ran its job "
        f"{start.job_id} again by itself, as some versions do after a preemption. To resume: {resume_command(run)}"
    )


def _is_requested(run: RunDirectory, events: Sequence[Event]) -> bool:
    """Return whether hpcddp or the run's user has asked for a start since the run ended."""
    request = run.attempt(run.newest_attempt() or 0).requeue_request
    if exists(request) and request.stat().st_mtime > run.result.stat().st_mtime:
        return True
    turns = [event.kind for event in events if event.kind in {"failure", "stop", "requeue", "resume"}]
    return bool(turns) and turns[-1] in {"requeue", "resume"}


def refuse_unfinished_predecessors(run: RunDirectory, environment: Mapping[str, str]) -> None:
    """Refuse a run that must wait for others to finish (``--after``), if one of them has ended in another way.

    Raises:
        PredecessorError: says which one, and how to resume.
    """
    predecessors = runs_before(environment)
    why = _why_unfinished(predecessors)
    if why is None:
        return
    resume = resume_command(run, after=predecessors)
    write_unfinished(run, "stopped", why, PredecessorError.exit_code, resume=resume)
    raise PredecessorError(f"run {run.run_id} is not started: {why}. Then resume this one: {resume}")


def _why_unfinished(predecessors: Sequence[Path]) -> str | None:
    """Return a sentence about the first run that has not finished; None if all runs before this one have.

    Args:
        predecessors: the directories of the runs and sweeps that must have finished.
    """
    for path in predecessors:
        try:
            for run in _runs_of(path):
                if (why := _why_run_is_unfinished(run)) is not None:
                    return f"run {run.run_id}, which must finish first (--after), {why}"
        except (RecordError, ManifestError) as error:
            return f"it is not known whether {path}, which must finish first (--after), has finished: {error.message}"
    return None


def _runs_of(path: Path) -> Iterator[RunDirectory]:
    """Yield the run of a directory, or the elements of its sweep."""
    sweep = read_sweep(path)
    if sweep is None:
        yield RunDirectory(path)
        return
    for index in range(len(sweep.elements)):
        yield sweep.run(index)


def _why_run_is_unfinished(run: RunDirectory) -> str | None:
    result = read_result(run)
    if result is None:
        return "has ended without a result"
    if result.status == FINISHED:
        return None
    return f"has {result.status}; continue that one first: {resume_command(run)}"


def refuse_cancelled(attempt: AttemptDirectory, start: Start, events: Sequence[Event], cause: Cause) -> None:
    """Refuse the start of a job that its program has requeued while it was being cancelled, or of the next in a chain.

    Lightning and many scripts requeue their job when they get a signal. Slurm accepts that until the job has ended.

    Args:
        attempt: the attempt before.
        events: the events of the run.
        cause: why the attempt before ended. With some versions of Slurm, the notice of a preemption is like that of
            ``scancel``.

    Raises:
        CancelledError: says how to resume.
    """
    run = attempt.run
    cancel_time = _cancel_time(attempt, events, cause)
    if cancel_time is None:
        return
    why = f"the job before its job {start.job_id} was cancelled"
    if start.restart_count > 0:
        why = f"its job {start.job_id} was cancelled, and then its program requeued it"
        requeue_time = moment_of(start.submit_time)
        if requeue_time is None or abs(requeue_time - cancel_time) > _REQUEUE_OF_PROGRAM_S:
            return
    request = attempt.requeue_request
    if exists(request) and request.stat().st_mtime > cancel_time:
        return
    write_unfinished(run, "cancelled", BY_USER, ExitCode.INTERRUPTED)
    append_event(
        run.events,
        kind="stop",
        time=start.time,
        attempt=attempt.number,
        reason=BY_USER,
        cause=str(Cause.CANCELLED),
    )
    raise CancelledError(f"run {run.run_id} is not started again: {why}. To resume: {resume_command(run)}")


def _cancel_time(attempt: AttemptDirectory, events: Sequence[Event], cause: Cause) -> float | None:
    """Return when an attempt was cancelled, in seconds since the epoch; None if it was not."""
    requests = [event.time for event in events if event.kind == "cancel" and event.attempt == attempt.number]
    if requests:
        return max(requests)
    if cause in {Cause.PREEMPTION, Cause.NODE_FAILURE}:
        return None
    return moment_of(cancelled_at(attempt))


def refuse_exceeded_budget(run: RunDirectory, start: Start, why: str) -> NoReturn:
    """Refuse a start that the budgets do not allow: Slurm's own requeues do not check them.

    Args:
        why: which budget is exceeded (``why_exceeded``).

    Raises:
        BudgetError: says how to resume.
    """
    exit_code = int(ExitCode.NO_PROGRESS)
    write_unfinished(run, "failed", why, exit_code)
    append_event(
        run.events,
        kind="failure",
        time=start.time,
        attempt=run.newest_attempt() or 0,
        reason=why,
        exit_code=exit_code,
    )
    raise BudgetError(f"run {run.run_id} is not started again: {why}. To resume: {resume_command(run)}")


def write_unfinished(run: RunDirectory, status: str, reason: str, exit_code: int, *, resume: str | None = None) -> None:
    """Write the result of a run whose start is refused; arguments as for ``unfinished_result``."""
    saved_step = newest_saved_step(read_events(run.events))
    result = unfinished_result(
        run, status, reason, exit_code, attempt=run.newest_attempt(), saved_step=saved_step, resume=resume
    )
    write_result(run, result)


def compare_code(run: RunDirectory, spec: JobSpec) -> list[str]:
    """Return which files differ from the submission; none where its code is not known.

    Raises:
        CodeError: some differ, or nobody knows, and the code is frozen; or there is no copy of code that is to run from
            one.
        RecordError: the record is damaged, and the job depends on it.
    """
    mode = spec.environment.code
    if mode == "snapshot":
        read_copy(run)
    try:
        code = read_code(run)
        changes = [] if code is None else changes_since(code.record)
    except HpcddpError as error:
        if mode == "frozen":
            raise
        write_message(f"warning: {error.message}")
        return []
    if code is None and mode == "frozen":
        raise CodeError(
            f"environment.code is frozen, and nothing is known of the code that the run {run.run_id} was submitted "
            "with; submit the job with hpcddp submit"
        )
    if changes and mode == "frozen":
        _refuse_frozen(run, changes)
    return changes


def _refuse_frozen(run: RunDirectory, changes: Sequence[str]) -> NoReturn:
    """Write the result of a run whose frozen code has changed, and refuse the attempt."""
    why = f"environment.code is frozen, and {printable(changes_sentence(changes))}"
    resume = f"{resume_command(run)} --code now"
    write_unfinished(run, "stopped", why, CodeError.exit_code, resume=resume)
    append_event(run.events, kind="refusal", time=time.time(), attempt=run.newest_attempt() or 0, reason=why)
    raise CodeError(
        f"run {run.run_id} is not started: {why}. Undo the change and resume: {resume_command(run)}. Or run the code "
        f"as it is now: {resume}"
    )


def record_changes(attempt: AttemptDirectory, spec: JobSpec, changes: Sequence[str]) -> None:
    """Record in the event log, and print, that the code of an attempt is not that of the submission."""
    if not changes:
        return
    runs_copy = spec.environment.code == "snapshot"
    runs = "the copy of the submission" if runs_copy else "the new one"
    reason = f"{printable(changes_sentence(changes))}; this attempt runs {runs}"
    append_event(
        attempt.run.events,
        kind="code",
        time=time.time(),
        attempt=attempt.number,
        reason=reason,
    )
    write_message(reason if runs_copy else f"warning: {reason}")
