"""The likely cause of a difference after a resumption, by what differs first and what the checkpoint holds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from hpcddp.rehearse.compare import Comparison, Course, Metrics, metrics_of, training_steps
from hpcddp.rehearse.saved import GENERATORS, SavedComparison
from hpcddp.run.metrics import is_evaluation

UNSEEDED: Final = (
    "the runs differ before the fault already: a generator is not seeded, or an operation is not deterministic"
)
STARTS_OVER: Final = "the second attempt starts over: it finds no checkpoint, or does not load the one that is there"
STEP_COUNTER: Final = "the step counter is not that of the checkpoint: steps are counted from another number on"
OPTIMIZER_MISSING: Final = "the checkpoint holds no state of the optimizer: momentum and averages begin at zero"
OPTIMIZER_NOT_LOADED: Final = (
    "the first step after the resumption is right and a later one is not: the state of the optimizer is not restored"
)
DATA_OR_RANDOM: Final = (
    "the first step after the resumption has other samples or other random numbers: the position in the epoch, the "
    "epoch of the sampler or the states of the generators are not restored, or the weights are not those of the step"
)
NO_GENERATORS: Final = "; the checkpoint holds no state of a generator"
SCHEDULER: Final = (
    "the learning rate is another one: the state of the scheduler is not restored, or it makes a step too many"
)
SCALER: Final = "the loss scale is another one: the state of the gradient scaler is not restored"
BUFFERS: Final = (
    "the buffers of BatchNorm are not restored: the state_dict of the model has them, its parameters do not"
)
AVERAGE: Final = "the averaged weights (EMA) are not restored: the average begins anew at the resumption"
OTHER_STATE: Final = "the steps are right, and a state that is saved beside the weights is not restored"


@dataclass(frozen=True, slots=True, kw_only=True)
class _StatePart:
    """A part of a training, by the names of its metrics or of its saved values."""

    name: re.Pattern[str]
    cause: str


_MEASURED_PARTS: Final = (
    _StatePart(name=re.compile(r"(^|[_/.-])(lr|learning_rate)", re.IGNORECASE), cause=SCHEDULER),
    _StatePart(name=re.compile(r"scale", re.IGNORECASE), cause=SCALER),
)
_SAVED_PARTS: Final = (
    _StatePart(name=re.compile(r"running_mean|running_var|num_batches_tracked"), cause=BUFFERS),
    _StatePart(name=re.compile(r"ema|shadow|averaged", re.IGNORECASE), cause=AVERAGE),
)
_OPTIMIZER: Final = re.compile(r"optim|exp_avg|momentum_buffer|param_groups", re.IGNORECASE)


def likely_cause(comparison: Comparison, reference: Course, disturbed: Course, held: Sequence[str]) -> str | None:
    """Return the likely cause of a difference, a sentence; None if nothing differs.

    Args:
        comparison: how the runs differ.
        reference: the undisturbed run.
        disturbed: the run that met a fault.
        held: the names of the values in the newest file that the resumption found; empty if there was none that can be
            loaded.
    """
    metric = comparison.metric
    if comparison.differs_before_fault:
        return UNSEEDED
    if comparison.starts_over:
        return STARTS_OVER if metric is None else STEP_COUNTER
    if metric is None or is_evaluation(metric.name):
        return _cause_of_saved(comparison.saved)
    return _cause_at_step(metric.step, metrics_of(reference.before), disturbed, held)


def _cause_of_saved(saved: SavedComparison) -> str | None:
    """Return the likely cause if the metrics of the training are equal, and what is saved is not."""
    for part in _SAVED_PARTS:
        if any(part.name.search(difference.name) for difference in saved.differences):
            return part.cause
    return OTHER_STATE if saved.differences else None


def _cause_at_step(step: int, expected: Metrics, disturbed: Course, held: Sequence[str]) -> str:
    """Return the likely cause of the first difference of a training's metrics, which is at a step."""
    resumed = metrics_of(disturbed.after)
    steps = sorted({at for at, _ in expected})
    stride = min((second - first for first, second in pairwise(steps)), default=1)
    first_step = disturbed.first_step_after
    steps_before = training_steps(disturbed.before)
    skips_steps = first_step is not None and bool(steps_before) and first_step > steps_before[-1] + stride
    if skips_steps or _is_shifted(expected, resumed, stride):
        return STEP_COUNTER
    is_first_step = step == first_step
    lacks_optimizer = bool(held) and not any(_OPTIMIZER.search(name) for name in held)
    if lacks_optimizer and not is_first_step:
        # Before the learning rate, which is a part of that state.
        return OPTIMIZER_MISSING
    different_names = [
        name for (at, name), value in resumed.items() if at == step and expected.get((at, name), value) != value
    ]
    for part in _MEASURED_PARTS:
        if any(part.name.search(name) for name in different_names):
            return part.cause
    if not is_first_step:
        return OPTIMIZER_NOT_LOADED
    lacks_generators = bool(held) and not any(GENERATORS.search(name) for name in held)
    if lacks_generators:
        return f"{DATA_OR_RANDOM}{NO_GENERATORS}"
    return DATA_OR_RANDOM


def _is_shifted(expected: Metrics, resumed: Metrics, stride: int) -> bool:
    """Return whether the losses after the resumption are those of the neighbouring steps.

    Args:
        expected: the metrics of the undisturbed run.
        resumed: the metrics after the resumption.
        stride: the steps from one report to the next.
    """
    losses = {
        (step, name): value for (step, name), value in resumed.items() if "loss" in name and not is_evaluation(name)
    }
    for shift in (-stride, stride):
        neighbours = {
            (step, name): expected[step + shift, name] for step, name in losses if (step + shift, name) in expected
        }
        changes = len(set(neighbours.values())) > 1
        # Losses that do not change say nothing.
        if changes and all(losses[key] == value for key, value in neighbours.items()):
            return True
    return False
