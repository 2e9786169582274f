"""Errors of a training, each with the exit code that the requeue decision reads."""

from __future__ import annotations

from typing import ClassVar

from hpcddp.errors import HpcddpError
from hpcddp.stop.reasons import ExitCode


class TrainingError(HpcddpError):
    """The training cannot go on, and would fail in the same way if it were started again."""

    kind = "training"
    exit_code: ClassVar[int] = ExitCode.USER_CODE


class DataError(TrainingError):
    """The data set is missing, damaged, or not what the job says."""

    kind = "data"


class ModelError(TrainingError):
    """The model cannot be built, or does not fit the data."""

    kind = "model"


class UserCodeError(TrainingError):
    """The user's code failed; the original exception is the cause.

    Attributes:
        traceback: the user's traceback as text.
    """

    kind = "user_code"


class NonFiniteError(TrainingError):
    """A loss or a parameter is infinite or not a number.

    Attributes:
        step: the optimizer step, counted from 1.
    """

    kind = "nonfinite"


class ResumeError(TrainingError):
    """The checkpoint belongs to another training than the job file describes."""

    kind = "resume"


class SaveError(TrainingError):
    """Several saves in a row failed."""

    kind = "save"
    exit_code: ClassVar[int] = ExitCode.INFRASTRUCTURE


class StoppedError(TrainingError):
    """All ranks agreed to stop after the same step; its state is saved, unless the save failed.

    Attributes:
        step: optimizer steps done.
        reason: the ``StopReason`` that the ranks agreed on.
        outcome: result of the save; None on other ranks than 0.
    """

    kind = "stopped"
    exit_code: ClassVar[int] = ExitCode.STOPPED


class DriftError(TrainingError):
    """The replicas of the ranks are no longer equal.

    Attributes:
        step: optimizer steps done.
        rank: the rank that differs most.
        names: the tensors that differ on it.
    """

    kind = "drift"


class LossError(TrainingError):
    """A loss returns, or is given, a value with which it cannot be exact on several ranks."""

    kind = "loss"


def describe(value: object) -> str:
    """Return a description of a value for a message: ``a tensor of shape (3,)`` or ``a float``."""
    # Here, because the process of a command's trackers knows these errors, and not torch.
    from torch import Tensor

    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
