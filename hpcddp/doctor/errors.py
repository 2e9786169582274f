"""Why a loss or a model could not be looked at."""

from __future__ import annotations

from hpcddp.errors import UserError


class DoctorError(UserError):
    """The loss could not be run, so that nothing can be said about it."""

    kind = "doctor"


class UnusableError(DoctorError):
    """The loss gives nothing on a batch that could be compared."""


class NoLossError(UnusableError):
    """The loss runs, but what it gives is no loss: no scalar, no gradient, not finite, or not on every share."""
