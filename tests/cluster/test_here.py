"""Runs in the allocation of a shell: ``hpcddp submit --cluster here`` inside ``salloc``, on a real Slurm."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hpcddp.run.directory import RunDirectory
from hpcddp.run.job_records import read_start
from hpcddp.run.metrics import read_metrics
from tests.cluster.allocations import result_when_ended, salloc
from tests.cluster.jobs import HPCDDP, finished, result_of, submit, write_job
from tests.cluster.sandbox import Sandbox
from tests.waiting import wait_until

HERE = ("--cluster", "here")


def step_of(run: RunDirectory) -> int:
    return max((line.step for line in read_metrics(run.metrics, 1 << 20).records), default=0)


def says(log: Path, text: str) -> bool:
    return log.exists() and text in log.read_text()


def slow_job(directory: Path, *, epochs: int, seconds: float) -> Path:
    """Write a training on 2 hosts with a rank each, each forward of which takes so long."""
    shutil.copy(Path(__file__).with_name("traced_model.py"), directory)
    train = {"model": "traced_model:build", "epochs": epochs, "model_args": {"seconds": seconds}}
    sections: Mapping[str, Mapping[str, Any]] = {"train": train, "requeue": {"signal_lead": "30s"}}
    return write_job(directory, nodes=2, tasks=1, sections=sections)


@pytest.fixture(scope="module")
def expected(sandbox: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The result of the training as a job of sbatch, without interruption."""
    job = slow_job(tmp_path_factory.mktemp("reference"), epochs=12, seconds=0.0)
    submitted = submit(sandbox, job)
    finished(sandbox, submitted["job_id"])
    return result_of(RunDirectory(Path(submitted["run_dir"])))


def test_a_job_in_an_allocation_trains_the_same_as_with_sbatch(
    sandbox: Sandbox, tmp_path: Path, expected: dict[str, Any], subtests: pytest.Subtests
) -> None:
    job = slow_job(tmp_path, epochs=12, seconds=0.0)
    with subtests.test("outside of an allocation it says how to get one"):
        done = sandbox.run(*HPCDDP, "submit", str(job), *HERE, cwd=tmp_path, check=False)
        assert done.returncode == 2
        assert done.stderr == (
            "hpcddp: --cluster here: this shell is in no allocation, because SLURM_JOB_ID is not set; submit in the "
            "shell that this command opens: salloc --nodes=2 --ntasks-per-node=1 --cpus-per-task=1 --time=00:20:00; or "
            "give the job to the queue: --cluster slurm\n"
        )
        assert not (tmp_path / "runs").exists()
    # One node and one CPU of each more than the job needs.
    with salloc(sandbox, tmp_path, "--nodes=3", "--ntasks-per-node=2", "--time=20") as shell:
        document = shell.submit(job, *HERE, "--follow")
        assert (document["cluster"], document["status"]) == ("here", "finished")
        run = RunDirectory(Path(document["run_dir"]))
        with subtests.test("the parameters are those of the job of sbatch, bit for bit"):
            assert result_of(run)["parameters_sha256"] == expected["parameters_sha256"]
            assert result_of(run)["final_loss"] == expected["final_loss"]
        with subtests.test("its ranks were on the hosts of the allocation"):
            ranks = json.loads((run.attempt(0).path / "ranks.json").read_text())["ranks"]
            assert [rank["host"] for rank in ranks] == ["n1", "n2"]
        with subtests.test("its time is over when the allocation ends, or with its own limit"):
            start = read_start(run.attempt(0))
            assert start is not None
            assert (start.allocation, start.is_local) == (shell.job_id, True)
            end = sandbox.job(shell.job_id)["EndTime"]
            # Both limits are 20 minutes, and the allocation began first.
            assert start.end_time == time.mktime(time.strptime(end, "%Y-%m-%dT%H:%M:%S"))
        with subtests.test("what the allocation is too small for is refused before anything is written"):
            before = sorted(run.path.parent.iterdir())
            typed = shell.type(*HPCDDP, "submit", str(job), *HERE, "--set", "resources.nodes=4")
            assert typed.code == 2, typed
            assert typed.stderr.startswith(
                f"hpcddp: --cluster here: resources.nodes is 4, and the allocation, job {shell.job_id}, has 3"
            )
            assert sorted(run.path.parent.iterdir()) == before
        with subtests.test("a dry run prints the script"):
            typed = shell.type(*HPCDDP, "submit", str(job), *HERE, "--dry-run")
            assert typed.code == 0, typed
            assert typed.stderr.startswith("dry run: would go to this allocation, run directory ")
            assert "export HPCDDP_LOCAL_JOB_ID=$$\n" in typed.stdout
        with subtests.test("inside a step of srun it says that the step holds the CPUs"):
            typed = shell.type("srun", "--ntasks=1", "--nodes=1", *HPCDDP, "submit", str(job), *HERE)
            assert typed.code == 2
            assert "srun has started this shell as a step of job" in typed.stderr
        assert sandbox.job(shell.job_id)["JobState"] == "RUNNING"
    with subtests.test("an allocation that has ended is named"):
        env = {"SLURM_JOB_ID": shell.job_id}
        sandbox.wait(shell.job_id)
        done = sandbox.run(*HPCDDP, "submit", str(job), *HERE, cwd=tmp_path, check=False, env=env)
        assert done.returncode == 2
        assert f"SLURM_JOB_ID is {shell.job_id}, but that job is not running; submit" in done.stderr


def test_a_run_that_is_cancelled_or_loses_its_allocation_is_saved_and_resumed(
    sandbox: Sandbox, tmp_path: Path, expected: dict[str, Any], subtests: pytest.Subtests
) -> None:
    job = slow_job(tmp_path, epochs=12, seconds=0.25)
    with salloc(sandbox, tmp_path, "--nodes=2", "--ntasks-per-node=1", "--time=20") as shell:
        run = RunDirectory(Path(shell.submit(job, *HERE)["run_dir"]))
        wait_until(lambda: step_of(run) > 0, "the first step", 240)
        with subtests.test("the stacks of its ranks are read on their nodes"):
            done = sandbox.run(*HPCDDP, "stacks", str(run.path), "--json", cwd=tmp_path)
            processes = json.loads(done.stdout)["processes"]
            assert [(each["rank"], each["host"]) for each in processes] == [(0, "n1"), (1, "n2")]
        with subtests.test("hpcddp cancel saves it, and the allocation stays"):
            assert shell.type(*HPCDDP, "cancel", str(run.path)).code == 0
            result = result_when_ended(run)
            assert (result["status"], result["reason"]) == ("cancelled", "cancelled by its user")
            assert result["saved_step"] > 0
            assert sandbox.job(shell.job_id)["JobState"] == "RUNNING"
        saved = result["saved_step"]
        with subtests.test("it continues in the same allocation"):
            shell.submit("--resume", run.path)
            wait_until(lambda: step_of(run) > saved + 5, "steps of the second attempt", 240)
        with subtests.test("the end of the allocation saves it"):
            sandbox.run("scancel", shell.job_id)
            result = result_when_ended(run)
            assert result["status"] == "stopped", run.batch_log.read_text()
            assert result["reason"] == (
                f"the allocation of this run, job {shell.job_id}, has ended; runs in an allocation are not requeued"
            )
            assert result["saved_step"] > saved
    with subtests.test("without an allocation it says how to go on"):
        done = sandbox.run(*HPCDDP, "submit", "--resume", str(run.path), cwd=tmp_path, check=False)
        assert done.returncode == 2
        assert done.stderr.startswith("hpcddp: --cluster here: this shell is in no allocation")
        assert done.stderr.endswith("or give the job to the queue: --cluster slurm\n")
    with subtests.test("sbatch finishes it, with the parameters of a run without interruption"):
        (tmp_path / "fast").touch()
        resumed = submit(sandbox, job, "--resume", str(run.path), "--cluster", "slurm")
        finished(sandbox, resumed["job_id"])
        assert result_of(run)["parameters_sha256"] == expected["parameters_sha256"]


def test_ctrl_c_and_a_near_time_limit_save_the_run_and_the_next_one_starts(
    sandbox: Sandbox, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    job = slow_job(tmp_path, epochs=400, seconds=0.2)
    with salloc(sandbox, tmp_path, "--nodes=2", "--ntasks-per-node=1", "--time=20") as shell:
        env = {**sandbox.environment, "SLURM_JOB_ID": shell.job_id}
        with subtests.test("Ctrl-C of --follow sends a program SIGTERM, and its node is free for the next one"):
            (tmp_path / "train.py").write_text(
                "import pathlib, signal, socket, sys, time\n"
                "def end(*_):\n    print('saving', flush=True); sys.exit(0)\n"
                "signal.signal(signal.SIGTERM, end)\nprint('on', socket.gethostname(), flush=True)\n"
                "time.sleep(600)\n"
            )
            words = ("--nodes", "2", "--time", "10min", "--run-root", "programs", "--name", "waits")
            follower = subprocess.Popen(
                [*HPCDDP, "submit", *words, *HERE, "--follow", "--json", "--", sys.executable, "train.py"],
                cwd=tmp_path,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            runs = tmp_path / "programs" / "waits"
            wait_until(lambda: runs.is_dir() and any(runs.iterdir()), "the run's directory", 60)
            run = RunDirectory(next(runs.iterdir()))
            logs = [run.attempt(0).rank_log(rank) for rank in range(2)]
            for log, host in zip(logs, ("n1", "n2"), strict=True):
                wait_until(partial(says, log, f"on {host}"), "the program", 120)
            follower.send_signal(signal.SIGINT)
            printed, errors = follower.communicate(timeout=120)
            document = json.loads(printed)
            assert (follower.returncode, document["status"]) == (130, "cancelled"), errors
            assert result_when_ended(run)["status"] == "cancelled"
            assert all("saving" in log.read_text() for log in logs)
        with subtests.test("the next run gets the warning before its time limit, and saves"):
            limited = ("--set", "resources.time_limit=2min", "--set", "requeue.signal_lead=70s")
            run = RunDirectory(Path(shell.submit(job, *HERE, *limited)["run_dir"]))
            result = result_when_ended(run)
            assert result["status"] == "stopped"
            assert result["reason"] == ("the time limit of this run is near; runs in an allocation are not requeued")
            signals = [json.loads(line) for line in run.events.read_text().splitlines() if '"signal"' in line]
            assert {(event["signal"], event["rank"]) for event in signals} >= {("SIGUSR2", rank) for rank in range(2)}
            assert result["saved_step"] > 0
        assert sandbox.job(shell.job_id)["JobState"] == "RUNNING"
