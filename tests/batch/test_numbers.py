"""The batch contract's numbers, as a program is told them."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hpcddp.batch.explain import explain
from hpcddp.batch.job import batch_variables, plan_job
from hpcddp.batch.plan import PlanError, plan_batch
from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.read import load_job
from hpcddp.jobfile.sweep import element_spec
from hpcddp.jobfile.write import dump_job, parse_resolved
from tests.messages import GoldenMessages


@given(size=st.integers(1, 50), world=st.integers(1, 50), steps=st.integers(1, 9))
def test_what_every_rank_is_told_makes_exactly_the_global_batch(size: int, world: int, steps: int) -> None:
    batch = plan_batch(global_batch_size=size * world * steps, world_size=world, samples=None, grad_accum_steps=steps)
    told = batch_variables(batch, learning_rate=0.1)
    assert told["HPCDDP_PER_DEVICE_BATCH_SIZE"] == str(size)
    assert int(told["HPCDDP_RANK_BATCH_SIZE"]) * world == int(told["HPCDDP_GLOBAL_BATCH_SIZE"])
    assert told["HPCDDP_GRAD_ACCUM_STEPS"] == str(steps)
    assert told["HPCDDP_LEARNING_RATE"] == "0.1"


def test_a_batch_that_one_number_cannot_say_is_refused_with_those_that_it_can(golden: GoldenMessages) -> None:
    batch = plan_batch(global_batch_size=33, world_size=2, samples=None, grad_accum_steps=2)
    with pytest.raises(PlanError) as caught:
        batch_variables(batch, learning_rate=None)
    message = golden.message(caught.value)
    assert message.startswith("batch.global_batch_size is 33, ")
    assert " 2 ranks x 2 micro-steps " in message
    assert "; write 32 or 36; only" in message


def test_a_batch_below_one_round_names_the_smallest_that_works() -> None:
    batch = plan_batch(global_batch_size=3, world_size=2, samples=None, grad_accum_steps=2)
    with pytest.raises(PlanError, match=r"write 4; only the built-in"):
        batch_variables(batch, learning_rate=None)


@given(size=st.integers(2, 60), world=st.integers(2, 6), cap=st.integers(1, 9))
def test_the_nearest_batches_that_a_command_can_have_are_named(size: int, world: int, cap: int) -> None:
    assume(size >= world)

    def can_have(size: int) -> bool:
        values = {"name": "a", "command": ["a"], "resources": {"tasks_per_node": world}}
        batch = {"global_batch_size": size, "max_per_device_batch_size": cap}
        try:
            plan_job(JobSpec.model_validate({**values, "batch": batch}), samples=None)
        except PlanError as error:
            raised.append(error)
            return False
        return True

    raised: list[PlanError] = []
    assume(not can_have(size))
    below, above = raised[0].below, raised[0].above
    assert above == next(filter(can_have, count(size + 1)))
    assert below == next(filter(can_have, range(size - 1, world - 1, -1)), None)


@pytest.mark.parametrize("way", ["command: [python, t.py]", "entrypoint: pkg.m:main"])
@pytest.mark.parametrize(
    ("section", "rate"),
    [("", None), ("learning_rate: {warmup_epochs: 1}", None), ("learning_rate: {base: 0.1}", 0.1)],
)
def test_a_job_without_training_has_only_a_learning_rate_that_is_written(
    tmp_path: Path, way: str, section: str, rate: float | None
) -> None:
    """Also after the job was written into a run directory, and in an element of a sweep."""
    path = tmp_path / "job.yaml"
    path.write_text(f"name: n\n{way}\nbatch: {{global_batch_size: 8}}\n{section}\n")
    spec = load_job(path).spec
    recorded = parse_resolved(dump_job(spec, environment_values=True))
    element = element_spec(spec, {"learning_rate.warmup_epochs": 2.0})
    assert recorded == spec
    for job in (spec, recorded, element):
        plan = plan_job(job, samples=None)
        assert (plan.learning_rate, plan.as_json()["base_learning_rate"]) == (rate, rate)
        assert ("learning rate unknown" in " ".join(explain(plan).split())) is (rate is None)


def test_an_unknown_learning_rate_is_not_told() -> None:
    batch = plan_batch(global_batch_size=4, world_size=2, samples=None)
    assert "HPCDDP_LEARNING_RATE" not in batch_variables(batch, learning_rate=None)
