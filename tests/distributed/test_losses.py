"""Losses of the user's own, by their declaration: the same training on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.training import evaluations, job_document, parameters, run_ranks, steps
from tests.messages import GoldenMessages

CODE = "tests.distributed.loss_code"
# 98 samples in batches of 24 leave a last batch of 2, so that from three ranks on some have none.
SMALL: dict[str, Any] = {
    "batch__global_batch_size": 24,
    "train__dataset_args": {"train": 98},
    "train__optimizer": {"name": "sgd", "momentum": 0.9},
    "train__epochs": 2,
}
LOSSES = {
    "Focal": "mean",
    "total": "sum",
    "per_sample": "per_sample",
    "class_weights": "global",
    "dice": "global",
    "contrast": "global",
}
ACCUMULATED = [f"{name}, accumulated" for name, reduction in LOSSES.items() if reduction != "global"]
NAMES = {
    1: [*LOSSES],
    3: [*LOSSES],
    4: [*ACCUMULATED, *(name for name, reduction in LOSSES.items() if reduction == "global")],
}


def loss(name: str, **changes: Any) -> dict[str, Any]:
    reduction = LOSSES.get(name, "mean")
    rate = {"learning_rate__base": 0.002} if reduction == "sum" else {}
    return job_document(
        **(SMALL | rate | {"train__loss": f"{CODE}:{name}", "train__loss_reduction": reduction} | changes)
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("losses")
    for world_size, names in NAMES.items():
        folder = root / f"W{world_size}"
        jobs = []
        for name in names:
            cap = 3 if name in ACCUMULATED else None
            spec = loss(name.partition(",")[0], batch__max_per_device_batch_size=cap)
            jobs.append({"run": folder / name, "spec": spec})
        outcome = run_ranks(folder, world_size, jobs)
        assert outcome.codes == [0] * world_size, outcome.outputs
    return root


@pytest.mark.parametrize(("world_size", "name"), [(ranks, name) for ranks in (3, 4) for name in NAMES[ranks]])
def test_losses_and_parameters_equal_those_of_one_process(runs: Path, world_size: int, name: str) -> None:
    reference, found = runs / "W1" / name.partition(",")[0], runs / f"W{world_size}" / name
    expected = [record["loss"] for record in steps(reference)]
    assert len(expected) == 10
    assert len(set(expected)) == 10
    assert [record["loss"] for record in steps(found)] == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert (parameters(found, 10) - parameters(reference, 10)).abs().max() <= 1e-12


def test_evaluations_report_cross_entropy_whatever_is_trained(runs: Path) -> None:
    assert evaluations(runs / "W4" / "dice")[-1].keys() == evaluations(runs / "W1" / "Focal")[-1].keys()


@pytest.mark.parametrize(
    ("name", "changes", "kind", "facts"),
    [
        (
            "failing",
            {},
            "user_code",
            (f"train.loss is {CODE}:failing", "of 24 samples: ValueError: no loss of"),
        ),
        ("WithParameters", {}, "user_code", (f"train.loss is {CODE}:WithParameters", "holds parameters")),
        (
            "per_sample",
            {"train__loss_reduction": "mean"},
            "loss",
            ("declared mean", "of shape (24,) for 24 samples", "not a tensor of shape ();"),
        ),
    ],
)
def test_a_loss_that_cannot_be_trained_is_refused(
    golden: GoldenMessages, tmp_path: Path, name: str, changes: dict[str, Any], kind: str, facts: tuple[str, ...]
) -> None:
    outcome = run_ranks(tmp_path, 1, [{"run": tmp_path / "run", "spec": loss(name, **changes)}])
    assert outcome.errors[0]["kind"] == kind
    message = golden.message(outcome.errors[0]["message"])
    for fact in facts:
        assert fact in message
