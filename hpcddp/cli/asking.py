"""Asking what one run is doing, and asking again now and then."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from hpcddp.report.states import State
    from hpcddp.report.status import RunStatus
    from hpcddp.run.directory import RunDirectory

# Files say most of it; Slurm is asked for those that end without a word.
_ASK_EVERY_S = 10.0


def status_of(run: RunDirectory, *, job_id: str | None = None, quiet: bool = False) -> RunStatus:
    """Return what a run is doing now; say on stderr if Slurm could not be asked.

    Args:
        run: the run.
        job_id: what Slurm was told to call it, where none of its files says so yet.
        quiet: whether nothing is said.
    """
    from hpcddp.report.status import statuses
    from hpcddp.report.traces import read_traces
    from hpcddp.slurm.commands import queue

    environment = dict(os.environ)
    traces = read_traces(run, job_id=job_id)
    answer = statuses([traces], ask=lambda: queue(environment), now=time.time())
    if answer.unanswered is not None and not quiet:
        typer.echo(f"Slurm could not be asked: {answer.unanswered}", err=True)
    return answer.runs[0]


class Watch:
    """Knows whether a run is alive, asking Slurm now and then.

    Args:
        run: the run.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._asked = float("-inf")
        self.state: State | None = None

    def is_alive(self) -> bool:
        """Return whether it waits or runs, as far as anybody can tell."""
        if self._run.result.exists() or time.monotonic() - self._asked > _ASK_EVERY_S:
            self._asked = time.monotonic()
            self.state = status_of(self._run, quiet=True).state
        return self.state is None or self.state.is_alive or self.state == "unknown"
