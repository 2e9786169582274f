"""Runs that die or fail in saves."""

from __future__ import annotations

from typing import Any

from tests.cluster.scenarios import OTHER_HOSTS, STEPS_PER_EPOCH, ScenarioContext, ScenarioResult


def faults(*texts: str) -> dict[str, Any]:
    return {"environment": {"env": {"HPCDDP_FAULTS": ";".join(texts)}}}


# One before the checkpoint has its name, one between name and `latest`; the others are taken by the repetitions.
SOME_POINTS = ("save.manifest", "save.latest")


def killed_in_saves(
    context: ScenarioContext, points: tuple[str, ...] = SOME_POINTS, name: str = "killed"
) -> ScenarioResult:
    """Rank 0 is killed at points of a save, once in each attempt, always in its second save."""
    # In an attempt that begins after epoch e, the second save comes two epochs later; before that one is published.
    texts = [
        f"kill@{point}:{STEPS_PER_EPOCH * (attempt + 2)},attempt={attempt}" for attempt, point in enumerate(points)
    ]
    budgets: dict[str, Any] = {"max_failures": len(points), "max_attempts_without_progress": len(points) + 1}
    tracked = context.start(name, on=OTHER_HOSTS, seconds=0.01, sections={**faults(*texts), "requeue": budgets})
    return tracked, context.compare(f"SIGKILL at each of {len(points)} points of a save", tracked)
