"""The result does not depend on the number of ranks (batch contract, sections 0, 2 and 7)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.training import evaluations, job_document, result, run_ranks, steps

WORLD_SIZES = (1, 2, 3, 4)
CASES = [(batch, cap) for batch in (32, 30) for cap in (None, 3)]


def case_name(batch: int, cap: int | None) -> str:
    return f"B{batch}-m{cap}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train the whole digits job for every batch and cap, for each number of ranks in one set of processes."""
    root = tmp_path_factory.mktemp("worlds")
    for world_size in WORLD_SIZES:
        folder = root / f"W{world_size}"
        jobs = [
            {
                "run": str(folder / case_name(batch, cap)),
                "spec": job_document(
                    batch__global_batch_size=batch,
                    batch__max_per_device_batch_size=cap,
                    train__dataset="digits",
                    train__epochs=2,
                    train__optimizer={"name": "sgd", "momentum": 0.9, "weight_decay": 1e-4},
                ),
            }
            for batch, cap in CASES
        ]
        outcome = run_ranks(folder, world_size, jobs)
        assert outcome.codes == [0] * world_size, outcome.outputs
    return root


@pytest.mark.parametrize(("batch", "cap"), CASES)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_losses_of_all_steps_equal_those_of_one_process(
    runs: Path, world_size: int, batch: int, cap: int | None
) -> None:
    reference = steps(runs / "W1" / case_name(batch, None))
    found = steps(runs / f"W{world_size}" / case_name(batch, cap))
    assert len(reference) == 2 * -(-1437 // batch)
    assert [record["step"] for record in found] == list(range(1, len(reference) + 1))
    assert [record["loss"] for record in found] == pytest.approx(
        [record["loss"] for record in reference], rel=0, abs=1e-12
    )
    assert [record["samples_seen"] for record in found] == [record["samples_seen"] for record in reference]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_evaluations_count_every_sample_once_and_agree(runs: Path, world_size: int) -> None:
    reference = evaluations(runs / "W1" / case_name(32, None))
    for batch, cap in CASES:
        found = evaluations(runs / f"W{world_size}" / case_name(batch, cap))
        assert [record["val_samples"] for record in found] == [360, 360]
        if batch == 32:
            assert [record["val_accuracy"] for record in found] == [record["val_accuracy"] for record in reference]
            assert [record["val_loss"] for record in found] == pytest.approx(
                [record["val_loss"] for record in reference], rel=0, abs=1e-12
            )


def test_training_learns(runs: Path) -> None:
    assert result(runs / "W4" / case_name(30, 3))["val_accuracy"] > 0.9


def test_result_tells_what_was_run(runs: Path) -> None:
    document = result(runs / "W3" / case_name(30, 3))
    assert document["status"] == "finished"
    assert document["steps"] == 96
    assert document["epochs"] == 2
    assert document["samples_seen"] == 2 * 1437
    assert document["world_size"] == 3
    assert document["attempts"] == 1
    assert document["threads"] == 1
    assert len(document["parameters_sha256"]) == 64
