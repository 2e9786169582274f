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
from tests.waiting import wait_until


def step_of(run: RunDirectory) -> int:
    return max((line.step for line in read_metrics(run.metrics, 1 << 20).records), default=0)


def test_a_running_job_is_entered_and_shows_its_stacks_and_goes_on(
    sandbox: Sandbox, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    shutil.copy(Path(__file__).with_name("traced_model.py"), tmp_path)
    train = {"model": "traced_model:build", "epochs": 400, "model_args": {"seconds": 0.05}}
    job = write_job(tmp_path, nodes=2, tasks=2, sections={"train": train})
    submitted = submit(sandbox, job)
    run = RunDirectory(Path(submitted["run_dir"]))
    wait_until(lambda: step_of(run) > 0, "the first step", 240)
    before = step_of(run)
    with subtests.test("a command runs on the node of a rank, in the directory of the call"):
        for rank, node in ((0, "n1"), (1, "n1"), (2, "n2"), (3, "n2")):
            words = ("shell", str(run.path), "--rank", str(rank), "--", "sh", "-c", "hostname; pwd")
            done = sandbox.run(*HPCDDP, *words, cwd=tmp_path)
            assert done.stdout.split() == [node, str(tmp_path)]
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
        done = sandbox.run(*HPCDDP, "shell", str(run.path), "--rank", "4", "--", "true", cwd=tmp_path, check=False)
        assert done.returncode == 2
        assert "--rank is 4, and run" in done.stderr
        assert "has ranks 0 to 3" in done.stderr
    with subtests.test("every rank shows where it is"):
        done = sandbox.run(*HPCDDP, "stacks", str(run.path), "--json", cwd=tmp_path)
        processes = json.loads(done.stdout)["processes"]
        assert [(each["rank"], each["host"]) for each in processes] == [(0, "n1"), (1, "n1"), (2, "n2"), (3, "n2")]
        for each in processes:
            text = "\n".join(each["lines"])
            assert "hpcddp/train/loop/loop.py" in text
            assert "most recent call first" in text
        shown = sandbox.run(*HPCDDP, "stacks", str(run.path), "--rank", "3", cwd=tmp_path).stdout
        assert shown.startswith("rank 3 on n2, process ")
        assert "rank 2 on" not in shown
        assert "most recent call first" in shown
    with subtests.test("the job has gone on"):
        wait_until(lambda: step_of(run) > before + 20, "twenty more steps", 120)
        assert sandbox.job(submitted["job_id"])["JobState"] == "RUNNING"
        assert [event for event in run.events.read_text().splitlines() if '"signal"' in event] == []


def test_an_element_of_a_sweep_is_entered(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import time\nfor _ in range(600): time.sleep(1)\n")
    program = ("--", "python", "train.py", "{lr}")
    words = ("submit", "--json", "--sweep", "lr=1,2", "--run-root", str(tmp_path / "runs"), *program)
    sweep = Path(json.loads(sandbox.run(*HPCDDP, *words, cwd=tmp_path).stdout)["sweep_dir"])
    for run in (sweep.with_name(f"{sweep.name}_{index}") for index in range(2)):

        def shown(run: Path = run) -> str:
            return sandbox.run(*HPCDDP, "stacks", str(run), cwd=tmp_path, check=False).stdout

        wait_until(lambda shown=shown: "python train.py" in shown(), "the program", 120)  # type: ignore[misc]
        done = sandbox.run(*HPCDDP, "shell", str(run), "--", "sh", "-c", "echo $HPCDDP_RUN_DIR", cwd=tmp_path)
        assert done.stdout.split() == [str(run)]


def test_a_program_of_the_users_own_is_read_with_py_spy(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import time\nfor _ in range(600): time.sleep(1)\n")
    words = (
        "submit",
        "--json",
        "--nodes",
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

    two = 2

    def stacks() -> list[dict[str, object]]:
        done = sandbox.run(*HPCDDP, "stacks", str(run.path), "--json", cwd=tmp_path, check=False)
        found: list[dict[str, object]] = json.loads(done.stdout).get("processes", [])
        return found

    wait_until(lambda: len(stacks()) == two, "a program on each node", 120)
    processes = stacks()
    assert [(each["rank"], each["host"], each["command"]) for each in processes] == [
        (0, "n1", "python train.py"),
        (1, "n2", "python train.py"),
    ]
    for each in processes:
        assert "<module>" in "\n".join(map(str, each["lines"]))  # type: ignore[call-overload]
    shown = sandbox.run(*HPCDDP, "stacks", str(run.path), cwd=tmp_path).stdout
    assert shown.startswith("2 ranks at train.py:2\n")
    assert "ranks 0-1, such as rank 0 on n1, process " in shown
