"""Groups that stay together, micro-batches of one size, scaled constants: the same on any number of ranks."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcddp.run.checkpoints import list_checkpoints
from tests.distributed.grouped_code import uneven_groups
from tests.distributed.training import evaluations, job_document, parameters, run_ranks, steps
from tests.messages import GoldenMessages

CODE = "tests.distributed.grouped_code"
GROUPED: dict[str, Any] = {
    "batch__global_batch_size": 5,
    "batch__unit": "group",
    "batch__group": f"{CODE}:uneven_groups",
    "learning_rate": {"base": 0.01, "base_global_batch_size": 2, "rule": "sqrt"},
    "train__optimizer": {"name": "adamw"},
    "train__epochs": 3,
}
# 107 samples in batches of 24 leave a last batch of 11: micro-batches of 4, 4 and 3, and none for the last rank.
GHOST: dict[str, Any] = {
    "batch__global_batch_size": 24,
    "batch__per_device_batch_size": 4,
    "train__model": f"{CODE}:ghost_model",
    "train__dataset_args": {"train": 107},
    "train__optimizer": {"name": "sgd", "momentum": 0.9},
    "train__epochs": 3,
}
# Two groups each, of different sizes, in front of statistics that every rank takes of its own samples.
NORMALISED: dict[str, Any] = {
    **GROUPED,
    "batch__global_batch_size": 6,
    "train__model": f"{CODE}:ghost_model",
    "train__epochs": 2,
}
CASES = {
    "groups": GROUPED,
    "groups, two at once": GROUPED | {"batch__max_per_device_batch_size": 2},
    "ghost": GHOST,
    "ghost of all batches": GHOST | {"train__model": f"{CODE}:cumulative_ghost_model", "train__ema_decay": 0.9},
}
GHOSTS = ["ghost", "ghost of all batches"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("groups")
    for world_size in (1, 2, 3):
        folder = root / f"W{world_size}"
        cases = CASES if world_size != 3 else CASES | {"normalised": NORMALISED}
        jobs = [{"run": folder / name, "spec": job_document(**case)} for name, case in cases.items()]
        outcome = run_ranks(folder, world_size, jobs)
        assert outcome.codes == [0] * world_size, outcome.outputs
    return root


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_losses_of_all_steps_equal_those_of_one_process(runs: Path, world_size: int, case: str) -> None:
    reference, found = steps(runs / "W1" / case.partition(",")[0]), steps(runs / f"W{world_size}" / case)
    assert len(found) == (15 if case in GHOSTS else 9)
    assert [record["loss"] for record in found] == pytest.approx(
        [record["loss"] for record in reference], rel=0, abs=1e-12
    )
    assert [record["samples_seen"] for record in found] == [record["samples_seen"] for record in reference]


@pytest.mark.parametrize("case", GHOSTS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_micro_batches_of_one_size_give_the_running_statistics_of_one_process(
    runs: Path, world_size: int, case: str
) -> None:
    reference, found = runs / "W1" / case, runs / f"W{world_size}" / case
    expected = [record["val_loss"] for record in evaluations(reference)]
    assert len(expected) == 3
    assert [record["val_loss"] for record in evaluations(found)] == pytest.approx(expected, rel=0, abs=1e-12)
    # Weights, running statistics and the number of batches that they were taken over.
    assert (parameters(found, 15) - parameters(reference, 15)).abs().max() <= 1e-12
    # No rank has statistics of its own.
    assert not (found / "checkpoints" / "step-000015" / "ranks.pt").exists()


def test_steps_of_groups_see_whole_groups_and_every_sample_once_an_epoch(runs: Path) -> None:
    seen = [0, *(record["samples_seen"] for record in steps(runs / "W3" / "groups"))]
    sizes = Counter(map(uneven_groups, range(100)))
    assert len(sizes) == 12
    assert [seen[step] for step in (3, 6, 9)] == [100, 200, 300]
    assert len({after - before for before, after in pairwise(seen)}) > 2


def test_running_statistics_of_groups_count_by_samples(runs: Path) -> None:
    path = list_checkpoints(runs / "W3" / "normalised" / "checkpoints")[0]
    model, saved = (torch.load(path / file, weights_only=True) for file in ("model.pt", "ranks.pt"))
    assert sum(saved["samples"]) == 200
    # Every rank had as many groups as the others, and other numbers of samples.
    assert len(set(saved["samples"])) > 1
    weights = torch.tensor(saved["samples"], dtype=torch.float64)[:, None] / 200
    means = saved["buffers"]["model.3.running_mean"]
    torch.testing.assert_close(model["3.running_mean"], (weights * means).sum(dim=0), rtol=0, atol=1e-14)


def test_the_rate_follows_the_batch_and_not_the_ranks(runs: Path) -> None:
    for world_size in (1, 3):
        (rate,) = {record["lr"] for record in steps(runs / f"W{world_size}" / "groups")}
        assert rate == pytest.approx(0.01 * 2.5**0.5, rel=1e-15)


def test_groups_that_differ_between_ranks_are_refused_by_every_rank(golden: GoldenMessages, tmp_path: Path) -> None:
    spec = job_document(batch__unit="group", batch__group=f"{CODE}:groups_of_the_rank", batch__global_batch_size=5)
    outcome = run_ranks(tmp_path / "ranks", 2, [{"run": tmp_path / "run", "spec": spec}])
    assert outcome.codes == [70, 70], outcome.outputs
    assert outcome.errors[0] == outcome.errors[1]
    message = golden.message(outcome.errors[0]["message"])
    assert f"batch.group is {CODE}:groups_of_the_rank" in message
    assert "other groups on rank 1 than on" in message
    assert "on the index and the data alone" in message
