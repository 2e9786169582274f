from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcddp.batch.observed import ObservedBatch, explain_steps
from hpcddp.batch.plan import plan_batch
from hpcddp.batch.refusals import PlanError
from tests.messages import GoldenMessages

IMAGENET = 1_281_167

WHOLE = """\
Actual batch of this run
  seen             5,025 steps per epoch, from 1,281,167 samples on 3 ranks
  per device       85 samples
  global batch     255 samples (world size x per device)

Why
  - DistributedSampler gives each rank ceil(N / W) = 427,056 samples; DataLoader makes ceil(427,056
    / n) steps of n, which is 5,025 for n = 85 alone.
  - DistributedSampler(drop_last=True) gives each rank floor(N / W) = 427,055 samples; DataLoader
    makes ceil(427,055 / n) steps of n, which is 5,025 for n = 85 alone.
  - A global batch of 256 is not what it has (int(256 / 3) is 85): with 256 an epoch would be
    ceil(1,281,167 / 256) = 5,005 steps.
  - Steps are batches of the loader. Where a run accumulates and counts optimizer steps, multiply
    them by its micro-steps first; its global batch is as many times larger.
"""


def found(steps: int, samples: int, world_size: int, intended_batch: int | None = None) -> ObservedBatch:
    seen = explain_steps(steps=steps, samples=samples, world_size=world_size, intended_batch=intended_batch)
    assert not seen.uneven
    return seen


@pytest.mark.parametrize(
    ("steps", "world_size", "size", "meant"), [(5025, 3, 85, 256), (2513, 6, 85, 512), (5005, 4, 64, None)]
)
def test_the_batch_of_an_imagenet_run_is_recovered(steps: int, world_size: int, size: int, meant: int | None) -> None:
    document = found(steps, IMAGENET, world_size).as_json()
    (candidate,) = document["candidates"]
    for answer in (document, candidate):
        assert answer["per_device_batch_size"] == size
        assert answer["global_batch_size"] == world_size * size
    assert document["meant_global_batch_size"] == meant


def test_the_whole_text() -> None:
    assert found(5025, IMAGENET, 3).explain() == WHOLE


def test_all_candidates_are_told_with_the_rounding_that_makes_them() -> None:
    document = found(10, 95, 1).as_json()
    assert document["candidates"] == [
        {"per_device_batch_size": 9, "global_batch_size": 9, "recipes": [["keep", "drop"]]},
        {"per_device_batch_size": 10, "global_batch_size": 10, "recipes": [["keep", "keep"]]},
    ]
    assert (document["per_device_batch_size"], document["global_batch_size"]) == (None, None)
    assert "  per device       9 or 10 samples\n" in found(10, 95, 1).explain()


def test_many_candidates_are_told_as_a_range() -> None:
    text = found(3, 1000, 2).explain()
    assert "  per device       126 to 249 samples\n" in text
    assert "  global batch     252 to 498 samples, in" in text
    assert "in steps of 2 (" in text
    assert "3 for n = 167 to 249" in text


def test_one_step_has_no_largest_batch() -> None:
    seen = found(1, 10, 2)
    assert "  seen             1 step per epoch, from 10 samples on 2 ranks\n" in seen.explain()
    assert "  per device       3 samples or more\n" in seen.explain()
    assert "1 for every n from 5 on" in seen.explain()
    assert json.loads(json.dumps(seen.as_json()))["candidates"] is None


def test_a_batch_that_was_asked_for_is_confirmed_or_denied() -> None:
    assert found(5025, IMAGENET, 3, 255).missed_batch is None
    assert found(5025, IMAGENET, 3, 300).missed_batch == 300
    assert "A global batch of 300 is not " in found(5025, IMAGENET, 3, 300).explain()
    assert found(1, 10, 2, 64).missed_batch is None


@pytest.mark.parametrize(
    ("steps", "samples", "world_size", "facts"),
    [
        (
            5025,
            100,
            3,
            ("5,025 steps per epoch ", "100 samples on 3 ranks: each rank has 34,", "the fewest, makes 34 steps;"),
        ),
        (
            7,
            10,
            1,
            ("7 steps per epoch ", "10 samples on 1 rank: each rank has 10,", "makes 10 and 2 make 5 steps;"),
        ),
    ],
)
def test_numbers_that_cannot_be_are_refused(
    steps: int, samples: int, world_size: int, facts: tuple[str, ...], golden: GoldenMessages
) -> None:
    with pytest.raises(PlanError) as caught:
        found(steps, samples, world_size)
    message = golden.message(caught.value)
    assert [fact for fact in facts if fact not in message] == []
    assert message.endswith(" multiply its optimizer steps by the micro-steps")


def test_no_steps_at_all_are_refused() -> None:
    with pytest.raises(PlanError, match=r"^steps is 0, .*; write 1 or"):
        found(0, 10, 1)


def torch_steps(samples: int, world_size: int, size: int, *, drop_sampler: bool, drop_loader: bool) -> int:
    """Return the length of torch's loader, written as torch does (DistributedSampler, BatchSampler.__len__)."""
    if drop_sampler and samples % world_size:
        share = math.ceil((samples - world_size) / world_size)
    else:
        share = math.ceil(samples / world_size)
    return share // size if drop_loader else (share + size - 1) // size


@given(
    samples=st.integers(1, 5000),
    world_size=st.integers(1, 9),
    size=st.integers(1, 300),
    drops=st.tuples(st.booleans(), st.booleans()),
)
def test_the_batch_of_every_torch_loader_is_among_the_candidates(
    samples: int, world_size: int, size: int, drops: tuple[bool, bool]
) -> None:
    steps = torch_steps(samples, world_size, size, drop_sampler=drops[0], drop_loader=drops[1])
    if steps == 0:
        return
    seen = found(steps, samples, world_size)
    assert any(recipe.covers(size) for recipe in seen.roundings)
    for candidate in (seen.candidates or ())[:20]:
        assert steps in {
            torch_steps(samples, world_size, candidate, drop_sampler=sampler, drop_loader=loader)
            for sampler in (False, True)
            for loader in (False, True)
        }


WHOLE_UNEVEN = """\
Actual batch of this run
  seen             5,005 steps per epoch, from 1,281,167 samples on 3 ranks
  per device       uneven shares
  global batch     256 samples

Why
  - No equal batch per device makes them: with DistributedSampler and DataLoader n = 85 gives 5,025
    steps, and n = 86 gives 4,966.
  - ceil(1,281,167 / 256) is 5,005: a global batch that is split without rounding, as hpcddp does,
    in shares of 86, 85, 85.
"""


def uneven(steps: int, samples: int, world_size: int, intended_batch: int | None = None) -> ObservedBatch:
    seen = explain_steps(steps=steps, samples=samples, world_size=world_size, intended_batch=intended_batch)
    assert seen.uneven
    return seen


def test_a_run_that_shares_its_batch_unevenly_is_recognised() -> None:
    seen = uneven(5005, 1_281_167, 3)
    assert seen.explain() == WHOLE_UNEVEN
    document = seen.as_json()
    assert (document["global_batch_size"], document["per_device_batch_size"]) == (256, None)
    assert document["candidates"] == [{"per_device_batch_size": None, "global_batch_size": 256, "recipes": []}]


def test_a_batch_that_was_asked_for_is_confirmed_or_denied_in_uneven_shares_too() -> None:
    assert uneven(5005, 1_281_167, 3, 256).missed_batch is None
    assert uneven(5005, 1_281_167, 3, 512).as_json()["meant_steps_per_epoch"] == 2503
    assert "A global batch of 512 is not " in uneven(5005, 1_281_167, 3, 512).explain()


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
    if seen.uneven:
        assert batch in (seen.candidates or ())


def test_too_many_uneven_batches_are_not_listed() -> None:
    seen = uneven(3, 64 * 10**9, 16 * 10**9)
    assert seen.as_json()["candidates"] is None
    assert "  global batch     16,000,000,001 to 31,999,999,999 samples\n" in seen.explain()


def test_fewer_samples_than_ranks_in_a_step_explain_nothing(golden: GoldenMessages) -> None:
    with pytest.raises(PlanError, match=r"^3 steps per epoch") as caught:
        uneven(3, 10, 20)
    assert "10 samples on 20 ranks" in golden.message(caught.value)
