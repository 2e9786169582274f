"""What a rank that is left after others have died goes on with, or saves: the last step that all ranks have made."""

from __future__ import annotations

import threading
from typing import Final

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from hpcddp.batch.job import plan_job
from hpcddp.batch.plan import refuse_single_over_ranks
from hpcddp.batch.refusals import PlanError
from hpcddp.polling import wait_until
from hpcddp.run.files import exists
from hpcddp.run.metrics_file import MetricsFile
from hpcddp.train.checkpoint.checkpointer import Checkpointer
from hpcddp.train.checkpoint.memory import MemoryCheckpoint
from hpcddp.train.context import TrainContext
from hpcddp.train.loop.assembly import Setting, samples_of_step
from hpcddp.train.loop.loop import Loop
from hpcddp.train.loop.state import TrainingProgress
from hpcddp.train.model.normalisation import local_batch_norms, synchronised_batch_norms
from hpcddp.train.model.replica import Replica

# How long a save waits for a run directory that is away: nobody saves the step later. A rank that was told to end has a
# minute (hpcddp.supervise.serve_members).
_DIRECTORY_S: Final = 45.0
_POLL_S: Final = 0.5


class Survivor:
    """The last step of a training, on a rank that is left: ``state`` returns it to go on with, ``save`` saves it.

    Every rank has the parameters, the state of the optimizer and, with ``keeps_steps``, the record of each step. It has
    the buffers of all ranks, too, if no step changes them, or if they are those of BatchNorm: these are equal on all
    ranks, or gathered in each step. Other ones are gone with the dead rank.

    Args:
        context: the job and this rank.
        replica: the state that the training changes.
        loop: the loop, before its first step.
        setting: what stays the same while the ranks are these.
        checkpointer: the checkpointer of the run.
        metrics: the metrics file, on rank 0; None on the other ranks.
    """

    def __init__(
        self,
        context: TrainContext,
        replica: Replica,
        loop: Loop,
        setting: Setting,
        checkpointer: Checkpointer,
        metrics: MetricsFile | None,
    ) -> None:
        self._context = context
        self._replica = replica
        self._loop = loop
        self._checkpointer = checkpointer
        self._setting = setting
        self._plan = setting.plan.batch
        self.data = setting.data
        """The opened data set."""
        self.metrics = metrics
        """The metrics file, with the lines that the disk has not taken, on rank 0; None on the other ranks."""
        self._saved_step = loop.saved_step
        # The watchdog may save while the main thread waits for ranks that have gone.
        self._lock = threading.Lock()
        self._is_done = False
        self._own_buffers = [(name, buffer, buffer.clone()) for name, buffer in _own_buffers(replica)]

    @property
    def smallest_world(self) -> int:
        """The fewest ranks that can go on with the same result.

        The ranks can be fewer where the global batch can be split over them, and where no rank has statistics or noise
        of its own (docs/batch.md, "What stays the same, and what does not").
        """
        world_size = self._context.spec.world_size
        if self._context.spec.requeue.recovery != "auto" or _depends_on_ranks(self._replica):
            return world_size
        while world_size > 1 and self._can_be_split(world_size - 1):
            world_size -= 1
        return world_size

    def _can_be_split(self, world_size: int) -> bool:
        batch = self._plan
        try:
            plan = plan_job(
                self._context.spec, samples=batch.samples, smallest_group=batch.smallest_group, world_size=world_size
            ).batch
            if synchronised_batch_norms(self._replica.model):
                refuse_single_over_ranks(plan)
        except PlanError:
            return False
        return batch.global_batch_size >= world_size

    def save(self) -> None:
        """Save the last step that all ranks have made, unless another rank does; print what came of it.

        Called in any thread, while the main thread waits for other ranks or has left the loop with an error.
        """
        with self._lock:
            if self._is_done:
                return
            self._is_done = True
            try:
                outcome = self._save()
            except Exception as error:  # noqa: BLE001  the process ends with its first error, whatever comes of this
                outcome = f"the last step is not saved ({error})"
            self._context.write_line(f"hpcddp: other ranks have gone; {outcome}")

    def state(self) -> MemoryCheckpoint | None:
        """Return the state after the last step that all ranks have made; None where this rank does not have it."""
        with self._lock:
            progress = self._loop.last_made_step()
            if self._changed_buffer() is not None:
                return None
            return self._checkpointer.state_alone(progress.step, progress.as_document())

    def samples_of_begun_step(self) -> list[int]:
        """Return the numbers of the samples of the step after that one; none if an evaluation is due before it."""
        progress = self._loop.last_made_step()
        schedule = self._setting.schedule
        is_evaluation_due = schedule.evaluation_missing(progress.step, progress.evaluated_step)
        if is_evaluation_due or progress.step >= schedule.total_steps:
            return []
        return samples_of_step(self._setting, progress.step)

    def _save(self) -> str:
        progress = self._loop.last_made_step()
        if progress.step == (self._saved_step or 0):
            return "no step was made"
        changed = self._changed_buffer()
        if changed is not None:
            return f"step {progress.step} is not saved, because {changed} differs between ranks"
        attempt = self._context.run.attempt(self._context.attempt)
        wait_until(lambda: exists(attempt.path), timeout_s=_DIRECTORY_S, poll_s=_POLL_S)
        if not self._takes(progress):
            return f"another rank saves step {progress.step}"
        outcome = self._checkpointer.save_alone(progress.step, progress.as_document(), reason="other ranks have gone")
        if outcome is None or outcome.error is not None:
            error = None if outcome is None else outcome.error
            return f"step {progress.step} is not saved ({error})"
        return f"step {progress.step} is saved in {outcome.seconds:.1f} s"

    def _changed_buffer(self) -> str | None:
        """Return the name of a buffer, or of other state, that may differ between ranks; None if there is none."""
        for name, buffer, first in self._own_buffers:
            if not torch.equal(buffer, first):
                return name
        return next((name for name in self._replica.model.state_dict() if name.endswith("_extra_state")), None)

    def _takes(self, progress: TrainingProgress) -> bool:
        """Return whether this rank is the first that wants to save a step."""
        path = self._context.run.attempt(self._context.attempt).survivor(progress.step)
        try:
            path.touch(mode=0o600, exist_ok=False)
        except FileExistsError:
            return False
        return True


def _depends_on_ranks(replica: Replica) -> bool:
    """Return whether the result depends on which rank computes a sample."""
    has_dropout = any(isinstance(module, _DropoutNd) and module.p > 0 for module in replica.model.modules())
    has_own_statistics = bool(local_batch_norms(replica.model)) and replica.statistics is None
    return has_dropout or has_own_statistics


def _own_buffers(replica: Replica) -> list[tuple[str, torch.Tensor]]:
    """Return the buffers of the model that only their own rank has, if they change, by name."""
    shared: set[int] = set()
    layers: list[nn.Module] = [*synchronised_batch_norms(replica.model)]
    if replica.statistics is not None or replica.shared_statistics is not None:
        layers += local_batch_norms(replica.model)
    for layer in layers:
        shared.update(id(buffer) for buffer in layer.buffers(recurse=False))
    return [(name, buffer) for name, buffer in replica.model.named_buffers() if id(buffer) not in shared]
