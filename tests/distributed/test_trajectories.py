"""The same training on any number of ranks, step by step and through restarts on other numbers of them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hpcddp.batch.plan import plan_batch
from hpcddp.batch.sampler import GlobalBatches
from tests.distributed.training import (
    evaluations,
    job_document,
    parameters,
    result,
    run_ranks,
    steps,
    without_times,
)

WORLD_SIZES = (4, 3, 2, 1)
SAMPLES, BATCH, EPOCHS = 203, 32, 4
STEPS = 28
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "nesterov": {"train__optimizer": {"name": "sgd", "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3}},
    "adamw": {"train__optimizer": {"name": "adamw", "weight_decay": 0.05}, "learning_rate__base": 0.01},
    "clipped": {"train__clip_grad_norm": 0.5, "train__optimizer": {"name": "sgd", "momentum": 0.5}},
}
CAPS = (None, 3)
# One optimizer shows what micro-batches change.
CASES: list[tuple[str, int | None]] = [("nesterov", None), ("nesterov", 3), ("adamw", 3), ("clipped", 3)]
# One save and one evaluation, at the end.
SELDOM: dict[str, Any] = {"checkpoint__every": {"epochs": 9}, "train__eval_every": 9}
# The built-in digits as a whole: 1,437 images, 48 steps per epoch.
DIGITS_BATCH, DIGITS_CAP = 30, 3
# Four steps per epoch; the schedule moves the rate in every step.
ELASTIC: dict[str, Any] = {
    "train__epochs": 3,
    "train__clip_grad_norm": 0.5,
    "train__optimizer": {"name": "sgd", "momentum": 0.9, "nesterov": True},
    "learning_rate__schedule": "cosine",
    "learning_rate__warmup_epochs": 1,
}
# Ranks -> calls before one of them wants to stop, and the step after which they do: within the second epoch and within
# the third.
STOPS = {4: (4, 6), 3: (2, 10)}
# BatchNorm, dropout and samples with random noise: whatever could differ from one attempt to the next.
BITWISE: dict[str, Any] = {
    "train__epochs": 3,
    "train__precision": "fp32",
    "train__model": "tests.distributed.own_code:norm_model",
    "train__dataset": "tests.distributed.own_code:noisy_digits",
    "train__optimizer": {"name": "adamw"},
    "learning_rate__base": 0.01,
    "batch__global_batch_size": 16,
    "batch__tail": "drop",
}
KEYED: dict[str, dict[str, Any]] = {
    "images": {
        "train__dataset": "imagefolder",
        "train__dataset_args": {"image_size": 32},
        "batch__global_batch_size": 8,
        "train__epochs": 3,
    },
    "own": {"train__dataset": "tests.distributed.own_code:noisy_digits", "train__epochs": 3},
}


def trajectory_name(optimizer: str, cap: int | None) -> str:
    return f"{optimizer}-m{cap}"


def trajectories(folder: Path, world_size: int) -> list[dict[str, Any]]:
    """Return a job for each case; one process makes all without a cap, too."""
    cases = CASES if world_size > 1 else sorted({*CASES, *((optimizer, None) for optimizer in OPTIMIZERS)}, key=str)
    return [
        {
            "run": folder / trajectory_name(optimizer, cap),
            "spec": job_document(
                train__dataset="tests.distributed.own_code:recorded_digits",
                train__dataset_args={"record": str(folder / f"record-{trajectory_name(optimizer, cap)}")},
                train__epochs=EPOCHS,
                **SELDOM,
                batch__global_batch_size=BATCH,
                batch__max_per_device_batch_size=cap,
                **OPTIMIZERS[optimizer],
            ),
        }
        for optimizer, cap in cases
    ]


def digits(folder: Path, world_size: int) -> dict[str, Any]:
    """Return a whole training, without a cap where there is one rank."""
    return {
        "run": folder / "digits",
        "spec": job_document(
            batch__global_batch_size=DIGITS_BATCH,
            batch__max_per_device_batch_size=DIGITS_CAP if world_size > 1 else None,
            train__dataset="digits",
            train__epochs=2,
            train__optimizer={"name": "sgd", "momentum": 0.9, "weight_decay": 1e-4},
        ),
    }


def write_images(folder: Path) -> None:
    """Write an image folder of two classes, with 20 images to train and 6 to validate."""
    generator = np.random.default_rng(0)
    for split, count in (("train", 10), ("val", 3)):
        for name, number in itertools.product(("cat", "dog"), range(count)):
            path = folder / split / name / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(generator.integers(0, 256, (40, 48, 3), dtype=np.uint8)).save(path)


def keyed(root: Path, world_size: int) -> list[dict[str, Any]]:
    """Return jobs that draw at random for each sample; odd numbers of ranks have loader workers, two a cap.

    Images are read by one and by two ranks only: torchvision takes seconds to import.
    """
    return [
        {
            "run": root / f"W{world_size}" / f"keyed-{name}",
            "spec": job_document(
                **changes,
                **SELDOM,
                train__data_dir=str(root / "images") if name == "images" else None,
                train__num_workers=2 * (world_size % 2),
                batch__max_per_device_batch_size=2 if world_size == 2 else None,
            ),
        }
        for name, changes in KEYED.items()
        if name == "own" or world_size <= 2
    ]


def bitwise(root: Path) -> list[dict[str, Any]]:
    stop = {"stop_after_calls": 3, "stop_rank": 3}
    return [
        {"run": root / name, "spec": job_document(**BITWISE)} | (stop if name == "stopped" else {})
        for name in ("whole", "rerun", "stopped")
    ]


def elastic(root: Path, world_size: int) -> dict[str, Any]:
    """Return the job that goes from four ranks to three and to two, or the one that has one rank all the time."""
    if world_size == 1:
        return {"run": root / "W1" / "elastic", "spec": job_document(**ELASTIC)}
    job = {"run": root / "elastic", "spec": job_document(**ELASTIC), "attempt": 4 - world_size}
    calls, _ = STOPS.get(world_size, (None, None))
    return job | {"stop_after_calls": calls, "stop_rank": world_size - 1}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run every job on four ranks, then on three, two and one."""
    root = tmp_path_factory.mktemp("trajectories")
    write_images(root / "images")
    for world_size in WORLD_SIZES:
        folder = root / f"W{world_size}"
        jobs = [*trajectories(folder, world_size), digits(folder, world_size), *keyed(root, world_size)]
        jobs += bitwise(root) if world_size == 4 else []
        outcome = run_ranks(root / f"ranks-{world_size}", world_size, [*jobs, elastic(root, world_size)])
        stops = world_size in STOPS
        assert outcome.codes == [75 if stops else 0] * world_size, outcome.outputs
        messages = [error["message"] for error in outcome.errors.values()]
        assert len(messages) == world_size * stops
        for message in messages:
            assert f"after step {STOPS[world_size][1]} (warned)" in message
            assert "the state is saved" in message
    again = {"run": root / "stopped", "spec": job_document(**BITWISE), "attempt": 1}
    outcome = run_ranks(root / "again", 4, [again])
    assert outcome.codes == [0] * 4, outcome.outputs
    assert "going on after step 5" in outcome.outputs[0]
    return root


@pytest.mark.parametrize(("optimizer", "cap"), CASES)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_parameters_after_28_steps_are_those_of_one_process(
    root: Path, world_size: int, optimizer: str, cap: int | None
) -> None:
    expected = parameters(root / "W1" / trajectory_name(optimizer, None), STEPS)
    found = parameters(root / f"W{world_size}" / trajectory_name(optimizer, cap), STEPS)
    assert float((found - expected).abs().max()) <= 1e-12
    losses = [record["loss"] for record in steps(root / f"W{world_size}" / trajectory_name(optimizer, cap))]
    assert len(losses) == STEPS
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_ranks_together_take_the_global_batches(root: Path, world_size: int, cap: int | None) -> None:
    plan = plan_batch(global_batch_size=BATCH, world_size=world_size, samples=SAMPLES, max_per_device_batch_size=cap)
    batches = GlobalBatches(SAMPLES, BATCH, "keep", "keyed", 0)
    record = root / f"W{world_size}" / f"record-{trajectory_name('nesterov', cap)}"
    taken = []
    for rank in range(world_size):
        lines = [int(line) for line in (record / f"rank-{rank}").read_text().split()]
        # The model is tried on the first two samples.
        assert lines[:2] == [0, 1]
        taken.append(iter(lines[2:]))
    for epoch, step in itertools.product(range(EPOCHS), range(batches.steps_per_epoch)):
        expected = batches.indices(epoch, step)
        shares = [sum(plan.rank_share(len(expected), rank)) for rank in range(world_size)]
        found = [next(indices) for indices, share in zip(taken, shares, strict=True) for _ in range(share)]
        assert np.array_equal(found, expected)
    assert all(next(indices, None) is None for indices in taken)


def test_run_on_four_ranks_goes_on_with_three_and_two_as_if_it_had_been_one(root: Path) -> None:
    found, expected = root / "elastic", root / "W1" / "elastic"
    assert float((parameters(found, 12) - parameters(expected, 12)).abs().max()) <= 1e-12
    assert [record["lr"] for record in steps(found)] == [record["lr"] for record in steps(expected)]
    assert [record["samples_seen"] for record in steps(found)] == [record["samples_seen"] for record in steps(expected)]
    assert [record["loss"] for record in steps(found)] == pytest.approx(
        [record["loss"] for record in steps(expected)], rel=0, abs=1e-12
    )
    assert (result(found)["attempts"], result(found)["world_size"]) == (3, 2)


@pytest.mark.parametrize("name", ["rerun", "stopped"])
def test_four_ranks_repeat_their_bits_in_a_rerun_and_after_a_stop(root: Path, name: str) -> None:
    assert result(root / name)["parameters_sha256"] == result(root / "whole")["parameters_sha256"]
    assert without_times(root / name) == without_times(root / "whole")


@pytest.mark.parametrize(("world_size", "name"), [(2, "images"), (2, "own"), (3, "own"), (4, "own")])
def test_random_transforms_are_the_same_for_every_number_of_ranks_and_workers(
    root: Path, world_size: int, name: str
) -> None:
    expected, found = (steps(root / f"W{ranks}" / f"keyed-{name}") for ranks in (1, world_size))
    assert [record["loss"] for record in found] == pytest.approx(
        [record["loss"] for record in expected], rel=0, abs=1e-12
    )


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_losses_and_evaluations_of_a_whole_training_equal_those_of_one_process(root: Path, world_size: int) -> None:
    one, many = (root / f"W{ranks}" / "digits" for ranks in (1, world_size))
    expected, found = steps(one), steps(many)
    assert len(expected) == 2 * -(-1437 // DIGITS_BATCH)
    assert [record["step"] for record in found] == list(range(1, len(expected) + 1))
    assert [record["samples_seen"] for record in found] == [record["samples_seen"] for record in expected]
    assert [record["loss"] for record in found] == pytest.approx(
        [record["loss"] for record in expected], rel=0, abs=1e-12
    )
    for left, right in zip(evaluations(many), evaluations(one), strict=True):
        del left["eval_s"], right["eval_s"]
        assert left.pop("val_loss") == pytest.approx(right.pop("val_loss"), rel=0, abs=1e-12)
        assert left == right
        assert left["val_samples"] == 360


def test_training_learns_and_its_result_tells_what_was_run(root: Path) -> None:
    document = result(root / "W3" / "digits")
    assert document["val_accuracy"] > 0.9
    assert document["val_top5"] > document["val_accuracy"]
    assert document["status"] == "finished"
    assert document["steps"] == 96
    assert document["epochs"] == 2
    assert document["samples_seen"] == 2 * 1437
    assert document["world_size"] == 3
    assert document["attempts"] == 1
    assert document["threads"] == 1
    assert len(document["parameters_sha256"]) == 64
