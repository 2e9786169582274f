"""A rank that is left after others have died: it saves the last step that all ranks have made."""

from __future__ import annotations

import threading

import torch
from torch import nn

from hpcddp.train.checkpoint.checkpointer import Checkpointer
from hpcddp.train.context import TrainContext
from hpcddp.train.loop.loop import Loop
from hpcddp.train.loop.state import TrainingProgress
from hpcddp.train.model.normalisation import local_batch_norms, synchronised_batch_norms
from hpcddp.train.model.replica import Replica


class Survivor:
    """Saves the last step of a training without the other ranks.

    Every rank has the parameters, the state of the optimizer and, with ``keeps_steps``, the record of each step. It has
    the buffers of all ranks, too, if no step changes them, or if they are those of BatchNorm: these are equal on all
    ranks, or gathered in each step. Other ones are gone with the dead rank.

    Args:
        context: the job and this rank.
        replica: the state that the training changes.
        loop: the loop, before its first step.
        checkpointer: the checkpointer of the run.
    """

    def __init__(self, context: TrainContext, replica: Replica, loop: Loop, checkpointer: Checkpointer) -> None:
        self._context, self._replica, self._loop, self._checkpointer = context, replica, loop, checkpointer
        self._resumed_step = loop.step
        # The watchdog may save while the main thread waits for ranks that have gone.
        self._lock = threading.Lock()
        self._is_done = False
        self._own_buffers = [(name, buffer, buffer.clone()) for name, buffer in _own_buffers(replica)]

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

    def _save(self) -> str:
        progress = self._loop.last_made_step()
        if progress.step == self._resumed_step:
            return "no step was made"
        changed = self._changed_buffer()
        if changed is not None:
            return f"step {progress.step} is not saved, because {changed} differs between ranks"
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


def _own_buffers(replica: Replica) -> list[tuple[str, torch.Tensor]]:
    """Return the buffers of the model that only their own rank has, if they change, by name."""
    shared: set[int] = set()
    layers: list[nn.Module] = [*synchronised_batch_norms(replica.model)]
    if replica.statistics is not None or replica.shared_statistics is not None:
        layers += local_batch_norms(replica.model)
    for layer in layers:
        shared.update(id(buffer) for buffer in layer.buffers(recurse=False))
    return [(name, buffer) for name, buffer in replica.model.named_buffers() if id(buffer) not in shared]
