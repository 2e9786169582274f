"""Scale a job's constants for another global batch than they were tuned for (batch contract, section 3).

Only the global batch matters, not the world size: the gradient of a step is the mean over the samples of its global
batch, however many ranks compute it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from hpcddp.batch.plan import PlanError
from hpcddp.jobfile.batch_rules import ADAM_FAMILY, as_written, batch_ratio, scaling_findings
from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.sections import LearningRate, Optimizer, Rule


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledRule:
    """The constants of a training, after scaling.

    Args:
        rule: the rule that was applied.
        kappa: B / B0, the global batch over the one that the constants were tuned for; 1 where none is given.
        learning_rate: the rate after the warm-up and before any decay.
        minimum: the lower bound of the schedule.
        betas: of the Adam family; None for SGD, or where the optimizer is unknown.
        eps: likewise.
        ema_decay: decay of averaged weights per step; None where there is no average.
    """

    rule: Rule
    kappa: float
    learning_rate: float
    minimum: float = 0.0
    betas: tuple[float, float] | None = None
    eps: float | None = None
    ema_decay: float | None = None

    def course(self, rate: LearningRate) -> LearningRate:
        """Return the job's learning rate for its own batch: scaled, with no rule left to apply."""
        return rate.model_copy(
            update={"base": self.learning_rate, "min": self.minimum, "rule": "none", "base_global_batch_size": None}
        )

    def optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return the job's optimizer with its constants scaled."""
        if self.betas is None:
            return optimizer
        return optimizer.model_copy(update={"betas": self.betas, "eps": self.eps})

    def as_json(self) -> dict[str, Any]:
        """Return the constants; None where the training has no such constant."""
        return {
            "learning_rate": self.learning_rate,
            "min": self.minimum,
            "betas": None if self.betas is None else list(self.betas),
            "eps": self.eps,
            "ema_decay": self.ema_decay,
        }


def scaled_hyperparameters(spec: JobSpec) -> ScaledRule:
    """Return the scaled constants of a job; see ``scale``.

    Raises:
        PlanError: the rule does not hold for the optimizer or its betas.
    """
    return scaling_of_job(spec).scaled


def scale(
    rate: LearningRate, optimizer: Optimizer | None, *, ema_decay: float | None, global_batch_size: int
) -> ScaledRule:
    """Return the constants for a global batch B, from those that were tuned for B0; kappa = B / B0.

    - ``none``: all as they are.
    - ``linear``: learning rate times kappa (Goyal et al. 2017, section 2.1); SGD.
    - ``sqrt``: learning rate times sqrt(kappa); for the Adam family also beta -> 1 - kappa (1 - beta) and
      eps -> eps / sqrt(kappa) (Malladi et al. 2022, definition 4.3).
    - Averaged weights under every rule but ``none``: decay -> decay^kappa (Busbridge et al. 2023, definition 1.2).

    kappa (1 - beta) is computed exactly, from the decimals as written. The warm-up and the schedule count epochs, so
    that they need no scaling; ``min`` scales with ``base``. torch's SGD does not include the learning rate in its
    momentum buffer, which needs no correction (Goyal et al. 2017, remark 2).

    Args:
        rate: the job's ``learning_rate``: rule, base and the batch that it was tuned for.
        optimizer: the job's ``train.optimizer``; None = unknown.
        ema_decay: decay of averaged weights per step; None where there is no average.
        global_batch_size: B >= 1.

    Raises:
        PlanError: the rule does not hold for the optimizer or its betas, or a result overflows or underflows.
    """
    for key, sentence in scaling_findings(rate, optimizer, global_batch_size):
        raise PlanError(f"{key} {sentence}", key=key)
    kappa = batch_ratio(rate, global_batch_size)
    learning_rate = rate.base
    minimum = rate.min
    betas = None
    eps = None
    if optimizer is not None and optimizer.name in ADAM_FAMILY:
        betas = optimizer.betas
        eps = optimizer.eps
    if rate.rule != "none" and kappa != 1:
        factor = kappa
        if rate.rule == "sqrt":
            factor = Fraction(math.sqrt(kappa))
        learning_rate = _times("learning_rate.base", learning_rate, factor)
        minimum = _times("learning_rate.min", minimum, factor)
        if betas is not None:
            betas = (_faster(betas[0], kappa), _faster(betas[1], kappa))
        if eps is not None:
            eps = _times("train.optimizer.eps", eps, 1 / factor)
        if ema_decay is not None:
            ema_decay = ema_decay ** float(kappa)
    return ScaledRule(
        rule=rate.rule,
        kappa=float(kappa),
        learning_rate=learning_rate,
        minimum=minimum,
        betas=betas,
        eps=eps,
        ema_decay=ema_decay,
    )


def _times(key: str, number: float, factor: Fraction) -> float:
    """Return the product, rounded once; refuse one that is infinite, or zero though the number is not."""
    try:
        product = float(as_written(number) * factor)
    except OverflowError:
        product = math.inf
    if math.isinf(product):
        outcome = "infinity"
    elif product == 0 and number != 0:
        outcome = "zero"
    else:
        return product
    raise PlanError(
        f"{key} is {number:g}, and its rule makes {outcome} of it; write a number nearer "
        "to 1, or learning_rate.rule: none",
        key=key,
    )


def _faster(beta: float, kappa: Fraction) -> float:
    """Return ``1 - kappa (1 - beta)``, which keeps the decay per sample."""
    return float(1 - kappa * (1 - as_written(beta)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """The constants scaled by the chosen rule, and by the rule from the literature for the optimizer.

    Args:
        base: the rate as stated, for the batch that it was tuned for.
        tuned_for: B0, that batch; None = not given, so that kappa is 1.
        scaled: the constants by the chosen rule.
        optimizer: the optimizer's name; None = unknown.
        fitting: the constants by the rule for the optimizer; None = unknown, or that rule does not hold.
    """

    base: float
    tuned_for: int | None
    scaled: ScaledRule
    optimizer: str | None = None
    fitting: ScaledRule | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the keys of ``hpcddp plan --json``."""
        fitting = None
        if self.fitting is not None:
            fitting = {"optimizer": self.optimizer, "rule": self.fitting.rule, **self.fitting.as_json()}
        return {
            "base_learning_rate": self.base,
            "kappa": self.scaled.kappa,
            "rule": self.scaled.rule,
            "scaled": self.scaled.as_json(),
            "fitting": fitting,
        }


def scaling_of_job(spec: JobSpec) -> Scaling:
    """Return the scaled constants of a job; see ``scaling_of``.

    Raises:
        PlanError: the rule does not hold for the optimizer or its betas.
    """
    optimizer = None
    ema_decay = None
    if spec.train is not None:
        optimizer = spec.train.optimizer
        ema_decay = spec.train.ema_decay
    return scaling_of(spec.learning_rate, optimizer, ema_decay=ema_decay, global_batch_size=spec.global_batch_size)


def scaling_of(
    rate: LearningRate, optimizer: Optimizer | None, *, ema_decay: float | None, global_batch_size: int
) -> Scaling:
    """Return the constants scaled by the chosen rule and by the rule for the optimizer; arguments as for ``scale``.

    Raises:
        PlanError: the chosen rule does not hold.
    """
    scaled = scale(rate, optimizer, ema_decay=ema_decay, global_batch_size=global_batch_size)
    scaling = Scaling(base=rate.base, tuned_for=rate.base_global_batch_size, scaled=scaled)
    if optimizer is None:
        return scaling
    # The rule from the literature; it need not fit a given model.
    rule: Rule = "sqrt" if optimizer.name in ADAM_FAMILY else "linear"
    fitted = rate.model_copy(update={"rule": rule})
    try:
        fitting = scale(fitted, optimizer, ema_decay=ema_decay, global_batch_size=global_batch_size)
    except PlanError:
        return replace(scaling, optimizer=optimizer.name)
    return replace(scaling, optimizer=optimizer.name, fitting=fitting)


def learning_rate_at(spec_lr: LearningRate, *, step: float, steps_per_epoch: int, epochs: int) -> float:
    """Return the learning rate that an optimizer step uses.

    With t the step, T all steps and T_w the steps of the warm-up (both products, not rounded):

    - warm-up, t < T_w: ``base * min(1, (t+1) / T_w)`` (Goyal et al. 2017, section 2.2: gradual, per step);
    - ``constant``: ``base``;
    - ``cosine``: ``min + (base - min) * (1 + cos(pi * (t - T_w) / (T - T_w))) / 2`` (Loshchilov and Hutter 2017,
      equation 5);
    - ``step``: ``max(min, base * gamma^k)``, k the milestones (epochs) that have passed.

    Args:
        spec_lr: the job's ``learning_rate`` with its rule applied: ``ScaledRule.course``.
        step: zero-based optimizer step since the beginning of the training; after its end the last rate stays. A
            fraction where batches of another size came before: ``Steps.schedule_step``.
        steps_per_epoch: S >= 1.
        epochs: epochs of the whole training, >= 1.

    Raises:
        ValueError: the rule was not applied.
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
        milestones_passed = 0
        for milestone in spec_lr.milestones:
            if step >= milestone * steps_per_epoch:
                milestones_passed += 1
        return max(spec_lr.min, spec_lr.base * spec_lr.gamma**milestones_passed)
    return spec_lr.base
