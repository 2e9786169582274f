"""Tracker for Weights & Biases, with one W&B run for all attempts."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence

import wandb

from hpcddp.run.metrics import EVALUATION_PREFIXES
from hpcddp.train.tracking.protocol import AttemptEnding, Point, TrackerInputs


class WeightsAndBiases:
    """A run of W&B.

    W&B keeps one row per step and rejects steps before the last one. A late evaluation is therefore logged in the row
    of a later step, with its own step as ``evaluated_step``.
    """

    def __init__(self, run: wandb.Run) -> None:
        # Reading run.step sends a message to W&B's process, so the step is counted here.
        self._run = run
        self._step = run.step
        run.define_metric("train/*", step_metric="step")
        for prefix in EVALUATION_PREFIXES:
            run.define_metric(f"{prefix}/*", step_metric="evaluated_step")

    def write(self, points: Sequence[Point]) -> None:
        """Pass the points to W&B's process."""
        for point in points:
            axis = "evaluated_step" if point.evaluated else "step"
            self._step = max(point.step, self._step)
            self._run.log({axis: point.step, **point.values}, step=self._step)

    def close(self, ending: AttemptEnding) -> None:
        """Finish the W&B run; an attempt that may be continued is shown as preempted."""
        if ending is AttemptEnding.STOPPED:
            self._run.mark_preempting()
        self._run.finish(exit_code=ending.value)


def connect(inputs: TrackerInputs) -> WeightsAndBiases:
    """Open the W&B run, the same one for all attempts."""
    state = inputs.state
    if wandb.run is not None:
        # SIGTERM may have ended W&B's process; teardown then fails when it writes to it.
        with contextlib.suppress(OSError, SystemExit):
            wandb.teardown()
    if state.run_id is None:
        # Ids are unique within a project, where another cluster may have a run of the same id.
        state.set_run_id(f"{inputs.run.run_id}-{secrets.token_hex(4)}")
    # W&B would create it with the submitter's umask.
    inputs.run.wandb.mkdir(mode=0o700, exist_ok=True)
    run = wandb.init(
        id=state.run_id,
        resume="allow",
        project=inputs.project,
        entity=inputs.settings.entity,
        name=inputs.run.run_id,
        config=dict(inputs.config),
        dir=str(inputs.run.path),
        # The logs of the ranks are in the run directory already.
        settings=wandb.Settings(console="off", silent=True, save_code=False),
    )
    if run.resumed:
        state.rewind(run.step - 1)
    return WeightsAndBiases(run)
