"""Why a training stops before its end; the codes that ranks vote with."""

from __future__ import annotations

from enum import IntEnum


class StopReason(IntEnum):
    """Why a rank wants to stop. When ranks have different reasons in one step, the largest wins."""

    NONE = 0
    REQUESTED = 1
    """The user's code asked for it."""
    DEADLINE = 2
    """By the ranks' own clock the job's end is near."""
    WARNED = 3
    """USR2: Slurm says that the time limit is near."""
    TERMINATED = 4
    """TERM: the job must leave its nodes."""
    INTERRUPTED = 5
    """INT: Ctrl-C."""

    @property
    def word(self) -> str:
        """The reason's name for logs and files."""
        return self.name.lower()
