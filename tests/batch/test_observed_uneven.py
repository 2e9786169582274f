from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcddp.batch.observed import UnevenBatch, explain_steps
from hpcddp.batch.plan import plan_batch
from hpcddp.batch.refusals import PlanError

WHOLE = """\
Batch that this run really has
  seen             5,005 steps per epoch, from 1,281,167 samples on 3 ranks
  per device       uneven shares
  global batch     256 samples

Why
  - No equal batch per device makes them: with DistributedSampler and DataLoader n = 85 gives 5,025
    steps, and n = 86 gives 4,966.
  - ceil(1,281,167 / 256) is 5,005: a global batch that is shared as it is, as hpcddp does, in
    shares of 86, 85, 85.
"""


def uneven(steps: int, samples: int, world_size: int, asked_for: int | None = None) -> UnevenBatch:
    seen = explain_steps(steps=steps, samples=samples, world_size=world_size, asked_for=asked_for)
    assert isinstance(seen, UnevenBatch)
    return seen


def test_a_run_that_shares_its_batch_unevenly_is_recognised() -> None:
    seen = uneven(5005, 1_281_167, 3)
    assert seen.explain() == WHOLE
    document = seen.as_json()
    assert (document["global_batch_size"], document["per_device_batch_size"]) == (256, None)
    assert document["candidates"] == [{"per_device_batch_size": None, "global_batch_size": 256, "recipes": []}]


def test_a_batch_that_was_asked_for_is_confirmed_or_denied_in_uneven_shares_too() -> None:
    assert uneven(5005, 1_281_167, 3, 256).meant is None
    assert uneven(5005, 1_281_167, 3, 512).as_json()["meant_steps_per_epoch"] == 2503
    assert "A global batch of 512 is not what it has" in uneven(5005, 1_281_167, 3, 512).explain()


def test_several_uneven_batches_are_told_as_a_range() -> None:
    seen = uneven(4, 60, 12)
    assert seen.candidates == (13, 14, 15, 16, 17, 18, 19)
    assert seen.as_json()["global_batch_size"] is None
    assert "  global batch     13 to 19 samples\n" in seen.explain()
    assert "as hpcddp does." in seen.explain().replace("\n    ", " ")


@given(samples=st.integers(1, 3000), world_size=st.integers(2, 9), extra=st.integers(0, 200), drop=st.booleans())
def test_the_batch_of_every_plan_is_found(*, samples: int, world_size: int, extra: int, drop: bool) -> None:
    batch = world_size + extra
    try:
        plan = plan_batch(
            global_batch_size=batch, world_size=world_size, samples=samples, tail="drop" if drop else "keep"
        )
    except PlanError:
        return
    seen = explain_steps(steps=plan.steps_per_epoch or 0, samples=samples, world_size=world_size)
    if isinstance(seen, UnevenBatch):
        assert batch in (seen.candidates or ())


def test_too_many_uneven_batches_are_not_listed() -> None:
    seen = uneven(3, 64 * 10**9, 16 * 10**9)
    assert seen.as_json()["candidates"] is None
    assert "  global batch     16,000,000,001 to 31,999,999,999 samples\n" in seen.explain()


def test_fewer_samples_than_ranks_in_a_step_explain_nothing() -> None:
    with pytest.raises(PlanError, match=r"^3 steps per epoch cannot come from 10 samples on 20 ranks"):
        uneven(3, 10, 20)
