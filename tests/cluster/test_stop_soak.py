"""A minute of random faults; benchmarks/soak.py takes half an hour."""

from __future__ import annotations

import random

from benchmarks.soak import Ended, Soak
from tests.cluster.scenarios import ScenarioContext, after_scenario


def soaked(context: ScenarioContext) -> list[Ended]:
    return Soak(context=context, seconds=60, every=12, dice=random.Random(4)).run()


@after_scenario(soaked, own_slurm=True)
def test_every_run_comes_out_well_after_a_minute_of_random_faults(scenario_result: list[Ended]) -> None:
    assert scenario_result
    assert [ended for ended in scenario_result if not ended.is_well] == []
