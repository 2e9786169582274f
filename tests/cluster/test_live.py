"""Commands and stacks inside a running job on a real Slurm."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from hpcddp.run.directory import RunDirectory
from hpcddp.run.metrics import read_metrics
from tests.cluster.jobs import HPCDDP, submit, write_job
from tests.cluster.sandbox import Sandbox
from tests.waiting import wait_for_text, wait_until

WAITS = "import time; print('at work', flush=True)\nfor _ in range(600): time.sleep(1)\n"


def step_of(run: RunDirectory) -> int:
    return max((line.step for line in read_metrics(run.metrics, 1 << 20).records), default=0)


def test_a_running_job_is_entered_and_shows_its_stacks_and_goes_on(
    sandbox: Sandbox, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    shutil.copy(Path(__file__).with_name("traced_model.py"), tmp_path)
    train = {"model": "traced_model:build", "epochs": 400, "model_args": {"seconds": 0.2}}
    job = write_job(tmp_path, nodes=2, tasks=1, sections={"train": train})
    submitted = submit(sandbox, job)
    run = RunDirectory(Path(submitted["run_dir"]))
    wait_until(lambda: step_of(run) > 0, "the first step", 240)
    before = step_of(run)
    with subtests.test("a command runs on the node of a rank, in the directory of the call"):
        words = ("shell", str(run.path), "--rank", "1", "--", "sh", "-c", "hostname; pwd")
        assert sandbox.run(*HPCDDP, *words, cwd=tmp_path).stdout.split() == ["n2", str(tmp_path)]
    with subtests.test("its exit code is that of the command, and it knows the run"):
        program = ("sh", "-c", "echo $HPCDDP_RUN_DIR; exit 3")
        done = sandbox.run(*HPCDDP, "shell", str(run.path), "--", *program, cwd=tmp_path, check=False)
        assert (done.returncode, done.stdout.strip()) == (3, str(run.path))
    with subtests.test("on a terminal it has a terminal"):
        line = shlex.join([*HPCDDP, "shell", str(run.path), "--", "sh", "-c", "tty; hostname"])
        done = sandbox.run("script", "--quiet", "--return", "--command", line, "/dev/null", cwd=tmp_path)
        # ``script`` shows the end of its input as ^@, at any place.
        assert re.fullmatch(r"/dev/pts/\d+ n1", " ".join(re.sub(r"\^@|\0", "", done.stdout).split())), done.stdout
        assert "srun" not in done.stdout
    with subtests.test("a rank that does not exist is named"):
        done = sandbox.run(*HPCDDP, "shell", str(run.path), "--rank", "2", "--", "true", cwd=tmp_path, check=False)
        assert done.returncode == 2
        assert "--rank is 2, and run" in done.stderr
        assert "has ranks 0 to 1" in done.stderr
    with subtests.test("every rank shows where it is"):
        done = sandbox.run(*HPCDDP, "stacks", str(run.path), "--json", cwd=tmp_path)
        processes = json.loads(done.stdout)["processes"]
        assert [(each["rank"], each["host"]) for each in processes] == [(0, "n1"), (1, "n2")]
        for each in processes:
            text = "\n".join(each["lines"])
            assert "hpcddp/train/loop/loop.py" in text
            assert "most recent call first" in text
        shown = sandbox.run(*HPCDDP, "stacks", str(run.path), "--rank", "1", cwd=tmp_path).stdout
        assert shown.startswith("rank 1 on n2, process ")
        assert "rank 0 on" not in shown
        assert "most recent call first" in shown
    with subtests.test("the job has gone on"):
        wait_until(lambda: step_of(run) > before + 20, "twenty more steps", 120)
        assert sandbox.job(submitted["job_id"])["JobState"] == "RUNNING"
        assert [event for event in run.events.read_text().splitlines() if '"signal"' in event] == []


def test_an_element_of_a_sweep_is_entered(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WAITS)
    program = ("--", "python", "train.py", "{lr}")
    words = ("submit", "--json", "--sweep", "lr=1,2", "--run-root", str(tmp_path / "runs"), *program)
    sweep = Path(json.loads(sandbox.run(*HPCDDP, *words, cwd=tmp_path).stdout)["sweep_dir"])
    for run in (sweep.with_name(f"{sweep.name}_{index}") for index in range(2)):
        wait_for_text(RunDirectory(run).attempt(0).rank_log(0), "at work")
        assert "python train.py" in sandbox.run(*HPCDDP, "stacks", str(run), cwd=tmp_path).stdout
        done = sandbox.run(*HPCDDP, "shell", str(run), "--", "sh", "-c", "echo $HPCDDP_RUN_DIR", cwd=tmp_path)
        assert done.stdout.split() == [str(run)]


def test_a_program_of_the_users_own_is_read_with_py_spy_and_each_of_its_ranks_entered(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(WAITS)
    words = (
        "submit",
        "--json",
        "--nodes",
        "2",
        "--tasks-per-node",
        "2",
        "--time",
        "20min",
        "--run-root",
        str(tmp_path / "runs"),
        "--",
        "python",
        "train.py",
    )
    submitted = json.loads(sandbox.run(*HPCDDP, *words, cwd=tmp_path).stdout)
    run = RunDirectory(Path(submitted["run_dir"]))
    places = [(0, "n1"), (1, "n1"), (2, "n2"), (3, "n2")]
    for rank, _ in places:
        wait_for_text(run.attempt(0).rank_log(rank), "at work")
    done = sandbox.run(*HPCDDP, "stacks", str(run.path), "--json", cwd=tmp_path)
    processes = json.loads(done.stdout)["processes"]
    assert [(each["rank"], each["host"]) for each in processes] == places
    assert {each["command"] for each in processes} == {"python train.py"}
    for each in processes:
        assert "<module>" in "\n".join(each["lines"])
    shown = sandbox.run(*HPCDDP, "stacks", str(run.path), cwd=tmp_path).stdout
    assert shown.startswith("4 ranks at train.py:2\n")
    assert "ranks 0-3, such as rank 0 on n1, process " in shown
    for rank, node in places:
        done = sandbox.run(*HPCDDP, "shell", str(run.path), "--rank", str(rank), "--", "hostname", cwd=tmp_path)
        assert done.stdout == f"{node}\n"
