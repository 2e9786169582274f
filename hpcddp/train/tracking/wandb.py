"""Weights & Biases: one run over all attempts."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence

import wandb

from hpcddp.train.tracking.protocol import Ending, Point, Subject


class WeightsAndBiases:
    """A run of W&B.

    W&B keeps one row for each step and takes no step that is behind the last one. An evaluation that is made up for
    comes with the next step, so that evaluations carry their own.

    Args:
        run: the run, as W&B opened it.
    """

    def __init__(self, run: wandb.Run) -> None:
        # Asking for it costs a message to W&B's own process, so that it is counted here from now on.
        self._run, self._step = run, run.step
        run.define_metric("train/*", step_metric="step")
        run.define_metric("val/*", step_metric="evaluated_step")

    def write(self, points: Sequence[Point]) -> None:
        """Hand the points over to the process of W&B."""
        for point in points:
            axis = "evaluated_step" if point.evaluated else "step"
            self._step = max(point.step, self._step)
            self._run.log({axis: point.step, **point.values}, step=self._step)

    def close(self, ending: Ending) -> None:
        """Say how the attempt ended; one that may go on is shown as preempted until it does."""
        if ending is Ending.STOPPED:
            self._run.mark_preempting()
        self._run.finish(exit_code=ending.value)


def connect(subject: Subject, first_step: int | None) -> WeightsAndBiases:  # noqa: ARG001  a step told before stays
    """Open the run of W&B, the same one for all attempts."""
    memory, settings = subject.memory, subject.settings
    if wandb.run is not None:
        # SIGTERM has ended W&B's process, with which its library still wants to speak before it lets go.
        with contextlib.suppress(OSError, SystemExit):
            wandb.teardown()
    if memory.run_id is None:
        # Ids are unique within a project, where another cluster may have a run of the same id.
        memory.name(f"{subject.run.run_id}-{secrets.token_hex(4)}")
    run = wandb.init(
        id=memory.run_id,
        resume="allow",
        project=settings.project or subject.job,
        entity=settings.entity,
        name=subject.run.run_id,
        config=dict(subject.config),
        dir=str(subject.run.path),
        # The rank's log is the run's own.
        settings=wandb.Settings(console="off", silent=True, save_code=False),
    )
    if run.resumed:
        memory.forget_after(run.step - 1)
    return WeightsAndBiases(run)
