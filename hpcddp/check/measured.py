"""What earlier runs of a job have measured: the speed of their steps, and how long their saves took."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hpcddp.batch.plan import BatchPlan
from hpcddp.manage.run_progress import progress_of
from hpcddp.run.directory import RunDirectory
from hpcddp.run.events import read_events
from hpcddp.run.metrics import read_metrics
from hpcddp.run.plan import read_plan
from hpcddp.run.record import RecordError

_MOST_RUNS: Final = 5
_TAIL_BYTES: Final = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a run has measured.

    Args:
        step_s: seconds of a step, evaluations and saves included.
        save_s: seconds of its longest save, of those that its log still names; None if it has saved nothing.
    """

    run_id: str
    step_s: float
    save_s: float | None


def measured_in(runs: Path, batch: BatchPlan) -> Measured | None:
    """Return what the newest run with the same global batch on as many ranks has measured; None if none has.

    Only the newest runs are looked at.

    Args:
        runs: the folder of a job's runs, ``<run_root>/<name>``; it need not exist.
        batch: the batch of the job.
    """
    try:
        newest = sorted((path for path in runs.iterdir() if path.is_dir()), key=lambda path: path.name, reverse=True)
    except OSError:
        return None
    for path in newest[:_MOST_RUNS]:
        # A record that cannot be read is as if it were not there.
        with suppress(OSError, RecordError):
            measured = _measured_by(RunDirectory(path), batch)
            if measured is not None:
                return measured
    return None


def _measured_by(run: RunDirectory, batch: BatchPlan) -> Measured | None:
    plan = read_plan(run)
    if plan is None or not _is_same_batch(plan.facts, batch):
        return None
    progress = progress_of(read_metrics(run.metrics, _TAIL_BYTES).records)
    if progress is None or not progress.steps_per_s:
        return None
    saves = [event.facts.get("seconds") for event in read_events(run.events, _TAIL_BYTES) if event.kind == "save"]
    seconds = [float(value) for value in saves if isinstance(value, int | float) and 0 < value < math.inf]
    return Measured(run_id=run.run_id, step_s=1 / progress.steps_per_s, save_s=max(seconds, default=None))


def _is_same_batch(facts: Mapping[str, Any], batch: BatchPlan) -> bool:
    return (facts.get("global_batch_size"), facts.get("world_size")) == (batch.global_batch_size, batch.world_size)
