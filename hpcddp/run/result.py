"""The result of a run, ``result.json``, and the sentences about the end of an attempt."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final

from hpcddp.run.directory import RunDirectory
from hpcddp.run.evaluations import Summary, summaries
from hpcddp.run.events import append_event
from hpcddp.run.files import open_regular
from hpcddp.run.job_records import Decision, chain_of, read_submission
from hpcddp.run.record import LARGEST_RECORD, Record, RecordError, read_record, write_record
from hpcddp.stop.reasons import Cause, StopReason

if TYPE_CHECKING:
    from hpcddp.jobfile.fields import Best

# The other ranks wait for rank 0 meanwhile.
_RESULT_PATIENCE_S: Final = 120.0
_POLL_S: Final = 1.0

FINISHED: Final = "finished"
"""The status of a run that has come to its own end."""
# A run that has stopped may still be requeued, by an administrator for example.
_FINAL: Final = frozenset({FINISHED, "failed", "cancelled"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Result(Record):
    """The result of a run; a field that does not apply to its kind or its end is None.

    Args:
        status: ``finished``, ``failed``, ``cancelled``, or ``stopped`` where it may be resumed.
        reason: why it ended before its work was done.
        exit_code: the run's own exit code; None for a training or an entrypoint that has finished.
        attempts: how many attempts it took.
        saved_step: the newest step that is saved, of a run that has not finished.
        resume: the command that resumes it.
        final: whether the run has ended for good: Slurm must not run its job again, and only its user resumes it.
            ``write_result`` sets it.
        steps: optimizer steps of a built-in training that has finished.
        val_accuracy: its accuracy, from 0 to 1.
        world_size: ranks of the last attempt.
        wall_s: how long it ran, in seconds, without the time between attempts.
        metrics: the last and the best value of each metric of the evaluations, by name; ``write_result`` sets it.
        facts: what else is known, by name.
    """

    ADVICE: ClassVar[str] = (
        "the run's checkpoints and logs are as they were; to go on from the newest checkpoint, remove this file, and "
        "resume the run"
    )

    status: str
    reason: str | None = None
    exit_code: int | None = None
    attempts: int | None = None
    saved_step: int | None = None
    resume: str | None = None
    final: bool = False
    steps: int | None = None
    val_accuracy: float | None = None
    world_size: int | None = None
    wall_s: float | None = None
    metrics: Mapping[str, Summary] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return what commands print with ``--json``."""
        # These two are printed as null where the run could have had them.
        named = {"saved_step": self.reason is not None, "val_accuracy": self.steps is not None}
        document = Record.as_document(self)
        del document["format"]
        return {
            name: value
            for name, value in document.items()
            if value not in (None, {}) or name in self.facts or named.get(name, False)
        }

    def as_document(self) -> dict[str, Any]:
        """Return the document that is written."""
        return {"format": Record.as_document(self)["format"], **self.as_json()}


def unfinished_result(
    run: RunDirectory,
    status: str,
    reason: str,
    exit_code: int,
    *,
    attempt: int | None,
    saved_step: int,
    resume: str | None = None,
) -> Result:
    """Return the result of a run that ends before its work is done.

    Args:
        status: ``failed``, ``cancelled`` or ``stopped``.
        exit_code: the exit code of its job.
        attempt: its newest attempt; None before the first.
        saved_step: the newest step that is saved; 0 if none is.
        resume: the command that resumes it; None is that of any run.
    """
    return Result(
        status=status,
        reason=reason,
        exit_code=int(exit_code),
        attempts=0 if attempt is None else attempt + 1,
        saved_step=saved_step or None,
        resume=resume or resume_command(run),
    )


def read_result(run: RunDirectory) -> Result | None:
    """Return the result of a run, or None if it has none: it has not ended for good.

    Raises:
        RecordError: the record is damaged.
    """
    return read_record(run.result, Result)


def metrics_of(run: RunDirectory) -> dict[str, Summary]:
    """Return the last and the best value of each metric of a run's evaluations; empty where they are unreadable."""
    try:
        return summaries(run.metrics, _best_of_job(run))
    except RecordError:
        return {}


# In the resolved job every field is written, most often as null.
_NAMES_BEST: Final = re.compile(rb"^  best:(?! null$)", re.MULTILINE)


def _best_of_job(run: RunDirectory) -> Best | None:
    """Return ``checkpoint.best`` of a run's job; None where it cannot be read."""
    try:
        with open_regular(run.job_file) as (stream, size):
            if size > LARGEST_RECORD or not _NAMES_BEST.search(stream.read()):
                return None
        # Here: it takes longer to import what checks a job than to show the state of a run.
        from hpcddp.run.job_file import read_job_file

        return read_job_file(run).checkpoint.best
    except (OSError, RecordError):
        return None


def write_result(run: RunDirectory, result: Result) -> None:
    """Write the result of a run: whether it is final, and the last and the best value of each evaluation metric."""
    result = replace(result, final=result.status in _FINAL, metrics=metrics_of(run))
    write_record(run.result, result, reserves=run.reserves("result"))


def finish_run(
    run: RunDirectory, result: Result, *, attempt: int, step: int | None = None, reason: str | None = None
) -> None:
    """Write the result and the event of a run that has finished; wait for a disk that is full or away.

    Args:
        attempt: the attempt that has finished it.
        step: optimizer steps done, where they are known.
        reason: why, in a few words.

    Raises:
        OSError: the result cannot be written, not within two minutes either.
    """
    deadline = time.monotonic() + _RESULT_PATIENCE_S
    while True:
        try:
            write_result(run, result)
            break
        except OSError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(_POLL_S)
    # Nothing depends on the event.
    with suppress(OSError):
        append_event(run.events, kind="finish", time=time.time(), attempt=attempt, step=step, reason=reason)


def has_finished(run: RunDirectory) -> bool:
    """Return whether a run has come to its own end.

    Raises:
        RecordError: its result is damaged.
    """
    result = read_result(run)
    return result is not None and result.status == FINISHED


BY_USER: Final = "cancelled by its user"
"""The reason of a run that `hpcddp cancel` has ended, or on this machine a signal to its script, such as Ctrl-C."""
_CAUSES: Mapping[Cause, str] = MappingProxyType(
    {
        Cause.PREEMPTION: "{job} was preempted",
        Cause.TIME_LIMIT: "the time limit of {job} is near",
        Cause.CANCELLED: "{job} was cancelled",
        Cause.REQUEUED: "{job} was requeued by Slurm or by its user",
    }
)
_REASONS: Mapping[StopReason, str] = MappingProxyType(
    {
        StopReason.REQUESTED: "the training's own code asked to stop",
        StopReason.TERMINATED: "the tasks of {job} received SIGTERM; the cause is unknown",
    }
)


def resume_command(run: RunDirectory, *, with_job: bool = False, after: Sequence[Path] = ()) -> str:
    """Return the one command that continues a run.

    A run whose script was submitted by hand needs its job file.

    Args:
        with_job: whether its job file, and its template, must be given in any case, because the script cannot be used
            again.
        after: the directories of the runs that must finish first.
    """
    words = ["hpcddp", "submit"]
    if with_job or not run.submission.exists():
        words.append("JOB")
    words += ["--resume", str(run.path)]
    if chain := chain_of(run):
        words += ["--chain", str(len(chain))]
    template = _template_of(run) if with_job else None
    if template is not None:
        words += ["--template", template]
    for path in after:
        words += ["--after", str(path)]
    return shlex.join(words)


def _template_of(run: RunDirectory) -> str | None:
    """Return the template with which a run was submitted; None if it is the default one, or is not known."""
    submission = None
    # Whoever resumes the run hears of a damaged record.
    with suppress(RecordError):
        submission = read_submission(run)
    return None if submission is None else submission.template


def why_it_stopped(cause: Cause, decision: Decision | None, *, job: str) -> str:
    """Return why the attempt ended, where no error did it.

    Args:
        decision: what the ranks decided, if they did.
        job: what to call the job.
    """
    sentence = _CAUSES.get(cause)
    if sentence is None and decision is not None:
        sentence = _REASONS.get(decision.reason)
    return (sentence or "the tasks of {job} ended before their work was done").format(job=job)


def what_is_saved(decision: Decision | None, newest_step: int) -> str:
    """Return which step is saved, in a phrase.

    Args:
        decision: what the ranks decided, if they did.
        newest_step: the newest step that was ever saved; 0 if none was.
    """
    if decision is not None and decision.saved:
        if decision.save_s:
            return f"step {decision.step} is saved in {decision.save_s:.1f} s"
        return f"step {decision.step} is saved"
    newest_checkpoint = f"the newest checkpoint is of step {newest_step}"
    if decision is not None and decision.step:
        if newest_step:
            return f"step {decision.step} could not be saved, {newest_checkpoint}"
        return f"step {decision.step} could not be saved, there is no checkpoint"
    if newest_step:
        return newest_checkpoint
    return "no step is saved yet"
