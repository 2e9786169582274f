from __future__ import annotations

from typing import Any

import pytest

from hpcddp.batch.job import split_notes
from hpcddp.batch.plan import plan_batch


def notes(**numbers: Any) -> list[str]:
    return list(split_notes(plan_batch(**{"samples": None, **numbers})))


def test_a_plan_with_large_shares_needs_no_note() -> None:
    assert notes(global_batch_size=256, world_size=3, samples=1_281_167, max_per_device_batch_size=32) == []


@pytest.mark.parametrize(("tail", "step"), [("keep", "with all of them"), ("wrap", "which repeats some of them")])
def test_data_smaller_than_a_batch_are_noted(tail: str, step: str) -> None:
    (note,) = notes(global_batch_size=100, world_size=2, samples=40, tail=tail)
    assert note == (
        "global_batch_size is 100, and the training data has 40 samples, so that an epoch is one step, "
        f"{step}; write 40 or less."
    )


def test_micro_steps_that_are_always_empty_are_noted() -> None:
    assert notes(global_batch_size=20, world_size=2, grad_accum_steps=12)[0] == (
        "grad_accum_steps is 12, more than the 10 samples of a rank: some micro-steps are empty in every step."
    )


def test_ranks_without_samples_in_the_tail_are_noted() -> None:
    assert notes(global_batch_size=64, world_size=8, samples=66)[0] == (
        "The last step of an epoch has 2 samples for 8 ranks: 6 ranks without any, which take part in the "
        "step with weight 0."
    )


def test_a_single_sample_is_noted_with_its_step_and_the_ways_out() -> None:
    assert notes(global_batch_size=32, world_size=3, samples=1029) == [
        (
            "If the model has BatchNorm, the job is refused before its first step: step 32 of every epoch has "
            "5 samples, which leaves rank 2 one sample in micro-step 0, and BatchNorm has no variance over one sample; "
            "use tail 'drop' or global_batch_size 33 or 2 ranks or train.batch_norm sync or a model without "
            "BatchNorm."
        )
    ]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_small_groups_of_batch_norm_are_noted(size: int) -> None:
    assert notes(global_batch_size=8 * size, world_size=8) == [
        (
            f"If the model has BatchNorm: in every step it takes its statistics over micro-batches of {size} samples, "
            "and 4 or fewer are poor; use train.batch_norm sync, fewer ranks or a larger global batch."
        )
    ]


def test_small_groups_in_the_tail_alone_name_that_step() -> None:
    assert notes(global_batch_size=64, world_size=2, samples=134) == [
        (
            "If the model has BatchNorm: in the last step of every epoch (step 2) it takes its statistics over "
            "micro-batches of 3 samples, and 4 or fewer are poor; use train.batch_norm sync, tail 'drop', fewer "
            "ranks or a larger batch."
        )
    ]


def test_groups_of_five_are_not_noted() -> None:
    assert notes(global_batch_size=40, world_size=8) == []


def test_sync_with_accumulation_is_said_to_be_no_whole_batch() -> None:
    few = plan_batch(global_batch_size=24, world_size=4, samples=None, grad_accum_steps=2)
    (local,) = split_notes(few)
    assert local.endswith("With 2 micro-steps sync is not one batch: it takes them over one micro-step of all ranks.")
    (sync,) = split_notes(few, "sync")
    assert sync == (
        "If the model has BatchNorm: sync takes its statistics over a micro-step of all ranks, 12 of 24 samples; with "
        "2 micro-steps that is not one batch, and changes with the number of ranks."
    )
    assert list(split_notes(plan_batch(global_batch_size=4, world_size=4, samples=None), "sync")) == []


def test_one_sample_over_all_ranks_is_noted() -> None:
    refused = "If the model has BatchNorm, the job is refused before its first step: "
    one = "leaves one sample to all ranks together in micro-step"
    (*_, tail) = split_notes(plan_batch(global_batch_size=8, world_size=2, samples=17), "sync")
    assert tail == (
        f"{refused}step 2 of every epoch has 1 sample, which {one} 0, and BatchNorm has no variance over one sample; "
        "use tail 'drop', another global_batch_size, or a model without BatchNorm."
    )
    (every,) = split_notes(plan_batch(global_batch_size=5, world_size=4, samples=None, grad_accum_steps=2), "sync")
    assert every == (
        f"{refused}step 0 of every epoch has 5 samples, which {one} 1, and BatchNorm has no variance over one sample; "
        "use another global_batch_size, or a model without BatchNorm."
    )
