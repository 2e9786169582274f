"""Exit codes inside a job, as one table."""

from enum import IntEnum


class ExitCode(IntEnum):
    """What a task or a batch script exits with, and what it means to whoever decides on a requeue."""

    FINISHED = 0
    NO_CHECKPOINT = 65
    """There should be a usable checkpoint and there is none."""
    USER_CODE = 70
    """The user's code failed: never requeued."""
    INFRASTRUCTURE = 71
    """A peer, a node or the network failed."""
    STOPPED = 75
    """Stopped with a checkpoint; wants to go on."""
    FENCED = 76
    """Another attempt owns the run."""
    NO_PROGRESS = 93
    HANG = 124
    INTERRUPTED = 130
