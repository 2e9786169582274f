"""The end of an attempt: the only place that requeues. It decides by a table, acts, and says what it did."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from hpcddp.errors import HpcddpError
from hpcddp.run.directory import AttemptDirectory, RunDirectory
from hpcddp.run.events import EventKind, append_event, newest_saved_step, read_events
from hpcddp.run.failure import describe_failure, failure_sentence
from hpcddp.run.job_records import ProgramEnd, read_start
from hpcddp.run.record import RecordError
from hpcddp.run.result import FINISHED, Result, resume_command, what_is_saved, why_it_stopped, write_result
from hpcddp.stop.reasons import Cause, ExitCode
from hpcddp.supervise import slurm_requeue as requeuing
from hpcddp.supervise.attempt_facts import Situation
from hpcddp.supervise.decision import Action, Deed, decide, is_interruption, tell_progress
from hpcddp.supervise.slurm_requeue import Outcome

_OVERTAKEN = Action(deed=Deed.FENCED, exit_code=ExitCode.FENCED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How the batch script ends.

    Args:
        exit_code: its exit code.
        text: the paragraph for its log.
        expedite: the job that is to be started again soon, once all else is done; None for none.
    """

    exit_code: int
    text: str
    expedite: str | None = None


def end(attempt: AttemptDirectory, *, code: int, environment: Mapping[str, str], cancelled: bool = False) -> Ending:
    """Decide what becomes of the run, and do it.

    Args:
        attempt: the attempt whose tasks have ended.
        code: what srun (or the local controller) exited with; it hides the cause.
        environment: the batch script's environment.
        cancelled: whether the user ended the job on this machine.
    """
    try:
        return _decide_and_act(attempt, code=code, environment=environment, cancelled=cancelled)
    except RecordError as error:
        return _give_up(attempt, error)


def _decide_and_act(attempt: AttemptDirectory, *, code: int, environment: Mapping[str, str], cancelled: bool) -> Ending:
    situation = Situation(attempt=attempt, environment=environment, cancelled=cancelled)
    if situation.is_unexplained and not situation.is_overtaken:
        _wait_for_slurm(situation)
        situation = Situation(attempt=attempt, environment=environment, cancelled=cancelled)
    if situation.program is not None:
        _conclude_program(situation, situation.program)
    action = decide(situation.facts())
    if situation.damage is not None:
        sys.stderr.write(f"hpcddp: {situation.damage.message}\n")
    if situation.is_overtaken:
        # Slurm may have been asked for a minute.
        action = _OVERTAKEN
    return _DEEDS[action.deed](situation, action, code)


def _give_up(attempt: AttemptDirectory, error: RecordError) -> Ending:
    """Stop the run where a record that the decision needs is damaged: a guess could blame or requeue wrongly."""
    run = attempt.run
    if run.newest_attempt() == attempt.number:
        result = Result(
            status="stopped",
            reason=error.message,
            exit_code=int(ExitCode.INFRASTRUCTURE),
            attempts=attempt.number + 1,
            saved_step=_saved_step(run),
            resume=resume_command(run),
        )
        with _told(run.result):
            # A damaged one stays: it may be of a run that has finished.
            if error.path != run.result:
                write_result(run, result)
        with _told(run.events):
            append_event(run.events, kind="stop", time=time.time(), attempt=attempt.number, reason=error.message)
    text = f"attempt {attempt.number} of run {run.run_id} has ended, and nothing starts it again: {error.message}"
    return Ending(exit_code=ExitCode.INFRASTRUCTURE, text=text)


def _saved_step(run: RunDirectory) -> int | None:
    """Return the newest step that is saved, as far as the event log can be read."""
    try:
        return newest_saved_step(read_events(run.events)) or None
    except RecordError:
        return None


def _wait_for_slurm(situation: Situation) -> None:
    """Stay until Slurm says why the tasks had to end: a preempted job that ends by itself is never requeued."""
    # Slurm may kill this shell while it waits: the run must not look as if it went on by itself.
    _conclude(situation, "stopped", f"{_why(situation)}; Slurm does not answer", ExitCode.STOPPED)
    requeuing.outlast_silence(situation.job_id or "")


def _conclude_program(situation: Situation, program: ProgramEnd) -> None:
    """Write down what the ranks of a training write themselves: that the run has finished, or came further."""
    # Slurm may be asked for a minute, in which the run may begin anew on other nodes.
    interrupted = not program.finished and is_interruption(situation.counted_cause)
    if situation.is_overtaken:
        return
    attempt = situation.attempt
    with _told(attempt.run.path):
        if program.finished:
            result = Result(
                status=FINISHED,
                exit_code=0,
                attempts=attempt.number + 1,
                world_size=program.world_size,
                wall_s=_wall_s(attempt),
            )
            write_result(attempt.run, result)
            append_event(attempt.run.events, kind="finish", time=time.time(), attempt=attempt.number)
        else:
            tell_progress(attempt, now=time.time(), interrupted=interrupted)


def _wall_s(attempt: AttemptDirectory) -> float | None:
    """Return how long the attempts of a run took, from the first start until now, in seconds; None if unreadable."""
    try:
        first, now = read_start(attempt.run.attempt(0)), time.time()
    except RecordError as error:
        # The run has finished nevertheless.
        sys.stderr.write(f"hpcddp: {error.message}\n")
        return None
    return 0.0 if first is None else round(now - first.time, 3)


def _finish(situation: Situation, action: Action, _: int) -> Ending:
    run = situation.attempt.run
    return Ending(exit_code=action.exit_code, text=f"run {run.run_id} has finished; its result is {run.result}")


def _be_fenced(situation: Situation, action: Action, _: int) -> Ending:
    run, number = situation.attempt.run, situation.attempt.number
    text = f"attempt {run.newest_attempt()} owns run {run.run_id}, so attempt {number} ends here and writes nothing"
    return Ending(exit_code=action.exit_code, text=text)


def _fail(situation: Situation, action: Action, code: int) -> Ending:
    attempt, failures = situation.attempt, situation.failures
    over = action.exit_code == ExitCode.NO_PROGRESS
    reason = f"{_why(situation)}; {action.why}" if over else failure_sentence(attempt, failures)
    _conclude(situation, "failed", reason, action.exit_code)
    _tell(situation, "failure", reason, exit_code=action.exit_code, srun=code, cause=str(situation.cause))
    if over:
        return Ending(exit_code=action.exit_code, text=_paragraph(situation, _by_hand(situation, action.why)))
    text = describe_failure(attempt, failures)
    if action.why:
        text = f"{text}\n{_by_hand(situation, action.why)}"
    return Ending(exit_code=action.exit_code, text=text)


def _cancel(situation: Situation, action: Action, _: int) -> Ending:
    _conclude(situation, "cancelled", "cancelled by a signal to the job", action.exit_code)
    _tell(situation, "stop", "cancelled by a signal to the job", cause=str(Cause.CANCELLED))
    text = _paragraph(situation, _by_hand(situation), cause=Cause.CANCELLED)
    return Ending(exit_code=action.exit_code, text=text)


def _stop(situation: Situation, action: Action, _: int) -> Ending:
    _conclude(situation, "stopped", f"{_why(situation)}; {action.why}", action.exit_code)
    _tell(situation, "stop", f"{_why(situation)}; {action.why}", cause=str(situation.cause))
    return Ending(exit_code=action.exit_code, text=_paragraph(situation, _by_hand(situation, action.why)))


def _let(situation: Situation, action: Action, _: int) -> Ending:
    return _goes_on(situation, action, by="user" if situation.by_user else "slurm")


def _requeue(situation: Situation, action: Action, code: int) -> Ending:
    job_id = situation.job_id or ""
    done = requeuing.requeue(job_id, restarts=situation.restarts, lift=not situation.spec.requeue.left_to_slurm)
    in_vain = done.outcome in {Outcome.REFUSED, Outcome.UNREACHABLE}
    if in_vain and situation.is_being_taken_away and not situation.is_overtaken:
        # Slurm may kill this shell while it waits: the run must not look as if it went on by itself.
        _conclude(situation, "stopped", f"{_why(situation)}; {done.why}", action.exit_code)
        done = requeuing.outlast_grace(job_id, restarts=situation.restarts, before=done)
    if situation.is_overtaken:
        # On a node that was cut off, Slurm does not answer: it has long run the job again elsewhere.
        return _be_fenced(situation, _OVERTAKEN, code)
    if done.outcome is Outcome.REQUEUED:
        return _goes_on(situation, action, by="user" if situation.by_user else "hpcddp")
    if done.outcome is Outcome.CANCELLED:
        return _cancel(situation, Action(deed=Deed.CANCEL, exit_code=ExitCode.INTERRUPTED), code)
    if done.outcome is Outcome.REFUSED and situation.spec.requeue.allow_continuation:
        return _continue(situation, action, code)
    return _stop(situation, Action(deed=Deed.STOP, exit_code=action.exit_code, why=done.why), code)


def _goes_on(situation: Situation, action: Action, *, by: str) -> Ending:
    """Say that Slurm runs the job again."""
    run, job_id = situation.attempt.run, situation.job_id
    run.result.unlink(missing_ok=True)
    _tell_stop(situation)
    _tell(situation, "requeue", _why(situation), cause=str(situation.counted_cause), job_id=job_id, by=by)
    expedite = situation.spec.requeue.expedite
    soon = "in a few seconds, if its nodes are free" if expedite else "in about two minutes"
    next_step = f"Slurm runs {situation.job} again {soon}, and it goes on from there."
    return Ending(
        exit_code=action.exit_code, text=_paragraph(situation, next_step), expedite=job_id if expedite else None
    )


def _continue(situation: Situation, action: Action, code: int) -> Ending:
    """Submit another job for the same run."""
    from hpcddp.submit.resume import continue_by_itself

    run = situation.attempt.run
    try:
        submission = continue_by_itself(run, environment=situation.environment)
    except HpcddpError as error:
        return _stop(situation, Action(deed=Deed.STOP, exit_code=action.exit_code, why=error.message), code)
    cause = str(situation.counted_cause)
    _tell_stop(situation)
    _tell(situation, "requeue", _why(situation), cause=cause, job_id=submission.job_id, by="hpcddp")
    next_step = f"Job {submission.job_id} was submitted, and it goes on from there."
    return Ending(exit_code=action.exit_code, text=_paragraph(situation, next_step))


_DEEDS: Mapping[Deed, Callable[[Situation, Action, int], Ending]] = MappingProxyType(
    {
        Deed.FINISH: _finish,
        Deed.FENCED: _be_fenced,
        Deed.FAIL: _fail,
        Deed.CANCEL: _cancel,
        Deed.STOP: _stop,
        Deed.LET: _let,
        Deed.REQUEUE: _requeue,
        Deed.CONTINUE: _continue,
    }
)


def _why(situation: Situation) -> str:
    cause = situation.counted_cause
    if cause is Cause.NODE_FAILURE:
        return f"node {', '.join(situation.lost_nodes)} was lost" if situation.lost_nodes else "a node was lost"
    if situation.by_user:
        return f"its user asked to have {situation.job} run again"
    program = situation.program
    if program is not None and program.wants_to_go_on and cause is Cause.UNKNOWN:
        return (
            f"the command asked to be run again (exit code {int(ExitCode.STOPPED)}, or a file at HPCDDP_REQUEUE_FILE)"
        )
    if cause is Cause.CRASH:
        return failure_sentence(situation.attempt, situation.failures)
    return why_it_stopped(cause, situation.decision, job=situation.job)


def _by_hand(situation: Situation, why: str = "") -> str:
    because = f": {why}" if why else ""
    return f"It does not go on by itself{because}. To go on: {resume_command(situation.attempt.run)}"


def _paragraph(situation: Situation, next_step: str, *, cause: Cause | None = None) -> str:
    """Return why the attempt stopped, what was saved, and what happens next."""
    attempt = situation.attempt
    why = _why(situation) if cause is None else why_it_stopped(cause, situation.decision, job=situation.job)
    newest = newest_saved_step(situation.events)
    # A program of the user's own has checkpoints of its own.
    known = situation.program is None or newest
    saved = f"; {what_is_saved(situation.decision, newest)}" if known else ""
    return f"attempt {attempt.number} of run {attempt.run.run_id} has ended: {why}{saved}. {next_step}"


def _conclude(situation: Situation, status: str, reason: str, exit_code: int) -> None:
    """Write the run's result."""
    attempt, decision = situation.attempt, situation.decision
    saved = decision.step if decision is not None and decision.saved else newest_saved_step(situation.events)
    result = Result(
        status=status,
        reason=reason,
        exit_code=int(exit_code),
        attempts=attempt.number + 1,
        saved_step=saved or None,
        resume=resume_command(attempt.run),
    )
    with _told(attempt.run.result):
        write_result(attempt.run, result)


def _tell_stop(situation: Situation) -> None:
    """Write down that the attempt has stopped, unless its ranks have."""
    if situation.decision is None:
        _tell(situation, "stop", _why(situation), cause=str(situation.counted_cause))


def _tell(situation: Situation, kind: EventKind, reason: str, *, cause: str | None = None, **facts: object) -> None:
    """Append an event."""
    attempt, decision = situation.attempt, situation.decision
    with _told(attempt.run.events):
        append_event(
            attempt.run.events,
            kind=kind,
            time=time.time(),
            attempt=attempt.number,
            step=decision.step if decision else None,
            reason=reason,
            cause=cause,
            **facts,
        )


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Say what could not be written, and go on: a full disk must not keep a job from being requeued."""
    try:
        yield
    except OSError as error:
        sys.stderr.write(f"hpcddp: {path} cannot be written ({error.strerror})\n")
