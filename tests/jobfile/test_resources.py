"""What a job may ask Slurm for, and how it is written for sbatch."""

from __future__ import annotations

from typing import Any

import pytest

from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.problems import JobFileError
from hpcddp.jobfile.read import load_job
from hpcddp.slurm.directives import directives_for
from tests.messages import GoldenMessages


def job(resources: dict[str, Any]) -> dict[str, Any]:
    return {"name": "a", "command": ["true"], "resources": resources}


def directives(**resources: Any) -> dict[str, str | None]:
    spec: JobSpec = load_job(job(resources)).spec
    return {directive.flag: directive.value for directive in directives_for(spec, run_id="r")}


@pytest.mark.parametrize(
    ("resources", "gres"),
    [
        ({"gres": {"nvme": 100}}, "nvme:100"),
        ({"gres": {"gmem": "40g"}}, "gmem:40G"),
        ({"gpus_per_node": 4, "gpu_type": "v100", "gres": {"nvme": 100}}, "gpu:v100:4,nvme:100"),
        ({"gpus_per_node": 1, "gres": {"lscratch": 200, "nic:fast": 2}}, "gpu:1,lscratch:200,nic:fast:2"),
    ],
)
def test_other_generic_resources_are_requested_beside_the_gpus(resources: dict[str, Any], gres: str) -> None:
    assert directives(**resources)["gres"] == gres


@pytest.mark.parametrize(
    ("resources", "gpus", "gres"),
    [
        ({"gpu_request": "gpus-per-node"}, "2", None),
        ({"gpu_request": "gpus-per-node", "gpu_type": "a100", "gres": {"nvme": 100}}, "a100:2", "nvme:100"),
        ({"gpu_request": "none"}, None, None),
        ({"gpu_request": "none", "gres": {"nvme": 100}}, None, "nvme:100"),
        # A profile also holds for jobs on CPUs.
        ({"gpu_request": "gpus-per-node", "gpus_per_node": 0, "tasks_per_node": 2}, None, None),
    ],
)
def test_the_site_says_how_gpus_are_requested(resources: dict[str, Any], gpus: str | None, gres: str | None) -> None:
    written = directives(**{"gpus_per_node": 2, **resources})
    assert (written.get("gpus-per-node"), written.get("gres"), written["ntasks-per-node"]) == (gpus, gres, "2")


@pytest.mark.parametrize(
    ("resources", "nodes"), [({"nodes": 3, "min_nodes": 2}, "3"), ({"nodes": 3, "spare_nodes": 2}, "5")]
)
def test_a_job_that_may_lose_nodes_gets_the_spare_ones_and_is_not_killed(resources: dict[str, Any], nodes: str) -> None:
    # Not read from a file: such a job is still refused.
    spec = JobSpec.model_validate(job(resources))
    written = {directive.flag: directive.value for directive in directives_for(spec, run_id="r")}
    assert (written["nodes"], written["no-kill"]) == (nodes, None)


@pytest.mark.parametrize(
    ("written", "sbatch"),
    [("500GB", "500G"), ("64GiB", "64G"), ("1.5T", "1536G"), ("0.5g", "512M"), ("1.25TB", "1280G"), ("2000m", "2000M")],
)
def test_memory_is_written_as_slurm_reads_it(written: str, sbatch: str) -> None:
    assert directives(mem=written)["mem"] == sbatch


@pytest.mark.parametrize(
    ("written", "value"), [(True, None), ("user", "user"), ("mcs", "mcs"), ("topo", "topo"), (False, "")]
)
def test_nodes_are_shared_with_those_who_are_named(written: object, value: str | None) -> None:
    assert directives(exclusive=written).get("exclusive", "") == value


@pytest.mark.parametrize(
    ("resources", "way_out"),
    [
        ({"gres": {"gpu": 2}}, "write gpus_per_node and gpu_type"),
        ({"gres": {"gpu:a100": 2}}, "write gpus_per_node and gpu_type"),
        ({"gres": {"nvme": 0}}, "write for example 1, or 100G"),
        ({"gres": {"a b": 1}}, "for example nvme"),
        ({"gpus_per_node": 2, "gpu_type": "a100:2"}, "write gpu_type a100, and the count in gpus_per_node"),
        ({"gpus_per_node": 2, "gpu_type": "gpu:a100:4"}, "write gpu_type a100"),
        ({"exclusive": "users"}, "user, mcs, topo"),
        ({"mem": "0G"}, "write for example 64G"),
        ({"mem": "1.5"}, "write for example 64G"),
        ({"mem": "12B"}, "write for example 64G"),
        ({"sbatch": {"gres": "nvme:1"}}, "resources.gres for others"),
        ({"sbatch": {"cpus-per-gpu": 4}}, "write resources.cpus_per_task"),
        ({"sbatch": {"gpu-bind": "single:1"}}, "write resources.srun.gpu-bind"),
        ({"sbatch": {"cpu-bind": "none"}}, "write resources.srun.cpu-bind"),
        ({"sbatch": {"accel-bind": "g"}}, "write resources.srun.accel-bind"),
        ({"sbatch": {"output": "x"}}, "set run_root"),
        ({"gres": "gpu:2"}, "expected a mapping"),
        ({"extra": "x"}, "goes under resources.sbatch, as in {extra: ...}"),
        ({"srun": {"label": True}}, "where they write; remove it"),
        ({"srun": {"cpus-per-task": 7}}, "write resources.cpus_per_task"),
        ({"srun": {"container-im": "x.sqsh"}}, "write environment.container.image"),
        ({"gpus_per_node": 8, "srun": {"gpus-per-task": 2}}, "8 GPUs for 8 tasks"),
        ({"gpus_per_node": 8, "srun": {"gpu-bind": "verbose,single:2"}}, "8 GPUs for 8 tasks"),
        ({"tasks_per_node": 1, "srun": {"gpus-per-t": "a100:1"}}, "0 GPUs for 1 task"),
        ({"srun": {"cpu-bind": True, "mpi": "pmix"}}, "resources.srun.cpu-bind: is true, and --cpu-bind takes a value"),
        ({"srun": {"comm": True}}, "resources.srun.comm: is true"),
        ({"sbatch": {"comment": True}}, "resources.sbatch.comment: is true, and --comment takes a value; write it"),
    ],
)
def test_what_cannot_be_is_refused_with_the_field(
    resources: dict[str, Any], way_out: str, golden: GoldenMessages
) -> None:
    with pytest.raises(JobFileError) as refused:
        load_job(job(resources))
    assert way_out in golden.message(refused.value)


@pytest.mark.parametrize(
    ("launcher", "flags"),
    [
        (None, {"gpus-per-task": 1, "gpu-bind": "closest"}),
        (None, {"gpus-per-task": "a100:1", "gpu-bind": "none"}),
        (None, {"gpu-bind": "single:1"}),
        (None, {"gpu-bind": "v,per_task:1"}),
        (None, {"gpu-bind": "map_gpu:0,1,2,3"}),
        ("own", {"gpus-per-task": 4}),
    ],
)
def test_each_rank_may_be_bound_to_its_gpu(launcher: str | None, flags: dict[str, Any]) -> None:
    fields = {**job({"gpus_per_node": 4, "srun": flags}), "launcher": launcher}
    written = {flag: str(value) for flag, value in flags.items()}
    assert load_job(fields).spec.resources.srun == written


def test_a_task_that_starts_the_ranks_of_its_node_has_all_gpus() -> None:
    fields = {**job({"gpus_per_node": 4, "srun": {"gpus-per-task": 1}}), "launcher": "own"}
    with pytest.raises(JobFileError, match="4 GPUs for 1 task "):
        load_job(fields)


def test_a_flag_without_a_value_is_true_unless_it_is_known_to_need_one() -> None:
    flags = {"exact": True, "overlap": True, "of-a-plugin": True}
    assert load_job(job({"srun": flags, "sbatch": {"nice": True, "of-a-plugin": True}})).spec.resources.srun == flags
