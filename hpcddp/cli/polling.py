"""Poll the state of one run."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpcddp.manage.status import State
    from hpcddp.run.directory import RunDirectory

# Most changes show in files; Slurm is queried for runs that ended without a record.
_POLL_EVERY_S = 10.0


class Watch:
    """Polls whether a run is alive."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._polled = float("-inf")
        self.state: State | None = None

    def is_alive(self) -> bool:
        """Return whether the run is pending or running, or its state is unknown."""
        if self._run.result.exists() or time.monotonic() - self._polled > _POLL_EVERY_S:
            self._polled = time.monotonic()
            self.state = self._poll()
        return self.state is None or self.state.is_alive or self.state == "unknown"

    def _poll(self) -> State:
        from hpcddp.manage.overview import traces_of
        from hpcddp.manage.status import statuses
        from hpcddp.slurm.commands import queue

        environment = dict(os.environ)
        return statuses(traces_of(self._run), ask=lambda: queue(environment), now=time.time()).runs[0].state
