"""What a tracker has been told of a run, kept over its attempts: ``trackers/<name>.json``."""

from __future__ import annotations

from pathlib import Path

from hpcddp.run.metrics import TrackerMemory, read_memory, write_memory
from hpcddp.run.record import RecordError


class Memory:
    """The tracker's own id of the run, and how far it has been told.

    Args:
        path: the file; need not exist.

    Attributes:
        run_id: what the tracker calls the run; None before it has said so.
        step: the last step that it was told; -1 before the first.
        evaluated_step: the step of the last evaluation that it was told; -1 before the first.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.recall()

    def recall(self) -> None:
        """Go back to what was saved last."""
        saved = _saved(self._path)
        self.run_id: str | None = saved.run_id
        self.step: int = saved.step
        self.evaluated_step: int = saved.evaluated_step
        self._last: tuple[int, bool] | None = None

    def name(self, run_id: str) -> None:
        """Keep what the tracker calls the run."""
        self.run_id = run_id
        self.save()

    def takes(self, step: int, *, evaluated: bool) -> bool:
        """Return whether a record of a step, or of its evaluation, is new, and remember it as told until ``recall``.

        Records of one step may follow each other. A step that comes back later was computed twice.
        """
        if (step, evaluated) == self._last:
            return True
        if step <= (self.evaluated_step if evaluated else self.step):
            return False
        if evaluated:
            self.evaluated_step = step
        else:
            self.step = step
        self._last = (step, evaluated)
        return True

    def forget_after(self, step: int) -> None:
        """Forget what came after ``step``: the tracker does not have it, or drops it."""
        self.step, self.evaluated_step = min(self.step, step), min(self.evaluated_step, step)

    def save(self) -> None:
        """Write it down."""
        self._path.parent.mkdir(mode=0o700, exist_ok=True)
        memory = TrackerMemory(run_id=self.run_id, step=self.step, evaluated_step=self.evaluated_step)
        write_memory(self._path, memory)


def _saved(path: Path) -> TrackerMemory:
    try:
        return read_memory(path)
    except RecordError:
        # A tracker that begins anew is better than a training that does not begin.
        return TrackerMemory()
