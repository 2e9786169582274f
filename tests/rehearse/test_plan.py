"""How a job is made small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcddp.errors import UserError
from hpcddp.jobfile.read import load_job
from hpcddp.rehearse.plan import Place, SmallJob, make_small
from hpcddp.rehearse.rehearsal import choose_faults
from tests.messages import GoldenMessages

IMAGENET: dict[str, Any] = {
    "name": "large",
    "resources": {"nodes": 8, "gpus_per_node": 4, "gpu_type": "a100", "cpus_per_task": 16, "partition": "gpu"},
    "batch": {"global_batch_size": 8192},
    "train": {
        "model": "resnet50",
        "dataset": "imagefolder",
        "data_dir": "/data",
        "num_classes": 1000,
        "epochs": 90,
        "precision": "bf16",
    },
    "trackers": {"use": ["wandb"]},
}
ON_CPUS: dict[str, Any] = {
    "name": "large",
    "batch": {"global_batch_size": 256},
    "train": {"model": "resnet18", "dataset": "synthetic", "dataset_args": {"samples": 1000}},
}
COMMAND: dict[str, Any] = {"name": "mine", "resources": {"tasks_per_node": 8}, "command": ["python", "train.py"]}


def small(job: dict[str, Any], *overrides: str, place: Place = "here", gpus: int = 0) -> SmallJob:
    read = load_job(job, overrides=overrides)
    return make_small(read, place=place, run_root=Path("/scratch"), gpus=gpus, environment={})


def test_a_large_training_has_two_ranks_few_steps_and_many_saves_on_cpus() -> None:
    job = small(IMAGENET)
    spec, train = job.spec, job.spec.train
    assert train is not None
    assert (spec.world_size, spec.resources.nodes, spec.uses_gpus, spec.device) == (2, 1, False, "cpu")
    assert (train.dataset, train.epochs, train.precision, train.model) == ("synthetic", 1, "fp32", "resnet50")
    assert train.dataset_args["num_classes"] == 1000
    assert train.dataset_args["samples"] == 24 * spec.global_batch_size == 24 * 64
    assert spec.checkpoint.every.steps == 4
    assert (spec.trackers.use, spec.run_root) == ((), "/scratch")
    assert "train.epochs: 90 -> 1" in job.changes
    assert not any(change.startswith("run_root") for change in job.changes)


@pytest.mark.parametrize(("per_device", "expected"), [(256, 32), (24, 24)])
def test_a_fixed_micro_batch_divides_the_small_batch_with_one_rank_and_with_two(per_device: int, expected: int) -> None:
    batch = {"global_batch_size": 8 * per_device, "per_device_batch_size": per_device}
    made_small = small({**ON_CPUS, "resources": {"nodes": 8}, "batch": batch}).spec.batch
    assert (made_small.per_device_batch_size, made_small.global_batch_size) == (expected, 2 * expected)


def test_the_gpus_of_this_machine_are_used() -> None:
    job = small(IMAGENET, gpus=4)
    assert job.spec.train is not None
    assert (job.spec.world_size, job.spec.device, job.spec.train.precision) == (2, "cuda", "bf16")
    assert small(IMAGENET, gpus=1).spec.world_size == 1


def test_what_the_command_line_sets_stays() -> None:
    job = small(IMAGENET, "train.epochs=3", "resources.gpus_per_node=4", gpus=8)
    assert job.spec.train is not None
    assert (job.spec.train.epochs, job.spec.world_size) == (3, 4)


def test_a_command_keeps_its_words_and_gets_two_ranks() -> None:
    job = small(COMMAND)
    assert (job.spec.command, job.spec.world_size) == (("python", "train.py"), 2)
    assert job.other_world_size() == ["resources.tasks_per_node=1"]


def test_a_job_of_one_rank_stays_one_and_gets_two_as_the_other_world_size() -> None:
    job = small({**COMMAND, "resources": {}})
    assert job.spec.world_size == 1
    assert job.other_world_size() == ["resources.tasks_per_node=2"]


def test_on_two_nodes_each_has_a_rank_and_the_cluster_keeps_its_partition() -> None:
    job = small(IMAGENET, place="cluster")
    resources = job.spec.resources
    assert (resources.nodes, job.spec.world_size, resources.partition, job.spec.device) == (2, 2, "gpu", "cuda")
    assert resources.time_limit is not None
    assert resources.time_limit.seconds == 600
    job = small(IMAGENET, "resources.gpus_per_node=8", place="sandbox")
    assert (job.spec.resources.nodes, job.spec.world_size, job.spec.resources.partition) == (2, 2, None)


@pytest.mark.parametrize("place", ["here", "sandbox", "cluster"])
def test_a_job_of_a_range_of_nodes_gets_as_many_as_the_rehearsal_has(place: Place) -> None:
    made_small = small({**ON_CPUS, "resources": {"nodes": "2-8"}}, place=place)
    assert made_small.spec.resources.nodes == (1 if place == "here" else 2)


def test_the_sandbox_gets_nothing_that_is_of_a_site_and_the_cluster_all_of_it() -> None:
    of_a_site: dict[str, Any] = {
        "gpu_request": "none",
        "gres": {"nvme": "100G"},
        "mem_per_cpu": "2G",
        "partition": "cpu",
        "account": "a",
        "qos": "long",
        "constraint": "avx512",
        "reservation": "maintenance",
        "nodelist": "n1",
        "exclude": "n9",
        "exclusive": "mcs",
        "mail_type": "END",
        "mail_user": "a@b.c",
        "sbatch": {"comment": "x", "licenses": "matlab"},
    }
    two_nodes = {"nodes": 2, "tasks_per_node": 1, "time_limit": "00:10:00"}
    job = {**ON_CPUS, "resources": {"nodes": 8, **of_a_site}}
    assert small(job, place="sandbox").spec.resources.model_dump(exclude_defaults=True) == two_nodes
    assert small(job, place="cluster").spec.resources.model_dump(exclude_defaults=True) == {**two_nodes, **of_a_site}


def test_a_sweep_is_refused(golden: GoldenMessages) -> None:
    with pytest.raises(UserError, match="sweep=null") as caught:
        small(
            {
                **COMMAND,
                "sweep": {"train.seed": [0, 1]},
                "command": None,
                "train": IMAGENET["train"],
                "batch": {"global_batch_size": 8},
            }
        )
    golden.message(caught.value)


def test_faults_are_chosen_by_name_where_they_are() -> None:
    chosen = choose_faults(["requeue", "kill"], ["here", "sandbox"])
    assert {place: [fault.name for fault in faults] for place, faults in chosen.items()} == {
        "here": ["kill"],
        "sandbox": ["requeue"],
    }
    assert len(choose_faults([], ["here"])["here"]) == 6
    with pytest.raises(UserError, match="write one of preemption"):
        choose_faults(["requeue"], ["here"])
