"""The learning rate of each step: a function of the position in the training, never of the world size."""

from __future__ import annotations

import math

from hpcddp.spec.job import LearningRate


def learning_rate_at(spec_lr: LearningRate, *, step: int, steps_per_epoch: int, epochs: int) -> float:
    """Return the learning rate that an optimizer step uses.

    With t the step, T all steps and T_w the steps of the warm-up (both products, not rounded):

    - warm-up, t < T_w: ``base * min(1, (t+1) / T_w)`` (Goyal et al. 2017, section 2.2: gradual, per step);
    - ``constant``: ``base``;
    - ``cosine``: ``min + (base - min) * (1 + cos(pi * (t - T_w) / (T - T_w))) / 2`` (Loshchilov and Hutter 2017,
      equation 5);
    - ``step``: ``max(min, base * gamma^k)``, k the milestones (epochs) that have passed.

    Args:
        spec_lr: the job's ``learning_rate`` with its rule applied: ``ScaledRule.course``.
        step: zero-based optimizer step, counted from the beginning of the training; beyond its end the last rate stays.
        steps_per_epoch: S >= 1.
        epochs: epochs of the whole training, >= 1.

    Raises:
        ValueError: there is a rule left to apply.
    """
    if spec_lr.rule != "none":
        raise ValueError(f"learning_rate.rule is {spec_lr.rule}, and is applied before: ScaledRule.course")
    warmup_steps = spec_lr.warmup_epochs * steps_per_epoch
    if step < warmup_steps:
        return spec_lr.base * min(1.0, (step + 1) / warmup_steps)
    if spec_lr.schedule == "cosine":
        decay_steps = epochs * steps_per_epoch - warmup_steps
        progress = min(1.0, (step - warmup_steps) / decay_steps) if decay_steps > 0 else 1.0
        return spec_lr.min + (spec_lr.base - spec_lr.min) * (1 + math.cos(math.pi * progress)) / 2
    if spec_lr.schedule == "step":
        passed = sum(step >= milestone * steps_per_epoch for milestone in spec_lr.milestones)
        return max(spec_lr.min, spec_lr.base * spec_lr.gamma**passed)
    return spec_lr.base
