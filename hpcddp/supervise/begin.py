"""Begin an attempt: claim the run directory, check the budgets, record the start."""

from __future__ import annotations

import errno
import re
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar, get_args

from hpcddp.errors import HpcddpError, UserError, counted, printable, write_message
from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.write import OtherDefaultsError, dump_job, parse_from_script
from hpcddp.processes import wait_until
from hpcddp.run.directory import AttemptDirectory, ReservedRecord, RunDirectory
from hpcddp.run.events import Event, append_event, read_events, requeue_event
from hpcddp.run.failure import cause_in_log
from hpcddp.run.files import exists, full_disk_sentence, is_full, make_reserves, write_text
from hpcddp.run.find import is_run
from hpcddp.run.job_file import read_job_file, read_submitted_job
from hpcddp.run.job_records import Start, chain_of, newest_start, read_program_end, read_start, write_start
from hpcddp.run.moved import refuse_other_script
from hpcddp.run.ownership import (
    RunDirectoryError,
    check_run_directory,
    make_private_directory,
    raise_if_fenced,
    refuse_another_training,
)
from hpcddp.run.record import RecordError
from hpcddp.run.result import has_finished, resume_command
from hpcddp.slurm.hostlist import HostListError
from hpcddp.slurm.job import allocation_of, ask_slurm, end_time_of, moment_of, nodes_of_job, slurm_job_id
from hpcddp.slurm.job_environment import PICKLE_DIGEST
from hpcddp.slurm.rank_env import own_host
from hpcddp.stop.reasons import Cause, ExitCode
from hpcddp.submission.sweep_element import Element, complete_directory, element_of
from hpcddp.supervise.budgets import is_interruption, record_progress, why_exceeded
from hpcddp.supervise.nodes import lost_nodes
from hpcddp.supervise.refusals import (
    PATIENCE_S,
    compare_code,
    record_changes,
    refuse_being_requeued,
    refuse_cancelled,
    refuse_ended,
    refuse_exceeded_budget,
    refuse_second_job,
    refuse_unfinished_predecessors,
    write_unfinished,
)
from hpcddp.supervise.requeue_job import forbid_requeue

_POLL_S: Final = 5.0
# No time limit and no signal ends the wait of a run on this machine: bash handles a signal after begin.
_LOCAL_PATIENCE_S: Final = 60.0
T = TypeVar("T")


class DirectoryAwayError(HpcddpError):
    """The directory that the run has used is not there."""

    kind = "directory_away"
    exit_code: ClassVar[int] = ExitCode.INFRASTRUCTURE


class DiskFullError(HpcddpError):
    """An attempt cannot begin, because the disk of the run is full."""

    kind = "disk_full"
    exit_code: ClassVar[int] = ExitCode.INFRASTRUCTURE


class _NumberTakenError(Exception):
    """Another script has created the attempt of this number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Script:
    """A batch script that starts.

    Args:
        job_id: its job in Slurm; None on this machine.
        job_fields: Slurm's record of the job; None if Slurm does not respond.
        restart_count: how often Slurm has requeued the job before this start.
        spec: the job of the run.
        element: its run as an element of a sweep; None for a run of its own.
        is_by_hand: whether the script was given to sbatch by hand, so that the run's id follows from the job's.
        warnings: what the script has noticed before; it goes into the event log.
    """

    environment: Mapping[str, str]
    job_id: str | None
    job_fields: Mapping[str, str] | None
    restart_count: int
    run: RunDirectory
    spec: JobSpec
    element: Element | None
    is_by_hand: bool
    warnings: Sequence[str]


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
        run_id: the run's id; None derives ``<cluster name>-<job id>``.
        job_text: the job in the script, as ``dump_for_script`` writes it.
        environment: the batch script's environment.
        element: which element of a sweep it is, whose id and job these are; None is a run of its own.
        warnings: what the script has noticed before; it goes into the event log.

    Returns:
        The attempt's directory, or an empty text if the run has finished already, or its chain has ended with it.

    Raises:
        RunDirectoryError: the directory belongs to another job, or is not safe.
        BudgetError: the run was started often enough.
        CancelledError: the job was cancelled, and its program has requeued it.
        BeingRequeuedError: Slurm already ends this start of the job, and will start it again.
        EndedError: the run has ended for good, and Slurm has run its job again by itself.
        PredecessorError: a run that must finish before has ended in another way.
        CodeError: the code has changed, and it is frozen.
        DirectoryAwayError: the directory that the run had before is not there after ten minutes.
        DiskFullError: the disk is still full after ten minutes, on this machine after one.
        OtherDefaultsError: another version with other defaults has rendered the script, and no job file has them all.
    """
    job_id = slurm_job_id(environment)
    job_fields = ask_slurm(job_id) if job_id else None
    refuse_being_requeued(job_id, job_fields)
    submitted_id = run_id or _derived_run_id(environment)
    if run_id is None and element is not None:
        # The job of an element has the id of its array, then its index; the id of the sweep is without the index.
        submitted_id = submitted_id.rpartition("_")[0]
    # The directory that the submission made: of the run, or of its sweep.
    submitted = RunDirectory(Path(run_root).absolute() / name / submitted_id)
    refuse_other_script((job_fields or {}).get("Command"), submitted.path)
    restart_count = _count_restarts(environment, job_fields)
    was_submitted_by_hpcddp = bool(environment.get(PICKLE_DIGEST))
    if restart_count > 0 or was_submitted_by_hpcddp:
        _wait_for_directory(submitted.path)
    run = submitted
    spec = read_job_of_script(job_text, submitted)
    sweep_element = None
    if element is not None:
        sweep_element = element_of(submitted, element, spec, environment)
        run = sweep_element.run
        spec = sweep_element.spec
    script = _Script(
        environment=environment,
        job_id=job_id,
        job_fields=job_fields,
        restart_count=restart_count,
        run=run,
        spec=spec,
        element=sweep_element,
        is_by_hand=run_id is None,
        warnings=warnings,
    )
    attempt = _when_there_is_space(run, environment, partial(_begin_unless_finished, script))
    return "" if attempt is None else str(attempt.path)


def begin_again(attempt: AttemptDirectory, spec: JobSpec, environment: Mapping[str, str]) -> AttemptDirectory:
    """Begin the attempt after one that has ended, in the same start of its job; wait for space if the disk is full.

    The process that has recorded the end of the attempt calls this, so nothing is to be checked anew. ``begin`` refuses
    any other script of this start of the job.

    Args:
        attempt: the attempt that has ended.
        environment: the batch script's environment.

    Raises:
        FencedError: another script has begun the next attempt.
        CodeError: the code has changed, and it is frozen; the result is written.
        DiskFullError: the disk is still full after ten minutes, on this machine after one; the result is written.
        RecordError: the start of the attempt that has ended cannot be read.
    """
    previous = read_start(attempt)
    if previous is None:
        raise RecordError(f"{attempt.start} is missing", path=attempt.start)
    now = time.time()
    limiting_job_id = slurm_job_id(environment) or allocation_of(environment)
    limiting_job = ask_slurm(limiting_job_id) if limiting_job_id else None
    start = replace(
        previous,
        start_number=previous.start_number + 1,
        token=secrets.token_hex(16),
        time=now,
        end_time=end_time_of(limiting_job, environment, now=now),
    )
    code_changes = compare_code(attempt.run, spec)
    try:
        following = _when_there_is_space(
            attempt.run, environment, lambda: _create_attempt(attempt.run, start, attempt.number + 1)
        )
    except _NumberTakenError:
        raise_if_fenced(attempt.run, attempt.number)
        raise
    record_changes(following, spec, code_changes)
    return following


def _count_restarts(environment: Mapping[str, str], job_fields: Mapping[str, str] | None) -> int:
    """Return how often Slurm has requeued the job before this start.

    A job that another job submits inherits the variable, and Slurm sets it for a requeued job only. The record of a
    job that is requeued right now is ahead of it.
    """
    count = int(environment.get("SLURM_RESTART_COUNT") or 0)
    if job_fields is None:
        return count
    return min(count, int(job_fields.get("Restarts", count)))


def _derived_run_id(environment: Mapping[str, str]) -> str:
    job_id = slurm_job_id(environment)
    if job_id is None:
        raise UserError("this script was rendered for sbatch; run it with sbatch, or use hpcddp submit --cluster local")
    cluster = re.sub(r"[^A-Za-z0-9._-]", "-", environment.get("SLURM_CLUSTER_NAME") or "cluster")
    return f"{cluster}-{job_id}"


def _wait_for_directory(path: Path) -> None:
    """Wait for a directory that ``hpcddp submit`` or an earlier attempt has made: a new one would begin at step 0.

    That it exists does not suffice: newer versions of Slurm make the directory of the batch log where it is missing.

    Raises:
        DirectoryAwayError: it is not there after ten minutes.
    """
    if is_run(path):
        return
    minutes = f"{PATIENCE_S / 60:g} minutes"
    write_message(f"the run directory {path} is not there; waiting up to {minutes} for it")
    if not wait_until(lambda: is_run(path), timeout_s=PATIENCE_S, poll_s=_POLL_S):
        raise DirectoryAwayError(
            f"the run directory {path} is not there after {minutes}, and a new one would begin the training anew; "
            "mount its file system again, then submit the job again"
        )


def _begin_unless_finished(script: _Script) -> AttemptDirectory | None:
    """Begin an attempt; None if the run has finished. Others use the run meanwhile, so each try checks all anew."""
    while True:
        try:
            return _begin_attempt(script)
        except _NumberTakenError:
            continue


def _when_there_is_space(run: RunDirectory, environment: Mapping[str, str], begin_attempt: Callable[[], T]) -> T:
    """Return what ``begin_attempt`` returns; call it again while the disk of the run is full.

    Args:
        environment: the batch script's environment.

    Raises:
        DiskFullError: the disk is still full after ten minutes, on this machine after one.
    """
    patience_s = PATIENCE_S if slurm_job_id(environment) else _LOCAL_PATIENCE_S
    patience = counted(round(patience_s / 60), "minute")
    deadline = time.monotonic() + patience_s
    is_first = True
    while True:
        try:
            return begin_attempt()
        except OSError as error:
            if not is_full(error):
                raise
            full = full_disk_sentence(run.path, error)
            if time.monotonic() >= deadline:
                raise _disk_full_error(run, f"{full}, and no space became free in {patience}") from error
        if is_first:
            write_message(f"{full}; waiting up to {patience} for space")
        is_first = False
        time.sleep(_POLL_S)


def _disk_full_error(run: RunDirectory, why: str) -> DiskFullError:
    """Return the error about a disk that stays full, and write it as the result of the run."""
    with suppress(OSError):
        write_unfinished(run, "stopped", f"it was not started again: {why}", ExitCode.INFRASTRUCTURE)
    return DiskFullError(f"run {run.run_id} is not started: {why}; make room, and resume: {resume_command(run)}")


def _begin_attempt(script: _Script) -> AttemptDirectory | None:
    """Check that the run may start, and create its next attempt; None if the run has ended, and nothing is left to do.

    Raises:
        _NumberTakenError: another script was quicker.
    """
    run = script.run
    check_run_directory(run.path)
    chain = _chain_of_job(script)
    make_private_directory(run.path)
    newest_number = run.newest_attempt()
    previous = newest_start(run)
    start = _observe_start(script)
    refuse_second_job(run, previous, start, chain)
    # A chain ends with its run, however that has ended.
    if has_finished(run) or (chain and exists(run.result)):
        return None
    spec = script.spec
    is_same_job = previous is not None and previous.job_id == start.job_id
    is_requeue = is_same_job and start.restart_count > 0
    if is_requeue:
        refuse_ended(run, start)
    # The job may have moved to other resources, never to other training.
    refuse_another_training(run, spec)
    _complete_directory(script, start)
    if is_requeue or (previous is not None and previous.job_id in chain):
        # The attempt before may have had another number of nodes.
        _take_over_requeue(run, start, read_job_file(run), by="slurm" if is_same_job else "chain")
    else:
        # The runs before had finished at the first start of this job, and may have been deleted since.
        refuse_unfinished_predecessors(run, script.environment)
    if previous is not None:
        _check_budgets(run, start, spec, newest_number)
    code_changes = compare_code(run, spec)
    # A result is written when a run has ended for good; this one is being continued.
    run.result.unlink(missing_ok=True)
    number = 0 if newest_number is None else newest_number + 1
    attempt = _create_attempt(run, start, number)
    record_changes(attempt, spec, code_changes)
    for warning in script.warnings:
        append_event(run.events, kind="warning", time=start.time, attempt=attempt.number, reason=printable(warning))
    return attempt


def _check_budgets(run: RunDirectory, start: Start, spec: JobSpec, newest_number: int | None) -> None:
    """Refuse a start that the budgets of the run do not allow.

    Args:
        newest_number: the number of the newest attempt when this start was looked at.

    Raises:
        BudgetError: the run was started often enough.
        _NumberTakenError: another script has begun an attempt meanwhile.
    """
    why = why_exceeded(read_events(run.events), spec)
    if why is None:
        return
    if run.newest_attempt() != newest_number:
        # The events may be those of another job that begins the run at this moment, and owns it.
        raise _NumberTakenError
    refuse_exceeded_budget(run, start, why)


def _observe_start(script: _Script) -> Start:
    """Return who starts now, with the submit time that Slurm knows."""
    environment = script.environment
    job_id = script.job_id
    restart_count = script.restart_count
    is_local = job_id is None
    if is_local:
        job_id = environment.get("HPCDDP_LOCAL_JOB_ID")
        restart_count = 0
    submit_time = None
    if script.job_fields is not None:
        submit_time = script.job_fields.get("SubmitTime")
    now = time.time()
    limiting_job = script.job_fields
    allocation = allocation_of(environment)
    if allocation is not None:
        limiting_job = ask_slurm(allocation)
    return Start(
        job_id=job_id,
        restart_count=restart_count,
        submit_time=submit_time,
        host=own_host(environment),
        token=secrets.token_hex(16),
        time=now,
        end_time=end_time_of(limiting_job, environment, now=now),
        is_local=is_local,
        allocation=allocation,
        nodes=nodes_of_job(environment),
        run_dir=str(script.run.path),
    )


def _chain_of_job(script: _Script) -> tuple[str, ...]:
    """Return the jobs of the chain of a job, empty for one of no chain.

    The first job may begin before the others are submitted. Nothing may happen in the run directory until then, because
    a submission that fails removes it.

    Raises:
        RunDirectoryError: the submission was not completed.
    """
    run = script.run
    if script.environment.get("SLURM_JOB_NAME") != run.name_of_chain:
        return ()
    if not wait_until(lambda: script.job_id in chain_of(run), timeout_s=PATIENCE_S, poll_s=_POLL_S):
        raise RunDirectoryError(
            f"{run.submission} does not name job {script.job_id}: the submission of its chain was not completed; "
            "submit the run again"
        )
    return chain_of(run)


def _complete_directory(script: _Script, start: Start) -> None:
    """Write into the run directory what a script that was given to sbatch by hand, or a sweep, has not written yet."""
    write_text(script.run.job_file, dump_job(script.spec, environment_values=False))
    if script.is_by_hand:
        _link_log(script.run)
    if script.element is not None:
        complete_directory(script.element, start.job_id or "", script.environment.get(PICKLE_DIGEST))


def _link_log(run: RunDirectory) -> None:
    """Link ``batch.log`` to the output of a script that was submitted by hand; Slurm's notices are in it."""
    printed = Path("/proc/self/fd/2").resolve()
    if printed.is_file() and not run.batch_log.exists():
        run.batch_log.symlink_to(printed)


def _take_over_requeue(run: RunDirectory, start: Start, spec: JobSpec, *, by: str) -> None:
    """Refuse a requeue by the program of a cancelled job; record one whose script has recorded no end.

    Raises:
        CancelledError: the job was cancelled before its program requeued it.
    """
    attempt = run.attempt(run.newest_attempt() or 0)
    events = read_events(run.events)
    cause = cause_of_requeue(attempt, events, tasks=spec.tasks)
    refuse_cancelled(attempt, start, events, cause)
    record_requeue(attempt, start, events, cause=cause, spec=spec, by=by)
    if not spec.requeue.left_to_slurm:
        # Requeue=1 was set for this one requeue only.
        forbid_requeue(start.job_id or "")


def _create_attempt(run: RunDirectory, start: Start, number: int) -> AttemptDirectory:
    """Create an attempt with its start, as a whole or not at all.

    Raises:
        _NumberTakenError: another script has created it.
    """
    for record in get_args(ReservedRecord):
        make_reserves(run.reserves(record))
    run.attempts.mkdir(mode=0o700, exist_ok=True)
    attempt = run.attempt(number)
    unfinished = run.attempts / f".{start.token}"
    unfinished.mkdir(mode=0o700)
    try:
        write_start(AttemptDirectory(unfinished), start)
        # Atomic, also over NFS; a directory that holds a start is not replaced (rename(2), ENOTEMPTY).
        unfinished.rename(attempt.path)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        if error.errno in {errno.EEXIST, errno.ENOTEMPTY}:
            raise _NumberTakenError from error
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


def read_job_of_script(job_text: str, submitted: RunDirectory) -> JobSpec:
    """Return the job of a script; where its defaults are those of another version, from the job file in its directory.

    Args:
        job_text: the job in the script, as ``dump_for_script`` writes it.
        submitted: the directory of its run or of its sweep.

    Raises:
        OtherDefaultsError: the defaults are those of another version, and there is no job file.
        DamagedJobError: the job was changed and is not valid.
    """
    try:
        return parse_from_script(job_text)
    except OtherDefaultsError:
        if not exists(submitted.job_file):
            raise
        check_run_directory(submitted.path)
        return read_submitted_job(submitted)


# Slurm signals the tasks, and kills those that have not ended some seconds later.
_SIGNALLED: Final = frozenset({Cause.REQUEUED, Cause.PREEMPTION})
_NODE_MAY_BE_LOST: Final = frozenset({Cause.REQUEUED, Cause.NODE_FAILURE})


def cause_of_requeue(attempt: AttemptDirectory, events: Sequence[Event], *, tasks: int) -> Cause:
    """Return why the job of an attempt was requeued, as its records show it.

    Args:
        attempt: the attempt before the requeue.
        events: the events of the run.
        tasks: tasks of the job.
    """
    requeue = requeue_event(events, attempt.number)
    if requeue is not None:
        return requeue.known_cause
    # A program can requeue its job itself, after which Slurm no longer shows the preemption.
    if read_program_end(attempt, tasks=tasks).preempted:
        return Cause.PREEMPTION
    newest_cause = Cause.REQUEUED
    for event in events:
        if event.attempt == attempt.number and event.cause:
            newest_cause = event.known_cause
    if newest_cause is Cause.REQUEUED:
        return cause_in_log(attempt) or Cause.REQUEUED
    return newest_cause


def record_requeue(
    attempt: AttemptDirectory, start: Start, events: Sequence[Event], *, cause: Cause, spec: JobSpec, by: str
) -> None:
    """Record that Slurm runs a job after that of an attempt, unless the end of that attempt has recorded it.

    Args:
        attempt: the attempt before the requeue.
        start: the start after it.
        events: the events of the run.
        cause: why the job of the attempt ended.
        by: who runs the next job, as in ``Event``.
    """
    if requeue_event(events, attempt.number) is not None:
        return
    if spec.command is not None:
        record_progress(attempt, now=start.time, interrupted=is_interruption(cause))
    facts: dict[str, Any] = {}
    if cause in _SIGNALLED and not _has_recorded_its_end(attempt, events, spec):
        facts["killed"] = True
    if cause in _NODE_MAY_BE_LOST:
        lost_hosts = _lost_batch_host(attempt)
        if lost_hosts:
            facts["node_faults"] = dict.fromkeys(lost_hosts, "lost")
    if cause is Cause.REQUEUED and exists(attempt.requeue_request):
        by = "user"
    append_event(
        attempt.run.events,
        kind="requeue",
        time=_requeue_time(start, events),
        attempt=attempt.number,
        reason="its script has recorded no end",
        cause=str(cause),
        job_id=start.job_id,
        by=by,
        found_at_start=True,
        **facts,
    )


def _lost_batch_host(attempt: AttemptDirectory) -> list[str]:
    """Return the host of the batch script, which has recorded no end, if it was lost; the name in a list, or none."""
    start = read_start(attempt)
    if start is None:
        return []
    try:
        return lost_nodes({"SLURM_JOB_NODELIST": start.host}, tasks_per_node=1, recorded=[], started_at=start.time)
    except HostListError:
        # The record is damaged.
        return []


def _has_recorded_its_end(attempt: AttemptDirectory, events: Sequence[Event], spec: JobSpec) -> bool:
    """Return whether the tasks of an attempt have recorded their end, as far as that can be read."""
    if spec.command is not None:
        return read_program_end(attempt, tasks=spec.tasks).is_complete
    return any(event.attempt == attempt.number and event.kind in {"stop", "failure"} for event in events)


def _requeue_time(start: Start, events: Sequence[Event]) -> float:
    """Return when Slurm requeued the job, in seconds since the epoch: after all events, and before the start."""
    # Slurm renews the submit time when it requeues a job, and may start the job minutes later.
    requeue_time = moment_of(start.submit_time)
    if requeue_time is None:
        return start.time
    last_event = max((event.time for event in events), default=0.0)
    return min(start.time, max(last_event, requeue_time))
