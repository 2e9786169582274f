"""One thing that a comparison found, and how to read what ranks reported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hpcddp.doctor.ddp_processes import Report

Severity = Literal["defect", "note"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DdpFinding:
    """One thing that was found.

    Args:
        kind: a stable word for programs.
        severity: ``defect``: W ranks train something else than one process; ``note``: good to know.
        sentence: what was seen.
        way_out: what to do; empty where nothing needs doing.
    """

    kind: str
    severity: Severity
    sentence: str
    way_out: str


def steps_of(report: Report) -> Sequence[Mapping[str, Any]]:
    """Return what a rank reported of each step; nothing where none was made."""
    steps: Sequence[Mapping[str, Any]] = report.get("looks", {}).get("exact", {}).get("steps", ())
    return steps


def errors_of(step: Mapping[str, Any]) -> dict[str, float]:
    """Return the relative error of every parameter's gradient."""
    return {name: float(gradient["error"]) for name, gradient in (step["gradients"] or {}).items()}


def named(names: Sequence[str]) -> str:
    """Return the first name and how many more there are."""
    others = len(names) - 1
    return names[0] + ("" if not others else f" and {others} more parameter{'s' if others > 1 else ''}")
