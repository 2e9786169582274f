"""The sums that the ranks agree on do not depend on how many steps share an all-reduce."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hpcddp.train.loop.agreement import PendingAgreement, StepPart, joined, split
from tests.ranks import run_forked

pytestmark = pytest.mark.distributed
STEPS = 20
LENGTHS = (1, 2, 3, 7, 20)


def losses_of(rank: int) -> list[float]:
    """Return the loss of each step of a rank."""
    draw = random.Random(rank)
    return [draw.uniform(-1, 1) * 10.0 ** draw.randint(-12, 12) for _ in range(STEPS)]


def agree(directory: str, world_size: int, rank: int) -> int:
    """Write the sums of all steps for each length of a block."""
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world_size)
    parts = [StepPart(torch.tensor(loss, dtype=torch.float64)) for loss in losses_of(rank)]
    found = {
        length: [
            step.loss_sum
            for first in range(0, STEPS, length)
            for step in PendingAgreement(parts[first : first + length]).read().steps
        ]
        for length in LENGTHS
    }
    Path(directory, f"sums-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
    return 0


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_sums_have_the_same_bits_for_every_length_of_a_block(world_size: int, tmp_path: Path) -> None:
    ended = run_forked(agree, (str(tmp_path), world_size), world_size=world_size, logs=tmp_path)
    assert ended.codes == [0] * world_size, ended.outputs
    sums = [json.loads((tmp_path / f"sums-{rank}.json").read_text()) for rank in range(world_size)]
    expected = sums[0][str(LENGTHS[0])]
    for of_rank in sums:
        for length in LENGTHS:
            assert of_rank[str(length)] == expected
    every = [losses_of(rank) for rank in range(world_size)]
    for step in range(STEPS):
        exact = math.fsum(losses[step] for losses in every)
        assert abs(expected[step] - exact) <= math.ulp(exact)


def test_a_number_is_the_sum_of_its_parts() -> None:
    numbers = [0.0, -0.1, 1 / 3, 1e-30, -7.25e23, 2.0**79, 2.0**-148, 1e300, -math.inf, 5e22 + 1]
    assert joined(split(torch.tensor(numbers, dtype=torch.float64)).tolist()) == numbers
    (found,) = joined(split(torch.tensor([math.nan], dtype=torch.float64)).tolist())
    assert math.isnan(found)
