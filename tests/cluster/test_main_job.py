"""The main job on a real Slurm of several hosts: what is submitted is what was rendered, and it trains."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpcddp.run.directory import RunDirectory
from hpcddp.slurm.hostlist import expand
from tests.cluster.jobs import HPCDDP, finished, result_of, submit, write_job
from tests.cluster.models import SMALL_MODEL
from tests.waiting import wait_for_text

if TYPE_CHECKING:
    from tests.cluster.sandbox import Sandbox


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "small.py").write_text(SMALL_MODEL)
    return tmp_path


def test_two_hosts_with_two_tasks_each_train_and_the_script_is_the_rendered_one(
    sandbox: Sandbox, directory: Path
) -> None:
    job = write_job(directory, tasks=2)
    submitted = submit(sandbox, job)
    run = RunDirectory(Path(submitted["run_dir"]))
    job_id = submitted["job_id"]
    assert finished(sandbox, job_id)["ExitCode"] == "0:0"
    rendered = sandbox.run(*HPCDDP, "render", str(job), "--run-id", submitted["run_id"], cwd=directory).stdout
    assert (run.submitit / f"{job_id}_submission.sh").read_text() == rendered
    assert run.script.read_text() == rendered
    assert sandbox.run("scontrol", "write", "batch_script", job_id, "-").stdout.strip() == rendered.strip()
    result = result_of(run)
    assert (result["status"], result["world_size"], result["val_samples"]) == ("finished", 4, 360)
    # Whoever holds the submitit job has the result of rank 0.
    outcome, value = pickle.loads((run.submitit / f"{job_id}_0_result.pkl").read_bytes())
    assert (outcome, value["parameters_sha256"]) == ("success", result["parameters_sha256"])
    assert sorted(path.name for path in run.attempt(0).path.glob("rank-*.log")) == [f"rank-{r}.log" for r in range(4)]
    assert [path for path in run.path.rglob("*") if path.stat().st_mode & 0o077] == []


# Of the job in whose shell sbatch is called. srun takes most of them for options.
FOREIGN = {
    "SLURM_CPU_BIND": "mask_cpu:0x1",
    "SLURM_DISTRIBUTION": "cyclic",
    "SLURM_EXPORT_ENV": "NONE",
    "SLURM_GPUS_PER_TASK": "1",
    "SLURM_GPU_BIND": "single:1",
    "SLURM_MEM_PER_CPU": "50",
    "SLURM_NTASKS_PER_CORE": "1",
    "TORCHELASTIC_RUN_ID": "outer",
}


def test_the_script_without_a_run_id_runs_by_hand_from_any_directory_beside_another_job_and_gives_the_same_parameters(
    sandbox: Sandbox, directory: Path
) -> None:
    # Both jobs are on the same nodes at the same moment.
    job = write_job(directory, sections={"resources": {"mem": "100M", "nodelist": "n1,n2"}})
    reference = submit(sandbox, job)
    script = directory / "elsewhere" / "job.sbatch"
    script.parent.mkdir()
    (script.parent / "small.py").write_text(SMALL_MODEL)
    sandbox.run(*HPCDDP, "render", str(job), "-o", str(script), cwd=directory)
    job_id = sandbox.submit(script, cwd=script.parent, env=FOREIGN)
    finished(sandbox, job_id)
    finished(sandbox, reference["job_id"])
    (by_hand,) = (script.parent / "runs" / "digits").iterdir()
    assert by_hand.name.endswith(f"-{job_id}")
    assert (script.parent / f"digits-{job_id}.out").exists()
    expected = result_of(RunDirectory(Path(reference["run_dir"])))["parameters_sha256"]
    assert result_of(RunDirectory(by_hand))["parameters_sha256"] == expected


@pytest.mark.long("test_stop_signals.py requeues a run with scontrol too, and compares every step")
def test_a_requeued_job_goes_on_and_ends_with_the_parameters_of_the_uninterrupted_one(
    sandbox: Sandbox, directory: Path
) -> None:
    job = write_job(directory, epochs=30, sections={"checkpoint": {"every": {"steps": 20}}})
    reference = submit(sandbox, job)
    finished(sandbox, reference["job_id"])
    submitted = submit(sandbox, job)
    run = RunDirectory(Path(submitted["run_dir"]))
    wait_for_text(run.events, '"save"')
    sandbox.run("scontrol", "requeue", submitted["job_id"])
    finished(sandbox, submitted["job_id"])
    result, expected = result_of(run), result_of(RunDirectory(Path(reference["run_dir"])))
    assert result["attempts"] == 2
    assert result["parameters_sha256"] == expected["parameters_sha256"]
    steps = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    trained = [record["step"] for record in steps if "loss" in record]
    assert trained == list(range(1, result["steps"] + 1))


def test_a_rank_that_never_starts_is_named_with_its_host(sandbox: Sandbox, directory: Path) -> None:
    wrapper = directory / "python"
    wrapper.write_text(
        f'#!/bin/sh\n[ "$SLURM_STEP_NUM_TASKS:$SLURM_PROCID" = 2:1 ] && exec sleep 600\nexec {sys.executable} "$@"\n'
    )
    wrapper.chmod(0o755)
    job = write_job(directory, python=str(wrapper), sections={"launch": {"rendezvous_timeout": "20s"}})
    submitted = submit(sandbox, job)
    ended = sandbox.wait(submitted["job_id"], states={"FAILED"})
    result = result_of(RunDirectory(Path(submitted["run_dir"])))
    second = expand(ended["NodeList"])[1]
    assert "1 of 2 ranks did not start within the rendezvous timeout of" in result["reason"]
    assert ended["ExitCode"] == "71:0"
    assert f"rank 1 on {second};" in result["reason"]


def test_the_tasks_are_started_with_the_flags_of_srun(sandbox: Sandbox, directory: Path) -> None:
    prolog = directory / "prolog"
    prolog.write_text("#!/bin/sh\necho export FROM_THE_PROLOG=yes\n")
    prolog.chmod(0o755)
    flags = ("--set", f"resources.srun.task-prolog={prolog}", "--set", "resources.srun.cpu-bind=none")
    program = ("sh", "-c", 'echo "prolog: $FROM_THE_PROLOG"')
    done = sandbox.run(*HPCDDP, "submit", "--json", "--time", "5", *flags, "--", *program, cwd=directory)
    submitted = json.loads(done.stdout)
    finished(sandbox, submitted["job_id"])
    log = RunDirectory(Path(submitted["run_dir"])).attempt(0).path / "rank-0.log"
    assert "prolog: yes" in log.read_text()


def test_inherited_variables_that_would_override_the_script_are_dropped_and_named(
    sandbox: Sandbox, directory: Path
) -> None:
    environment = {"SBATCH_PARTITION": "no-such-partition", "SLURM_NTASKS": "17"}
    done = sandbox.run(*HPCDDP, "submit", "--json", "--time", "5", "--", "true", cwd=directory, env=environment)
    submitted = json.loads(done.stdout)
    assert submitted["dropped_environment"] == ["SBATCH_PARTITION", "SLURM_NTASKS"]
    finished(sandbox, submitted["job_id"])


def test_a_controller_that_does_not_answer_is_never_a_silent_local_run(sandbox: Sandbox, directory: Path) -> None:
    dead = directory / "slurm.conf"
    text = sandbox.slurm_conf.read_text()
    port = next(line for line in text.splitlines() if line.startswith("SlurmctldPort="))
    dead.write_text(text.replace(port, "SlurmctldPort=1"))
    job = write_job(directory, nodes=1)
    done = sandbox.run(
        *HPCDDP, "submit", str(job), cwd=directory, env={"SLURM_CONF": str(dead)}, check=False, timeout=120
    )
    assert done.returncode == 2
    assert done.stderr == (
        "hpcddp: Slurm's controller does not answer; try again later, or run here with --cluster local\n"
    )
    assert not (directory / "runs").exists()


def test_a_refused_job_leaves_no_run_directory(sandbox: Sandbox, directory: Path) -> None:
    job = write_job(directory, nodes=1)
    done = sandbox.run(
        *HPCDDP, "submit", str(job), "--set", "resources.partition=nowhere", cwd=directory, check=False, timeout=60
    )
    assert done.returncode == 2
    assert "sbatch refused the job: the cluster has no partition 'nowhere'; " in done.stderr.replace("\n", " ")
    assert not (directory / "runs").exists()
