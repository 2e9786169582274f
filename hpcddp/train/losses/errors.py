"""Errors in the use of a loss."""

from __future__ import annotations

from torch import Tensor

from hpcddp.train.errors import TrainingError


class LossError(TrainingError):
    """A loss returns, or is given, a value with which it cannot be exact on several ranks."""

    kind = "loss"


def describe(value: object) -> str:
    """Return a description of a value for a message: ``a tensor of shape (3,)`` or ``a float``."""
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
