from __future__ import annotations

import numpy as np  # noqa: TID253
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcddp.batch.explain import explain
from hpcddp.batch.job import plan_numbers, split_notes
from hpcddp.batch.plan import PlanError, plan_batch, refuse_single_sample
from hpcddp.batch.sampler import GlobalBatches, GroupTable, share_of
from tests.messages import GoldenMessages


def test_groups_are_numbered_by_their_first_sample() -> None:
    table = GroupTable(["b", "a", "b", 7, "a", "b"])
    assert (len(table), table.smallest, table.largest) == (3, 1, 3)
    assert table.samples(np.array([1, 0])).tolist() == [1, 4, 0, 2, 5]
    assert table.count(np.array([0, 2])) == 4
    assert table.samples(np.empty(0, dtype=np.int64)).tolist() == []


def test_a_number_and_its_text_are_two_groups() -> None:
    assert len(GroupTable([1, "1"])) == 2


def test_the_digest_tells_groupings_apart_and_not_their_names() -> None:
    assert GroupTable("aab").digest == GroupTable([5, 5, 2]).digest
    assert GroupTable("aab").digest != GroupTable("abb").digest


@given(names=st.lists(st.integers(0, 12), min_size=1, max_size=60), batch=st.integers(1, 8), world=st.integers(1, 8))
def test_every_group_lies_on_one_rank_in_one_micro_step_and_every_sample_comes_once(
    names: list[int], batch: int, world: int
) -> None:
    table = GroupTable(names)
    batches = GlobalBatches(len(table), batch, "keep", "keyed", seed=3)
    plan = plan_batch(
        global_batch_size=batch,
        world_size=min(world, batch),
        samples=len(table),
        max_per_device_batch_size=2,
        unit="group",
    )
    seen: list[int] = []
    for step in range(batches.steps_per_epoch):
        units = batches.indices(0, step)
        places = [
            table.samples(share).tolist() for rank in range(plan.world_size) for share in share_of(plan, units, rank)
        ]
        assert sum(map(len, places)) == table.count(units)
        for place in places:
            for group in {names[sample] for sample in place}:
                assert sum(names[sample] == group for sample in place) == names.count(group)
        seen += [sample for place in places for sample in place]
    assert sorted(seen) == list(range(len(names)))


def test_a_plan_of_groups_speaks_of_groups(golden: GoldenMessages) -> None:
    plan = plan_batch(global_batch_size=10, world_size=3, samples=25, unit="group")
    text = explain(plan_numbers(plan, epochs=1, learning_rate=0.1))
    for line in ("10 groups, over 3 ranks", "    rank 0         4 groups\n", "25 groups", "every group exactly once"):
        assert line in text
    assert golden.message(next(split_notes(plan))).startswith("batch.unit is group: ")
    with pytest.raises(PlanError, match=r"^global_batch_size is 2, fewer groups than") as caught:
        plan_batch(global_batch_size=2, world_size=3, samples=25, unit="group")
    assert "the 3 ranks" in golden.message(caught.value)


def test_one_group_in_front_of_batch_norm_is_refused_only_where_a_group_may_be_one_sample(
    golden: GoldenMessages,
) -> None:
    plans = [
        plan_batch(global_batch_size=4, world_size=4, samples=8, unit="group", smallest_group=smallest)
        for smallest in (1, 2, 9)
    ]
    with pytest.raises(PlanError, match="rank 0 one group in micro-step 0,") as caught:
        refuse_single_sample(plans[0])
    assert "some groups have one sample" in golden.message(caught.value)
    for plan in plans[1:]:
        refuse_single_sample(plan)
    _, statistics = split_notes(plans[1])
    assert "micro-batches of 2 samples," in golden.message(statistics)
    assert len(list(split_notes(plans[2]))) == 1
