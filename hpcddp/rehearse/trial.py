"""One run of a rehearsal: started in a copy of the project, watched, disturbed by a fault, and resumed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Final

from hpcddp.errors import HpcddpError, UserError
from hpcddp.jobfile.cluster import Cluster
from hpcddp.jobfile.read import change_job
from hpcddp.manage.control import commands_of_slurm, requeue
from hpcddp.manage.follow import JobPoller, RecordReader
from hpcddp.manage.format import processes_text
from hpcddp.manage.overview import status_now
from hpcddp.manage.starts_over import first_losses
from hpcddp.processes import environment_of, find, own_processes, wait_until
from hpcddp.rehearse.compare import Course, SavedFile, newest_to_damage, saved_files, training_steps
from hpcddp.rehearse.faults import Fault, SlurmAct, cut_in_half, send
from hpcddp.rehearse.plan import SmallJob
from hpcddp.rehearse.project import Project
from hpcddp.run.directory import RunDirectory
from hpcddp.run.files import TAIL_BYTES, read_tail, write_text
from hpcddp.run.job_records import read_submission
from hpcddp.run.metrics import MetricsLine, read_metrics
from hpcddp.run.record import LARGEST_RECORD, RecordError
from hpcddp.run.result import FINISHED, Result, read_result
from hpcddp.slurm import commands
from hpcddp.slurm.hostlist import expand
from hpcddp.submission.interrupts import uninterrupted
from hpcddp.submission.request import SubmitRequest
from hpcddp.submission.resume import request_to_resume, resume
from hpcddp.submission.submit import Submission, new_run_id, submit

MARK: Final = "REHEARSAL_OF_HPCDDP"
"""The variable that marks every process of a rehearsal; its value is the directory of the rehearsal.

A submission does not pass on variables that begin with HPCDDP.
"""
_POLL_S: Final = 0.02
_LOOK_FOR_FILES_EVERY_S: Final = 0.2
_END_S: Final = 10.0
"""How long processes may take to disappear after SIGKILL."""
_PART: Final = 0.58
"""The part of a run after which the fault comes: within an epoch, also of a run of two to six epochs."""
_LEAST_STEPS: Final = 4
_LOG_LINES: Final = 5


class UndisturbedError(UserError):
    """The job does not finish on this machine without a fault, or nothing shows how far it is."""

    kind = "rehearse_undisturbed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What all runs of a rehearsal share.

    Args:
        project: the files of each copy.
        root: the directory of the rehearsal.
        python: the interpreter of the tasks.
        environment: the environment of the submissions; ``MARK`` is set in it.
        timeout_s: the longest time of one attempt, in seconds.
        cluster: where the runs go.
    """

    small: SmallJob
    project: Project
    root: Path
    python: str
    environment: Mapping[str, str]
    timeout_s: float
    cluster: Cluster = "local"


class Trial:
    """A run that is watched.

    Args:
        copy: the copy of the project in which it runs.
        started: when it was started, in nanoseconds since the epoch.

    Attributes:
        job_id: Slurm's id of its job; on this machine the process id of the script of its newest attempt.
        steps: the steps of the training that its metrics show so far.
        saves: the files that it has saved so far, each with its time: a file that is written again counts again.
    """

    def __init__(self, submission: Submission, copy: Path, started: int) -> None:
        self.run: RunDirectory = submission.run
        self.steps: list[int] = []
        self.saves: set[tuple[str, int]] = set()
        self.job_id = submission.job_id
        self._copy = copy
        self._started = started
        self._phase = JobPoller(self.run) if submission.cluster == "slurm" else None
        self._metrics = RecordReader(self.run.metrics, MetricsLine)
        self._looked = 0.0
        self._attempt: int | None = None
        self._attempt_seen = 0.0

    def look(self) -> bool:
        """Read what is new; return whether the newest attempt still runs."""
        is_running = self._is_running()
        attempt = self.run.newest_attempt()
        if attempt != self._attempt:
            self._attempt = attempt
            self._attempt_seen = time.monotonic()
        self.steps += training_steps(self._metrics.new_records())
        if not is_running or time.monotonic() - self._looked >= _LOOK_FOR_FILES_EVERY_S:
            self.saves |= {(file.name, file.time) for file in self.files()}
            self._looked = time.monotonic()
        return is_running

    @property
    def seconds(self) -> float:
        """How long the newest attempt has run when it was looked at last; 0 while the job waits in the queue."""
        return 0.0 if self._attempt is None else time.monotonic() - self._attempt_seen

    def _is_running(self) -> bool:
        if self._phase is None:
            return find(int(self.job_id)) is not None
        # Slurm may take a moment to show that a job is over whose result is there.
        return self._phase() != "ended" and not self.run.result.exists()

    def files(self) -> list[SavedFile]:
        """Return what it has saved, the oldest first."""
        return saved_files(self.run, self._copy, since=self._started)

    def lines(self) -> tuple[MetricsLine, ...]:
        """Return the lines of its metrics; damaged ones are left out."""
        with suppress(RecordError):
            return read_metrics(self.run.metrics, LARGEST_RECORD).records
        return ()

    def result(self) -> Result | None:
        """Return its result; None if it has none, or a damaged one."""
        with suppress(RecordError):
            return read_result(self.run)
        return None

    def last_output(self) -> list[str]:
        """Return the last lines that rank 0 of the newest attempt has printed."""
        log = self.run.attempt(self.run.newest_attempt() or 0).rank_log(0)
        return read_tail(log, TAIL_BYTES).splitlines()[-_LOG_LINES:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Undisturbed:
    """The run without a fault.

    Args:
        course: what it has reported.
        files: what it has saved.
        seconds: how long it took.
        saves: how many files it has written, each time counted.
        first_saved_step: the last step that was reported when the first file appeared; None if nothing was saved, or
            before the first step.
    """

    course: Course
    files: list[SavedFile]
    seconds: float
    saves: int
    first_saved_step: int | None

    @property
    def steps(self) -> list[int]:
        """The steps of the training that it has reported."""
        return training_steps(self.course.before)


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbed:
    """A run that met a fault.

    Args:
        course: what it has reported.
        files: what it has saved in the end.
        step: the last step that was reported before the fault; None without metrics.
        ended_as: the status of the run after the fault; ``lost`` without a result.
        damaged: the name of the file that was cut in half; None if none was.
        restart_s: from the resumption to the first new step, else to the first new file; None without either.
        problem: why the run did not come back, a sentence; None if it did.
        not_tried: why the fault could not be caused, a phrase; None if it was.
        output: the last lines that rank 0 has printed, of a run that did not come back.
    """

    course: Course
    files: list[SavedFile]
    step: int | None
    ended_as: str
    damaged: str | None = None
    restart_s: float | None = None
    problem: str | None = None
    not_tried: str | None = None
    output: tuple[str, ...] = ()


def run_undisturbed(stage: Stage) -> Undisturbed:
    """Run the job to its end.

    Raises:
        UndisturbedError: it does not finish, or not in time.
        HpcddpError: it cannot be submitted.
    """
    begun = time.monotonic()
    trial = _start(stage, "undisturbed")
    first_saved_step: int | None = None
    while trial.look():
        if first_saved_step is None and trial.saves and trial.steps:
            first_saved_step = trial.steps[-1]
        if trial.seconds > stage.timeout_s:
            raise UndisturbedError(
                f"without a fault the job has not ended after {stage.timeout_s:g} s; make it shorter (--set, or the "
                "arguments of the command after --), or raise --timeout"
            )
        time.sleep(_POLL_S)
    result = trial.result()
    if result is None or result.status != FINISHED:
        output = "".join(f"\n  {line}" for line in trial.last_output())
        left_out = ", ".join(stage.project.left_out) or "nothing"
        raise UndisturbedError(
            f"without a fault the job does not finish on this machine: {_why_not_finished(result)}{output}",
            hint="Let it finish first: hpcddp submit ... --cluster local --follow. Each run of a rehearsal has a copy "
            f"of the project, which lacks: {left_out}; --link PATH adds one.",
        )
    course = Course(
        before=trial.lines(),
        losses_before=first_losses(trial.run.attempt(0)),
        parameters_sha256=result.facts.get("parameters_sha256"),
    )
    return Undisturbed(
        course=course,
        files=trial.files(),
        seconds=time.monotonic() - begun,
        saves=len(trial.saves),
        first_saved_step=first_saved_step,
    )


def _why_not_finished(result: Result | None) -> str:
    """Return why a run has not finished.

    Args:
        result: the result that it left; None if it left none.
    """
    if result is None:
        return "it left no result"
    return result.reason or result.status


def run_disturbed(stage: Stage, fault: Fault, reference: Undisturbed) -> Disturbed:
    """Run the job until about the middle, cause the fault, let the run go on, and wait for its end."""
    trial = _start(stage, fault.name)
    _wait_for_moment(stage, trial, reference)
    if fault.by_slurm is not None:
        return _run_disturbed_by_slurm(stage, fault.by_slurm, trial, reference)
    _disturb(fault, trial)
    end_processes(stage.root)
    outcome = _after_first_attempt(trial)
    ended_outcome = _without_rest(outcome, reference)
    if ended_outcome is not None:
        return ended_outcome
    if fault.damages_newest:
        newest_file = newest_to_damage(outcome.files)
        if newest_file is None:
            reason = "the program has saved no file with tensors that could be damaged; --fault names the other faults"
            return replace(outcome, not_tried=reason)
        cut_in_half(newest_file.path)
        outcome = replace(outcome, damaged=newest_file.name)
    return _resume(stage, fault, trial, outcome)


def _run_disturbed_by_slurm(stage: Stage, act: SlurmAct, trial: Trial, reference: Undisturbed) -> Disturbed:
    """Let Slurm cause the fault and run the job again, and wait for its end."""
    begun = time.monotonic()
    try:
        cause_by_slurm(act, trial.run, stage.environment)
    except HpcddpError as error:
        return replace(_after_first_attempt(trial), problem=error.message)
    # A job may wait in a queue for long before Slurm runs it again.
    while trial.look() and not trial.run.newest_attempt():
        time.sleep(_POLL_S)
    outcome = _after_first_attempt(trial)
    ended_outcome = _without_rest(outcome, reference)
    if ended_outcome is not None:
        return ended_outcome
    return _finish(stage, trial, outcome, begun=begun)


def _start(stage: Stage, name: str) -> Trial:
    """Submit the job in a copy of the project of its own."""
    folder = stage.root / name
    folder.mkdir(mode=0o700)
    copy = folder / "project"
    stage.project.copy_to(copy)
    spec = stage.small.spec.model_copy(update={"run_root": str(folder / "runs")})
    request = SubmitRequest(
        job=replace(stage.small.job, spec=spec),
        run_id=new_run_id(datetime.now().astimezone(), os.urandom(2).hex()),
        cluster=stage.cluster,
        python=stage.python,
        template=None,
        directory=copy,
        environment=stage.environment,
    )
    started = time.time_ns()
    with uninterrupted():
        submission = submit(request)
    return Trial(submission, copy, started)


def _wait_for_moment(stage: Stage, trial: Trial, reference: Undisturbed) -> None:
    """Wait until a run is about as far as the fault needs it, or has ended."""
    has_come = _moment_of(reference)
    while trial.look():
        if has_come(trial) or trial.seconds > stage.timeout_s:
            return
        time.sleep(_POLL_S)


def _moment_of(reference: Undisturbed) -> Callable[[Trial], bool]:
    """Return what tells from a run whether it is about in the middle.

    Its steps tell that, else the files that it has saved, else the time.
    """
    steps = reference.steps
    if len(steps) >= _LEAST_STEPS:
        target = steps[int(len(steps) * _PART)]
        saved_before = reference.first_saved_step is not None and reference.first_saved_step < target
        return lambda trial: bool(trial.steps) and trial.steps[-1] >= target and (bool(trial.saves) or not saved_before)
    if reference.saves > 1:
        count = max(1, int(reference.saves * _PART))
        return lambda trial: len(trial.saves) >= count
    return lambda trial: trial.seconds >= reference.seconds * _PART


def _disturb(fault: Fault, trial: Trial) -> None:
    """Send the signals of a fault, each at its time, until the attempt has ended."""
    attempt = trial.run.attempt(0)
    begun = time.monotonic()
    waiting = list(fault.signals)
    while trial.look():
        while waiting and time.monotonic() - begun >= waiting[0].after_s:
            send(waiting.pop(0), attempt, job_id=int(trial.job_id))
        if not waiting and time.monotonic() - begun >= fault.signals[-1].after_s + _END_S:
            # The script waits for a task that SIGKILL did not end, or was not told of its end.
            return
        time.sleep(_POLL_S)


def _after_first_attempt(trial: Trial) -> Disturbed:
    """Return what is known when the first attempt has ended."""
    before = trial.lines()
    steps = training_steps(before)
    result = trial.result()
    ended_as = "requeued" if trial.run.newest_attempt() else "lost"
    return Disturbed(
        course=Course(before=before, losses_before=first_losses(trial.run.attempt(0))),
        files=trial.files(),
        step=steps[-1] if steps else None,
        ended_as=ended_as if result is None else result.status,
    )


def _without_rest(outcome: Disturbed, reference: Undisturbed) -> Disturbed | None:
    """Return the outcome of a run that has nothing left to do after the fault; None if it has."""
    last_step = reference.steps[-1] if reference.steps else None
    has_all_steps = None
    if last_step is not None and outcome.step is not None:
        has_all_steps = outcome.step >= last_step
    if outcome.ended_as == FINISHED and has_all_steps is False:
        problem = (
            f"the run counts as finished after step {outcome.step} of {reference.steps[-1]}: its program exits with "
            "code 0 as if all work were done"
        )
        return replace(outcome, problem=problem)
    if outcome.ended_as == FINISHED or has_all_steps:
        return replace(
            outcome, not_tried="all steps were done before the run ended; give it more steps, or longer ones"
        )
    return None


def _resume(stage: Stage, fault: Fault, trial: Trial, outcome: Disturbed) -> Disturbed:
    """Resume a run after a fault, wait for its end, and add what it shows to its outcome."""
    begun = time.monotonic()
    try:
        with uninterrupted():
            trial.job_id = _submit_again(stage, fault, trial.run).job_id
    except HpcddpError as error:
        return replace(outcome, problem=f"the run cannot be resumed: {error.message}")
    return _finish(stage, trial, outcome, begun=begun)


def _finish(stage: Stage, trial: Trial, outcome: Disturbed, *, begun: float) -> Disturbed:
    """Wait for the end of a run's second attempt, and add what it shows to the outcome of the first.

    Args:
        outcome: what was known after the first attempt.
        begun: from when on the restart counts, on the monotonic clock.
    """
    saves_before = len(trial.saves)
    steps_before = len(trial.steps)
    restart_s: float | None = None
    while trial.look():
        has_progress = len(trial.steps) > steps_before
        if not trial.steps:
            has_progress = len(trial.saves) > saves_before
        if has_progress and restart_s is None:
            restart_s = time.monotonic() - begun
        if trial.seconds > stage.timeout_s:
            end_processes(stage.root)
            problem = f"the second attempt has not ended after {stage.timeout_s:g} s"
            return replace(outcome, problem=problem, output=tuple(trial.last_output()))
        time.sleep(_POLL_S)
    end_processes(stage.root)
    result = trial.result()
    course = replace(
        outcome.course,
        after=_lines_after(outcome.course.before, trial.lines()),
        losses_after=first_losses(trial.run.attempt(trial.run.newest_attempt() or 0)),
        parameters_sha256=None if result is None else result.facts.get("parameters_sha256"),
    )
    outcome = replace(outcome, course=course, files=trial.files(), restart_s=restart_s)
    if result is None or result.status != FINISHED:
        problem = f"the second attempt does not finish: {_why_not_finished(result)}"
        return replace(outcome, problem=problem, output=tuple(trial.last_output()))
    return outcome


def _submit_again(stage: Stage, fault: Fault, run: RunDirectory) -> Submission:
    if not fault.changes_world_size:
        return resume(run, request_to_resume(run, environment=stage.environment))
    change = partial(
        change_job,
        file=str(run.job_file),
        overrides=stage.small.other_world_size(),
        environment=stage.environment,
    )
    return resume(run, request_to_resume(run, change, environment=stage.environment))


def _lines_after(before: Sequence[MetricsLine], lines: Sequence[MetricsLine]) -> Sequence[MetricsLine]:
    """Return the lines that a second attempt has written.

    A program appends to its metrics. The built-in training first drops the steps that it computes again.
    """
    kept = 0
    for old, new in zip(before, lines, strict=False):
        if old != new:
            break
        kept += 1
    return lines[kept:]


def end_jobs(root: Path) -> None:
    """Cancel the jobs of a rehearsal that are left on Slurm.

    Args:
        root: the directory of the rehearsal.
    """
    for path in root.glob("*/runs/*/*/"):
        run = RunDirectory(path)
        with suppress(HpcddpError):
            submission = read_submission(run)
            if submission is not None and submission.cluster == "slurm" and not run.result.exists():
                commands.cancel([submission.job_id], os.environ)


def end_processes(root: Path) -> None:
    """Kill what is left of a rehearsal on this machine, and wait until it is gone.

    Args:
        root: the directory of the rehearsal.

    Raises:
        HpcddpError: processes are still there after ten seconds.
    """

    def is_gone() -> bool:
        left = _processes_of(root)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not left

    if not wait_until(is_gone, timeout_s=_END_S, poll_s=_POLL_S):
        left = _processes_of(root)
        raise HpcddpError(f"{processes_text(left)} of the rehearsal did not end after SIGKILL")


def _processes_of(root: Path) -> list[int]:
    return [process.pid for process in own_processes() if environment_of(process.pid).get(MARK) == str(root)]


_TAKES_BOTH_HOSTS: Final = """\
#!/bin/bash
#SBATCH --partition=high --nodes=2 --exclusive --output=/dev/null
sleep 3
"""


def cause_by_slurm(act: SlurmAct, run: RunDirectory, environment: Mapping[str, str]) -> None:
    """Cause a fault of Slurm.

    Args:
        run: the run, whose job runs.
        environment: the environment of Slurm's commands.

    Raises:
        HpcddpError: Slurm refuses it.
    """
    if act == "requeue":
        requeue(status_now(run, environment), commands_of_slurm(environment))
    elif act == "preemption":
        script = run.path.parent / "takes-both-hosts.sh"
        write_text(script, _TAKES_BOTH_HOSTS)
        commands.sbatch(script, environment=environment)
    else:
        node = _last_node_of(run, environment)
        commands.update_node(node, State="DOWN", Reason="rehearsal")
        # The job, which Slurm has requeued, needs it again.
        commands.update_node(node, State="RESUME")


def _last_node_of(run: RunDirectory, environment: Mapping[str, str]) -> str:
    job = status_now(run, environment).files.job
    fields = None if job is None else commands.show_job(job.job_id, environment=environment)
    nodes = expand(fields.get("NodeList", "")) if fields else []
    if not nodes:
        raise HpcddpError(f"the job of the run {run.run_id} has no node; it may have ended")
    return nodes[-1]
