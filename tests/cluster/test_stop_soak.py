"""A minute of random faults; benchmarks/soak.py takes half an hour or more."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.soak import Soak, place_of_soak


@pytest.mark.long("a soak")
def test_every_run_comes_out_well_after_a_minute_of_random_faults(tmp_path: Path) -> None:
    with place_of_soak(tmp_path / "disk") as context:
        ended = Soak(context=context, seconds=60, every=12, dice=random.Random(4)).run()
    assert ended
    assert [one for one in ended if not one.is_well] == []
