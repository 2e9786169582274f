"""The main job on this machine: real processes, real images."""

from __future__ import annotations

import contextlib
import json
import os
import pickletools
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any, Literal

import pytest

from hpcddp.submission.request import SubmissionError
from hpcddp.submission.submit import choose_cluster
from tests.command_line import hpcddp
from tests.messages import GoldenMessages
from tests.submission.fake_sbatch import make_fake_slurm
from tests.waiting import wait_until, wait_until_gone

MODEL = """
from torch import nn

def build(num_classes):
    return nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(192, num_classes))
"""

JOB = """
name: local
resources: {tasks_per_node: 2}
environment: {env: {PLAIN: "a value"}, pass_env: [TEST_SECRET]}
batch: {global_batch_size: 64}
learning_rate: {base: 0.1}
train: {model: "small:build", dataset: digits, epochs: 2}
"""
ONE_RANK = ("--set", "resources.tasks_per_node=1")


def write_job(directory: Path) -> None:
    (directory / "small.py").write_text(MODEL)
    (directory / "job.yaml").write_text(JOB)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_job(tmp_path)
    return tmp_path


def submit(directory: Path, *options: str, secret: str | None = "hunter2") -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ)
    if secret is not None:
        environment["TEST_SECRET"] = secret
    return hpcddp(directory, "submit", "job.yaml", "--cluster", "local", *options, environment=environment)


def document(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(done.stdout)
    return parsed


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what ``submit`` says of a run that it has followed to its end."""
    directory = tmp_path_factory.mktemp("followed")
    write_job(directory)
    done = submit(directory, "--follow", "--json")
    assert done.returncode == 0, done.stderr
    return document(done)


def test_a_followed_run_trains_with_two_ranks_and_tells_no_secret(answer: dict[str, Any]) -> None:
    assert (answer["status"], answer["result"]["world_size"]) == ("finished", 2)
    run = Path(answer["run_dir"])
    assert run.stat().st_mode & 0o777 == 0o700
    names = {path.name for path in run.iterdir()}
    assert names >= {"job.yaml", "plan.json", "job.sbatch", "submitit", "attempts", "events.jsonl", "metrics.jsonl"}
    assert all(b"hunter2" not in path.read_bytes() for path in run.rglob("*") if path.is_file())
    assert "a value" not in (run / "job.yaml").read_text()


def test_submit_returns_at_once_and_the_run_outlives_its_session(directory: Path) -> None:
    done = submit(directory, *ONE_RANK)
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if line.startswith("next"))
    assert lines["next"].startswith("hpcddp logs ")
    job_id = int(next(line.split()[2] for line in done.stdout.splitlines() if line.startswith("job id")))
    assert os.getsid(job_id) == job_id
    wait_until_gone(job_id)
    (run,) = (directory / "runs" / "local").iterdir()
    assert json.loads((run / "result.json").read_text())["status"] == "finished"


@pytest.mark.long("tests/cluster/test_stop_failures.py kills a rank")
def test_a_killed_rank_ends_the_run_and_leaves_no_process(directory: Path, golden: GoldenMessages) -> None:
    (directory / "small.py").write_text(
        "import os, signal\n"
        + MODEL.replace("    return", "    if os.environ['RANK'] == '1': os.kill(os.getpid(), 9)\n    return")
    )
    done = submit(directory, "--follow", "--json")
    assert done.returncode == 1
    result = document(done)["result"]
    assert (result["status"], result["exit_code"], document(done)["exit_code"]) == ("failed", 71, 71)
    host = f" on {socket.gethostname()} "
    message = golden.message(result["reason"], {host: " on HOST "})
    assert message.startswith(f"rank 1{host}")
    assert ": killed, out of memory" in message


def test_who_insists_on_the_end_of_a_job_ends_ranks_that_do_not_stop(directory: Path) -> None:
    (directory / "small.py").write_text(
        "import time\n" + MODEL.replace("    return", "    time.sleep(600)\n    return")
    )
    answer = document(submit(directory, "--json", *ONE_RANK))
    log = Path(answer["run_dir"]) / "attempts" / "0" / "rank-0.log"
    wait_until(log.exists, f"{log}")
    deadline = time.monotonic() + 180
    # The first one asks them to save; this model never comes to the end of a step.
    while Path(f"/proc/{answer['job_id']}").exists():
        assert time.monotonic() < deadline
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(answer["job_id"]), signal.SIGTERM)
        time.sleep(1)
    assert json.loads((Path(answer["run_dir"]) / "result.json").read_text())["status"] == "cancelled"
    listing = subprocess.run(["ps", "-eo", "sid="], capture_output=True, text=True, check=True).stdout.split()
    assert answer["job_id"] not in listing


def test_the_pickle_holds_an_importable_function_and_a_path_only(answer: dict[str, Any]) -> None:
    (pickle,) = (Path(answer["run_dir"]) / "submitit").glob("*_submitted.pkl")
    operations = list(pickletools.genops(pickle.read_bytes()))
    names = [argument for operation, argument, _ in operations if "UNICODE" in operation.name]
    assert {"submitit.core.utils", "DelayedSubmission", "hpcddp.task.work", "run", answer["run_dir"]} <= set(names)
    calls = [operation.name for operation, _, _ in operations if operation.name in {"STACK_GLOBAL", "GLOBAL"}]
    assert len(calls) == 2


def test_a_pickle_that_was_changed_is_not_loaded(directory: Path) -> None:
    pickles = "runs/*/*/submitit/*_submitted.pkl"
    change = f"until ls {pickles} >/dev/null 2>&1; do sleep 0.1; done; echo >> $(ls {pickles})"
    done = submit(directory, "--follow", "--set", f"environment.setup={json.dumps([change])}")
    assert done.returncode != 0
    assert "is not the file that was submitted" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("options", "secret", "problem", "advice"),
    [
        (["--set", "resources.nodes=2"], "x", "resources.nodes is 2, ", "; add --set resources.nodes=1"),
        ([], None, "environment.pass_env names TEST_SECRET, ", "; export it"),
        (
            ["--set", "environment.python=/no/such/python"],
            "x",
            "environment.python is '/no/such/python', ",
            "no program of that name; ",
        ),
        (
            ["--set", "train.dataset=cifar10", "--set", "train.data_dir=nowhere"],
            "x",
            "train.data_dir is 'nowhere', ",
            "that directory does not exist; ",
        ),
    ],
)
def test_what_cannot_run_is_one_sentence_and_leaves_nothing(
    directory: Path, golden: GoldenMessages, options: list[str], secret: str | None, problem: str, advice: str
) -> None:
    done = submit(directory, *options, secret=secret)
    assert (done.returncode, done.stdout) == (2, "")
    assert golden.message(done.stderr).startswith(f"hpcddp: {problem}")
    assert advice in done.stderr
    assert not (directory / "runs").exists()


@pytest.mark.parametrize(("line", "code"), [("exit 0", 70), ("exit 3", 3)])
def test_a_setup_line_that_ends_the_script_is_never_a_success(
    directory: Path, golden: GoldenMessages, line: str, code: int
) -> None:
    answer = document(submit(directory, "--json", "--set", f"environment.setup=[{line}]"))
    log = Path(answer["run_dir"]) / "batch.log"
    wait_until_gone(int(answer["job_id"]))
    exit_code = int(line.split()[1])
    (message,) = [text for text in log.read_text().splitlines() if "environment.setup ended " in text]
    assert f" exit code {exit_code}; " in golden.message(message)
    script = subprocess.run(
        ["/bin/bash", Path(answer["run_dir"]) / "job.sbatch"], capture_output=True, check=False, cwd=directory
    )
    assert script.returncode == code


def test_a_path_that_submitit_would_rewrite_is_refused(directory: Path) -> None:
    done = submit(directory, "--set", "run_root=50%test")
    assert done.returncode == 2
    assert "50%test/local/" in done.stderr
    assert "holds %t, " in done.stderr
    assert "; choose another run_root" in done.stderr
    assert not (directory / "50%test").exists()


def test_slurm_that_is_not_here_is_an_error_that_names_the_way_out(directory: Path) -> None:
    done = hpcddp(directory, "submit", "job.yaml", "--cluster", "slurm")
    assert done.returncode == 2
    assert done.stderr.startswith("hpcddp: --cluster slurm: ")
    assert "--cluster local" in done.stderr


@pytest.mark.parametrize("requested", ["auto", "slurm"])
def test_a_named_slurm_that_is_not_there_is_never_a_silent_local_run(
    golden: GoldenMessages, requested: Literal["auto", "slurm"]
) -> None:
    with pytest.raises(SubmissionError, match=r"SLURM_CONF is '/no/slurm\.conf', .*--cluster local") as caught:
        choose_cluster(requested, {"SLURM_CONF": "/no/slurm.conf", "PATH": "/usr/bin"})
    golden.message(caught.value)


def test_who_has_a_sandbox_is_told_how_to_use_it(tmp_path: Path, golden: GoldenMessages) -> None:
    configuration = tmp_path / "hpcddp" / "sandbox" / "slurm.conf"
    configuration.parent.mkdir(parents=True)
    configuration.touch()
    with pytest.raises(SubmissionError) as caught:
        choose_cluster("slurm", {"XDG_STATE_HOME": str(tmp_path), "PATH": str(tmp_path)})
    assert "; to use your sandbox, run the line that hpcddp sandbox status prints" in golden.message(caught.value)


def test_a_slurm_without_srun_is_told_before_the_submission(tmp_path: Path, golden: GoldenMessages) -> None:
    slurm = make_fake_slurm(tmp_path / "slurm")
    configuration = tmp_path / "slurm.conf"
    configuration.touch()
    environment = {"SLURM_CONF": str(configuration), "PATH": str(slurm.directory / "bin")}
    (slurm.directory / "bin" / "srun").unlink()
    with pytest.raises(SubmissionError, match=r"srun was not; .*--cluster local") as caught:
        choose_cluster("auto", environment)
    golden.message(caught.value)


def test_a_dry_run_prints_the_script_and_touches_nothing(directory: Path) -> None:
    done = submit(directory, "--dry-run")
    assert done.returncode == 0
    assert done.stdout.startswith("#!/bin/bash\n#SBATCH --job-name=local\n")
    assert not (directory / "runs").exists()
