"""The same training on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from hpcddp.spec.job import JobSpec
from hpcddp.train.context import TrainContext
from hpcddp.train.job import run_training
from tests.distributed.training import job_document, result, steps
from tests.train.conftest import Training

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
            rank=0,
            local_rank=0,
            world_size=1,
            device=device,
            run=run.run,
            attempt=0,
            threads=1,
            say=run.said.append,
        )
    )


@pytest.fixture
def gpu_training(tmp_path: Any) -> Training:
    from hpcddp.run.directory import RunDirectory

    return Training(RunDirectory(tmp_path / "run"))


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16", "fp64"])
def test_every_precision_trains(nccl: torch.device, gpu_training: Training, precision: str) -> None:
    train(gpu_training, nccl, train__precision=precision, train__channels_last=True)
    found = steps(gpu_training.run.path)
    assert found[-1]["loss"] < found[0]["loss"]
    assert result(gpu_training.run.path)["device"] == torch.cuda.get_device_name(nccl)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_deterministic_run_repeats_its_bits(nccl: torch.device, tmp_path: Any, optimizer: str) -> None:
    from hpcddp.run.directory import RunDirectory

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


def test_compiled_model_trains(nccl: torch.device, gpu_training: Training) -> None:
    train(gpu_training, nccl, train__model="resnet18", train__precision="bf16", train__compile=True)
    assert result(gpu_training.run.path)["status"] == "finished"
