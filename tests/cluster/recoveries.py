"""Runs whose ranks go on when one of them dies: what they come to, and their numbers against an undisturbed run."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch  # noqa: TID253

from hpcddp.run.checkpoints import newest_valid
from tests.cluster.tracked_run import TrackedRun, records

# Another number of ranks adds the same numbers in another order.
_ROUNDING = 1e-12


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How the numbers of a run differ from those of an undisturbed one.

    Attributes:
        each_once: whether it has one record for each step, and for each evaluation.
        loss: the largest difference of a loss; infinity if a record is missing.
        val_loss: the same of an evaluation.
        parameters: the largest difference of a parameter at the end.
    """

    each_once: bool
    loss: float
    val_loss: float
    parameters: float

    @property
    def is_rounding(self) -> bool:
        """Whether each step is recorded once, with the undisturbed run's numbers but for the order of additions."""
        return self.each_once and max(self.loss, self.val_loss, self.parameters) <= _ROUNDING


def difference(tracked: TrackedRun, reference: TrackedRun) -> Difference:
    """Compare a run that has finished with an undisturbed one."""
    return Difference(
        each_once=all(_steps(tracked, key) == _steps(reference, key) for key in ("loss", "val_loss")),
        loss=_largest_difference(tracked, reference, "loss"),
        val_loss=_largest_difference(tracked, reference, "val_loss"),
        parameters=float((parameters(tracked) - parameters(reference)).abs().max()),
    )


def assert_same(tracked: TrackedRun, reference: TrackedRun) -> None:
    """Assert that a run has one record for each step and evaluation, with the numbers of the undisturbed run."""
    found = difference(tracked, reference)
    assert found.is_rounding, found


def parameters(tracked: TrackedRun) -> torch.Tensor:
    """Return the parameters at the end of a run, as one vector."""
    checkpoint = newest_valid(tracked.run.checkpoints, expected=True, warn=print)
    assert checkpoint is not None
    state = torch.load(checkpoint.path / "model.pt", weights_only=True)
    return torch.cat([tensor.reshape(-1).double() for tensor in state.values()])


def wait_for_world(tracked: TrackedRun, size: int, *, recoveries: int = 1) -> None:
    """Wait until the newest recovery of a run has so many ranks, and there are so many recoveries or more."""

    def is_reached() -> bool:
        found = tracked.events("recovery")
        return len(found) >= recoveries and found[-1].facts.get("world_size") == size

    tracked.wait_until(is_reached, f"{size} ranks", timeout_s=60)


def _steps(tracked: TrackedRun, key: str) -> list[int]:
    return [record["step"] for record in records(tracked.run, key)]


def _largest_difference(tracked: TrackedRun, reference: TrackedRun, key: str) -> float:
    values = {record["step"]: record[key] for record in records(tracked.run, key)}
    expected = records(reference.run, key)
    return max(abs(float(values.get(record["step"], math.inf) - record[key])) for record in expected)
