"""A minute of random faults; benchmarks/soak.py takes half an hour."""

from __future__ import annotations

import random

from benchmarks.soak import Ended, Soak
from tests.slurm.play import Place, looks_at


def soaked(place: Place) -> list[Ended]:
    return Soak(place=place, seconds=60, every=12, dice=random.Random(4)).run()


@looks_at(soaked, apart=True)
def test_every_run_comes_out_well_after_a_minute_of_random_faults(played: list[Ended]) -> None:
    assert played
    assert [ended for ended in played if not ended.is_well] == []
