"""Stop reasons, exit codes and causes of the end of an attempt."""

from __future__ import annotations

from enum import IntEnum, StrEnum


class StopReason(IntEnum):
    """Why a rank wants to stop. If ranks have different reasons in one step, the largest number wins."""

    NONE = 0
    REQUESTED = 1
    """The user's code asked for it."""
    DEADLINE = 2
    """The end of the job is near by the ranks' own clock."""
    WARNED = 3
    """USR2: Slurm says that the time limit is near."""
    TERMINATED = 4
    """TERM: the job must leave its nodes."""
    INTERRUPTED = 5
    """INT: Ctrl-C."""

    @property
    def word(self) -> str:
        """The name of the reason in logs and records."""
        return self.name.lower()


class ExitCode(IntEnum):
    """Exit codes of tasks and batch scripts; the supervisor decides on a requeue by them."""

    FINISHED = 0
    NO_CHECKPOINT = 65
    """There is no usable checkpoint although there should be one."""
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


class Cause(StrEnum):
    """Why an attempt ended before its work was done."""

    PREEMPTION = "preemption"
    TIME_LIMIT = "time_limit"
    CANCELLED = "cancelled"
    REQUEUED = "requeued"
    """The job was requeued by Slurm without a grace time, by an administrator, or by its user."""
    NODE_FAILURE = "node_failure"
    CRASH = "crash"
    """A rank failed or left no record, or the tasks were told to end and nothing shows why."""
    UNKNOWN = "unknown"
    """Slurm shows no cause. At the end of an attempt: its own code asked to stop, or all of its ranks agreed to."""
