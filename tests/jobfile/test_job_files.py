"""The job files that the project ships."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.read import load_job

JOBS = Path(__file__).parents[2] / "jobs"


def spec_of(name: str) -> JobSpec:
    return load_job(JOBS / name).spec


@pytest.mark.parametrize("file", sorted(JOBS.glob("*.yaml")), ids=lambda file: file.name)
def test_every_job_file_loads_and_is_named_like_its_file(file: Path) -> None:
    assert load_job(file).spec.name == file.stem.replace("_", "-")


def test_the_quickstart_needs_two_ranks_no_gpu_and_no_data() -> None:
    spec = spec_of("quickstart.yaml")
    assert (spec.world_size, spec.device, spec.resources.nodes) == (2, "cpu", 1)
    assert spec.train is not None
    assert spec.train.dataset == "digits"


def test_the_cifar10_job_is_one_node_with_four_gpus() -> None:
    spec = spec_of("resnet18_cifar10.yaml")
    assert (spec.resources.nodes, spec.resources.gpus_per_node, spec.world_size) == (1, 4, 4)


def test_the_imagenet_job_is_two_nodes_with_eight_gpus_that_come_back() -> None:
    spec = spec_of("resnet50_imagenet.yaml")
    assert (spec.resources.nodes, spec.resources.gpus_per_node, spec.world_size) == (2, 8, 16)
    assert set(spec.requeue.causes) == {"preemption", "time_limit", "node_failure"}
