from __future__ import annotations

import json
from typing import Any

import pytest

from hpcddp.batch.job import plan_job, plan_numbers
from hpcddp.batch.plan import PlanError, plan_batch
from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.resources import Resources
from hpcddp.jobfile.sections import Batch, LearningRate, Optimizer, Train
from tests.messages import GoldenMessages

KEYS = [
    "global_batch_size",
    "world_size",
    "grad_accum_steps",
    "per_rank_samples",
    "micro_batches",
    "steps_per_epoch",
    "tail_samples",
    "samples_per_epoch",
    "duplicated",
    "dropped",
    "imbalance",
    "learning_rate",
    "base_learning_rate",
    "kappa",
    "rule",
    "scaled",
    "fitting",
    "total_steps",
    "unit",
    "notes",
]


def job(*, batch: dict[str, Any] | None = None, train: dict[str, Any] | None = None, **sections: Any) -> JobSpec:
    return JobSpec(
        name="job",
        resources=Resources(nodes=2, gpus_per_node=3),
        batch=Batch(**{"global_batch_size": 256, **(batch or {})}),
        train=Train(**{"model": "resnet18", "dataset": "digits", "epochs": 90, **(train or {})}),
        **sections,
    )


def test_a_job_is_planned_with_its_world_size_epochs_and_rate() -> None:
    plan = plan_job(
        job(batch={"max_per_device_batch_size": 32}, learning_rate=LearningRate(base=0.4)), samples=1_281_167
    )
    document = plan.as_json()
    assert list(document) == KEYS
    assert json.loads(json.dumps(document)) == document
    assert document["per_rank_samples"] == [43, 43, 43, 43, 42, 42]
    assert document["micro_batches"] == [[22, 21]] * 4 + [[21, 21]] * 2
    assert (document["grad_accum_steps"], document["steps_per_epoch"], document["total_steps"]) == (2, 5005, 450_450)
    assert (document["learning_rate"], document["notes"]) == (0.4, [])


def test_every_field_of_the_batch_reaches_the_plan() -> None:
    plan = plan_job(job(batch={"grad_accum_steps": 3, "tail": "wrap"}), samples=1000)
    assert (plan.batch.grad_accum_steps, plan.batch.duplicated) == (3, 24)
    with pytest.raises(PlanError, match="write 252 or 258"):
        plan_job(job(batch={"split": "error"}), samples=1000)


def test_unknown_samples_are_null_with_the_note_that_says_why(golden: GoldenMessages) -> None:
    document = plan_job(job(), samples=None, notes=("The disk is away.",)).as_json()
    unknown = ["steps_per_epoch", "tail_samples", "samples_per_epoch", "duplicated", "dropped", "total_steps"]
    assert [document[key] for key in unknown] == [None] * 6
    assert document["notes"] == ["The disk is away."]
    (note,) = plan_job(job(), samples=None).notes
    assert golden.message(note).endswith("samples is unknown; give it with --samples.")


def test_numbers_alone_leave_null_what_was_not_given() -> None:
    batch = plan_batch(global_batch_size=256, world_size=3, samples=None)
    document = plan_numbers(batch, epochs=None, learning_rate=None).as_json()
    assert (document["learning_rate"], document["total_steps"], document["steps_per_epoch"]) == (None, None, None)
    assert document["notes"] == []


def test_numbers_that_are_all_given_need_no_note() -> None:
    batch = plan_batch(global_batch_size=256, world_size=3, samples=1_281_167)
    plan = plan_numbers(batch, epochs=90, learning_rate=0.1)
    assert (plan.total_steps, plan.notes) == (450_450, ())
    with pytest.raises(PlanError, match=r"^epochs is 0, .*; write 1 or"):
        plan_numbers(batch, epochs=0, learning_rate=0.1)


@pytest.mark.parametrize(("optimizer", "law", "rate"), [("sgd", "linear", 0.8), ("adamw", "sqrt", 0.282843)])
def test_a_base_tuned_for_another_batch_says_what_the_fitting_rule_would_give(
    optimizer: Any, law: str, rate: float, golden: GoldenMessages
) -> None:
    spec = job(
        batch={"global_batch_size": 2048},
        train={"optimizer": Optimizer(name=optimizer)},
        learning_rate=LearningRate(base=0.1, base_global_batch_size=256),
    )
    plan = plan_job(spec, samples=10_000)
    assert plan.learning_rate == 0.1
    (note,) = plan.notes
    assert golden.message(note).startswith("learning_rate.base 0.1 was tuned for")
    assert "256, and this one has 2048:" in note
    fitting = plan.as_json()["fitting"]
    assert (fitting["rule"], fitting["learning_rate"]) == (law, pytest.approx(rate, rel=1e-5))


def test_a_warm_up_as_long_as_the_training_is_noted(golden: GoldenMessages) -> None:
    plan = plan_job(job(train={"epochs": 3}, learning_rate=LearningRate(warmup_epochs=3.0)), samples=2560)
    (note,) = plan.notes
    assert golden.message(note).startswith("learning_rate.warmup_epochs is 3 and ")
    assert " 3 epochs: " in note


def test_a_loss_over_the_global_batch_is_planned_without_micro_steps(golden: GoldenMessages) -> None:
    loss = {"loss": "losses:clip", "loss_reduction": "global"}
    assert plan_job(job(train=loss), samples=1000).batch.grad_accum_steps == 1
    with pytest.raises(PlanError) as caught:
        plan_job(job(batch={"max_per_device_batch_size": 32}, train=loss), samples=1000)
    message = golden.message(caught.value)
    assert message.startswith("train.loss_reduction is global, and grad_accum_steps is 2:")
    assert "; use more ranks, allow more samples" in message
    assert message.endswith("(hpcddp.accumulate_additive)")
