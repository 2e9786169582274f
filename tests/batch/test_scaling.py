from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcddp.batch.plan import PlanError
from hpcddp.batch.scaling import ScaledRule, scale, scaled_hyperparameters, scaling_of
from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.resources import Resources
from hpcddp.jobfile.sections import Batch, LearningRate, Optimizer, Train
from tests.messages import GoldenMessages


def scaled(
    batch: int,
    *,
    rule: Any = "sqrt",
    tuned: int | None = 256,
    ema: float | None = None,
    base: float = 0.1,
    **fields: Any,
) -> ScaledRule:
    rate = LearningRate(base=base, base_global_batch_size=tuned, rule=rule, **fields.pop("rate", {}))
    return scale(rate, Optimizer(**fields), ema_decay=ema, global_batch_size=batch)


def test_none_changes_nothing() -> None:
    found = scaled(4096, rule="none", name="adamw", ema=0.999)
    assert (found.kappa, found.learning_rate, found.betas, found.eps, found.ema_decay) == (
        16.0,
        0.1,
        (0.9, 0.999),
        1e-8,
        0.999,
    )


def test_linear_multiplies_the_rate_of_sgd_by_kappa_exactly() -> None:
    # 0.1 * 3 is 0.30000000000000004 in floating point.
    found = scaled(768, rule="linear", momentum=0.9, ema=0.99, rate={"schedule": "cosine", "min": 0.01})
    assert (found.kappa, found.learning_rate, found.minimum) == (3.0, 0.3, 0.03)
    assert (found.betas, found.eps, found.ema_decay) == (None, None, 0.99**3)


def test_sqrt_multiplies_the_rate_of_sgd_by_the_root() -> None:
    assert scaled(1024, rule="sqrt").learning_rate == 0.2
    assert scaled(512, rule="sqrt").learning_rate == pytest.approx(0.1 * math.sqrt(2), rel=1e-15)


def test_sqrt_scales_rate_betas_eps_and_average_of_adamw() -> None:
    found = scaled(1024, name="adamw", base=0.001, ema=0.9999)
    assert (found.learning_rate, found.betas, found.eps) == (0.002, (0.6, 0.996), 5e-9)
    assert found.ema_decay == 0.9999**4


def test_a_smaller_batch_scales_the_other_way() -> None:
    found = scaled(64, name="adamw", base=0.001)
    assert (found.kappa, found.learning_rate, found.betas, found.eps) == (0.25, 0.0005, (0.975, 0.99975), 2e-8)


def test_without_a_batch_that_base_was_tuned_for_kappa_is_one() -> None:
    found = scaled(4096, tuned=None, name="adamw", betas=(0.0, 0.99))
    assert (found.kappa, found.learning_rate, found.betas) == (1.0, 0.1, (0.0, 0.99))


def test_kappa_times_one_minus_beta_is_exact_and_refused_from_one_on(golden: GoldenMessages) -> None:
    # In floating point 10 * (1 - 0.9) is 0.9999999999999998.
    with pytest.raises(PlanError) as caught:
        scaled(2560, name="adamw")
    message = golden.message(caught.value)
    assert message.startswith("learning_rate.rule is sqrt, ")
    assert "10 * (1 - 0.9) = 1 " in message
    assert "train.optimizer.betas [0.9, 0.999], which must" in message
    assert "; write batch.global_batch_size 2559 or less, " in message
    assert message.endswith("betas closer to 1, or rule: none")
    betas = scaled(2559, name="adamw").betas
    assert betas is not None
    assert betas[0] == float(1 - Fraction(2559, 256) / 10) == 1 / 2560


def test_a_beta_of_zero_has_no_smaller_batch_to_go_to(golden: GoldenMessages) -> None:
    with pytest.raises(PlanError, match=r"; write betas closer to 1,") as caught:
        scaled(2, tuned=1, name="adamw", betas=(0.0, 0.999))
    assert "2 * (1 - 0.0) = 2 " in golden.message(caught.value)


def test_linear_is_refused_for_adamw(golden: GoldenMessages) -> None:
    with pytest.raises(PlanError) as caught:
        scaled(256, rule="linear", name="adamw")
    message = golden.message(caught.value)
    assert message.startswith("learning_rate.rule is linear, ")
    assert " adamw " in message
    assert message.endswith("; write sqrt, or none")


@pytest.mark.parametrize(("base", "batch", "word"), [(1e308, 2560, "infinity"), (5e-324, 16, "zero")])
def test_a_product_that_is_no_number_any_more_is_refused(
    base: float, batch: int, word: str, golden: GoldenMessages
) -> None:
    with pytest.raises(PlanError) as caught:
        scaled(batch, rule="linear", base=base)
    message = golden.message(caught.value)
    assert message.startswith(f"learning_rate.base is {base:g}, ")
    assert f" makes {word} of it; write a number nearer" in message
    assert message.endswith("or learning_rate.rule: none")


@pytest.mark.parametrize("nodes", [1, 2, 7])
def test_the_world_size_never_enters(nodes: int) -> None:
    spec = JobSpec(
        name="job",
        resources=Resources(nodes=nodes),
        batch=Batch(global_batch_size=512),
        learning_rate=LearningRate(base=0.1, base_global_batch_size=256, rule="linear"),
        train=Train(model="resnet18", dataset="digits"),
    )
    assert scaled_hyperparameters(spec).learning_rate == 0.2


def test_the_scaled_sections_have_no_rule_left_to_apply() -> None:
    rate = LearningRate(
        base=0.1, base_global_batch_size=64, rule="sqrt", warmup_epochs=2.0, schedule="cosine", min=0.01
    )
    optimizer = Optimizer(name="adamw", weight_decay=0.05)
    found = scale(rate, optimizer, ema_decay=None, global_batch_size=256)
    course, scaled_optimizer = found.course(rate), found.optimizer(optimizer)
    assert (course.base, course.min, course.warmup_epochs, course.rule) == (0.2, 0.02, 2.0, "none")
    assert (scaled_optimizer.betas, scaled_optimizer.eps, scaled_optimizer.weight_decay) == ((0.6, 0.996), 5e-9, 0.05)
    assert found.optimizer(Optimizer(momentum=0.9)).momentum == 0.9


def test_the_fitting_rule_is_told_beside_the_chosen_one() -> None:
    rate = LearningRate(base=0.1, base_global_batch_size=256)
    found = scaling_of(rate, Optimizer(name="adamw"), ema_decay=None, global_batch_size=1024).as_json()
    assert (found["base_learning_rate"], found["kappa"], found["rule"]) == (0.1, 4.0, "none")
    assert found["scaled"]["learning_rate"] == 0.1
    assert found["fitting"] == {
        "optimizer": "adamw",
        "rule": "sqrt",
        "learning_rate": 0.2,
        "min": 0.0,
        "betas": [0.6, 0.996],
        "eps": 5e-9,
        "ema_decay": None,
    }


def test_a_fitting_rule_that_does_not_hold_is_none() -> None:
    rate = LearningRate(base=0.1, base_global_batch_size=256)
    found = scaling_of(rate, Optimizer(name="adamw"), ema_decay=None, global_batch_size=25600).as_json()
    assert found["fitting"] is None


@given(
    batch=st.integers(1, 2**31 - 1),
    tuned=st.integers(1, 2**31 - 1),
    beta=st.floats(0, 1, exclude_max=True),
    ema=st.floats(0.5, 0.99999),
)
def test_scaled_constants_stay_in_their_ranges_or_are_refused(batch: int, tuned: int, beta: float, ema: float) -> None:
    kappa = Fraction(batch, tuned)
    if kappa != 1 and kappa * (1 - Fraction(repr(min(beta, 0.999)))) >= 1:
        with pytest.raises(PlanError, match=r"kappa \* \(1 - beta\)"):
            scaled(batch, tuned=tuned, name="adamw", betas=(beta, 0.999))
        return
    found = scaled(batch, tuned=tuned, name="adamw", betas=(beta, 0.999), ema=ema)
    assert found.betas is not None
    assert all(0 <= scaled_beta <= 1 for scaled_beta in found.betas)
    assert found.learning_rate > 0
    assert found.eps is not None
    assert found.eps > 0
    assert found.ema_decay is not None
    assert 0 <= found.ema_decay <= 1
