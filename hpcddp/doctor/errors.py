"""Errors of the examinations, and the format of percentages in their reports."""

from __future__ import annotations

import math
from typing import Final

from hpcddp.errors import UserError

# Fractions below it are shown as powers of ten.
_SMALLEST_PERCENT: Final = 5e-5


class DoctorError(UserError):
    """The loss could not be examined."""

    kind = "doctor"


class UnusableError(DoctorError):
    """The loss gives no comparable result on a batch."""


class NoLossError(UnusableError):
    """The loss runs, but its result is not a finite scalar with a gradient, or it fails on some share."""


class CannotJudgeError(NoLossError):
    """Nothing can be compared on any batch: the loss calls collectives, draws random numbers or keeps state."""


class ComparisonError(UserError):
    """The job did not run, so that nothing can be compared."""

    kind = "doctor"


def percent(fraction: float) -> str:
    """Return a fraction as percent with two digits, a small one as a power of ten, and NaN as text."""
    if math.isnan(fraction):
        return "NaN"
    if fraction == 0:
        return "0"
    if fraction < _SMALLEST_PERCENT:
        return f"{fraction:.0e}"
    if fraction < 1:
        return f"{100 * fraction:.2g} %"
    return f"{100 * fraction:,.0f} %"
