from __future__ import annotations

from typing import Any

import pytest

from hpcddp.batch.job import split_notes
from hpcddp.batch.plan import plan_batch
from tests.messages import GoldenMessages


def notes(**numbers: Any) -> list[str]:
    return list(split_notes(plan_batch(**{"samples": None, **numbers})))


def test_a_plan_with_large_shares_needs_no_note() -> None:
    assert notes(global_batch_size=256, world_size=3, samples=1_281_167, max_per_device_batch_size=32) == []


@pytest.mark.parametrize(("tail", "step"), [("keep", "with all of them"), ("wrap", "which repeats some of them")])
def test_data_smaller_than_a_batch_are_noted(tail: str, step: str, golden: GoldenMessages) -> None:
    (note,) = notes(global_batch_size=100, world_size=2, samples=40, tail=tail)
    assert golden.message(note).startswith("global_batch_size is 100, ")
    assert " 40 samples," in note
    assert note.endswith(f"{step}; write 40 or less.")


def test_micro_steps_that_are_always_empty_are_noted(golden: GoldenMessages) -> None:
    note, *_ = notes(global_batch_size=20, world_size=2, grad_accum_steps=12)
    assert golden.message(note).startswith("grad_accum_steps is 12, more than the 10 ")


def test_ranks_without_samples_in_the_tail_are_noted(golden: GoldenMessages) -> None:
    note, *_ = notes(global_batch_size=64, world_size=8, samples=66)
    assert "2 samples for 8 ranks: 6 ranks" in golden.message(note)
    assert note.endswith("with weight 0.")


def test_a_single_sample_is_noted_with_its_step_and_the_ways_out(golden: GoldenMessages) -> None:
    (note,) = notes(global_batch_size=32, world_size=3, samples=1029)
    assert golden.message(note).startswith("If the model has BatchNorm, the job")
    assert "step 32 of every epoch has 5 " in note
    assert "rank 2 one sample in micro-step 0," in note
    assert "use tail 'drop' or global_batch_size 33 or " in note
    assert " or train.batch_norm sync or " in note


@pytest.mark.parametrize("size", [2, 3, 4])
def test_small_groups_of_batch_norm_are_noted(size: int, golden: GoldenMessages) -> None:
    (note,) = notes(global_batch_size=8 * size, world_size=8)
    assert ": in every step " in golden.message(note)
    assert f" micro-batches of {size} samples," in note
    assert "use train.batch_norm sync, fewer ranks or " in note
    assert note.endswith("a larger batch.")


def test_small_groups_in_the_tail_alone_name_that_step(golden: GoldenMessages) -> None:
    (note,) = notes(global_batch_size=64, world_size=2, samples=134)
    assert "last step of every epoch (step 2)" in golden.message(note)
    assert " micro-batches of 3 samples," in note
    assert "use train.batch_norm sync, fewer ranks " in note


def test_groups_of_five_are_not_noted() -> None:
    assert notes(global_batch_size=40, world_size=8) == []


def test_sync_with_accumulation_is_said_to_be_no_whole_batch(golden: GoldenMessages) -> None:
    few = plan_batch(global_batch_size=24, world_size=4, samples=None, grad_accum_steps=2)
    (sync,) = split_notes(few, "sync")
    assert "12 of 24 samples; with 2 micro-steps" in golden.message(sync)
    assert "is not one batch" in sync
    assert list(split_notes(plan_batch(global_batch_size=4, world_size=4, samples=None), "sync")) == []


def test_one_sample_over_all_ranks_is_noted(golden: GoldenMessages) -> None:
    (*_, tail) = split_notes(plan_batch(global_batch_size=8, world_size=2, samples=17), "sync")
    assert "step 2 of every epoch has 1 " in golden.message(tail)
    assert "to all ranks together in micro-step 0," in tail
    assert "; use tail 'drop', another global_batch_size, " in tail
    (every,) = split_notes(plan_batch(global_batch_size=5, world_size=4, samples=None, grad_accum_steps=2), "sync")
    assert "step 0 of every epoch has 5 " in golden.message(every)
    assert "to all ranks together in micro-step 1," in every
    assert "; use another global_batch_size, " in every
