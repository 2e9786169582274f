"""``resources.srun``: commands that computing centres publish, in the words that srun gets."""

from __future__ import annotations

from typing import Any

import pytest

from hpcddp.jobfile.cluster import Cluster
from hpcddp.jobfile.read import load_job
from hpcddp.submission.checks import bound_gpus, check_submittable, notes_about
from hpcddp.submission.request import SubmissionError
from tests.messages import GoldenMessages
from tests.submission.requests import request_of
from tests.submission.script_runner import ScriptRunner, script_of

MASKS = (
    "mask_cpu:0x00fe000000000000,0xfe00000000000000,0x0000000000fe0000,0x00000000fe000000,"
    "0x00000000000000fe,0x000000000000fe00,0x000000fe00000000,0x0000fe0000000000"
)


@pytest.mark.parametrize("launcher", ["slurm", "here"])
@pytest.mark.parametrize(
    ("resources", "words", "directives"),
    [
        pytest.param(
            {
                "nodes": 2,
                "gpus_per_node": 4,
                "constraint": "thp_never&nvidia_vboost_enabled",
                "srun": {"environment": "edf.toml", "network": "disable_rdzv_get"},
            },
            # Not --label: each rank has a log of its own.
            ["--nodes=2", "--ntasks=8", "--unbuffered", "--environment=edf.toml", "--network=disable_rdzv_get"],
            ["--constraint=thp_never&nvidia_vboost_enabled"],
            id="alps",
        ),
        pytest.param(
            {
                "nodes": 2,
                "gpus_per_node": 8,
                "cpus_per_task": 7,
                "sbatch": {"network": "disable_rdzv_get"},
                "srun": {"gpus-per-task": 1, "gpu-bind": "closest"},
            },
            ["--nodes=2", "--ntasks=16", "--cpus-per-task=7", "--gpus-per-task=1", "--gpu-bind=closest"],
            ["--network=disable_rdzv_get"],
            id="frontier",
        ),
        pytest.param(
            {"gpus_per_node": 8, "cpus_per_task": 7, "srun": {"cpu-bind": MASKS}},
            ["--ntasks=8", "--cpus-per-task=7", f"--cpu-bind={MASKS}"],
            ["--ntasks-per-node=8"],
            id="lumi",
        ),
        pytest.param(
            {"srun": {"mpi": "pmix", "hint": "nomultithread", "exact": True, "comment": "$(touch x) 'it' \\ \""}},
            ["--mpi=pmix", "--hint=nomultithread", "--exact", "--comment=$(touch x) 'it' \\ \""],
            [],
            id="quoted",
        ),
    ],
)
def test_the_tasks_are_started_with_the_flags_as_they_are_written(
    runner: ScriptRunner, launcher: Cluster, resources: dict[str, Any], words: list[str], directives: list[str]
) -> None:
    script = script_of(runner, launcher=launcher, resources=resources)
    assert runner.run(script) == (0, "")
    called = runner.words("srun")
    assert set(words) <= set(called[: called.index("sh")])
    assert {f"#SBATCH {directive}" for directive in directives} <= set(script.replace('"', "").splitlines())


@pytest.mark.parametrize(
    ("resources", "words"),
    [
        ({"gpu_request": "none"}, ["--gpus-per-node=4"]),
        ({"gpu_request": "none", "srun": {"gpus-per-task": 1}}, ["--gpus-per-task=1"]),
        ({"gpu_request": "none", "gpus_per_node": 0, "tasks_per_node": 4}, []),
        ({"gpu_request": "gpus-per-node"}, []),
        ({"gpu_request": "gpus-per-node", "gres": {"nvme": 1, "lscratch": "2G"}}, ["--gres=nvme:1,lscratch:2G"]),
        ({"gpu_request": "none", "gres": {"nvme": 1}}, ["--gpus-per-node=4", "--gres=nvme:1"]),
        ({"gres": {"nvme": 1}}, []),
    ],
)
def test_srun_asks_for_the_gpus_that_came_with_the_nodes_and_for_the_resources_that_it_would_not_get_beside_them(
    runner: ScriptRunner, resources: dict[str, Any], words: list[str]
) -> None:
    script = script_of(runner, resources={"gpus_per_node": 4, **resources})
    assert runner.run(script, SLURM_JOB_GPUS="0,1,2,3") == (0, "")
    assert [word for word in runner.words("srun") if word.startswith("--g")] == words
    if "srun" not in resources:
        assert runner.run(script) == (0, "")
        assert "--gp" not in " ".join(runner.words("srun"))


def test_the_srun_that_copies_the_data_and_a_run_on_this_machine_have_none_of_them(runner: ScriptRunner) -> None:
    resources = {"srun": {"mpi": "pmix"}}
    stage = {"stage": {"source": "/data", "target": "/tmp/data"}}
    assert script_of(runner, resources=resources, environment=stage).count("--mpi=pmix") == 1
    assert runner.run(script_of(runner, launcher="local", resources=resources)) == (0, "")
    assert runner.words("srun") == []
    assert "--mpi" not in str(runner.words("task"))


def gpu_notes(flags: dict[str, Any], cluster: Cluster = "slurm") -> list[str]:
    fields = {"name": "a", "command": ["true"], "resources": {"gpus_per_node": 4, "cpus_per_task": 8, "srun": flags}}
    return list(notes_about(request_of(load_job(fields), cluster=cluster)))


@pytest.mark.parametrize("flags", [{"gpus-per-task": 1}, {"gpu-bind": "closest"}, {"gpu-bind": "single:1"}])
def test_a_program_that_may_see_its_gpu_alone_is_told(flags: dict[str, Any], golden: GoldenMessages) -> None:
    (note,) = gpu_notes(flags)
    assert "use GPU 0 if it sees one" in golden.message(note)


def test_who_sees_all_gpus_or_chooses_them_right_is_told_nothing() -> None:
    assert gpu_notes({"gpus-per-task": 1, "gpu-bind": "none"}) == []
    assert gpu_notes({"cpu-bind": "cores"}) == []
    assert gpu_notes({"gpu-bind": "closest"}, "local") == []
    own = {"name": "a", "command": ["true"], "launcher": "own"}
    resources = {"gpus_per_node": 4, "cpus_per_task": 8, "srun": {"gpus-per-task": 4}}
    assert list(bound_gpus(request_of(load_job({**own, "resources": resources})))) == []
    training = {"model": "resnet18", "dataset": "digits"}
    job = {"name": "a", "train": training, "batch": {"global_batch_size": 8}}
    resources = {"gpus_per_node": 4, "srun": {"gpu-bind": "single:1"}}
    assert list(bound_gpus(request_of(load_job({**job, "resources": resources})))) == []


def cpu_notes(binding: str, launcher: str | None = None, cluster: Cluster = "slurm", gpus: int = 4) -> list[str]:
    resources = {"gpus_per_node": gpus, "cpus_per_task": 7, "srun": {"cpu-bind": binding}}
    fields = {"name": "a", "command": ["true"], "launcher": launcher, "resources": resources}
    return [note for note in check_submittable(request_of(load_job(fields), cluster=cluster)) if "cpu-bind" in note]


@pytest.mark.parametrize("binding", [MASKS, f"v,{MASKS.replace(':', '=')}", "q,map_ldom:3,3,1,1,0,0,2,2"])
def test_a_list_of_the_cpus_of_more_tasks_than_a_node_has_is_told(binding: str, golden: GoldenMessages) -> None:
    with pytest.raises(SubmissionError) as refused:
        cpu_notes(binding, "own", gpus=8)
    assert "has 1 task for 8 ranks" in golden.message(refused.value)
    (note,) = cpu_notes(binding)
    assert note.endswith(" or add --set resources.srun.cpu-bind=null")
    assert cpu_notes(binding, gpus=8) == cpu_notes(binding, "own", "local") == []


def test_a_list_that_each_task_has_a_part_of_is_told_nothing() -> None:
    assert cpu_notes("cores") == cpu_notes("mask_ldom:0x1,0x2") == cpu_notes("map_cpu:0*4") == []
    assert cpu_notes("map_cpu:0", "own") == []
