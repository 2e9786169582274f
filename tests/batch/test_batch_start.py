"""Another global batch from a step on: every sample of an epoch once, and the place in the schedule."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np  # noqa: TID253
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcddp.batch.order import KeyedOrder
from hpcddp.batch.plan import BatchStart, Steps, plan_batch
from hpcddp.batch.sampler import GlobalBatches
from hpcddp.batch.scaling import learning_rate_at
from hpcddp.jobfile.sections import LearningRate, Tail

SEED = 3
EPOCHS = 3
sizes = st.integers(1, 60)


def steps_of(samples: int, batch: int, tail: Tail = "keep") -> Steps:
    return Steps.from_beginning(plan_batch(global_batch_size=batch, world_size=1, samples=samples, tail=tail))


def changed(steps: Steps, step: int, batch: int) -> Steps:
    plan = plan_batch(global_batch_size=batch, world_size=1, samples=steps.plan.samples or 0, tail=steps.plan.tail)
    return Steps(plan=plan, start=steps.change(step, batch))


def train(samples: int, tail: Tail, segments: Sequence[tuple[int, int]]) -> list[list[list[int]]]:
    """Return the batches of each epoch of a training that takes another batch at each (step, batch)."""
    (_, first), *later = segments
    steps = steps_of(samples, first, tail)
    epochs: list[list[list[int]]] = [[] for _ in range(EPOCHS)]
    for index in range(len(segments)):
        end = later[index][0] if index < len(later) else steps.total(EPOCHS)
        batches = GlobalBatches(samples, steps.plan.global_batch_size, tail, "keyed", SEED, start=steps.start)
        for step in range(steps.start.step, end):
            epoch, step_in_epoch = steps.place(step)
            epochs[epoch].append(batches.indices(epoch, step_in_epoch).tolist())
        if index < len(later):
            steps = changed(steps, *later[index])
    return epochs


def order_of(samples: int, epoch: int) -> list[int]:
    order: list[int] = KeyedOrder(samples, SEED, epoch)(np.arange(samples)).tolist()
    return order


@st.composite
def trainings(draw: st.DrawFn, *, largest: bool = False) -> tuple[int, list[tuple[int, int]]]:
    """A number of samples, and one to three changes of the batch at any step of the training."""
    samples = draw(sizes)
    batches = st.integers(1, samples) if largest else sizes
    segments = [(0, draw(batches))]
    tail: Tail = "drop" if largest else "keep"
    steps = steps_of(samples, segments[0][1], tail)
    for _ in range(draw(st.integers(1, 3))):
        step = draw(st.integers(steps.start.step, steps.total(EPOCHS)))
        segments.append((step, draw(batches)))
        steps = changed(steps, *segments[-1])
    return samples, segments


@given(training=trainings())
def test_every_sample_of_every_epoch_comes_once_in_the_order_of_the_epoch(
    training: tuple[int, list[tuple[int, int]]],
) -> None:
    samples, segments = training
    for epoch, batches in enumerate(train(samples, "keep", segments)):
        assert list(chain.from_iterable(batches)) == order_of(samples, epoch)


@given(training=trainings())
def test_all_batches_are_full_but_the_last_of_an_epoch(training: tuple[int, list[tuple[int, int]]]) -> None:
    samples, segments = training
    allowed = {batch for _, batch in segments}
    for batches in train(samples, "keep", segments):
        assert {len(batch) for batch in batches[:-1]} <= allowed
        assert len(batches[-1]) <= max(allowed)


@given(training=trainings(largest=True))
def test_a_dropped_tail_is_the_end_of_the_order_and_shorter_than_a_batch(
    training: tuple[int, list[tuple[int, int]]],
) -> None:
    samples, segments = training
    for epoch, batches in enumerate(train(samples, "drop", segments)):
        taken = list(chain.from_iterable(batches))
        assert taken == order_of(samples, epoch)[: len(taken)]
        assert samples - len(taken) < max(batch for _, batch in segments)


@given(samples=sizes, first=sizes, then=sizes, data=st.data())
def test_a_tail_that_wraps_takes_every_sample_and_repeats_from_the_beginning(
    samples: int, first: int, then: int, data: st.DataObject
) -> None:
    step = data.draw(st.integers(0, steps_of(samples, first, "wrap").total(EPOCHS)))
    for epoch, batches in enumerate(train(samples, "wrap", [(0, first), (step, then)])):
        taken, order = list(chain.from_iterable(batches)), order_of(samples, epoch)
        assert taken == [order[position % samples] for position in range(len(taken))]
        assert samples <= len(taken) < samples + max(first, then)
        assert {len(batch) for batch in batches} <= {first, then}


@given(training=trainings(), data=st.data())
def test_a_second_resumption_with_the_same_batch_changes_nothing(
    training: tuple[int, list[tuple[int, int]]], data: st.DataObject
) -> None:
    samples, segments = training
    last, batch = segments[-1]
    steps = steps_of(samples, segments[0][1])
    for segment in segments[1:]:
        steps = changed(steps, *segment)
    again = data.draw(st.integers(last, steps.total(EPOCHS)))
    assert train(samples, "keep", [*segments, (again, batch)]) == train(samples, "keep", segments)


@given(samples=sizes, batch=sizes, step=st.integers(0, 500))
def test_without_a_change_place_and_schedule_are_those_of_the_step(samples: int, batch: int, step: int) -> None:
    steps = steps_of(samples, batch)
    full = steps.plan.steps_per_epoch or 0
    assert steps.place(step) == divmod(step, full)
    assert steps.schedule_step(*steps.place(step)) == step
    assert steps.total(EPOCHS) == EPOCHS * full
    assert steps.plans == (steps.plan,)


def test_the_schedule_follows_the_place_in_the_epoch() -> None:
    # 100 samples: 10 steps of 10 are an epoch; after 5 of them 2.5 batches of 20 are left of it.
    steps = changed(steps_of(100, 10), 5, 20)
    assert steps.start == BatchStart(global_batch_size=20, step=5, epoch=0, offset_samples=50)
    assert [steps.place(step) for step in range(5, 10)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    assert [steps.schedule_step(*steps.place(step)) for step in range(5, 10)] == [2.5, 3.5, 4.5, 5, 6]
    assert steps.total(2) == 5 + 3 + 5
    rate = LearningRate(base=1.0, schedule="cosine")
    rates = [
        learning_rate_at(rate, step=steps.schedule_step(*steps.place(step)), steps_per_epoch=5, epochs=2)
        for step in (5, 8)
    ]
    # A quarter and a half of the training: (1 + cos(pi / 4)) / 2 and (1 + cos(pi / 2)) / 2.
    assert rates == pytest.approx([(1 + 2**-0.5) / 2, 0.5], abs=1e-15)


def test_an_epoch_whose_rest_is_dropped_is_over() -> None:
    steps = changed(steps_of(100, 10, "drop"), 8, 30)
    assert steps.start == BatchStart(global_batch_size=30, step=8, epoch=1, offset_samples=0)
    assert steps.total(1) == 8
    assert steps.total(2) == 8 + 3


def test_steps_before_the_start_have_no_place() -> None:
    with pytest.raises(ValueError, match="begin with step 5, not with 4"):
        changed(steps_of(100, 10), 5, 20).place(4)
