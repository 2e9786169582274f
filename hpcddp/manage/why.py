"""Explain why a run waits, how far it is, or why it ended, and which command helps."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from types import MappingProxyType
from typing import Any, Final

from hpcddp.errors import counted
from hpcddp.manage.first_error import failed_attempt
from hpcddp.manage.format import duration_text, limit_text, one_line, processes_text, ranks_text
from hpcddp.manage.overview import SweepStatus
from hpcddp.manage.run_files import readable
from hpcddp.manage.status import RunStatus, left_behind, state_in_slurm
from hpcddp.run.collectives import Collective, read_collectives
from hpcddp.run.directory import RunDirectory
from hpcddp.run.events import RECENT_BYTES, Event, newest_saved_step, read_events
from hpcddp.run.failure import failure_sentence, ranks_without_record, read_failures, rest_of_message
from hpcddp.run.files import read_tail
from hpcddp.run.find import run_of_job
from hpcddp.run.result import Result, resume_command
from hpcddp.run.source import read_sources
from hpcddp.run.sweep import element_id
from hpcddp.slurm.commands import QueuedJob
from hpcddp.slurm.states import State
from hpcddp.stop.reasons import ExitCode

_WAITS: Final = frozenset({State.PENDING, State.HELD, State.REQUEUED})
_HISTORY_LINES: Final = 6
_TAIL_BYTES: Final = 4096
_GROUPS_SHOWN: Final = 4
_JOBS_SHOWN: Final = 4
# A script ends within seconds after its requeue; if slurmctld has to save the requeue first, 7 s more.
_LEAVING_S: Final = 60.0
_LOST_REQUEUE: Final = (
    "it has stopped, and slurmctld has lost the requeue of its job, because it was down then; Slurm runs the job again "
    "by itself when the node reports that the job is not there, which may take up to seven times SlurmdTimeout"
)
# squeue(1), DEPENDENCY: afterok:12(unfulfilled),afterany:14_*(unfulfilled).
_DEPENDS_ON: Final = re.compile(r":([0-9]+(?:_[0-9]+)?)", re.ASCII)
# srun: Job 7 step creation temporarily disabled, retrying (Requested nodes are busy)   (22.05 to 26.05)
_STEP_WAITS: Final = re.compile("srun: .*step creation (?:temporarily|still) disabled, retrying")
# After these the same run would fail in the same way again.
_LOOK_FIRST: Final = frozenset({ExitCode.USER_CODE, ExitCode.NO_CHECKPOINT, ExitCode.NO_PROGRESS, ExitCode.HANG})
_CAUSES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "preemption": "preempted",
        "time_limit": "the time limit was near",
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
        error: the lines of the error's message below the one that ``why`` quotes.
        facts: what else is known, a sentence each.
        history: a line for each start and end of an attempt.
        advice: what to do about it; None where there is nothing to do.
        command: the command that helps most, None if none does.
    """

    status: RunStatus
    why: str
    error: tuple[str, ...] = ()
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
            "error": list(self.error),
            "facts": [*self.facts, *self.status.remarks],
            "history": list(self.history),
            "advice": self.advice,
            "next": self.command,
        }

    def lines(self) -> Iterator[str]:
        """Yield what a person reads."""
        yield f"{self.status.run.run_id} ({self.status.run.path.parent.name}): {self.why}"
        yield from (f"    {line}" for line in self.error)
        yield from (f"  {fact}" for fact in self.facts)
        yield from (f"  {remark}" for remark in self.status.remarks)
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
        priority: the parts of its job's priority, as ``sprio`` prints them; None if unknown.
        unanswered: whether Slurm could not be queried.
        called: what commands call the run; None is its id.
    """
    answer = _explained(status, priority, called or status.run.run_id, unanswered=unanswered)
    return replace(answer, facts=(*answer.facts, *_source(status.run)))


def _explained(status: RunStatus, priority: str | None, called: str, *, unanswered: bool) -> Answer:
    if status.state in _WAITS and status.job is not None:
        return _waits(status, status.job, priority, called)
    if status.state in _WAITS or status.state.has_nodes:
        return _runs(status, called)
    if status.files.is_result_damaged:
        finished = status.state is State.FINISHED
        how = "its event log says that it has finished" if finished else "its outcome is unknown"
        why = f"it has ended, and {how}: its result cannot be read"
        return Answer(status=status, why=why, facts=tuple(_signs(status)), history=_history(status))
    if status.state is State.UNKNOWN:
        why = f"its state is unknown: it has left no result, and {_why_unknown(status, unanswered=unanswered)}"
        return Answer(status=status, why=why, facts=tuple(_signs(status)), history=_history(status))
    if status.files.result is not None:
        return _ended(status, status.files.result, called)
    return _gone(status)


def _why_unknown(status: RunStatus, *, unanswered: bool) -> str:
    """Return why it is not known whether the job of a run is alive."""
    if status.files.job is None:
        return "it has no job: its submission was interrupted, unless its script was given to sbatch by hand"
    if unanswered:
        return "Slurm could not be queried"
    return "it was started on another machine, or on an unknown one"


def _has_lost_requeue(status: RunStatus, job: QueuedJob) -> bool:
    """Return whether Slurm shows a job as running although it was requeued and its script has ended."""
    start, requeues = status.files.start, status.files.of_attempt("requeue")
    if start is None or not requeues or state_in_slurm(job) is not State.RUNNING:
        return False
    return job.restarts == start.restart_count and status.now - requeues[-1].time > _LEAVING_S


def _waits(status: RunStatus, job: QueuedJob, priority: str | None, called: str) -> Answer:
    if _has_lost_requeue(status, job):
        return Answer(status=status, why=_LOST_REQUEUE, history=_history(status))
    found = waiting(job.reason, job_id=job.job_id, run=called, on=_depends_on(status.run, job.dependency))
    what = {State.REQUEUED: "waits to run again", State.HELD: "is held"}.get(status.state, "waits to start")
    facts = [f"Slurm reason: {job.reason} (job {job.job_id})"] if job.reason != "None" else []
    if job.start_time is not None and status.state is not State.HELD:
        facts.append(f"Slurm expects it to start at {job.start_time.replace('T', ' ')}; other jobs may change that")
    if priority is not None:
        facts += ["its priority, as sprio shows it:", *(f"  {line}" for line in priority.splitlines())]
    history = _history(status)
    return Answer(
        status=status, why=f"it {what}, because {found.why}", facts=tuple(facts), history=history, advice=found.advice
    )


def _depends_on(run: RunDirectory, dependency: str) -> str:
    """Return which jobs a job depends on, and the runs that they belong to."""
    jobs = list(dict.fromkeys(_DEPENDS_ON.findall(dependency)))
    named = []
    for job_id in jobs[:_JOBS_SHOWN]:
        found = run_of_job(job_id, run.path.parent.parent)
        named.append(f"job {job_id}" + (f" of the run {found.run_id} ({found.path.parent.name})" if found else ""))
    more = [f"{len(jobs) - _JOBS_SHOWN} more"] if len(jobs) > _JOBS_SHOWN else []
    return " and ".join([*named, *more]) or "another job"


def _runs(status: RunStatus, called: str) -> Answer:
    job = status.files.job
    if status.state is State.PENDING:
        # Without a job in Slurm, only an element of a sweep on this machine waits.
        why = "it waits for its turn: --max-parallel says how many runs of a sweep this machine runs at the same time"
        return Answer(status=status, why=why, history=_history(status))
    where = status.job.node_list if status.job is not None else ", ".join(status.hosts or ())
    what = {State.REQUEUED: "has stopped, and its job is about to run again", State.STOPPING: "is being stopped"}
    doing = what.get(status.state, f"is {status.state}")
    why = (
        f"it {doing}"
        + (f" on {where}" if where else "")
        + (f", as {'process' if job.local else 'job'} {job.job_id}" if job else "")
    )
    silent = status.silent_s is not None
    command = shlex.join(["hpcddp", "stacks", called] if silent else ["hpcddp", "logs", called, "--follow"])
    facts = (*_signs(status), *_waiting_step(status))
    return Answer(status=status, why=why, facts=facts, history=_history(status), command=command)


def _waiting_step(status: RunStatus) -> Iterator[str]:
    """Yield that the program calls srun, which waits for what its own task has; srun says so and retries."""
    if status.files.attempt is None:
        return
    log = status.run.attempt(status.files.attempt).rank_log(0)
    if any(map(_STEP_WAITS.match, read_tail(log, _TAIL_BYTES).splitlines()[-1:])):
        yield (
            "its program calls srun, and that step waits for the CPUs of the task until the time limit: let hpcddp "
            "start the tasks, or add --overlap to srun"
        )


def _signs(status: RunStatus) -> Iterator[str]:
    """Yield how far a run is."""
    files = status.files
    if status.step is not None:
        total = "" if files.total_steps is None else f" of {files.total_steps}"
        eta = "" if status.eta_s is None else f", about {duration_text(status.eta_s)} to go"
        yield f"step {status.step}{total}{eta}"
    yield from map(one_line, status.metric_sentences())
    if status.state.has_nodes and status.used_s is not None:
        limit = "" if status.limit_s is None else f" of its {limit_text(status.limit_s)}"
        yield f"it has used {duration_text(status.used_s)}{limit}"
    if not status.state.has_nodes and files.ended is not None:
        yield f"the last activity was {duration_text(status.now - files.ended)} ago"


def _ended(status: RunStatus, result: Result, called: str) -> Answer:
    run = status.run
    if status.state is State.FINISHED:
        accuracy = result.val_accuracy
        scored = "" if accuracy is None else f", val_accuracy {accuracy:.2%}"
        steps = "" if result.steps is None else f" after {counted(result.steps, 'step')}{scored}"
        facts = (*map(one_line, status.metric_sentences()), f"its result is {run.result}")
        return Answer(status=status, why=f"it has finished{steps}", facts=facts, history=_history(status))
    facts = (*_collectives(status), *_saved(run, result.saved_step))
    command, later = remedy(run, result, called)
    advice = None if later is None else f"When its cause is removed, resume with: {later}"
    reason = str(result.reason)
    said = reason.startswith(str(State.CANCELLED))
    why = f"it was {reason}" if said else f"it {_ENDED.get(status.state, 'has ended')}: {reason}"
    return Answer(
        status=status,
        why=why,
        error=tuple(_rest_of_error(status, why)),
        facts=facts,
        history=_history(status),
        advice=advice,
        command=command,
    )


def _rest_of_error(status: RunStatus, sentence: str) -> list[str]:
    """Return the lines of the error's message that follow the one in a sentence about the end of the run."""
    attempt = failed_attempt(status.run)
    return [] if attempt is None else rest_of_message(read_failures(attempt), sentence)


def remedy(run: RunDirectory, result: Result, called: str) -> tuple[str, str | None]:
    """Return the command that helps after a run has ended early, and the one that resumes it later, if that is another.

    Args:
        run: the run.
        result: its result.
        called: what commands call the run.
    """
    resume = result.resume or resume_command(run)
    look = result.exit_code in _LOOK_FIRST
    return (shlex.join(["hpcddp", "logs", called, "--first-error"]), resume) if look else (resume, None)


def _saved(run: RunDirectory, step: int | None) -> Iterator[str]:
    """Yield which step is saved; the checkpoints of a user's own program are not known."""
    if step:
        yield f"step {step} is saved"
    elif not any(run.attempts.glob("*/*exit-rank-*")):
        yield "no step is saved"


def _gone(status: RunStatus) -> Answer:
    """Return why a run without a result has ended, with the information available."""
    files, job = status.files, status.job
    run = status.run
    known = files.job.job_id if files.job else None
    said = None if files.attempt is not None else _reason_of_script(status)
    if said is not None:
        why = f"its script ended before an attempt began: {said}"
    elif files.attempt is None and job is not None and job.state == "COMPLETED":
        # An exit in environment.setup would have failed.
        why = "environment.setup has replaced the script, as exec does, so that no task was started"
    elif status.state is State.CANCELLED and files.of_attempt("cancel"):
        why = "it was cancelled by its user, and killed before it could end by itself"
    elif job is not None:
        why = _end_in_slurm(status, job)
    elif files.job is not None and files.job.local:
        why = f"its process {known} has ended, and it has left no result: it was killed, or this machine was restarted"
        if left := left_behind(status):
            why += f"; what it started still runs ({processes_text(left)}) until the run is cancelled or resumed"
    elif files.attempt is None and status.state is State.CANCELLED:
        why = "it was cancelled before it started"
    elif files.attempt is None and list(_last_line(status)):
        why = "its script ended before an attempt began"
    elif files.attempt is None:
        why = f"it never started, and its job {known} is unknown to Slurm: it was cancelled while it waited, or refused"
    else:
        why = f"its job {known} is unknown to Slurm, and it has left no result: it was killed, or its node was lost"
    facts = [*_signs(status), *_failure(status), *_collectives(status), *_last_line(status)]
    facts += _saved(run, newest_saved_step(read_events(run.events, RECENT_BYTES)))
    command = resume_command(run) if run.path.is_dir() else None
    return Answer(status=status, why=why, facts=tuple(facts), history=_history(status), command=command)


def _end_in_slurm(status: RunStatus, job: QueuedJob) -> str:
    """Return what Slurm says of a job that has ended without a result of the run."""
    end = "the run has left no result"
    if status.files.of_attempt("requeue"):
        end = "its script ended while slurmctld was down, and so its requeue was lost"
    return f"Slurm says that job {job.job_id} is {job.state}, and {end}"


def _source(run: RunDirectory) -> Iterator[str]:
    """Yield which commit the newest submission would run, where that is recorded."""
    sources, damage = readable(lambda: read_sources(run))
    if damage is not None:
        yield damage
    if sources and sources[-1].commit is not None:
        yield one_line(f"its code: {sources[-1].sentence}")


def _failure(status: RunStatus) -> Iterator[str]:
    attempt = failed_attempt(status.run)
    if attempt is not None and attempt.number == status.files.attempt:
        records = read_failures(attempt)
        sentence = failure_sentence(attempt, records)
        yield sentence
        yield from (f"  {line}" for line in rest_of_message(records, sentence))


def _collectives(status: RunStatus) -> Iterator[str]:
    """Yield, for each process group, in which collective its ranks hung, and which ranks had not reached it."""
    if status.files.attempt is None:
        return
    attempt = status.run.attempt(status.files.attempt)
    by_rank = read_collectives(attempt)
    groups = dict.fromkeys(collective.group for found in by_rank.values() for collective in found)
    for group in list(groups)[:_GROUPS_SHOWN]:
        found = {
            rank: [collective for collective in collectives if collective.group == group]
            for rank, collectives in by_rank.items()
        }
        yield from _collective_sentence(group, found, silent=ranks_without_record(attempt))


def _collective_sentence(group: str, found: Mapping[int, Sequence[Collective]], *, silent: list[int]) -> Iterator[str]:
    open_numbers = [one.number for collectives in found.values() for one in collectives if not one.is_finished]
    if not open_numbers:
        return
    number = min(open_numbers)
    waiting: dict[str, list[int]] = {}
    behind: dict[int, list[int]] = {}
    for rank, collectives in found.items():
        same = next((one for one in collectives if one.number == number), None)
        last = max((one.number for one in collectives), default=0)
        if same is not None and not same.is_finished:
            waiting.setdefault(same.call, []).append(rank)
        elif last < number:
            behind.setdefault(last, []).append(rank)
    parts = [f"{_ranks(ranks)} in {call}" for call, ranks in waiting.items()]
    parts += [f"{_ranks(ranks)} not there yet (last: {last or 'none'})" for last, ranks in behind.items()]
    parts += [f"{_ranks(silent)} without a trace"] if silent else []
    different = "; the ranks call different collectives" if len(waiting) > 1 else ""
    yield f"collective {number} of the process group {group} did not end: {', '.join(parts)}{different}"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {ranks_text(ranks)}"


# What the script says when a line of environment.setup, a module or an activation ends it.
_SETUP_ENDED: Final = ("hpcddp: environment.setup: ", "hpcddp: a module, an activation or environment.setup ")


def _reason_of_script(status: RunStatus) -> str | None:
    """Return what the script has said last itself; a trap of environment.setup may print after it."""
    lines = read_tail(status.run.batch_log, _TAIL_BYTES).splitlines()
    own = [line for line in lines if line.startswith(_SETUP_ENDED)]
    return own[-1].removeprefix("hpcddp: ") if own else None


def _last_line(status: RunStatus) -> Iterator[str]:
    lines = read_tail(status.run.batch_log, _TAIL_BYTES).rstrip().splitlines()[-1:]
    yield from (f"the batch script's last line: {line}" for line in lines)


def _history(status: RunStatus) -> tuple[str, ...]:
    """Return how each attempt began and ended."""
    lines = list(_history_lines(read_events(status.run.events, RECENT_BYTES)))
    left_out = len(lines) - _HISTORY_LINES
    return (
        (f"... {left_out} earlier lines in {status.run.events}", *lines[-_HISTORY_LINES:])
        if left_out > 1
        else tuple(lines)
    )


def _is_about_setup(event: Event) -> bool:
    return event.kind == "warning" and (event.reason or "").startswith("environment.setup")


def _history_lines(events: Sequence[Event]) -> Iterator[str]:
    ends = [event for event in events if event.kind in {"stop", "requeue"}]
    told = {(event.attempt, event.cause) for event in ends}
    for event, following in zip_longest(events, events[1:]):
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.time))
        step = "" if event.step is None else f" after step {event.step}"
        error = f"; {event.facts['error']}" if "error" in event.facts else ""
        if event.kind == "start":
            yield f"{moment}  attempt {event.attempt} began on {event.host}"
        elif event.kind == "resume":
            changes = event.facts.get("changes")
            named = [str(change) for change in changes] if isinstance(changes, list) else []
            yield f"{moment}  {event.reason}" + "".join(f", {change}" for change in named)
        elif event.kind == "requeue":
            cause = "its user requested it" if event.by == "user" else _CAUSES.get(str(event.cause), event.cause)
            killed = "; Slurm killed its tasks, which had not ended" if event.facts.get("killed") is True else ""
            yield f"{moment}  attempt {event.attempt} stopped{step}, to be requeued: {cause}{killed}{error}"
        elif event.kind == "stop" and event.saved is None:
            # The event that the ranks write for the same stop holds no cause, and that of a requeue follows it.
            if following is not None and (following.kind, following.attempt) == ("requeue", event.attempt):
                continue
            yield f"{moment}  attempt {event.attempt} stopped{step}: {event.reason}{error}"
        elif event.kind == "cause" and event.cause in _CAUSES and (event.attempt, event.cause) not in told:
            # Of an attempt that Slurm has killed, this may be all that is known.
            yield f"{moment}  Slurm ends attempt {event.attempt}: {_CAUSES[str(event.cause)]}"
        elif event.kind == "refusal" or _is_about_setup(event):
            yield f"{moment}  {event.reason}"
        elif event.kind in {"failure", "finish"}:
            ended = "failed" if event.kind == "failure" else "finished"
            yield f"{moment}  attempt {event.attempt} {ended}{step}{error}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Why a job waits.

    Args:
        why: in words that follow "because".
        advice: what to do, without a full stop, for it may end with a command.
    """

    why: str
    advice: str


_WAIT = "Wait; fewer nodes or a shorter time limit may let it in earlier"
_SMALLER = "Wait until other jobs have ended, or ask for less; `sacctmgr show {where}` shows its limits"
_ASK = "Ask the cluster's administrators"
# squeue(1), JOB REASON CODES, and https://slurm.schedmd.com/job_reason_codes.html; the first that fits wins.
_TABLE: Final[tuple[tuple[str, str, str], ...]] = (
    ("None|WaitingForScheduling|Sched.*", "Slurm has not looked at it yet", "Wait a minute"),
    ("Priority", "jobs of higher priority come first", _WAIT),
    ("Resources", "it is at the front of the queue, and the nodes that it needs are not free yet", _WAIT),
    ("DependencyNeverSatisfied", "{on} did not end as it had to, so it never starts",
     "Cancel it, and submit it again without that dependency: hpcddp cancel {run}"),
    ("Dependency", "it waits for the end of {on}", "Wait"),
    ("BeginTime", "its earliest start time has not come; Slurm lets a requeued job wait, too", "Wait"),
    ("JobHeldUser", "its user holds it (scontrol hold, or sbatch --hold)", "Release it: scontrol release {job}"),
    ("JobHeldAdmin", "an administrator holds it", _ASK),
    ("launch failed requeued held", "a node could not launch it, and Slurm holds it since",
     "Look at hpcddp logs {run} --batch, then release it: scontrol release {job}"),
    ("JobHoldMaxRequeue", "it was requeued too often for this cluster, and Slurm holds it",
     "Release it: scontrol release {job}"),
    ("job requeued in held state",
     "it was requeued to be held (scontrol requeuehold, or RequeueExitHold in slurm.conf)",
     "Release it: scontrol release {job}"),
    ("JobArrayTaskLimit", "as many elements of its array run as may run at once",
     "Wait, or allow more at once: scontrol update JobId={array} ArrayTaskThrottle=N"),
    ("PartitionTimeLimit", "its time limit is longer than its partition allows",
     "Cancel it, and submit it with a shorter resources.time_limit; `sinfo --format='%P %l'` shows what is allowed"),
    ("PartitionNodeLimit", "it asks for more nodes than its partition allows, or some of them are down",
     "Ask for fewer nodes, or another partition; `sinfo` shows both"),
    ("PartitionConfig", "it asks for what no node of its partition has", "Ask for less, or for another partition"),
    ("PartitionDown|PartitionInactive", "its partition does not start jobs now", "Wait, or take another partition"),
    ("ReservationDeleted|ReservationInvalid|InvalidReservation", "its reservation is gone",
     "Submit it without resources.reservation"),
    ("Reservation|RequiresReservation", "its reservation has not begun", "Wait for the reservation"),
    ("Nodes required for job are DOWN|ReqNodeNotAvail|NodeDown", "nodes that it needs are down, drained or reserved",
     "Look at `sinfo --list-reasons`. Before a maintenance only a time limit that ends earlier lets it start"),
    ("Licenses", "the licenses that it needs are in use", "Wait for others to give them back"),
    ("Constraints", "no node that has what it asks for can be used now", "Wait, or correct its constraint"),
    ("MaxPoweredUpNodes", "as many nodes are switched on as the site allows", "Wait"),
    ("MpiPortsBusy", "the ports that its MPI reserves are in use", "Wait"),
    ("NvidiaImexChannels", "all NVIDIA IMEX channels are in use", "Wait"),
    ("FedJobLock", "the clusters of the federation have not agreed on where it starts", "Wait a minute"),
    ("DeadLine", "it could not end before its deadline (sbatch --deadline)",
     "Cancel it, and submit it with a shorter resources.time_limit"),
    ("MaxMemPerLimit", "it asks for more memory for each CPU or node than is allowed", "Ask for less resources.mem"),
    ("BadConstraints", "no node has what it asks for", "Correct its constraint, GPUs, memory or CPUs per node"),
    ("InvalidAccount|AccountNotAllowed|AccountingPolicy", "its account is not valid here", "Correct resources.account"),
    ("InvalidQOS|QOSNotAllowed", "its QOS is not valid here", "Correct resources.qos"),
    ("QOSUsageThreshold", "its account has used too much for this QOS", "Wait, or use another resources.qos"),
    ("QOSMaxWall.*|AssocMaxWall.*", "its time limit is longer than its QOS or its account allows",
     "Cancel it, and submit it with a shorter resources.time_limit"),
    ("QOSMax.*(PerUser|PerAccount|(?-i:PU|PA)(Limit)?$)", "you, or your account, have reached the QOS limit",
     _SMALLER.format(where="qos")),
    ("QOSMax.*|QOSTimeLimit|QOSMin.*", "it asks for more, or less, than the QOS allows one job",
     _SMALLER.format(where="qos")),
    ("QOSGrp.*|QOSJobLimit|QOSResourceLimit|QOS.*", "all jobs of the QOS together have reached its limit",
     _SMALLER.format(where="qos")),
    ("AssocMax.*", "it requests more than your account allows one job, or you have reached its limit of jobs",
     _SMALLER.format(where="assoc")),
    ("Max.*PerUser", "you have reached a limit for one user", _SMALLER.format(where="qos")),
    ("Assoc.*|Max.*PerAccount", "your account, with all that share its limit, has reached that limit",
     _SMALLER.format(where="assoc")),
    ("BurstBuffer.*", "its burst buffer is not ready", "Wait"),
    ("Cleaning|Prolog", "its last attempt is still being cleaned up, or its nodes prepared", "Wait a minute"),
    ("FrontEndDown|SystemFailure|JobLaunchFailure", "a cluster-side failure", _ASK),
    ("NonZeroExitCode|RaisedSignal|OutOfMemory|TimeLimit|InactiveLimit", "its last start ended early",
     "Wait; hpcddp logs {run} --batch shows how that start ended"),
)  # fmt: skip
_KNOWN: Final = tuple((re.compile(pattern, re.IGNORECASE), why, advice) for pattern, why, advice in _TABLE)


def waiting(reason: str, *, job_id: str, run: str, on: str = "another job") -> Waiting:
    """Return why a job waits.

    Args:
        reason: Slurm's reason code, with or without the details that follow some codes.
        job_id: the job.
        run: the run's name in commands.
        on: the jobs that it depends on.
    """
    plain = reason.strip("()").replace("_", " ")
    for pattern, why, advice in _KNOWN:
        if pattern.match(plain):
            array, quoted = job_id.partition("_")[0], shlex.quote(run)
            return Waiting(why=why.format(on=on), advice=advice.format(job=job_id, array=array, run=quoted))
    return Waiting(why=f"Slurm says {reason}", advice="See https://slurm.schedmd.com/job_reason_codes.html")


# Hundreds of failed elements mostly share a few reasons.
_ANSWERS_SHOWN: Final = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepAnswer:
    """Why a sweep's elements are in their states.

    Args:
        status: the sweep.
        groups: the indices of the elements that share an answer, with the answer of the first of them.
        called: what commands call the sweep.
    """

    status: SweepStatus
    groups: tuple[tuple[tuple[int, ...], Answer], ...]
    called: str

    def as_json(self) -> dict[str, Any]:
        """Return the document that ``--json`` prints."""
        groups = [{"elements": list(indices), **answer.as_json()} for indices, answer in self.groups]
        return {"sweep_id": self.status.sweep.sweep_id, "counts": self.status.as_json()["counts"], "groups": groups}

    def lines(self) -> Iterator[str]:
        """Yield what a person reads."""
        sweep = self.status.sweep
        yield f"{sweep.sweep_id} ({sweep.path.parent.name}), a sweep of {len(sweep.elements)}: {self.status.sentence}"
        for indices, answer in self.groups[:_ANSWERS_SHOWN]:
            state = answer.status.state
            why = str(state) if state.has_nodes or state is State.FINISHED else f"{state}: {answer.why}"
            yield f"  element{'s' if len(indices) > 1 else ''} {ranks_text(indices)} {why}"
            if answer.advice is not None:
                yield f"    {answer.advice}"
        if len(self.groups) > _ANSWERS_SHOWN:
            yield f"  and {len(self.groups) - _ANSWERS_SHOWN} more answers; --json holds all"
        if not self.groups:
            yield "it has no elements"
            return
        first = element_id(self.called, self.groups[0][0][0])
        yield f"next: {shlex.join(['hpcddp', 'why', first])}"
        others = {answer.status.state for _, answer in self.groups} - {State.FINISHED, State.UNKNOWN}
        if any(not state.is_alive for state in others):
            resume = shlex.join(["hpcddp", "submit", "--resume", self.called])
            yield f"to resume those that ended without finishing: {resume}"


def explain_sweep(status: SweepStatus, *, unanswered: bool, called: str | None = None) -> SweepAnswer:
    """Return why the elements of a sweep are in their states; those that have finished or run as they should come last.

    Args:
        status: the sweep.
        unanswered: whether Slurm could not be queried.
        called: what commands call the sweep; None is its id.
    """
    named = called or status.sweep.sweep_id
    groups: dict[tuple[State, str], list[int]] = {}
    for index, element in enumerate(status.elements):
        result = element.files.result
        reason = (result.reason if result else None) or (element.job.reason if element.job else "")
        groups.setdefault((element.state, str(reason)), []).append(index)
    order = [State.FAILED, State.LOST, State.TIMED_OUT, State.PREEMPTED, State.STOPPED, State.HELD, *State]
    found = sorted(groups.items(), key=lambda group: (order.index(group[0][0]), group[1]))
    answers = (
        (
            tuple(indices),
            explain(status.elements[indices[0]], unanswered=unanswered, called=element_id(named, indices[0])),
        )
        for _, indices in found
    )
    return SweepAnswer(status=status, groups=tuple(answers), called=named)
