"""Whether the tasks of an attempt can be started again in the same job."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Final

from hpcddp.polling import wait_until
from hpcddp.run.directory import AttemptDirectory
from hpcddp.run.events import Event, first_train_event
from hpcddp.run.files import exists, open_regular
from hpcddp.run.job_records import Start
from hpcddp.slurm import commands
from hpcddp.slurm.job import end_time_of

# Slurm may send a signal up to 60 s earlier than --signal says (sbatch(1)).
_SIGNAL_EARLY_S: Final = 60.0
# srun ends some moments before slurmctld has heard of it from all nodes.
_STEP_PATIENCE_S: Final = 10.0
_POLL_S: Final = 0.5
# A record that is torn has no line end.
_STEP_ID: Final = re.compile(rb"([0-9]+\.[0-9]+)\n")
_LONGEST_STEP_ID: Final = 64


def had_met(attempt: AttemptDirectory) -> bool:
    """Return whether the ranks of an attempt had met: where they could not start, other nodes may do better."""
    return exists(attempt.ranks)


def has_time_for_restart(
    number: int,
    start: Start,
    events: Sequence[Event],
    *,
    job: Mapping[str, str],
    lead_s: float,
    now: float,
) -> bool:
    """Return whether a job lasts longer than a restart, and then a save before its end.

    Args:
        number: the number of the attempt that has ended.
        events: the events of the run.
        job: Slurm's record of the job.
        lead_s: how long before its end the tasks are warned, in seconds.
        now: seconds since the epoch.
    """
    end_time = end_time_of(job, {}, now=now)
    if end_time is None:
        return True
    train_event = first_train_event(events, number)
    began_work = now if train_event is None else train_event.time
    start_up_s = max(0.0, began_work - start.time)
    return end_time - now > start_up_s + lead_s + _SIGNAL_EARLY_S


def step_has_ended(attempt: AttemptDirectory) -> bool:
    """Return whether Slurm has ended the step of the tasks: if a slurmstepd was killed, the next one would wait for it.

    It waits some seconds for the end of the step. Where nothing is known of the step, a requeue ends it with the job.
    """
    step_id = _read_step_id(attempt)
    if step_id is None:
        return False
    try:
        return wait_until(
            lambda: not commands.step_exists(step_id, os.environ), timeout_s=_STEP_PATIENCE_S, poll_s=_POLL_S
        )
    except commands.SlurmCommandError:
        return False


def _read_step_id(attempt: AttemptDirectory) -> str | None:
    """Return the id of the step of the tasks; None if it is not recorded, or the record is damaged."""
    try:
        with open_regular(attempt.step) as (stream, _):
            match = _STEP_ID.fullmatch(stream.read(_LONGEST_STEP_ID))
    except OSError:
        return None
    return None if match is None else match[1].decode()
