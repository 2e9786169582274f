"""The same training on a GPU."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hpcddp.jobfile.job import JobSpec
from hpcddp.run.checkpoints import list_checkpoints
from hpcddp.run.directory import RunDirectory
from hpcddp.train.checkpoint.checkpointer import Staging
from hpcddp.train.context import TrainContext
from hpcddp.train.loop.job import run_training
from hpcddp.train.scoring import ValidationShare, evaluate
from hpcddp.train.scoring.evaluate import Tally
from tests.distributed.scoring_rank import METRICS, outputs_and_targets
from tests.distributed.training import job_document, result, steps
from tests.train.conftest import ONE_RANK, Training
from tests.train.scaled_steps import parameters_after_steps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def nccl(tmp_path: Any) -> Any:
    """Open an NCCL group of one rank."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1, device_id=device)
    yield device
    dist.destroy_process_group()


def train(run: Training, device: torch.device, **changes: Any) -> None:
    run.run.attempt(0).path.mkdir(parents=True)
    run_training(
        TrainContext(
            spec=JobSpec.model_validate(job_document(train__epochs=2, **changes)),
            rank_env=ONE_RANK,
            device=device,
            run=run.run,
            attempt=0,
            threads=1,
            write_line=run.said.append,
        )
    )


@pytest.fixture
def gpu_training(tmp_path: Any) -> Training:
    return Training(RunDirectory(tmp_path / "run"))


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16", "fp64"])
def test_every_precision_trains(nccl: torch.device, gpu_training: Training, precision: str) -> None:
    train(gpu_training, nccl, train__precision=precision, train__channels_last=True)
    found = steps(gpu_training.run.path)
    assert found[-1]["loss"] < found[0]["loss"]
    assert result(gpu_training.run.path)["device"] == torch.cuda.get_device_name(nccl)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_deterministic_run_repeats_its_bits(nccl: torch.device, tmp_path: Any, optimizer: str) -> None:
    digests = set()
    for name in ("a", "b"):
        run = Training(RunDirectory(tmp_path / name))
        train(
            run,
            nccl,
            train__model="resnet18",
            train__precision="bf16",
            train__deterministic=True,
            train__optimizer={"name": optimizer},
            learning_rate__base=0.01,
        )
        digests.add(result(run.run.path)["parameters_sha256"])
    assert len(digests) == 1


@pytest.mark.usefixtures("nan_in_new_memory")
@pytest.mark.parametrize("gradients", [["inf", 2.0, 3.0], [2.0, "inf", 3.0], [None, "inf", 2.0]])
def test_fused_sgd_leaves_out_steps_that_overflow(gradients: list[Any]) -> None:
    found = [parameters_after_steps(gradients, nesterov=False, fused=fused, device="cuda") for fused in (False, True)]
    assert torch.equal(found[0], found[1])


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_compiled_model_trains(nccl: torch.device, gpu_training: Training) -> None:
    train(gpu_training, nccl, train__model="resnet18", train__precision="bf16", train__compile=True)
    assert result(gpu_training.run.path)["status"] == "finished"


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_narrow_precision_agrees_with_fp32(nccl: torch.device, tmp_path: Any, precision: str) -> None:
    losses = []
    for name in ("fp32", precision):
        run = Training(RunDirectory(tmp_path / name))
        train(run, nccl, train__precision=name, learning_rate__base=0.02)
        losses.append([record["loss"] for record in steps(run.run.path)])
    # bf16 has 8 bits of precision, and the losses are of order 1.
    assert losses[1] == pytest.approx(losses[0], abs=0.05)
    assert losses[1] != losses[0]


def test_native_sync_batch_norm_of_one_rank_is_the_local_one(nccl: torch.device, tmp_path: Any) -> None:
    losses = []
    for batch_norm in ("local", "sync"):
        run = Training(RunDirectory(tmp_path / batch_norm))
        train(
            run,
            nccl,
            train__model="resnet18",
            train__batch_norm=batch_norm,
            learning_rate__base=0.01,
        )
        losses.append([record["loss"] for record in steps(run.run.path)])
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def test_random_samples_do_not_depend_on_loader_workers(nccl: torch.device, gpu_training: Training) -> None:
    noisy = {"train__dataset": "tests.distributed.own_code:noisy_digits", "train__precision": "fp64"}
    train(gpu_training, nccl, **noisy)
    without = [record["loss"] for record in steps(gpu_training.run.path)]
    other = Training(RunDirectory(gpu_training.run.path.with_name("workers")))
    train(other, nccl, **noisy, train__num_workers=2)
    assert [record["loss"] for record in steps(other.run.path)] == pytest.approx(without, rel=1e-10)


def test_metrics_on_the_gpu_are_those_on_the_cpu(nccl: torch.device) -> None:
    outputs, targets = outputs_and_targets(50)
    share = ValidationShare(50, batch_size=7)
    on_gpu = evaluate(share, ((outputs[i].to(nccl), targets[i].to(nccl)) for i in share), METRICS)
    tally = Tally(METRICS, 50, torch.device("cpu"))
    tally.add(range(50), outputs, targets)
    on_cpu = tally.values(tally.vector(tally.widths()), tally.widths())
    assert on_gpu.pop("loss") == pytest.approx(on_cpu.pop("loss"), abs=1e-12)
    assert on_gpu == on_cpu


def test_state_is_copied_before_what_the_gpu_does_next() -> None:
    value = torch.zeros(10_000_000, device="cuda")
    staging = Staging()
    copies = staging.copy({"model": {"weight": value}})
    for _ in range(100):
        value.add_(1)
    staging.wait_until_copied()
    assert not copies["model"]["weight"].any()
    assert copies["model"]["weight"].is_pinned()


def test_resumed_run_equals_the_uninterrupted_one(nccl: torch.device, tmp_path: Any) -> None:
    changes: dict[str, Any] = {"checkpoint": {"every": {"steps": 1}}, "train__optimizer": {"name": "adamw"}}
    whole, broken = (Training(RunDirectory(tmp_path / name)) for name in ("whole", "broken"))
    train(whole, nccl, **changes)
    train(broken, nccl, **changes)
    # As if it had been killed in the middle: the newest checkpoints are not there.
    for path in list_checkpoints(broken.run.checkpoints)[:-1]:
        shutil.rmtree(path)
    broken.run.result.unlink()
    shutil.rmtree(broken.run.attempt(0).path)
    train(broken, nccl, **changes)
    assert result(broken.run.path)["parameters_sha256"] == result(whole.run.path)["parameters_sha256"]
