from __future__ import annotations

import pytest

from hpcddp.batch.job import plan_job, plan_numbers
from hpcddp.batch.noise_scale import MeasuredNoise, larger_batch_pays
from hpcddp.batch.plan import plan_batch
from hpcddp.jobfile.job import JobSpec
from tests.messages import GoldenMessages

BEFORE = MeasuredNoise(samples=500.0, source="run 7")


def job(**batch: object) -> JobSpec:
    return JobSpec.model_validate(
        {
            "name": "job",
            "resources": {"tasks_per_node": 2},
            "batch": {"global_batch_size": 100, **batch},
            "train": {"model": "resnet18", "dataset": "digits", "noise_scale": not batch},
        }
    )


def test_a_training_that_will_measure_it_says_how_to_read_it(golden: GoldenMessages) -> None:
    plan = plan_job(job(), samples=1000)
    assert (plan.as_json()["noise_scale"], plan.as_json()["larger_batch_pays"]) == (None, None)
    (note,) = (note for note in plan.notes if "noise_scale in result.json" in note)
    assert "of 100 a larger one still saves" in golden.message(note)


@pytest.mark.parametrize(("scale", "pays"), [(100.5, True), (100.0, False), (3.0, False)])
def test_what_was_measured_says_whether_a_larger_batch_pays(scale: float, pays: bool, golden: GoldenMessages) -> None:  # noqa: FBT001
    plan = plan_job(job(), samples=1000, noise=MeasuredNoise(samples=scale, source="run 7"))
    assert (plan.as_json()["noise_scale"], plan.as_json()["larger_batch_pays"]) == (scale, pays)
    assert larger_batch_pays(scale, 100) is pays
    (note,) = (note for note in plan.notes if "gradient noise scale" in note)
    assert f"noise scale is {scale:.4g} samples, measured by run 7," in golden.message(note)
    assert "the global batch is 100;" in note
    assert f"a larger batch would {'still' if pays else 'hardly'} pay" in note


def test_twice_the_batch_saves_the_steps_of_the_formula(golden: GoldenMessages) -> None:
    # 1 + 500/200 against 1 + 500/100 times the fewest steps: 3.5 / 6.
    plan = plan_numbers(
        plan_batch(global_batch_size=100, world_size=2, samples=1000), epochs=1, learning_rate=0.1, noise=BEFORE
    )
    assert "would need 42% fewer steps" in golden.message(plan.notes[0])


def test_nothing_is_said_where_nothing_is_known_nor_of_groups(golden: GoldenMessages) -> None:
    assert not any("noise" in note for note in plan_job(job(tail="keep"), samples=1000).notes)
    plan = plan_job(job(unit="group", group="a.b:c"), samples=1000, noise=BEFORE)
    assert (plan.as_json()["noise_scale"], plan.as_json()["larger_batch_pays"]) == (None, None)
    (note,) = (note for note in plan.notes if "noise scale" in note)
    assert golden.message(note).endswith("cannot be compared.")
