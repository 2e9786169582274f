"""Why a run waits, how far it is, or why it ended; and the one command that helps."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from hpcddp.launch.paragraph import newest_saved_step, resume_command
from hpcddp.report.first_error import failed_attempt
from hpcddp.report.reasons import waiting
from hpcddp.report.states import State
from hpcddp.report.status import RunStatus
from hpcddp.report.wording import duration_text, limit_text
from hpcddp.run.directory import RunDirectory
from hpcddp.run.events import read_events
from hpcddp.run.failure import failure_sentence, read_failures
from hpcddp.run.files import read_tail
from hpcddp.slurm.queue import QueuedJob
from hpcddp.stop.exit_codes import ExitCode

_WAITS: Final = frozenset({State.PENDING, State.HELD, State.REQUEUED})
_TOLD: Final = 6
_TAIL_BYTES: Final = 4096
# After these the same run would end in the same way again.
_LOOK_FIRST: Final = frozenset({ExitCode.USER_CODE, ExitCode.NO_CHECKPOINT, ExitCode.NO_PROGRESS, ExitCode.HANG})
_CAUSES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "preemption": "preempted",
        "time_limit": "out of time",
        "node_failure": "a node was lost",
        "crash": "a task failed",
        "requeued": "requeued by Slurm or by hand",
    }
)

_ENDED: Final[Mapping[State, str]] = MappingProxyType(
    {
        State.FAILED: "has failed",
        State.CANCELLED: "was cancelled",
        State.STOPPED: "has stopped",
        State.TIMED_OUT: "ran out of time",
        State.PREEMPTED: "was preempted",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Why a run is in its state.

    Args:
        status: the run.
        why: a sentence.
        facts: what else is known, a sentence each.
        history: how it came there, a line for each start and end of an attempt.
        advice: what to do about it; None where there is nothing to do.
        command: the command that helps most, None if none does.
    """

    status: RunStatus
    why: str
    facts: tuple[str, ...] = ()
    history: tuple[str, ...] = ()
    advice: str | None = None
    command: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the document that ``--json`` prints."""
        return {
            "run_id": self.status.run.run_id,
            "state": str(self.status.state),
            "why": self.why,
            "facts": list(self.facts),
            "history": list(self.history),
            "advice": self.advice,
            "next": self.command,
        }

    def lines(self) -> Iterator[str]:
        """Yield what a person reads."""
        yield f"{self.status.run.run_id} ({self.status.run.path.parent.name}): {self.why}"
        yield from (f"  {fact}" for fact in self.facts)
        yield from (f"  {line}" for line in self.history)
        if self.advice is not None:
            yield self.advice
        if self.command is not None:
            yield f"next: {self.command}"


def explain(
    status: RunStatus, *, priority: str | None = None, unanswered: bool = False, called: str | None = None
) -> Answer:
    """Return why a run is in its state.

    Args:
        status: the run.
        priority: what its job's priority is made of, as ``sprio`` prints it; None if that is not known.
        unanswered: whether Slurm could not be asked.
        called: what commands call the run; None is its id.
    """
    called = called or status.run.run_id
    if status.state in _WAITS and status.job is not None:
        return _waits(status, status.job, priority, called)
    if status.state in _WAITS or status.state.has_nodes:
        return _runs(status, called)
    if status.state is State.UNKNOWN:
        asked = "Slurm could not be asked" if unanswered else "it was started on another machine, or nothing says where"
        why = f"nobody can tell: it has left no result, and {asked}"
        return Answer(status=status, why=why, facts=tuple(_signs(status)), history=_history(status))
    if status.traces.result is not None:
        return _ended(status, status.traces.result, called)
    return _gone(status)


def _waits(status: RunStatus, job: QueuedJob, priority: str | None, called: str) -> Answer:
    found = waiting(job.reason, job_id=job.job_id, run=called)
    what = {State.REQUEUED: "waits to run again", State.HELD: "is held"}.get(status.state, "waits to start")
    facts = [f"Slurm's word for it is {job.reason}, of job {job.job_id}"] if job.reason != "None" else []
    if job.start_time is not None and status.state is not State.HELD:
        facts.append(f"Slurm expects it to start at {job.start_time.replace('T', ' ')}; other jobs may change that")
    if priority is not None:
        facts += ["its priority, as sprio shows it:", *(f"  {line}" for line in priority.splitlines())]
    history = _history(status)
    return Answer(
        status=status, why=f"it {what}, because {found.why}", facts=tuple(facts), history=history, advice=found.advice
    )


def _runs(status: RunStatus, called: str) -> Answer:
    job = status.traces.job
    where = status.job.node_list if status.job is not None else ", ".join(status.hosts or ())
    what = {State.REQUEUED: "has stopped, and its job is about to run again", State.STOPPING: "is being stopped"}
    doing = what.get(status.state, f"is {status.state}")
    why = (
        f"it {doing}"
        + (f" on {where}" if where else "")
        + (f", as {'process' if job.local else 'job'} {job.job_id}" if job else "")
    )
    command = shlex.join(["hpcddp", "logs", called, "--follow"])
    return Answer(status=status, why=why, facts=tuple(_signs(status)), history=_history(status), command=command)


def _signs(status: RunStatus) -> Iterator[str]:
    """Yield how far a run is."""
    traces = status.traces
    if status.step is not None:
        total = "" if traces.total_steps is None else f" of {traces.total_steps}"
        eta = "" if status.eta_s is None else f", about {duration_text(status.eta_s)} to go"
        yield f"step {status.step}{total}{eta}"
    if status.state.has_nodes and status.used_s is not None:
        limit = "" if status.limit_s is None else f" of its {limit_text(status.limit_s)}"
        yield f"it has used {duration_text(status.used_s)}{limit}"
    if not status.state.has_nodes and traces.ended is not None:
        yield f"the last sign of life was {duration_text(status.now - traces.ended)} ago"


def _ended(status: RunStatus, result: Mapping[str, Any], called: str) -> Answer:
    run = status.run
    if status.state is State.FINISHED:
        accuracy = result.get("val_accuracy")
        scored = "" if accuracy is None else f", val_accuracy {accuracy:.2%}"
        steps = "" if result.get("steps") is None else f" after {result['steps']} steps{scored}"
        result_file = f"its result is {run.result}"
        return Answer(status=status, why=f"it has finished{steps}", facts=(result_file,), history=_history(status))
    saved = result.get("saved_step")
    facts = tuple(_saved(run, saved))
    resume = str(result.get("resume") or resume_command(run))
    look = result.get("exit_code") in _LOOK_FIRST
    command = shlex.join(["hpcddp", "logs", called, "--first-error"]) if look else resume
    advice = f"When its cause is removed, go on with: {resume}" if look else None
    reason = str(result.get("reason"))
    said = reason.startswith(str(State.CANCELLED))
    why = f"it was {reason}" if said else f"it {_ENDED.get(status.state, 'has ended')}: {reason}"
    return Answer(status=status, why=why, facts=facts, history=_history(status), advice=advice, command=command)


def _saved(run: RunDirectory, step: int | None) -> Iterator[str]:
    """Yield which step is saved; a program of the user's own has checkpoints of its own, and nobody knows of them."""
    if step:
        yield f"step {step} is saved"
    elif not any(run.attempts.glob("*/exit-rank-*.json")):
        yield "no step is saved"


def _gone(status: RunStatus) -> Answer:
    """Return why a run without a result has ended, as far as anybody knows."""
    traces, job = status.traces, status.job
    run = status.run
    known = traces.job.job_id if traces.job else None
    if job is not None:
        why = f"Slurm says that job {job.job_id} is {job.state}, and the run has left no result"
    elif traces.job is not None and traces.job.local:
        why = f"its process {known} is gone, and it has left no result: it was killed, or this machine was restarted"
    elif traces.attempt is None and status.state is State.CANCELLED:
        why = "it was cancelled before it started"
    elif traces.attempt is None:
        why = f"it never started, and Slurm has forgotten its job {known}: it was cancelled while it waited, or refused"
    else:
        why = f"Slurm has forgotten its job {known}, and it has left no result: it was killed, or its node was lost"
    facts = [*_signs(status), *_failure(status), *_last_words(status)]
    facts += _saved(run, newest_saved_step(read_events(run.events)))
    command = resume_command(run) if run.path.is_dir() else None
    return Answer(status=status, why=why, facts=tuple(facts), history=_history(status), command=command)


def _failure(status: RunStatus) -> Iterator[str]:
    attempt = failed_attempt(status.run)
    if attempt is not None and attempt.number == status.traces.attempt:
        yield failure_sentence(attempt, read_failures(attempt))


def _last_words(status: RunStatus) -> Iterator[str]:
    lines = read_tail(status.run.batch_log, _TAIL_BYTES).rstrip().splitlines()[-1:]
    yield from (f"the batch script's last words: {line}" for line in lines)


def _history(status: RunStatus) -> tuple[str, ...]:
    """Return how each attempt began and ended."""
    lines = list(_told(read_events(status.run.events)))
    left_out = len(lines) - _TOLD
    return (f"... {left_out} earlier lines in {status.run.events}", *lines[-_TOLD:]) if left_out > 1 else tuple(lines)


def _told(events: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for event in events:
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["time"]))
        step = "" if event.get("step") is None else f" after step {event['step']}"
        if event["event"] == "start":
            yield f"{moment}  attempt {event['attempt']} began on {event.get('host')}"
        elif event["event"] == "resume":
            yield f"{moment}  {event['reason']}"
        elif event["event"] == "requeue":
            asked = event.get("by") == "user"
            cause = "its user asked for it" if asked else _CAUSES.get(str(event.get("cause")), str(event.get("cause")))
            yield f"{moment}  attempt {event['attempt']} stopped{step}, to go on: {cause}"
        elif event["event"] == "stop" and "saved" not in event:
            # What the ranks write of the same stop says how, not why.
            yield f"{moment}  attempt {event['attempt']} stopped{step}: {event['reason']}"
        elif event["event"] in {"failure", "finish"}:
            ended = "failed" if event["event"] == "failure" else "finished"
            yield f"{moment}  attempt {event['attempt']} {ended}{step}"
