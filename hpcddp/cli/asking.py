"""Asking what one run is doing, and asking again now and then."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpcddp.report.states import State
    from hpcddp.run.directory import RunDirectory

# Files say most of it; Slurm is asked for those that end without a word.
_ASK_EVERY_S = 10.0


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
            self.state = self._ask()
        return self.state is None or self.state.is_alive or self.state == "unknown"

    def _ask(self) -> State:
        from hpcddp.report.status import statuses
        from hpcddp.report.sweeps import traces_of
        from hpcddp.slurm.commands import queue

        environment = dict(os.environ)
        return statuses(traces_of(self._run), ask=lambda: queue(environment), now=time.time()).runs[0].state
