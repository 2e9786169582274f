"""Models that hold complex numbers train as if they held pairs of real ones, on one rank and on two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.training import job_document, parameters, run_ranks, steps

CASES: dict[str, dict[str, Any]] = {
    "sgd": {
        "train__optimizer": {"name": "sgd", "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3},
        "train__clip_grad_norm": 0.5,
        "train__ema_decay": 0.8,
    },
    "adamw": {
        "train__optimizer": {"name": "adamw", "weight_decay": 0.05},
        "train__nonfinite_loss": "skip",
        "learning_rate__base": 0.01,
    },
}
MODEL = "tests.distributed.own_code:complex_model"
# 100 samples in batches of 32, two epochs.
STEPS = 8
WEIGHTS = 3 * 8 * 8 * 8 * 2
TURNS, SEEN = slice(WEIGHTS, WEIGHTS + 16), slice(WEIGHTS + 16, WEIGHTS + 32)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train with complex numbers and with pairs on one rank, and with complex numbers on two."""
    root = tmp_path_factory.mktemp("complex")

    def job(case: str, name: str, **changes: Any) -> dict[str, Any]:
        spec = job_document(train__model=MODEL, train__epochs=2, **CASES[case], **changes)
        return {"run": root / f"{case}-{name}", "spec": spec}

    alone = [job(case, "1") for case in CASES]
    pairs = [job(case, "pairs", train__model_args={"pairs": True}) for case in CASES]
    one = run_ranks(root / "one", 1, alone + pairs)
    assert one.codes == [0], one.outputs
    small: dict[str, Any] = {"batch__max_per_device_batch_size": 5}
    jobs = [job(case, "2", **small) for case in CASES]
    two = run_ranks(root / "two", 2, [*jobs, job("sgd", "2-pairs", train__model_args={"pairs": True}, **small)])
    assert two.codes == [0, 0], two.outputs
    return root


@pytest.mark.parametrize("case", CASES)
def test_complex_numbers_are_trained_like_pairs_of_real_ones(runs: Path, case: str) -> None:
    found, expected = (parameters(runs / f"{case}-{name}", STEPS) for name in ("1", "pairs"))
    assert len(found) == len(expected)
    assert (found - expected).abs().max() <= 1e-12
    angles = torch.arange(8.0)
    assert torch.equal(found[TURNS], torch.stack([angles.cos(), angles.sin()], dim=1).double().reshape(-1))
    assert found[SEEN].abs().min() > 0


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_the_complex_numbers_of_one(runs: Path, case: str) -> None:
    one, two = (parameters(runs / f"{case}-{name}", STEPS) for name in ("1", "2"))
    # What each rank has seen is its own: rank 0's is kept.
    one[SEEN], two[SEEN] = 0, 0
    assert (one - two).abs().max() <= 1e-12
    assert [record["loss"] for record in steps(runs / f"{case}-2")] == pytest.approx(
        [record["loss"] for record in steps(runs / f"{case}-1")], rel=1e-12
    )


def test_average_is_that_of_pairs(runs: Path) -> None:
    paths = [runs / f"sgd-{name}" / "checkpoints" / f"step-{STEPS:06d}" for name in ("2", "2-pairs")]
    averages = [torch.load(path / "ema.pt", weights_only=True)["weight"] for path in paths]
    assert averages[0].is_complex()
    assert (torch.view_as_real(averages[0]) - averages[1]).abs().max() <= 1e-12
