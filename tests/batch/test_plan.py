from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcddp.batch.plan import BatchPlan, PlanError, plan_batch, refuse_single_over_ranks, refuse_single_sample
from hpcddp.jobfile.sections import Tail
from tests.messages import GoldenMessages

TAILS: tuple[Tail, ...] = ("keep", "drop", "wrap")


@st.composite
def plans(draw: st.DrawFn) -> BatchPlan:
    world = draw(st.integers(1, 40))
    batch = draw(st.integers(world, 400))
    tail = draw(st.sampled_from(TAILS))
    return plan_batch(
        global_batch_size=batch,
        world_size=world,
        samples=draw(st.integers(batch if tail == "drop" else 1, 3000)),
        max_per_device_batch_size=draw(st.none() | st.integers(1, 64)),
        tail=tail,
    )


def refusal(**arguments: Any) -> str:
    with pytest.raises(PlanError) as caught:
        plan_batch(**{"samples": None, **arguments})
    assert caught.value.exit_code == 2
    return caught.value.message


@pytest.mark.parametrize(
    ("batch", "world", "cap", "shares", "steps"),
    [
        (256, 3, 32, (86, 85, 85), 3),
        (256, 6, 32, (43,) * 4 + (42,) * 2, 2),
        (1000, 7, 64, (143,) * 6 + (142,), 3),
        (256, 4, None, (64,) * 4, 1),
        (7, 7, 1, (1,) * 7, 1),
    ],
)
def test_worked_splits_come_out(batch: int, world: int, cap: int | None, shares: tuple[int, ...], steps: int) -> None:
    plan = plan_batch(global_batch_size=batch, world_size=world, samples=None, max_per_device_batch_size=cap)
    assert plan.per_rank_samples == shares
    assert plan.grad_accum_steps == steps


def test_the_imagenet_example_has_these_steps_and_this_tail() -> None:
    plan = plan_batch(global_batch_size=256, world_size=3, samples=1_281_167, max_per_device_batch_size=32)
    assert plan.micro_batches == ((29, 29, 28), (29, 28, 28), (29, 28, 28))
    assert (plan.steps_per_epoch, plan.tail_samples, plan.samples_per_epoch) == (5005, 143, 1_281_167)
    assert (plan.duplicated, plan.dropped) == (0, 0)
    assert plan.imbalance == 2 / 256


@given(plan=plans())
def test_every_share_adds_up_and_fits(plan: BatchPlan) -> None:
    for _, batch in plan.distinct_batches():
        share = plan.share(batch)
        ranks = [sum(micro) for micro in share]
        assert sum(ranks) == batch
        assert len(share) == plan.world_size
        assert max(ranks) - min(ranks) <= 1
        assert all(len(micro) == plan.grad_accum_steps and max(micro) - min(micro) <= 1 for micro in share)
        assert all(size <= (plan.max_per_device_batch_size or batch) for micro in share for size in micro)
        assert plan.micro_batch_sizes(batch) == {size for micro in share for size in micro}
    assert min(plan.per_rank_samples) >= 1


@given(plan=plans())
def test_accumulation_is_as_small_as_the_cap_allows(plan: BatchPlan) -> None:
    cap = plan.max_per_device_batch_size
    largest = max(plan.per_rank_samples)
    if cap is None:
        assert plan.grad_accum_steps == 1
    else:
        assert (plan.grad_accum_steps - 1) * cap < largest <= plan.grad_accum_steps * cap


@given(plan=plans())
def test_the_steps_of_an_epoch_add_up_to_its_samples(plan: BatchPlan) -> None:
    steps, samples = plan.steps_per_epoch, plan.samples
    assert steps is not None
    assert samples is not None
    sizes = [plan.batch_size(step) for step in range(steps)]
    assert sizes[-1] == plan.tail_samples
    assert sum(sizes) == plan.samples_per_epoch
    assert plan.samples_per_epoch == samples + (plan.duplicated or 0) - (plan.dropped or 0)
    assert {size: sizes.index(size) for size in sizes} == {size: step for step, size in plan.distinct_batches()}
    if plan.tail != "keep":
        assert set(sizes) == {plan.global_batch_size}


@given(plan=plans())
def test_world_size_and_cap_do_not_move_the_steps(plan: BatchPlan) -> None:
    alone = plan_batch(global_batch_size=plan.global_batch_size, world_size=1, samples=plan.samples, tail=plan.tail)
    assert list(alone.distinct_batches()) == list(plan.distinct_batches())
    assert alone.steps_per_epoch == plan.steps_per_epoch


@pytest.mark.parametrize(
    ("tail", "samples", "steps", "last", "duplicated", "dropped"),
    [
        ("keep", 100, 4, 4, 0, 0),
        ("keep", 96, 3, 32, 0, 0),
        ("keep", 5, 1, 5, 0, 0),
        ("drop", 100, 3, 32, 0, 4),
        ("wrap", 100, 4, 32, 28, 0),
        ("wrap", 5, 1, 32, 27, 0),
    ],
)
def test_each_tail_counts_repeats_and_leavings(
    tail: Any, samples: int, steps: int, last: int, duplicated: int, dropped: int
) -> None:
    plan = plan_batch(global_batch_size=32, world_size=2, samples=samples, tail=tail)
    assert (plan.steps_per_epoch, plan.tail_samples) == (steps, last)
    assert (plan.duplicated, plan.dropped) == (duplicated, dropped)


def test_without_samples_the_epoch_is_unknown_and_the_split_is_not() -> None:
    plan = plan_batch(global_batch_size=32, world_size=2, samples=None)
    unknown = (plan.steps_per_epoch, plan.tail_samples, plan.samples_per_epoch, plan.duplicated, plan.dropped)
    assert unknown == (None,) * 5
    assert plan.batch_size(10**9) == 32
    assert plan.per_rank_samples == (16, 16)


def test_more_micro_batches_than_anybody_has_are_refused(golden: GoldenMessages) -> None:
    with pytest.raises(PlanError) as caught:
        plan_batch(global_batch_size=10**9, world_size=1000, samples=None, max_per_device_batch_size=100)
    message = golden.message(caught.value)
    assert "1000 ranks x 10,000 micro-steps" in message.replace("1,000 ranks", "1000 ranks")
    assert "more samples per device" in message


def test_accumulation_by_hand_is_kept() -> None:
    plan = plan_batch(global_batch_size=64, world_size=2, samples=None, grad_accum_steps=4, max_per_device_batch_size=8)
    assert plan.micro_batches == ((8, 8, 8, 8),) * 2


@pytest.mark.parametrize("step", [-1, 4])
def test_a_step_outside_the_epoch_is_refused(step: int) -> None:
    plan = plan_batch(global_batch_size=32, world_size=2, samples=100)
    with pytest.raises(ValueError, match=rf"step of an epoch is 0\.\.3, not {step}"):
        plan.batch_size(step)


def test_a_share_of_a_rank_or_batch_that_is_not_there_is_refused() -> None:
    plan = plan_batch(global_batch_size=32, world_size=2, samples=None)
    with pytest.raises(ValueError, match=r"a rank is 0\.\.1, not 2"):
        plan.rank_share(32, 2)
    with pytest.raises(ValueError, match=r"global batch has 0\.\.32 samples, not 33"):
        plan.rank_share(33, 0)


def test_fewer_samples_than_ranks_names_a_batch_and_a_world_size_that_work(golden: GoldenMessages) -> None:
    message = golden.message(refusal(global_batch_size=2, world_size=3))
    assert message.startswith("global_batch_size is 2, fewer")
    assert "the 3 ranks" in message
    assert "write 3 or more," in message
    assert message.endswith("ask for at most 2 ranks")
    assert plan_batch(global_batch_size=3, world_size=3, samples=None).per_rank_samples == (1, 1, 1)
    assert plan_batch(global_batch_size=2, world_size=2, samples=None).per_rank_samples == (1, 1)


def test_uneven_split_names_the_nearest_sizes_that_work(golden: GoldenMessages) -> None:
    message = golden.message(refusal(global_batch_size=256, world_size=6, split="error"))
    assert message.startswith("global_batch_size is 256, which 6 ranks ")
    assert "write 252 or 258, or split 'exact'" in message
    assert plan_batch(global_batch_size=252, world_size=6, samples=None, split="error").imbalance == 0


def test_accumulation_by_hand_that_breaks_the_cap_names_what_fits(golden: GoldenMessages) -> None:
    numbers = {"global_batch_size": 256, "world_size": 3, "max_per_device_batch_size": 32, "grad_accum_steps": 2}
    message = golden.message(refusal(**numbers))
    assert message.startswith("grad_accum_steps is 2, ")
    assert "micro-batches of 43 samples" in message
    assert "86, and max_per_device_batch_size allows 32;" in message
    assert "write grad_accum_steps 3 or more, leave it" in message
    assert message.endswith("or allow 43 samples")


def test_dropping_the_only_batch_is_refused(golden: GoldenMessages) -> None:
    message = golden.message(refusal(global_batch_size=32, world_size=2, samples=31, tail="drop"))
    assert message.startswith("tail is 'drop' and ")
    assert "31 samples, fewer than one global batch" in message
    assert "; write global_batch_size 31 or less, " in message
    assert message.endswith(", or tail 'keep' or 'wrap'")


@pytest.mark.parametrize(
    "name", ["global_batch_size", "world_size", "samples", "max_per_device_batch_size", "grad_accum_steps"]
)
@pytest.mark.parametrize("value", [0, -3])
def test_numbers_below_one_are_refused_by_name(name: str, value: int, golden: GoldenMessages) -> None:
    message = golden.message(refusal(**{"global_batch_size": 8, "world_size": 2, name: value}))
    assert message.startswith(f"{name} is {value}, ")
    assert message.endswith("; write 1 or more")


def test_a_single_sample_in_the_tail_names_the_step_and_the_ways_out(golden: GoldenMessages) -> None:
    plan = plan_batch(global_batch_size=32, world_size=3, samples=1029)
    with pytest.raises(PlanError) as caught:
        refuse_single_sample(plan)
    message = golden.message(caught.value)
    assert message.startswith("step 32 of every epoch has 5 ")
    assert "rank 2 one sample in micro-step 0," in message
    assert "use tail 'drop' or global_batch_size 33 or " in message
    assert " or train.batch_norm sync or " in message


def test_a_single_sample_in_every_step_is_found_before_the_tail(golden: GoldenMessages) -> None:
    plan = plan_batch(global_batch_size=8, world_size=3, samples=1000, max_per_device_batch_size=2)
    with pytest.raises(PlanError, match=r"^step 0 of every epoch has 8 ") as caught:
        refuse_single_sample(plan)
    assert "rank 0 one sample in micro-step 1," in golden.message(caught.value)


@given(plan=plans())
def test_a_single_sample_is_refused_exactly_when_some_micro_batch_has_one(plan: BatchPlan) -> None:
    singles = [
        (step, rank, micro_step)
        for step in range(plan.steps_per_epoch or 0)
        for rank, micro in enumerate(plan.share(plan.batch_size(step)))
        for micro_step, size in enumerate(micro)
        if size == 1
    ]
    if not singles:
        refuse_single_sample(plan)
        return
    with pytest.raises(PlanError) as caught:
        refuse_single_sample(plan)
    assert (caught.value.step, caught.value.rank, caught.value.micro_step) == singles[0]


@given(plan=plans())
def test_every_proposed_way_out_of_a_single_sample_works(plan: BatchPlan) -> None:
    try:
        refuse_single_sample(plan)
    except PlanError as error:
        *ways, _ = error.message.rpartition("; use ")[2].split(" or ")
    else:
        return
    numbers: dict[str, Any] = {
        "global_batch_size": plan.global_batch_size,
        "world_size": plan.world_size,
        "samples": plan.samples,
        "max_per_device_batch_size": plan.max_per_device_batch_size,
        "tail": plan.tail,
    }
    for way in ways:
        if way == "train.batch_norm sync":
            refuse_single_over_ranks(plan)
            continue
        words = way.split()
        changed: dict[str, Any] = {"tail": "drop"} if words[0] == "tail" else {}
        changed |= {"global_batch_size": int(words[1])} if words[0] == "global_batch_size" else {}
        changed |= {"world_size": int(words[0])} if words[-1].startswith("rank") else {}
        assert len(changed) == 1
        refuse_single_sample(plan_batch(**{**numbers, **changed}))
