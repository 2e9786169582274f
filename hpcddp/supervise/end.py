"""End an attempt: decide by a table how the run goes on, carry that out, and print a summary."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Final

from hpcddp.errors import write_message
from hpcddp.run.code import CodeError
from hpcddp.run.directory import AttemptDirectory, RunDirectory
from hpcddp.run.events import (
    CONTINUATIONS,
    EventKind,
    NextStart,
    append_event,
    attempt_end,
    newest_saved_step,
    read_events,
)
from hpcddp.run.failure import describe_failure, failure_sentence
from hpcddp.run.files import write_errors_printed
from hpcddp.run.job_records import ProgramEnd, read_start
from hpcddp.run.ownership import FencedError, fenced_sentence
from hpcddp.run.record import RecordError
from hpcddp.run.result import (
    BY_USER,
    FINISHED,
    Result,
    finish_run,
    resume_command,
    unfinished_result,
    what_is_saved,
    why_it_stopped,
    write_result,
)
from hpcddp.slurm.job import ask_slurm
from hpcddp.stop.reasons import Cause, ExitCode, StopReason
from hpcddp.supervise import requeue_job
from hpcddp.supervise.attempt_facts import AttemptFacts
from hpcddp.supervise.budgets import is_interruption, record_progress
from hpcddp.supervise.decision import Action, ActionKind, decide
from hpcddp.supervise.nodes import avoid_failing_nodes
from hpcddp.supervise.requeue_job import RequeueOutcome, RequeueResult

# A file server that restarts is back after some minutes.
_DIRECTORY_PATIENCE_S: Final = 600.0
_POLL_S: Final = 1.0
# While the directory is away, Slurm is asked whether it has requeued the job, which then starts that much later; the
# start is put off again before that time is over.
_ASK_FOR_REQUEUE_EVERY_S: Final = 3.0
_POSTPONE_AGAIN_S: Final = 60.0
_WRITES_NOTHING = frozenset({ActionKind.FINISH, ActionKind.FENCED})
# After these Slurm must not run the job again.
_LAST = frozenset({ActionKind.FINISH, ActionKind.FAIL, ActionKind.CANCEL, ActionKind.STOP})
_CANCELLED = Action(kind=ActionKind.CANCEL, exit_code=ExitCode.INTERRUPTED)
_FENCED = Action(kind=ActionKind.FENCED, exit_code=ExitCode.FENCED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How the batch script ends.

    Args:
        text: the paragraph for its log.
        next_attempt: the attempt for which the script starts the tasks again; None where it ends.
    """

    exit_code: int
    text: str
    next_attempt: AttemptDirectory | None = None


def end(
    attempt: AttemptDirectory,
    *,
    code: int,
    environment: Mapping[str, str],
    cancelled: bool = False,
    may_restart: bool = False,
) -> Ending:
    """Decide whether the run is restarted or requeued, and carry the decision out.

    Args:
        attempt: the attempt whose tasks have ended.
        code: what srun (or the local controller) exited with; it hides the cause, but for 75: all ranks have stopped.
        environment: the batch script's environment.
        cancelled: whether the user ended the job on this machine.
        may_restart: whether the batch script starts the tasks again if there is a next attempt.
    """
    facts_unread = AttemptFacts(
        attempt=attempt,
        environment=environment,
        code=code,
        cancelled=cancelled,
        may_restart=may_restart,
    )
    try:
        attempt_facts = _wait_for_records(facts_unread)
        if attempt_facts is None:
            return _directory_is_missing(attempt)
        if attempt_facts.is_cause_unavailable and not attempt_facts.is_fenced:
            _wait_for_slurm(attempt_facts)
            attempt_facts = _wait_for_records(facts_unread) or attempt_facts
        return _decide_and_act(attempt_facts, code)
    except RecordError as error:
        return _give_up(attempt, error)


def _wait_for_records(facts_unread: AttemptFacts) -> AttemptFacts | None:
    """Return the facts with all records of the ranks; None if their file system does not give them in ten minutes."""
    deadline = time.monotonic() + _DIRECTORY_PATIENCE_S
    postpone_at = time.monotonic()
    is_first = True
    while True:
        # Each copy reads the records anew.
        attempt_facts = replace(facts_unread)
        if attempt_facts.read_records():
            return attempt_facts
        if time.monotonic() >= deadline:
            return None
        if time.monotonic() >= postpone_at:
            is_postponed = _postpone_start(attempt_facts.job_id)
            pause_s = _POSTPONE_AGAIN_S if is_postponed else _ASK_FOR_REQUEUE_EVERY_S
            postpone_at = time.monotonic() + pause_s
        if is_first:
            where = f"{attempt_facts.attempt.path} is missing, or its file server does not answer"
            write_message(f"{where}; waiting up to {_DIRECTORY_PATIENCE_S / 60:g} minutes")
        is_first = False
        time.sleep(_POLL_S)


def _postpone_start(job_id: str | None) -> bool:
    """Set a later start time for a job that Slurm has requeued while its run directory is away.

    Slurm opens the log of the job in the run directory, and fails a job where it cannot. It kills this process
    KillWait after the requeue, so that nobody may be there to do this later.

    Returns:
        Whether the job was requeued, or ends for another reason.
    """
    if job_id is None:
        return False
    job = ask_slurm(job_id)
    if job is None or job.get("JobState") in {"RUNNING", "SUSPENDED"}:
        return False
    requeue_job.set_start(job_id, requeue_job.DIRECTORY_AWAY_DELAY_S)
    return True


def _directory_is_missing(attempt: AttemptDirectory) -> Ending:
    text = (
        f"attempt {attempt.number} of run {attempt.run.run_id} has ended, and it will not be requeued: {attempt.path} "
        f"has been missing, or its file server has not answered, for {_DIRECTORY_PATIENCE_S / 60:g} minutes; when it "
        f"is back, resume: {resume_command(attempt.run)}"
    )
    return Ending(exit_code=ExitCode.INFRASTRUCTURE, text=text)


def _decide_and_act(attempt_facts: AttemptFacts, code: int) -> Ending:
    if attempt_facts.program is not None:
        _conclude_program(attempt_facts, attempt_facts.program)
    action = decide(attempt_facts.end_facts())
    if attempt_facts.damage is not None:
        write_message(attempt_facts.damage.message)
    if attempt_facts.is_fenced:
        # The query to Slurm may have taken a minute.
        action = _FENCED
    ending = _HANDLERS[action.kind](attempt_facts, action, code)
    if action.kind in _LAST and attempt_facts.job_id is not None:
        requeue_job.forbid_requeue(attempt_facts.job_id)
    if action.kind in _WRITES_NOTHING or attempt_facts.full_disk is None:
        return ending
    return replace(ending, text=f"{ending.text}\n{attempt_facts.full_disk}")


def _give_up(attempt: AttemptDirectory, error: RecordError) -> Ending:
    """Stop the run where a record that the decision needs is damaged: a guess could requeue wrongly."""
    run = attempt.run
    if run.newest_attempt() == attempt.number:
        exit_code = ExitCode.INFRASTRUCTURE
        saved_step = _saved_step(run)
        result = unfinished_result(
            run, "stopped", error.message, exit_code, attempt=attempt.number, saved_step=saved_step
        )
        with write_errors_printed(run.result):
            # A damaged one stays: it may be of a run that has finished.
            if error.path != run.result:
                write_result(run, result)
        with write_errors_printed(run.events):
            append_event(run.events, kind="stop", time=time.time(), attempt=attempt.number, reason=error.message)
    text = f"attempt {attempt.number} of run {run.run_id} has ended, and it will not be requeued: {error.message}"
    return Ending(exit_code=ExitCode.INFRASTRUCTURE, text=text)


def _saved_step(run: RunDirectory) -> int:
    """Return the newest step that is saved, as far as the event log can be read; 0 without one."""
    try:
        return newest_saved_step(read_events(run.events))
    except RecordError:
        return 0


def _wait_for_slurm(attempt_facts: AttemptFacts) -> None:
    """Wait until Slurm shows why the tasks were signalled: a preempted job that exits early is never requeued."""
    if not attempt_facts.later_jobs:
        # Slurm may kill this shell while it waits: the run must not be shown as still running.
        _conclude(attempt_facts, "stopped", f"{_why(attempt_facts)}; Slurm does not answer", ExitCode.STOPPED)
    requeue_job.wait_for_controller(attempt_facts.job_id or "")


def _conclude_program(attempt_facts: AttemptFacts, program: ProgramEnd) -> None:
    """Record what the ranks of a training record themselves: that the run has finished, or made progress."""
    # The query to Slurm may take a minute, in which the run may start again on other nodes.
    interrupted = not program.finished and is_interruption(attempt_facts.counted_cause)
    if attempt_facts.is_fenced:
        return
    attempt = attempt_facts.attempt
    with write_errors_printed(attempt.run.path):
        if program.finished:
            result = Result(
                status=FINISHED,
                exit_code=0,
                attempts=attempt.number + 1,
                world_size=attempt_facts.spec.world_size,
                wall_s=_wall_s(attempt),
            )
            finish_run(attempt.run, result, attempt=attempt.number)
        else:
            record_progress(attempt, now=time.time(), interrupted=interrupted)


def _wall_s(attempt: AttemptDirectory) -> float | None:
    """Return how long the attempts of a run took together, until now, in seconds; None if that is unreadable."""
    run = attempt.run
    now = time.time()
    try:
        events = read_events(run.events)
        starts = {number: read_start(run.attempt(number)) for number in range(attempt.number + 1)}
    except RecordError as error:
        # The run has finished nevertheless.
        write_message(error.message)
        return None
    known_starts = [(number, start) for number, start in starts.items() if start is not None]
    seconds = 0.0
    for (number, start), (_, following) in pairwise(known_starts):
        next_start = NextStart(time=following.time, submit_time=following.submit_time)
        end_of_attempt = attempt_end(events, number, last_sign=start.time, next_start=next_start)
        seconds += end_of_attempt.time - start.time
    if known_starts:
        _, newest_start = known_starts[-1]
        seconds += now - newest_start.time
    return round(seconds, 3)


def _finish(attempt_facts: AttemptFacts, action: Action, _: int) -> Ending:
    run = attempt_facts.attempt.run
    return Ending(exit_code=action.exit_code, text=f"run {run.run_id} has finished; its result is {run.result}")


def _leave_to_newer_attempt(attempt_facts: AttemptFacts, action: Action, _: int) -> Ending:
    run = attempt_facts.attempt.run
    text = fenced_sentence(run, newest=run.newest_attempt(), attempt=attempt_facts.attempt.number)
    return Ending(exit_code=action.exit_code, text=text)


def _fail(attempt_facts: AttemptFacts, action: Action, code: int) -> Ending:
    attempt = attempt_facts.attempt
    failures = attempt_facts.failures
    if action.exit_code == ExitCode.NO_PROGRESS:
        reason = f"{_why(attempt_facts)}; {action.why}"
        text = _summary(attempt_facts, _by_hand(attempt_facts, action.why))
    else:
        reason = failure_sentence(attempt, failures)
        text = describe_failure(attempt, failures)
        if action.why:
            reason = f"{reason}; not requeued, because {action.why}"
            text = f"{text}\n{_by_hand(attempt_facts, action.why)}"
    _conclude(attempt_facts, "failed", reason, action.exit_code)
    _append(attempt_facts, "failure", reason, exit_code=action.exit_code, srun=code, cause=str(attempt_facts.cause))
    return Ending(exit_code=action.exit_code, text=text)


def _cancel(attempt_facts: AttemptFacts, action: Action, _: int) -> Ending:
    reason = _how_cancelled(attempt_facts)
    _conclude(attempt_facts, "cancelled", reason, action.exit_code)
    _append(attempt_facts, "stop", reason, cause=str(Cause.CANCELLED))
    text = _summary(attempt_facts, _by_hand(attempt_facts), cause=Cause.CANCELLED)
    return Ending(exit_code=action.exit_code, text=text)


def _how_cancelled(attempt_facts: AttemptFacts) -> str:
    number = attempt_facts.attempt.number
    is_requested = any(event.kind == "cancel" and event.attempt == number for event in attempt_facts.events)
    if is_requested or attempt_facts.cancelled:
        return BY_USER
    decision = attempt_facts.decision
    if decision is not None and decision.reason is StopReason.INTERRUPTED:
        return "cancelled by SIGINT to its tasks"
    if attempt_facts.job_id is None:
        # The script got no signal. Who has sent one to the ranks is not known.
        return "cancelled, or its processes received SIGTERM"
    return "cancelled by a signal to the job"


def _stop(attempt_facts: AttemptFacts, action: Action, _: int) -> Ending:
    _conclude(attempt_facts, "stopped", f"{_why(attempt_facts)}; {action.why}", action.exit_code)
    _append(attempt_facts, "stop", f"{_why(attempt_facts)}; {action.why}", cause=str(attempt_facts.cause))
    return Ending(exit_code=action.exit_code, text=_summary(attempt_facts, _by_hand(attempt_facts, action.why)))


def _restart(attempt_facts: AttemptFacts, action: Action, code: int) -> Ending:
    """Begin the next attempt in this job."""
    from hpcddp.supervise.begin import DiskFullError, begin_again

    attempt = attempt_facts.attempt
    with write_errors_printed(attempt.run.result):
        attempt.run.result.unlink(missing_ok=True)
    _append_stop(attempt_facts)
    _append(attempt_facts, "restart", _why(attempt_facts), cause=str(attempt_facts.cause), by="hpcddp")
    try:
        next_attempt = begin_again(attempt, attempt_facts.spec, attempt_facts.environment)
    except FencedError:
        return _leave_to_newer_attempt(attempt_facts, _FENCED, code)
    except (CodeError, DiskFullError) as error:
        # The result is written already.
        return Ending(exit_code=error.exit_code, text=error.message)
    except OSError as error:
        why = f"the next attempt cannot be created in {attempt.run.attempts} ({error.strerror})"
        return _stop(attempt_facts, replace(action, kind=ActionKind.STOP, why=why), code)
    where = "" if attempt_facts.job_id is None else f" in job {attempt_facts.job_id}"
    next_step = f"Its tasks are started again{where}, and {_next_attempt_text(attempt_facts)}."
    return Ending(exit_code=action.exit_code, text=_summary(attempt_facts, next_step), next_attempt=next_attempt)


def _leave_to_slurm(attempt_facts: AttemptFacts, action: Action, code: int) -> Ending:
    return _after_request(attempt_facts, action, code, RequeueResult(outcome=RequeueOutcome.REQUEUED), by="slurm")


def _requeue(attempt_facts: AttemptFacts, action: Action, code: int) -> Ending:
    job_id = attempt_facts.job_id or ""
    set_requeue_flag = not attempt_facts.spec.requeue.left_to_slurm
    result = requeue_job.requeue(
        job_id,
        attempt=attempt_facts.attempt,
        restarts=attempt_facts.restart_count,
        set_requeue_flag=set_requeue_flag,
    )
    if result.outcome in {RequeueOutcome.REQUEUED, RequeueOutcome.CANCELLED}:
        return _after_request(attempt_facts, action, code, result, by="hpcddp")
    is_unreachable = result.outcome is RequeueOutcome.UNREACHABLE
    by = "hpcddp" if is_unreachable else "slurm"
    may_change = is_unreachable or attempt_facts.may_be_preempted
    if may_change and not attempt_facts.is_fenced:
        # Slurm may kill this shell while it waits: the run must not be shown as still running.
        _conclude(attempt_facts, "stopped", f"{_why(attempt_facts)}; {result.why}", action.exit_code)
        result = requeue_job.wait_and_requeue(
            job_id,
            attempt=attempt_facts.attempt,
            restarts=attempt_facts.restart_count,
            set_requeue_flag=set_requeue_flag,
            before=result,
        )
    return _after_request(attempt_facts, action, code, result, by=by)


def _after_request(attempt_facts: AttemptFacts, action: Action, code: int, result: RequeueResult, *, by: str) -> Ending:
    """Make sure that a requeue lasts, and record the result; ``by`` is who requeued the job, if not its user."""
    requeue = attempt_facts.spec.requeue
    # Slurm repairs a requeue that it has forgotten, if Requeue is 1 and the script has ended.
    must_stay = result.outcome is RequeueOutcome.REQUEUED and not requeue.left_to_slurm
    if must_stay and not attempt_facts.is_fenced:
        result = requeue_job.stay_until_saved(
            attempt_facts.job_id or "",
            attempt=attempt_facts.attempt,
            restarts=attempt_facts.restart_count,
        )
    if attempt_facts.is_fenced:
        # On a node that was cut off, Slurm does not respond: it has started the job again elsewhere.
        return _leave_to_newer_attempt(attempt_facts, _FENCED, code)
    if result.outcome is RequeueOutcome.REQUEUED:
        if attempt_facts.is_requeued_by_user:
            by = "user"
        return _leave(attempt_facts, action, code, by=by)
    if result.outcome is RequeueOutcome.CANCELLED:
        return _cancel(attempt_facts, _CANCELLED, code)
    why = result.why
    if result.outcome is not RequeueOutcome.UNREACHABLE:
        why = f"{why}; a chain of jobs needs no requeue (hpcddp submit --chain N)"
    return _stop(attempt_facts, replace(action, kind=ActionKind.STOP, why=why), code)


def _leave(attempt_facts: AttemptFacts, action: Action, code: int, *, by: str) -> Ending:
    """Record the requeue, set the start time, and return the summary."""
    run = attempt_facts.attempt.run
    job_id = attempt_facts.job_id or ""
    with write_errors_printed(run.result):
        run.result.unlink(missing_ok=True)
    _append_stop(attempt_facts)
    _append(attempt_facts, "requeue", _why(attempt_facts), cause=str(attempt_facts.counted_cause), job_id=job_id, by=by)
    _avoid_failing_nodes(attempt_facts, job_id)
    requeue = attempt_facts.spec.requeue
    left = requeue_job.leave(
        job_id,
        attempt=attempt_facts.attempt,
        restarts=attempt_facts.restart_count,
        set_requeue_flag=not requeue.left_to_slurm,
    )
    if left.outcome is RequeueOutcome.CANCELLED:
        return _cancel(attempt_facts, _CANCELLED, code)
    if left.outcome is not RequeueOutcome.REQUEUED:
        return _stop(attempt_facts, replace(action, kind=ActionKind.STOP, why=left.why), code)
    next_step = f"Slurm runs {attempt_facts.job_text} again {left.start}, and {_next_attempt_text(attempt_facts)}."
    return Ending(exit_code=action.exit_code, text=_summary(attempt_facts, next_step))


def _avoid_failing_nodes(attempt_facts: AttemptFacts, job_id: str) -> None:
    """Keep the job of the next attempt away from the nodes on which its run fails, if its user wants that."""
    if attempt_facts.spec.requeue.avoid_failed_nodes:
        with write_errors_printed(attempt_facts.attempt.run.events):
            avoid_failing_nodes(attempt_facts.attempt, job_id, attempt_facts.environment)


def _next_attempt_text(attempt_facts: AttemptFacts) -> str:
    """Return what the next attempt does."""
    if attempt_facts.spec.command is None:
        return "the run resumes from that step"
    return "the program starts again"


def _continue(attempt_facts: AttemptFacts, action: Action, _: int) -> Ending:
    """Leave the run to the next job of its chain."""
    job_id = (attempt_facts.later_jobs or ("",))[0]
    cause = str(attempt_facts.counted_cause)
    _append_stop(attempt_facts)
    _append(attempt_facts, "requeue", _why(attempt_facts), cause=cause, job_id=job_id, by="chain")
    _avoid_failing_nodes(attempt_facts, job_id)
    next_step = f"Job {job_id}, the next of its chain, goes on, and {_next_attempt_text(attempt_facts)}."
    return Ending(exit_code=action.exit_code, text=_summary(attempt_facts, next_step))


_HANDLERS: Mapping[ActionKind, Callable[[AttemptFacts, Action, int], Ending]] = MappingProxyType(
    {
        ActionKind.FINISH: _finish,
        ActionKind.FENCED: _leave_to_newer_attempt,
        ActionKind.FAIL: _fail,
        ActionKind.CANCEL: _cancel,
        ActionKind.STOP: _stop,
        ActionKind.LEAVE_TO_SLURM: _leave_to_slurm,
        ActionKind.RESTART: _restart,
        ActionKind.REQUEUE: _requeue,
        ActionKind.CONTINUE: _continue,
    }
)


def _why(attempt_facts: AttemptFacts) -> str:
    cause = attempt_facts.counted_cause
    if cause is Cause.UNKNOWN and attempt_facts.ended_allocation is not None:
        return f"the allocation of this run, job {attempt_facts.ended_allocation}, has ended"
    if cause is Cause.NODE_FAILURE:
        nodes = ", ".join(attempt_facts.lost_nodes)
        return f"node {nodes} was lost" if nodes else "a node was lost"
    if attempt_facts.is_requeued_by_user:
        return f"its user requested the requeue of {attempt_facts.job_text}"
    program = attempt_facts.program
    if program is not None and program.requeue_requested and cause is Cause.UNKNOWN:
        return f"the command requested a requeue (exit code {int(ExitCode.STOPPED)}, or a file at HPCDDP_REQUEUE_FILE)"
    if cause is Cause.CRASH:
        return failure_sentence(attempt_facts.attempt, attempt_facts.failures)
    return _why_without_error(attempt_facts, cause)


def _why_without_error(attempt_facts: AttemptFacts, cause: Cause) -> str:
    if cause is Cause.TIME_LIMIT and not attempt_facts.is_time_limit_near:
        # Slurm has ended the tasks at the limit, or `watch` has ended srun.
        return f"{attempt_facts.job_text} has reached its time limit"
    return why_it_stopped(cause, attempt_facts.decision, job=attempt_facts.job_text)


def _by_hand(attempt_facts: AttemptFacts, why: str = "") -> str:
    because = f": {why}" if why else ""
    return f"The run is not requeued{because}. To resume: {resume_command(attempt_facts.attempt.run)}"


def _summary(attempt_facts: AttemptFacts, next_step: str, *, cause: Cause | None = None) -> str:
    """Return why the attempt stopped, what was saved, and what happens next."""
    attempt = attempt_facts.attempt
    why = _why(attempt_facts) if cause is None else _why_without_error(attempt_facts, cause)
    parts = [why]
    saved_step = newest_saved_step(attempt_facts.events)
    # A program of the user's own has checkpoints of its own.
    if attempt_facts.program is None or saved_step:
        parts.append(what_is_saved(attempt_facts.decision, saved_step))
    error = _error_while_stopping(attempt_facts)
    if error is not None:
        parts.append(error)
    return f"attempt {attempt.number} of run {attempt.run.run_id} has ended: {'; '.join(parts)}. {next_step}"


def _error_while_stopping(attempt_facts: AttemptFacts) -> str | None:
    # srun ends the other ranks after a failure, which is no request to stop.
    if attempt_facts.program is None or attempt_facts.first_failure is not None:
        return None
    return attempt_facts.program.error_while_stopping


def _conclude(attempt_facts: AttemptFacts, status: str, reason: str, exit_code: int) -> None:
    """Write the run's result."""
    attempt = attempt_facts.attempt
    decision = attempt_facts.decision
    saved_step = newest_saved_step(attempt_facts.events)
    if decision is not None and decision.saved:
        saved_step = decision.step
    if attempt_facts.full_disk is not None:
        reason = f"{reason}; {attempt_facts.full_disk}"
    result = unfinished_result(attempt.run, status, reason, exit_code, attempt=attempt.number, saved_step=saved_step)
    with write_errors_printed(attempt.run.result):
        write_result(attempt.run, result)


def _append_stop(attempt_facts: AttemptFacts) -> None:
    """Record that the attempt has stopped, unless its ranks have."""
    if not attempt_facts.is_stop_recorded:
        _append(attempt_facts, "stop", _why(attempt_facts), cause=str(attempt_facts.counted_cause))


def _append(
    attempt_facts: AttemptFacts, kind: EventKind, reason: str, *, cause: str | None = None, **facts: object
) -> None:
    """Append an event."""
    attempt = attempt_facts.attempt
    decision = attempt_facts.decision
    step = None
    if decision is not None and decision.step != 0:
        step = decision.step
    error = _error_while_stopping(attempt_facts)
    if error is not None:
        facts["error"] = error
    if kind in CONTINUATIONS and attempt_facts.node_faults:
        facts["node_faults"] = attempt_facts.node_faults
    with write_errors_printed(attempt.run.events):
        append_event(
            attempt.run.events,
            kind=kind,
            time=time.time(),
            attempt=attempt.number,
            step=step,
            reason=reason,
            cause=cause,
            **facts,
        )
