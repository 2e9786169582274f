"""Explain why a run waits, how far it is, or why it ended, and which command helps."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

from hpcddp.errors import counted, listed
from hpcddp.manage.first_error import failed_attempt
from hpcddp.manage.format import duration_text, limit_text, numbered_text, one_line, processes_text
from hpcddp.manage.hindrances import hindrances
from hpcddp.manage.history import history_of
from hpcddp.manage.overview import SweepStatus
from hpcddp.manage.pending_reasons import pending_reason
from hpcddp.manage.run_files import recent_events, record_or_damage
from hpcddp.manage.run_progress import time_written
from hpcddp.manage.status import RunStatus, left_behind, state_in_slurm
from hpcddp.run.code import read_sources
from hpcddp.run.collectives import Collective, read_collectives
from hpcddp.run.directory import AttemptDirectory, RunDirectory
from hpcddp.run.events import newest_saved_step
from hpcddp.run.failure import failure_sentence, ranks_without_record, read_failures, rest_of_message
from hpcddp.run.files import is_empty, read_tail
from hpcddp.run.find import run_of_job
from hpcddp.run.job_records import chain_of
from hpcddp.run.moved import moved_from
from hpcddp.run.record import RecordError
from hpcddp.run.result import Result, resume_command
from hpcddp.run.sweep import ManifestError, element_id
from hpcddp.slurm.commands import QueuedJob
from hpcddp.slurm.job import State
from hpcddp.stop.reasons import ExitCode

_WAITING_STATES: Final = frozenset({State.PENDING, State.HELD, State.REQUEUED})
_TAIL_BYTES: Final = 4096
_JOBS_SHOWN: Final = 4
# A script ends within seconds after its requeue; if slurmctld has to save the requeue first, 7 s more.
_LEAVING_S: Final = 60.0
_LOST_REQUEUE: Final = (
    "it has stopped, and slurmctld has lost the requeue of its job, because it was down then; Slurm runs the job again "
    "by itself when the node reports that the job is not there, which may take up to seven times SlurmdTimeout"
)
# squeue(1), DEPENDENCY: afterok:12(unfulfilled),afterany:14_*(unfulfilled).
_DEPENDENCY: Final = re.compile(r":([0-9]+(?:_[0-9]+)?)", re.ASCII)
# srun: Job 7 step creation temporarily disabled, retrying (Requested nodes are busy)   (22.05 to 26.05)
_STEP_WAITS: Final = re.compile("srun: .*step creation (?:temporarily|still) disabled, retrying")
# What the script says when a line of environment.setup, a module or an activation ends it.
_SETUP_ENDED: Final = ("hpcddp: environment.setup: ", "hpcddp: a module, an activation or environment.setup ")
# slurmstepd ends a job whose output file it cannot open with ESLURMD_IO_ERROR, 4021, whose low seven bits are 53.
_OUTPUT_NOT_OPENED: Final = 53
# The ranks that wait for one rank leave their marks within seconds; an older mark is of an earlier wait.
_SAME_WAIT_S: Final = 15.0
_RANKS_SHOWN: Final = 4
# After these the same run would fail in the same way again.
_LOOK_FIRST: Final = frozenset({ExitCode.USER_CODE, ExitCode.NO_CHECKPOINT, ExitCode.HANG})
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
        yield f"{self.status.run.run_id} ({self.status.run.name}): {self.why}"
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
        priority: the parts of its job's priority, as ``sprio`` prints them; None if unknown.
        unanswered: whether Slurm could not be queried.
        called: what commands call the run; None is its id.
    """
    answer = _explain_state(status, priority, called or status.run.run_id, unanswered=unanswered)
    facts = [*answer.facts]
    sources, damage = record_or_damage(lambda: read_sources(status.run))
    if damage is not None:
        facts.append(damage)
    if sources and sources[-1].commit is not None:
        facts.append(one_line(f"its code: {sources[-1].sentence}"))
    facts += map(one_line, hindrances(status))
    return replace(answer, facts=tuple(facts), history=history_of(status.run))


def _explain_state(status: RunStatus, priority: str | None, called: str, *, unanswered: bool) -> Answer:
    is_waiting = status.state in _WAITING_STATES
    if is_waiting and status.job is not None:
        return _explain_waiting(status, status.job, priority, called)
    if is_waiting or status.state.has_nodes:
        return _explain_running(status, called)
    if status.files.is_result_damaged:
        return _explain_damaged_result(status)
    if status.state is State.UNKNOWN:
        why = "its state is unknown: it has left no result, and "
        if status.files.job is None:
            why += "it has no job: its submission was interrupted, unless its script was given to sbatch by hand"
        elif unanswered:
            why += "Slurm could not be queried"
        else:
            why += "it was started on another machine, or on an unknown one"
        return Answer(status=status, why=why, facts=tuple(_progress_lines(status)))
    if status.files.result is not None:
        return _explain_result(status, status.files.result, called)
    return _explain_missing_result(status)


def _explain_waiting(status: RunStatus, job: QueuedJob, priority: str | None, called: str) -> Answer:
    if _has_lost_requeue(status, job):
        return Answer(status=status, why=_LOST_REQUEUE)
    dependency = _dependency_text(status.run, job.dependency)
    reason = pending_reason(job.reason, job_id=job.job_id, run=called, dependency=dependency)
    verbs = {State.REQUEUED: "waits to run again", State.HELD: "is held"}
    why = f"it {verbs.get(status.state, 'waits to start')}, because {reason.why}"
    facts: list[str] = []
    if job.reason != "None":
        facts.append(f"Slurm reason: {job.reason} (job {job.job_id})")
    if job.start_time is not None and status.state is not State.HELD:
        facts.append(f"Slurm expects it to start at {job.start_time.replace('T', ' ')}; other jobs may change that")
    moved_sentence = _moved_sentence(status.run)
    if moved_sentence is not None:
        facts.append(f"{moved_sentence}: move it back, or cancel the run and resume it")
    if priority is not None:
        facts.append("its priority, as sprio shows it:")
        facts += [f"  {line}" for line in priority.splitlines()]
    return Answer(status=status, why=why, facts=tuple(facts), advice=reason.advice)


def _has_lost_requeue(status: RunStatus, job: QueuedJob) -> bool:
    """Return whether Slurm shows a job as running although it was requeued and its script has ended."""
    start = status.files.start
    requeues = status.files.of_attempt("requeue")
    if start is None or not requeues or state_in_slurm(job) is not State.RUNNING:
        return False
    return job.restarts == start.restart_count and status.now - requeues[-1].time > _LEAVING_S


def _dependency_text(run: RunDirectory, dependency: str) -> str:
    """Return which jobs a job depends on, and the runs that they belong to."""
    job_ids = list(dict.fromkeys(_DEPENDENCY.findall(dependency)))
    if not job_ids:
        return "another job"
    texts = []
    for job_id in job_ids[:_JOBS_SHOWN]:
        text = f"job {job_id}"
        run_of_that_job = run_of_job(job_id, run.run_root)
        if run_of_that_job is not None:
            text += f" of the run {run_of_that_job.run_id} ({run_of_that_job.name})"
        texts.append(text)
    if len(job_ids) > _JOBS_SHOWN:
        texts.append(f"{len(job_ids) - _JOBS_SHOWN} more")
    return listed(texts)


def _explain_running(status: RunStatus, called: str) -> Answer:
    if status.state is State.PENDING:
        # Without a job in Slurm, only an element of a sweep on this machine waits.
        why = "it waits for its turn: --max-parallel says how many runs of a sweep this machine runs at the same time"
        return Answer(status=status, why=why)
    verbs = {State.REQUEUED: "has stopped, and its job is about to run again", State.STOPPING: "is being stopped"}
    why = f"it {verbs.get(status.state, f'is {status.state}')}"
    nodes = status.job.node_list if status.job is not None else ", ".join(status.hosts or ())
    if nodes:
        why += f" on {nodes}"
    job = status.files.job
    if job is not None:
        kind = "process" if job.local else "job"
        why += f", as {kind} {job.job_id}"
    words = ["logs", called, "--follow"] if status.silent_s is None else ["stacks", called]
    facts = [*_progress_lines(status), *_waiting_step_lines(status)]
    if status.silent_s is not None:
        facts += _stuck_rank_lines(status)
        facts += _saved_lines(status.run, newest_saved_step(recent_events(status.run)))
    return Answer(status=status, why=why, facts=tuple(facts), command=shlex.join(["hpcddp", *words]))


def _waiting_step_lines(status: RunStatus) -> Iterator[str]:
    """Yield that the program calls srun, which waits for what its own task has; srun says so and retries."""
    if status.files.attempt is None:
        return
    log = status.run.attempt(status.files.attempt).rank_log(0)
    if any(map(_STEP_WAITS.match, read_tail(log, _TAIL_BYTES).splitlines()[-1:])):
        yield (
            "its program calls srun, and that step waits for the CPUs of the task until the time limit: let hpcddp "
            "start the tasks, or add --overlap to srun"
        )


def _stuck_rank_lines(status: RunStatus) -> Iterator[str]:
    """Yield which ranks the others wait for, and since when; nothing where no rank of the training has said so."""
    if status.files.attempt is None:
        return
    attempt = status.run.attempt(status.files.attempt)
    hosts = status.files.hosts or ()
    times = {rank: time_written(attempt.rank_wait(rank)) for rank in range(len(hosts))}
    newest = max(times.values(), default=0.0)
    if newest <= time_written(status.run.metrics):
        return
    waiting = [rank for rank in times if times[rank] >= newest - _SAME_WAIT_S]
    stuck = [rank for rank in times if rank not in waiting]
    since = time.strftime("%H:%M:%S", time.localtime(newest))
    if stuck:
        places = [f"rank {rank} on {hosts[rank]}" for rank in stuck[:_RANKS_SHOWN]]
        if len(stuck) > _RANKS_SHOWN:
            places.append(f"{len(stuck) - _RANKS_SHOWN} more")
        verb = "holds" if len(stuck) == 1 else "hold"
        yield (
            f"{listed(places)} {verb} up {numbered_text('rank', waiting)}, which waited for other ranks at {since}: "
            "stopped, stuck in native code or in its data, or on a lost host; if that lasts for launch.hang_timeout, "
            "the attempt ends"
        )
    elif len(waiting) == len(times):
        yield f"all ranks wait for each other, as they said at {since}"


def _explain_damaged_result(status: RunStatus) -> Answer:
    outcome = "its outcome is unknown"
    if status.state is State.FINISHED:
        outcome = "its event log says that it has finished"
    elif status.state in _ENDED:
        source = "Slurm says" if status.job is not None else "its event log says"
        outcome = f"{source} that it {_ENDED[status.state]}"
    why = f"it has ended, and {outcome}: its result cannot be read"
    return Answer(status=status, why=why, facts=tuple(_progress_lines(status)))


def _explain_result(status: RunStatus, result: Result, called: str) -> Answer:
    if status.state is State.FINISHED:
        return _explain_finish(status, result)
    reason = str(result.reason)
    if reason.startswith(str(State.CANCELLED)):
        why = f"it was {reason}"
    else:
        why = f"it {_ENDED.get(status.state, 'has ended')}: {reason}"
    command, later_command = remedy(status.run, result, called)
    attempt = failed_attempt(status.run)
    error = [] if attempt is None else rest_of_message(read_failures(attempt), why)
    return Answer(
        status=status,
        why=why,
        error=tuple(error),
        facts=(*_collective_lines(status), *_saved_lines(status.run, result.saved_step)),
        advice=None if later_command is None else f"When its cause is removed, resume with: {later_command}",
        command=command,
    )


def _explain_finish(status: RunStatus, result: Result) -> Answer:
    why = "it has finished"
    if result.steps is not None:
        why += f" after {counted(result.steps, 'step')}"
        if result.val_accuracy is not None:
            why += f", val_accuracy {result.val_accuracy:.2%}"
    facts = (*map(one_line, status.metric_sentences()), f"its result is {status.run.result}")
    return Answer(status=status, why=why, facts=facts)


def remedy(run: RunDirectory, result: Result, called: str) -> tuple[str, str | None]:
    """Return the command that helps after a run has ended early, and the one that resumes it later, if that is another.

    Args:
        called: what commands call the run.
    """
    resume = result.resume or resume_command(run)
    has_error = result.exit_code in _LOOK_FIRST
    if result.exit_code == ExitCode.NO_PROGRESS:
        # All of its attempts may have been preempted.
        has_error = failed_attempt(run) is not None
    if has_error:
        return shlex.join(["hpcddp", "logs", called, "--first-error"]), resume
    return resume, None


def _why_unseen(status: RunStatus) -> str | None:
    """Return why a run has ended whose node does not see its directory; None for another end."""
    job = status.job
    if job is None:
        return None
    log = status.run.batch_log
    node = f"the first node of {job.node_list or 'its job'}"
    is_first_start = status.files.attempt is None
    if job.exit_signal == _OUTPUT_NOT_OPENED:
        script = "its script did not start" if is_first_start else "its script did not start again"
        return (
            f"{script}, because Slurm could not open {log} on {node}: that node does not see this directory, or may "
            "not write there"
        )
    # Since 23.02 Slurm makes the directory on the node. The script waits there for the run, and says so in that file.
    if is_first_start and job.state == "FAILED" and job.exit_signal is None and is_empty(log):
        return f"its script has failed, and {log} is empty: most likely {node} does not see this directory"
    return None


def _moved_sentence(run: RunDirectory) -> str | None:
    """Return why the newest job of a run cannot begin, if the run directory was moved since its submission."""
    submitted_in = None
    # Of a record that cannot be read, a remark tells.
    with suppress(RecordError, ManifestError, OSError):
        submitted_in = moved_from(run)
    if submitted_in is None:
        return None
    return f"its job looks for the run in {submitted_in}, and the run directory has another path now"


def _explain_missing_result(status: RunStatus) -> Answer:
    """Explain the end of a run that has left no result, with what is known."""
    run = status.run
    why_unseen = _why_unseen(status)
    why_moved = None if why_unseen is None else _moved_sentence(run)
    saved_lines = _saved_lines(run, newest_saved_step(recent_events(run)))
    if why_unseen is not None and why_moved is None:
        resume = f"when the nodes see the directory again, resume with: {resume_command(run)}"
        if status.files.attempt is None:
            resume = f"submit the job again with a run_root on a file system that all nodes share, or {resume}"
        return Answer(
            status=status,
            why=why_unseen,
            facts=(*_progress_lines(status), *saved_lines),
            advice=f"Check with the command below whether the nodes share the run root; then {resume}",
            command=shlex.join(["hpcddp", "doctor", "install", "--on-nodes", "--run-root", str(run.run_root)]),
        )
    command = resume_command(run) if run.path.is_dir() else None
    if status.files.attempt is None and _reason_of_script(status) is not None:
        # Its own script would most likely end in the same way.
        command = resume_command(run, with_job=True)
    return Answer(
        status=status,
        why=why_moved or _why_without_result(status),
        facts=(
            *_progress_lines(status),
            *_failure_lines(status),
            *_collective_lines(status),
            *_last_line_of_script(status),
            *saved_lines,
        ),
        command=command,
    )


def _why_without_result(status: RunStatus) -> str:
    files = status.files
    job = status.job
    if files.attempt is None:
        why_not_begun = _why_not_begun(status)
        if why_not_begun is not None:
            return why_not_begun
    if status.state is State.CANCELLED and files.of_attempt("cancel"):
        return "it was cancelled by its user, and killed before it could end by itself"
    if job is not None:
        why = "the run has left no result"
        if files.of_attempt("requeue"):
            why = "its script ended while slurmctld was down, and so its requeue was lost"
            if chain_of(status.run):
                why = "no job of its chain is left to go on"
        return f"Slurm says that job {job.job_id} is {job.state}, and {why}"
    job_id = files.job.job_id if files.job else None
    if files.job is not None and files.job.local:
        return _why_process_ended(status, files.job.job_id)
    if files.attempt is not None:
        return f"its job {job_id} is unknown to Slurm, and it has left no result: it was killed, or its node was lost"
    return _why_never_started(status, job_id)


def _why_never_started(status: RunStatus, job_id: str | None) -> str:
    if status.state is State.CANCELLED:
        return "it was cancelled before it started"
    if list(_last_line_of_script(status)):
        return "its script ended before an attempt began"
    return (
        f"it never started, and its job {job_id} is unknown to Slurm: it was cancelled while it waited, or refused, or "
        "the nodes do not see its directory"
    )


def _why_not_begun(status: RunStatus) -> str | None:
    """Return why no attempt has begun, if the script or Slurm tells it."""
    reason = _reason_of_script(status)
    if reason is not None:
        return f"its script ended before an attempt began: {reason}"
    if status.job is not None and status.job.state == "COMPLETED":
        # An exit in environment.setup would have failed.
        return "environment.setup has replaced the script, as exec does, so that no task was started"
    return None


def _why_process_ended(status: RunStatus, process_id: str) -> str:
    why = f"its process {process_id} has ended, and it has left no result: it was killed, or this machine was restarted"
    processes = left_behind(status)
    if processes:
        why += f"; what it started still runs ({processes_text(processes)}) until the run is cancelled or resumed"
    return why


def _progress_lines(status: RunStatus) -> Iterator[str]:
    """Yield how far a run is."""
    if status.step is not None:
        line = f"step {status.step}"
        if status.files.total_steps is not None:
            line += f" of {status.files.total_steps}"
        if status.eta_s is not None:
            line += f", about {duration_text(status.eta_s)} to go"
        yield line
    yield from map(one_line, status.metric_sentences())
    if status.state.has_nodes and status.used_s is not None:
        line = f"it has used {duration_text(status.used_s)}"
        if status.limit_s is not None:
            line += f" of its {limit_text(status.limit_s)}"
        yield line
    if not status.state.has_nodes and status.files.ended is not None:
        yield f"the last activity was {duration_text(status.now - status.files.ended)} ago"


def _failure_lines(status: RunStatus) -> Iterator[str]:
    attempt = failed_attempt(status.run)
    if attempt is not None and attempt.number == status.files.attempt:
        records = read_failures(attempt)
        sentence = failure_sentence(attempt, records)
        yield sentence
        yield from (f"  {line}" for line in rest_of_message(records, sentence))


def _collective_lines(status: RunStatus) -> Iterator[str]:
    if status.files.attempt is not None:
        yield from _hung_collectives(status.run.attempt(status.files.attempt))


def _saved_lines(run: RunDirectory, step: int | None) -> Iterator[str]:
    """Yield which step is saved; the checkpoints of a user's own program are not known."""
    if step:
        yield f"step {step} is saved"
    elif not any(run.attempts.glob("*/*exit-rank-*")):
        yield "no step is saved"


def _reason_of_script(status: RunStatus) -> str | None:
    """Return what the script has said last itself; a trap of environment.setup may print after it."""
    lines = read_tail(status.run.batch_log, _TAIL_BYTES).splitlines()
    reasons = [line for line in lines if line.startswith(_SETUP_ENDED)]
    return reasons[-1].removeprefix("hpcddp: ") if reasons else None


def _last_line_of_script(status: RunStatus) -> Iterator[str]:
    """Yield the last line that the batch script, or a program that it called, has printed."""
    lines = read_tail(status.run.batch_log, _TAIL_BYTES).rstrip().splitlines()
    if lines and lines[-1].startswith(_SETUP_ENDED):
        # The answer says this already; the line before is that of the program that failed.
        del lines[-1]
    if lines:
        yield f"the batch script's last line: {lines[-1]}"


_GROUPS_SHOWN: Final = 4
# Hundreds of failed elements mostly share a few reasons.
_ANSWERS_SHOWN: Final = 12


def _hung_collectives(attempt: AttemptDirectory) -> Iterator[str]:
    """Yield, for each process group, in which collective its ranks hung, and which ranks had not reached it."""
    collectives_by_rank = read_collectives(attempt)
    # The names are the keys, in the order in which they are found.
    groups: dict[str, None] = {}
    for collectives in collectives_by_rank.values():
        groups.update(dict.fromkeys(collective.group for collective in collectives))
    if not groups:
        return
    silent_ranks = ranks_without_record(attempt)
    for group in list(groups)[:_GROUPS_SHOWN]:
        collectives_of_group = {
            rank: [collective for collective in collectives if collective.group == group]
            for rank, collectives in collectives_by_rank.items()
        }
        sentence = _collective_sentence(group, collectives_of_group, silent_ranks)
        if sentence is not None:
            yield sentence


def _collective_sentence(
    group: str, collectives_by_rank: Mapping[int, Sequence[Collective]], silent_ranks: list[int]
) -> str | None:
    """Return which ranks wait in the first collective of a group that did not end; None if all have ended."""
    unfinished_numbers: list[int] = []
    for collectives in collectives_by_rank.values():
        unfinished_numbers += [collective.number for collective in collectives if not collective.is_finished]
    if not unfinished_numbers:
        return None
    number = min(unfinished_numbers)
    waiting_ranks: dict[str, list[int]] = {}
    late_ranks: dict[int, list[int]] = {}
    for rank, collectives in collectives_by_rank.items():
        for collective in collectives:
            if collective.number == number and not collective.is_finished:
                waiting_ranks.setdefault(collective.call, []).append(rank)
        last_number = max((collective.number for collective in collectives), default=0)
        if last_number < number:
            late_ranks.setdefault(last_number, []).append(rank)
    parts = [f"{numbered_text('rank', ranks)} in {call}" for call, ranks in waiting_ranks.items()]
    for last_number, ranks in late_ranks.items():
        parts.append(f"{numbered_text('rank', ranks)} not there yet (last: {last_number or 'none'})")
    if silent_ranks:
        parts.append(f"{numbered_text('rank', silent_ranks)} without a trace")
    sentence = f"collective {number} of the process group {group} did not end: {', '.join(parts)}"
    if len(waiting_ranks) > 1:
        sentence += "; the ranks call different collectives"
    return sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepAnswer:
    """Why a sweep's elements are in their states.

    Args:
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
        yield f"{sweep.sweep_id} ({sweep.name}), a sweep of {len(sweep.elements)}: {self.status.sentence}"
        for indices, answer in self.groups[:_ANSWERS_SHOWN]:
            state = answer.status.state
            why = str(state)
            if not state.has_nodes and state is not State.FINISHED:
                why += f": {answer.why}"
            yield f"  {numbered_text('element', indices)} {why}"
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
        unanswered: whether Slurm could not be queried.
        called: what commands call the sweep; None is its id.
    """
    called = called or status.sweep.sweep_id
    indices_by_reason: dict[tuple[State, str], list[int]] = {}
    for index, element in enumerate(status.elements):
        reason = "" if element.job is None else element.job.reason
        if element.files.result is not None and element.files.result.reason:
            reason = element.files.result.reason
        indices_by_reason.setdefault((element.state, reason), []).append(index)
    order = [State.FAILED, State.LOST, State.TIMED_OUT, State.PREEMPTED, State.STOPPED, State.HELD, *State]
    groups = sorted(indices_by_reason.items(), key=lambda group: (order.index(group[0][0]), group[1]))
    answers = []
    for _, indices in groups:
        first = indices[0]
        answer = explain(status.elements[first], unanswered=unanswered, called=element_id(called, first))
        answers.append((tuple(indices), answer))
    return SweepAnswer(status=status, groups=tuple(answers), called=called)
