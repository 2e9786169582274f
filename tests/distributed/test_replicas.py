"""Whole trainings whose replicas hold more than parameters: running statistics, averaged weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcddp.run.checkpoints import list_checkpoints
from tests.distributed.training import evaluations, job_document, result, run_ranks, steps, without_times
from tests.messages import GoldenMessages

CODE = "tests.distributed.norm_code"
# Four ranks take 5, 4, 4, 4 samples of a batch, and 1, 1, 1, 0 of an epoch's last.
SYNC: dict[str, Any] = {
    "train__model": f"{CODE}:norm_net",
    "train__batch_norm": "sync",
    "train__dataset_args": {"train": 37, "val": 21},
    "train__epochs": 4,
    "train__clip_grad_norm": 0.5,
    "train__ema_decay": 0.8,
    "train__replica_check_every": 1,
    "train__optimizer": {"name": "sgd", "momentum": 0.9},
    "batch__global_batch_size": 17,
}
# 9, 9, 8, 8 samples of a batch, 3, 2, 2, 2 of the last of four.
LOCAL: dict[str, Any] = {
    "train__dataset_args": {"train": 111},
    "batch__global_batch_size": 34,
    "train__model": f"{CODE}:counting",
    "train__epochs": 3,
    "train__ema_decay": 0.8,
    "checkpoint": {"every": {"steps": 3}},
}
HALVES: dict[str, Any] = {"train__model": f"{CODE}:halves", "train__model_args": {"says_so": True}}
DRIFTING: dict[str, Any] = {"train__model": f"{CODE}:drifting", "train__replica_check_every": 2}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train with one process and with four; among the four, stop a run and go on with it, and let one drift."""
    root = tmp_path_factory.mktemp("replicas")

    def job(name: str, changes: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {"run": root / name, "spec": job_document(**changes), **more}

    one = run_ranks(root / "one", 1, [job("sync-1", SYNC), job("halves-1", HALVES)])
    assert one.codes == [0], one.outputs
    jobs = [
        job("sync-4", SYNC),
        job("halves-4", HALVES),
        job("whole", LOCAL),
        job("stopped", LOCAL, stop_rank=2, stop_after_calls=4),
        job("stopped", LOCAL, attempt=1),
        job("drifting", DRIFTING),
    ]
    four = run_ranks(root / "four", 4, jobs)
    assert four.codes == [70] * 4, four.outputs
    (root / "errors.json").write_text(json.dumps([error["message"] for error in four.errors.values()]))
    return root


@pytest.mark.parametrize("case", ["sync", "halves"])
def test_training_with_synchronised_batch_norm_or_unused_parameters_is_that_of_one_process(
    runs: Path, case: str
) -> None:
    for records_of in (steps, evaluations):
        expected, found = records_of(runs / f"{case}-1"), records_of(runs / f"{case}-4")
        assert len(found) == len(expected)
        for one, other in zip(expected, found, strict=True):
            for name in one.keys() & {"loss", "val_loss", "val_accuracy"}:
                assert other[name] == pytest.approx(one[name], rel=0, abs=1e-12)


def test_checkpoints_with_synchronised_batch_norm_are_those_of_one_process(runs: Path) -> None:
    paths = [list_checkpoints(runs / name / "checkpoints")[0] for name in ("sync-1", "sync-4")]
    for file in ("model.pt", "ema.pt"):
        one, other = (torch.load(path / file, weights_only=True) for path in paths)
        assert list(one) == list(other)
        for name, value in one.items():
            torch.testing.assert_close(other[name], value, rtol=0, atol=1e-12)
    assert not (paths[1] / "ranks.pt").exists()


def test_stopped_run_goes_on_as_if_it_had_not_been_statistics_included(runs: Path) -> None:
    assert without_times(runs / "stopped") == without_times(runs / "whole")
    for name in ("parameters_sha256", "ema_sha256", "val_loss"):
        assert result(runs / "stopped")[name] == result(runs / "whole")[name] is not None


def test_checkpoint_holds_the_merged_model_and_what_differs(runs: Path) -> None:
    path = list_checkpoints(runs / "whole" / "checkpoints")[0]
    saved = torch.load(path / "ranks.pt", weights_only=True)
    model = torch.load(path / "model.pt", weights_only=True)
    assert saved["world_size"] == 4
    assert saved["samples"] == [90, 87, 78, 78]
    own = saved["buffers"]
    assert own["model.seen"].shape == (4,)
    assert model["seen"] == own["model.seen"][0]
    means, merged = own["model.net.1.running_mean"], model["net.1.running_mean"]
    assert means.shape == (4, 4)
    weights = torch.tensor([[30.0], [29.0], [26.0], [26.0]], dtype=torch.float64) / 111
    torch.testing.assert_close(merged, (weights * means).sum(dim=0), rtol=0, atol=1e-14)
    variance = (weights * (own["model.net.1.running_var"] + (means - merged).square())).sum(dim=0)
    torch.testing.assert_close(model["net.1.running_var"], variance, rtol=0, atol=1e-14)
    assert "ema.net.1.running_mean" in own


def test_replica_that_drifts_ends_the_run_and_is_named_by_every_rank(golden: GoldenMessages, runs: Path) -> None:
    messages = json.loads((runs / "errors.json").read_text())
    assert len(messages) == 4
    assert set(messages) == {messages[0]}
    message = golden.message(messages[0])
    assert "after step 2 rank 1 differs" in message
    assert "in bias," in message
