"""Shares that are empty, parts that are smaller than the number of ranks, and statistics that belong to one rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.training import evaluations, job_document, parameters, result, run_ranks, steps
from tests.messages import GoldenMessages

FEW = {"train": 10, "val": 3}


def test_ranks_without_samples_change_nothing(tmp_path: Path) -> None:
    # 10 samples in batches of 8: the tail has 2 samples for 4 ranks of two micro-steps.
    changes = {"batch__global_batch_size": 8, "train__dataset_args": FEW, "train__epochs": 3}
    one = {"run": tmp_path / "one", "spec": job_document(**changes)}
    four = {"run": tmp_path / "four", "spec": job_document(**changes, batch__grad_accum_steps=2)}
    for world_size, job in ((1, one), (4, four)):
        outcome = run_ranks(tmp_path / str(world_size), world_size, [job])
        assert outcome.codes == [0] * world_size, outcome.outputs
    expected, found = steps(tmp_path / "one"), steps(tmp_path / "four")
    assert [record["samples_seen"] for record in found] == [8, 10, 18, 20, 28, 30]
    assert [record["loss"] for record in found] == pytest.approx(
        [record["loss"] for record in expected], rel=0, abs=1e-12
    )
    assert [record["val_samples"] for record in evaluations(tmp_path / "four")] == [3, 3, 3]
    assert [record["val_loss"] for record in evaluations(tmp_path / "four")] == pytest.approx(
        [record["val_loss"] for record in evaluations(tmp_path / "one")], rel=0, abs=1e-12
    )


def test_nonfinite_loss_on_one_rank_is_met_by_all_ranks_alike(golden: GoldenMessages, tmp_path: Path) -> None:
    poisoned = {"train__dataset_args": {"poison": 5}, "train__epochs": 2}
    skip = {"run": tmp_path / "skip", "spec": job_document(**poisoned, train__nonfinite_loss="skip")}
    stop = {"run": tmp_path / "stop", "spec": job_document(**poisoned)}
    outcome = run_ranks(tmp_path / "ranks", 2, [skip, stop])
    assert outcome.codes == [70, 70], outcome.outputs
    assert outcome.errors[0] == outcome.errors[1]
    message = golden.message(outcome.errors[0]["message"])
    assert "is nan" in message
    assert "train.nonfinite_loss is stop" in message
    assert result(tmp_path / "skip")["skipped_steps"] == 2
    assert sum(record.get("skipped", False) for record in steps(tmp_path / "skip")) == 2


def test_global_batch_that_leaves_one_sample_for_batch_norm_is_refused_by_every_rank(tmp_path: Path) -> None:
    spec = job_document(train__model="tests.distributed.own_code:norm_model", batch__global_batch_size=33)
    outcome = run_ranks(tmp_path / "ranks", 2, [{"run": tmp_path / "run", "spec": spec}])
    assert outcome.codes == [2, 2]
    assert outcome.errors[0] == outcome.errors[1]
    assert "BatchNorm" in outcome.errors[0]["message"]


def test_a_sample_that_is_not_finite_skips_the_same_steps_on_any_number_of_ranks(tmp_path: Path) -> None:
    """The last batch has one sample, so that a rank has none; the first sample is the one that is not a number."""
    document = job_document(
        train__epochs=1,
        train__nonfinite_loss="skip",
        train__dataset_args={"train": 97, "val": 20, "poison": 0},
        checkpoint={"every": {"epochs": 10}},
    )
    for ranks in (1, 2):
        outcome = run_ranks(tmp_path / f"ranks-{ranks}", ranks, [{"run": tmp_path / f"run-{ranks}", "spec": document}])
        assert outcome.codes == [0] * ranks, outcome.outputs
    one, two = (result(tmp_path / f"run-{ranks}") for ranks in (1, 2))
    assert one["skipped_steps"] == two["skipped_steps"] == 1
    assert (parameters(tmp_path / "run-1", 4) - parameters(tmp_path / "run-2", 4)).abs().max() <= 1e-12
