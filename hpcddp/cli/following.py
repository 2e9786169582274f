"""Staying with a submitted run until it has ended."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from hpcddp.launch.follow import JobState, Outcome, Output
    from hpcddp.launch.submission import Submission

_INTERRUPTED = 130


def follow_run(submission: Submission) -> Outcome:
    """Show a run's progress until it has ended for good.

    Ctrl-C stops a run on this machine, and it is followed until it is saved; a run on Slurm is no longer followed.

    Args:
        submission: what was handed over.

    Returns:
        How it ended.
    """
    from hpcddp.cli.progress import BarDisplay, PlainDisplay
    from hpcddp.run.files import read_json

    # A command may have no batch, and so no plan.
    steps = (read_json(submission.run.plan) or {}).get("steps_per_epoch")
    if sys.stderr.isatty():
        with BarDisplay(steps, submission.epochs) as bars:
            return _stay(submission, bars)
    return _stay(submission, PlainDisplay(steps, submission.epochs))


def _stay(submission: Submission, display: Any) -> Outcome:  # noqa: ANN401
    from hpcddp.launch.follow import follow

    local = submission.cluster == "local"
    # Whoever ends the follower of a local run by kill means the same as by Ctrl-C.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler) if local else None
    try:
        return follow(
            submission.run,
            display,
            job_state=_job_state(submission),
            interrupted=_stopper(submission) if local else None,
            output=_output(submission),
            first_attempt=submission.first_attempt,
        )
    except KeyboardInterrupt:
        stop = f"kill {submission.job_id}" if local else f"scancel {submission.job_id}"
        typer.echo(f"\nno longer following; run {submission.run.run_id} goes on. To end it: {stop}", err=True)
        raise typer.Exit(_INTERRUPTED) from None
    finally:
        if local:
            signal.signal(signal.SIGTERM, before)


def _output(submission: Submission) -> Output | None:
    """Return what prints the work's own lines; the training of a job file shows its steps instead."""
    from hpcddp.report.logs import OutputFollower
    from hpcddp.spec.write import parse_resolved

    run = submission.run
    if parse_resolved(run.job_file.read_text(encoding="utf-8")).train is not None:
        return None
    follower = OutputFollower(run, first_attempt=submission.first_attempt)

    def lines(*, ended: bool) -> list[str]:
        return [line.text for line in follower.new_lines(time.time(), ended=ended)]

    return lines


def _stopper(submission: Submission) -> Callable[[], bool]:
    """Return what Ctrl-C does: the first one stops the run, the second one stops following it."""
    stopped = False

    def stop() -> bool:
        nonlocal stopped
        if stopped:
            return False
        stopped = True
        typer.echo("\nstopping: the run is told to save and to end; Ctrl-C again to leave it alone", err=True)
        try:
            os.kill(int(submission.job_id), signal.SIGTERM)
        except ProcessLookupError:
            # It has just ended by itself.
            return True
        return True

    return stop


def _job_state(submission: Submission) -> Callable[[], JobState]:
    """Return the question that ``follow`` asks: is the job still there?"""
    from hpcddp.launch import watch

    if submission.cluster == "slurm":
        return watch.SlurmWatch(submission.run)

    def local() -> JobState:
        return "ended" if submission.job.done() else "running"

    return local
