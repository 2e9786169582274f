"""``hpcddp init`` on a real Slurm: what it writes is true, and a first job runs with it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hpcddp.run.directory import RunDirectory
from tests.cluster.jobs import HPCDDP, finished, result_of
from tests.cluster.sandboxes import QUICK, sandbox_with

if TYPE_CHECKING:
    from tests.cluster.sandbox import Sandbox


@pytest.fixture(scope="module")
def bare() -> Iterator[Sandbox]:
    """Start a Slurm of one node with one partition and neither accounting nor GPUs nor preemption nor requeue."""
    settings = ("PreemptType=preempt/none", "PreemptMode=OFF", "JobRequeue=0", "EnforcePartLimits=ALL")
    more = ("SelectTypeParameters=CR_Core_Memory", "DefMemPerCPU=500", *QUICK)
    with sandbox_with(*settings, *more, options=("--nodes", "1", "--gpus-per-node", "0")) as started:
        for name in ("low0", "lowc", "high"):
            started.run("scontrol", "delete", f"PartitionName={name}")
        started.run("scontrol", "update", "PartitionName=low", "MaxTime=60", "DefaultTime=5")
        yield started


def init(sandbox: Sandbox, directory: Path, *options: str) -> dict[str, Any]:
    """Run ``hpcddp init`` with a home of its own, and return what it says."""
    done = sandbox.run(*HPCDDP, "init", "--json", *options, cwd=directory, env=home(directory))
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def home(directory: Path) -> dict[str, str]:
    return {"XDG_CONFIG_HOME": str(directory / "config")}


def submit(sandbox: Sandbox, directory: Path, *options: str) -> dict[str, Any]:
    done = sandbox.run(*HPCDDP, "submit", "job.yaml", "--json", *options, cwd=directory, env=home(directory))
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def refusal(sandbox: Sandbox, directory: Path, *options: str) -> str:
    done = sandbox.run(*HPCDDP, "submit", "job.yaml", *options, cwd=directory, env=home(directory), check=False)
    assert done.returncode == 2
    return done.stderr.splitlines()[0]


def test_the_profile_tells_the_partitions_gpus_and_preemption_of_this_slurm(sandbox: Sandbox, tmp_path: Path) -> None:
    facts = init(sandbox, tmp_path, "--dry-run")["cluster"]
    assert (facts["name"], list(facts["partitions"])) == ("sandbox", ["low", "low0", "lowc", "high"])
    low = facts["partitions"]["low"]
    assert (low["default"], low["preempt_mode"], low["grace_time_s"]) == (True, "REQUEUE", 10)
    (kind,) = low["kinds"]
    assert (kind["nodes"], kind["cpus"], kind["gpus"], kind["gpu_types"]) == (4, 8, 4, {})
    assert facts["partitions"]["lowc"]["preempt_mode"] == "CANCEL"
    policy = facts["preemption"]
    assert (policy["type"], policy["kill_wait_s"], policy["requeue_delay_s"]) == ("partition_prio", 15, 6)
    assert facts["accounts"] == {"required": False, "default": None, "names": [], "qos": []}


def test_the_first_job_runs_to_its_end(sandbox: Sandbox, tmp_path: Path) -> None:
    written = init(sandbox, tmp_path, "--partition", "high")
    assert written["next"] == "hpcddp submit job.yaml --follow"
    submitted = submit(sandbox, tmp_path, "--set", "train.epochs=1", "--set", "train.model=squeezenet1_1")
    assert finished(sandbox, submitted["job_id"])["Partition"] == "high"
    result = result_of(RunDirectory(Path(submitted["run_dir"])))
    assert (result["status"], result["world_size"]) == ("finished", 2)


def test_what_is_refused_would_have_been_refused_or_have_waited_for_ever(sandbox: Sandbox, tmp_path: Path) -> None:
    init(sandbox, tmp_path)
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/bash\n")
    impossible = {
        "--cpus-per-task=9": ("resources.cpus_per_task=9", "--set", "resources.tasks_per_node=1"),
        "--mem=2T": ("resources.mem=2T",),
        "--gres=gpu:5": ("resources.gpus_per_node=5", "--set", "resources.tasks_per_node=null"),
        "--gres=gpu:a100:1": ("resources.gpus_per_node=1", "--set", "resources.tasks_per_node=null", "--set",
                              "resources.gpu_type=a100"),
        "--partition=hihg": ("resources.partition=hihg",),
    }  # fmt: skip
    for flag, words in impossible.items():
        assert sandbox.run("sbatch", flag, script, check=False).returncode != 0
        assert refusal(sandbox, tmp_path, "--set", *words).startswith("hpcddp: resources.")
    waits = sandbox.run("sbatch", "--parsable", "--nodes=5", "--output=/dev/null", script, check=False)
    # Slurm 24.11 refuses more nodes than there are, like the options above; 22.05 and 26.05 queue the job for ever.
    if waits.returncode == 0:
        fields = sandbox.wait(waits.stdout.strip(), states={"PENDING"})
        assert fields["Reason"] in {"PartitionNodeLimit", "PartitionConfig"}
    assert refusal(sandbox, tmp_path, "--set", "resources.nodes=5") == (
        "hpcddp: resources.nodes (--set) is 5, and partition low has 4; write 4 or less"
    )


@pytest.mark.long("the first job runs on the other Slurm; tests/cli has profiles of a Slurm with less")
def test_the_first_job_runs_on_a_slurm_with_the_least_of_everything(bare: Sandbox, tmp_path: Path) -> None:
    written = init(bare, tmp_path)
    facts = written["cluster"]
    (partition,) = facts["partitions"].values()
    assert (partition["max_time"], partition["default_time"]) == ("01:00:00", "00:05:00")
    assert (partition["default_mem"], partition["kinds"][0]["gpus"]) == ("500M per CPU", 0)
    assert (facts["preemption"]["type"], facts["preemption"]["requeue"]) == ("none", False)
    assert (facts["memory_is_shared_out"], facts["enforce_part_limits"]) == (True, "ALL")
    submitted = submit(bare, tmp_path, "--set", "train.epochs=1")
    job = bare.wait(submitted["job_id"], states={"RUNNING"})
    # The site requeues nobody who does not ask for it; the job does.
    assert (job["Requeue"], job["MinMemoryNode"]) == ("1", "4G")
    finished(bare, submitted["job_id"])
    assert refusal(bare, tmp_path, "--set", "resources.time_limit=2h") == (
        "hpcddp: resources.time_limit (--set) is 02:00:00, and partition low takes 01:00:00 at most; write that or less"
    )


def test_a_drained_cluster_and_one_that_is_away_are_told(bare: Sandbox, tmp_path: Path) -> None:
    bare.run("scontrol", "update", "PartitionName=low", "State=DOWN")
    done = bare.run(*HPCDDP, "init", cwd=tmp_path, env=home(tmp_path))
    assert "partitions     low (default): 1 node of 8 CPUs, 976G, 01:00:00 at most; DOWN\n" in done.stdout
    assert "next           hpcddp submit job.yaml --follow, which waits while low is DOWN\n" in done.stdout
    bare.run("scontrol", "update", "PartitionName=low", "State=UP")
    elsewhere = tmp_path / "slurm.conf"
    elsewhere.write_text(bare.slurm_conf.read_text().replace("SlurmctldPort=", "SlurmctldPort=1\n#"))
    done = bare.run(
        *HPCDDP, "init", "--force", cwd=tmp_path, check=False, env={**home(tmp_path), "SLURM_CONF": str(elsewhere)}
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "hpcddp: Slurm's controller does not answer, and only it knows the cluster; try again later\n"
    )
