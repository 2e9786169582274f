"""Numbers in sentences."""

from __future__ import annotations

import math


def percent(fraction: float) -> str:
    """Return a fraction as percent with two digits, or in words where that says more."""
    if math.isnan(fraction):
        return "NaN"
    if fraction < 5e-5:  # noqa: PLR2004
        return f"{fraction:.0e}" if fraction else "0"
    return f"{100 * fraction:.2g} %" if fraction < 1 else f"{100 * fraction:,.0f} %"
