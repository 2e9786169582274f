"""Whether the job of a run is still there."""

from __future__ import annotations

import contextlib
import time

from hpcddp.launch.follow import JobState
from hpcddp.run.directory import RunDirectory
from hpcddp.run.files import read_json
from hpcddp.slurm import commands

# One question every two seconds is what Slurm's own documentation calls considerate (squeue(1), PERFORMANCE).
_ASK_EVERY_S = 2.0

_PENDING = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "CONFIGURING", "SPECIAL_EXIT"})
_RUNNING = frozenset({"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"})


class SlurmWatch:
    """Answers for the job of a run, asking Slurm now and then.

    Args:
        run: the run; another job may take it over.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._asked = float("-inf")
        self._state: JobState = "pending"

    def __call__(self) -> JobState:
        """Return the job's state; a controller that does not answer changes nothing, a forgotten job has ended."""
        if time.monotonic() - self._asked >= _ASK_EVERY_S:
            self._asked = time.monotonic()
            with contextlib.suppress(commands.SlurmUnavailableError):
                job = commands.show_job(read_json(self._run.submission)["job_id"])
                self._state = "ended" if job is None else state_of(job.get("JobState", ""))
        return self._state


def state_of(slurm_state: str) -> JobState:
    """Return what a word of ``scontrol show job`` means to somebody who waits for the run's end."""
    if slurm_state in _PENDING:
        return "pending"
    return "running" if slurm_state in _RUNNING else "ended"
