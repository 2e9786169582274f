"""The start of a task, and the function of the pickle."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

import pytest

from hpcddp.jobfile.read import load_job
from hpcddp.jobfile.write import dump_job
from hpcddp.run.directory import AttemptDirectory, RunDirectory
from hpcddp.run.failure import read_failures
from hpcddp.run.job_records import Binding, Start, read_ranks, write_start
from hpcddp.stop.listener import LISTENER
from hpcddp.task.rendezvous import RendezvousError
from hpcddp.task.work import NotATaskError, opening, run
from tests.facts import assert_facts, line_from
from tests.messages import GoldenMessages
from tests.submission.local_run import ROOT


def test_the_function_of_the_pickle_runs_in_a_task_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: GoldenMessages
) -> None:
    monkeypatch.setattr(LISTENER, "reinstall", lambda: None)
    with pytest.raises(NotATaskError) as caught:
        run(str(tmp_path))
    assert_facts(golden.message(caught.value), "outside of a task", "start tasks with python -m hpcddp.task")


def run_task(attempt: AttemptDirectory, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run one task as srun starts it."""
    attempt.path.mkdir(parents=True, exist_ok=True)
    return subprocess.run(
        [sys.executable, "-P", "-m", "hpcddp.task"],
        env={"PYTHONPATH": str(ROOT), "HPCDDP_ATTEMPT_DIR": str(attempt.path), "SLURM_JOB_ID": "7", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_task_whose_rank_environment_is_wrong_writes_a_record_of_its_rank(
    tmp_path: Path, golden: GoldenMessages
) -> None:
    attempt = RunDirectory(tmp_path / "run").attempt(0)
    done = run_task(attempt, SLURM_PROCID="3", SLURMD_NODENAME="n4")
    (record,) = read_failures(attempt)
    assert (record.rank, record.host, record.kind, record.exit_code) == (3, "n4", "rank_environment", 71)
    assert done.returncode == 71
    assert_facts(golden.message(line_from(done.stderr, "rank 3 on n4 failed")), "inside Slurm job 7")


@pytest.mark.parametrize("work", ["command: [touch, started]", "train: {model: resnet18, dataset: digits}"])
def test_tasks_that_are_not_as_many_as_the_job_has_do_not_begin(
    tmp_path: Path, golden: GoldenMessages, work: str
) -> None:
    run = RunDirectory(tmp_path / "run")
    job = tmp_path / "job.yaml"
    job.write_text(f"name: a\nresources: {{nodes: 1, tasks_per_node: 2}}\nbatch: {{global_batch_size: 8}}\n{work}\n")
    attempt = run.attempt(0)
    attempt.path.mkdir(parents=True)
    run.job_file.write_text(dump_job(load_job(job).spec, environment_values=False))
    done = run_task(
        attempt,
        SLURM_PROCID="3",
        SLURM_LOCALID="3",
        SLURM_NODEID="0",
        SLURM_STEP_NUM_TASKS="4",
        SLURM_STEP_NUM_NODES="1",
        SLURM_STEP_TASKS_PER_NODE="4",
        SLURM_STEP_NODELIST="n1",
    )
    (record,) = read_failures(attempt)
    assert (record.rank, record.kind, record.exit_code, done.returncode) == (3, "number_of_tasks", 70, 70)
    assert_facts(golden.message(record.message), "starts 4 tasks", "has 2", "render the script again")


@pytest.fixture
def variables_of(tmp_path: Path) -> Callable[..., Mapping[str, str]]:
    """Return a function that runs the only task of an attempt, and returns the environment of its program."""

    def run_only_task(command: str, *, number: int = 0, tasks: int = 1, **environment: str) -> Mapping[str, str]:
        program = tmp_path / "torchrun"
        program.write_text(f"#!/bin/sh\nenv -0 >{tmp_path}/variables\n")
        program.chmod(0o755)
        job = tmp_path / "job.yaml"
        job.write_text(f"name: a\nresources: {{tasks_per_node: {tasks}}}\ncommand: [{command}]\n")
        attempt = RunDirectory(tmp_path / "run").attempt(number)
        attempt.path.mkdir(parents=True)
        attempt.run.job_file.write_text(dump_job(load_job(job).spec, environment_values=False))
        write_start(attempt, Start(job_id="7", host="n1", time=0.0, is_local=False, token="0" * 32))
        done = run_task(
            attempt,
            PATH=f"{tmp_path}:/usr/bin:/bin",
            VIRTUAL_ENV=str(tmp_path),
            SLURM_PROCID="0",
            SLURM_LOCALID="0",
            SLURM_NODEID="0",
            SLURM_NTASKS="1",
            SLURM_STEP_NUM_TASKS="1",
            SLURM_STEP_NUM_NODES="1",
            SLURM_STEP_TASKS_PER_NODE="1",
            SLURM_STEP_NODELIST="localhost",
            **environment,
        )
        assert done.returncode == 0, done.stderr
        pairs = (tmp_path / "variables").read_text().split("\0")
        return dict(pair.split("=", 1) for pair in pairs if pair)

    return run_only_task


def test_ranks_of_a_launcher_see_no_numbers_of_slurms_tasks(variables_of: Callable[..., Mapping[str, str]]) -> None:
    numbers = {"SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"}
    variables = variables_of("torchrun, train.py", tasks=2)
    assert not variables.keys() & numbers
    assert (variables["SLURM_NODEID"], variables["NODE_RANK"], variables["SLURM_JOB_ID"]) == ("0", "0", "7")


def test_a_program_without_a_launcher_keeps_the_numbers_of_its_task(
    variables_of: Callable[..., Mapping[str, str]],
) -> None:
    assert variables_of("torchrun, train.py")["SLURM_PROCID"] == "0"


def test_a_task_that_is_bound_to_some_cpus_records_them(
    tmp_path: Path, variables_of: Callable[..., Mapping[str, str]]
) -> None:
    allowed = os.sched_getaffinity(0)
    if len(allowed) == 1:
        pytest.skip("this machine has one CPU")
    first = min(allowed)
    os.sched_setaffinity(0, {first})
    try:
        variables_of("torchrun, a.py")
    finally:
        os.sched_setaffinity(0, allowed)
    (rank,) = read_ranks(RunDirectory(tmp_path / "run").attempt(0)) or ()
    assert rank.binding == Binding(cpus=str(first), cpus_needed=1)


@pytest.mark.parametrize(
    ("number", "slurms_count", "count"),
    [(0, None, None), (1, None, "1"), (2, "1", "2"), (1, "3", "3")],
)
def test_the_restart_count_is_at_least_the_number_of_the_attempt(
    variables_of: Callable[..., Mapping[str, str]], number: int, slurms_count: str | None, count: str | None
) -> None:
    environment = {} if slurms_count is None else {"SLURM_RESTART_COUNT": slurms_count}
    assert variables_of("torchrun, a.py", number=number, **environment).get("SLURM_RESTART_COUNT") == count


@pytest.mark.parametrize("kind", [RuntimeError, MemoryError, ValueError])
def test_an_error_of_torch_while_the_group_opens_is_one_of_the_infrastructure(
    tmp_path: Path, kind: type[Exception], golden: GoldenMessages
) -> None:
    attempt = RunDirectory(tmp_path).attempt(0)
    with pytest.raises(RendezvousError) as caught, opening(attempt, timedelta(minutes=1)):
        raise kind("unexpected key \x1b[31m\nException raised from ...")
    assert caught.value.exit_code == 71
    message = golden.message(caught.value.message)
    assert_facts(message, "torch could not open their process group", r"unexpected key \x1b[31m")


def test_a_rank_that_is_lost_while_the_group_opens_stays_the_first_cause(tmp_path: Path) -> None:
    manager = opening(RunDirectory(tmp_path).attempt(0), timedelta(minutes=1))
    manager.__enter__()
    # As torch raises it, below Python; the caller's exception goes on.
    assert not manager.__exit__(RuntimeError, RuntimeError("Connection closed by peer [10.0.0.2]:4242"), None)


OPENS_FOR_EVER = """
import sys, time
from datetime import timedelta
from hpcddp.run.directory import AttemptDirectory
from hpcddp.task.work import opening

with opening(AttemptDirectory.from_text(sys.argv[1]), timedelta(seconds=0.2)):
    time.sleep(600)
"""


def test_a_group_that_does_not_open_ends_the_rank_at_the_rendezvous_timeout(
    tmp_path: Path, golden: GoldenMessages
) -> None:
    attempt = RunDirectory(tmp_path / "run").attempt(0)
    attempt.path.mkdir(parents=True)
    words = [sys.executable, "-P", "-c", OPENS_FOR_EVER, str(attempt.path)]
    environment = {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, check=False)
    (record,) = read_failures(attempt)
    assert (done.returncode, record.kind, record.exit_code) == (71, "rendezvous", 71)
    message = golden.message(record.message)
    assert_facts(message, "torch did not open their process group within 0 s", "look at the network")
    assert_facts(message, "raise launch.rendezvous_timeout")
    assert record.message in done.stderr
