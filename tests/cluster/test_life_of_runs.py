"""What ``status``, ``why``, ``cancel`` and ``requeue`` say of real runs, in every state at once."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hpcddp.run.directory import RunDirectory
from hpcddp.run.events import read_events
from tests.cluster.jobs import HPCDDP, submit, write_job
from tests.cluster.sandbox import Sandbox
from tests.cluster.sandboxes import QUICK, sandbox_with
from tests.cluster.tracked_run import TrackedRun, processes_with, records, trace_file
from tests.manage.runs import make
from tests.waiting import wait_for_text, wait_until

ALL = 200
EXPECTED = {
    "pending": 3, "running": 2, "requeued": 1, "cancelled": 1, "failed": 1, "timed out": 1, "lost": 1,
    "finished": ALL - 10,
}  # fmt: skip
_WORKS = "import time; print('at work', flush=True); time.sleep(900)"
_COMMANDS = ("squeue", "scontrol", "sacct", "sinfo", "sprio", "sacctmgr", "sdiag")


@dataclass(frozen=True)
class Project:
    """Runs in every state, and what they are."""

    sandbox: Sandbox
    directory: Path
    runs: dict[str, TrackedRun]

    def hpcddp(self, *words: str | Path, check: bool = True, env: dict[str, str] | None = None) -> str:
        """Run a command where the runs were submitted, and return what it prints."""
        done = self.sandbox.run(*HPCDDP, *words, cwd=self.directory, check=check, env=env)
        return done.stdout + ("" if check else done.stderr)

    def state(self, name: str) -> str:
        document = json.loads(self.hpcddp("status", self.runs[name].run.run_id, "--json"))
        state: str = document["runs"][0]["state"]
        return state

    def wait_for(self, name: str, state: str) -> None:
        wait_until(lambda: self.state(name) == state, lambda: f"{name} is {self.state(name)} and not {state}", 120)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    directory = tmp_path_factory.mktemp("run")
    shutil.copy(Path(__file__).with_name("traced_model.py"), directory)
    # A job that has ended is forgotten in seconds.
    with sandbox_with(*QUICK, "MinJobAge=2") as sandbox:
        nodes = ",".join(sandbox.nodes)
        sandbox.run("scontrol", "create", "PartitionName=narrow", f"Nodes={nodes}", "MaxNodes=2", "State=UP")
        project = Project(sandbox, directory, {})
        _start_all(project)
        yield project
        sandbox.cancel_all()


def _start(project: Project, name: str, *, steps_s: float = 0.3, epochs: int = 400, **changes: Any) -> TrackedRun:
    resources = {"nodes": 1, "tasks_per_node": 1, "partition": "low", **changes.pop("resources", {})}
    train = {
        "model": "traced_model:build",
        "epochs": epochs,
        "model_args": {"seconds": steps_s, **changes.pop("model", {})},
    }
    job = write_job(
        project.directory, name=f"{name}.yaml", sections={"resources": resources, "train": train, **changes}
    )
    return _tracked(project, name, job, submit(project.sandbox, job))


def _start_program(project: Project, name: str, text: str = _WORKS, **changes: Any) -> TrackedRun:
    """Submit a program of one line in place of a training, which would import torch."""
    job = project.directory / f"{name}.yaml"
    resources = {"time_limit": 20, "partition": "low", **changes.pop("resources", {})}
    command = [sys.executable, "-c", text]
    job.write_text(json.dumps({"name": "digits", "command": command, "resources": resources, **changes}))
    return _tracked(project, name, job, submit(project.sandbox, job))


def _tracked(project: Project, name: str, job: Path, document: dict[str, Any]) -> TrackedRun:
    run = RunDirectory(Path(document["run_dir"]))
    project.runs[name] = TrackedRun(sandbox=project.sandbox, job=job, run=run, job_id=document["job_id"])
    return project.runs[name]


def _start_all(project: Project) -> None:
    causes = {"causes": ["preemption"], "signal_lead": "40s"}
    _start_program(project, "timed out", resources={"time_limit": 1}, requeue=causes)
    preempted = _start_program(project, "requeued", resources={"nodelist": "n4"})
    for name in ("running 1", "running 2", "cancelled"):
        _start_program(project, name)
    _start_program(project, "forgotten", resources={"nodelist": "n1"})
    _start_program(project, "failed", "raise ValueError('a bug')")
    _start_program(project, "finished", "print('done')")
    for name, resources in _WAITING.items():
        _start(project, name, resources=resources)
    _wait_for_work(preempted)
    words = ("--partition=high", "--exclusive", "--nodelist=n4", "--output=/dev/null", "--wrap=sleep 300")
    project.sandbox.submit(*words)
    for name in ("cancelled", "forgotten"):
        _wait_for_work(project.runs[name])
    _kill(project, project.runs["forgotten"])
    project.hpcddp("cancel", project.runs["cancelled"].run.run_id)
    for number in range(ALL - len(project.runs)):
        made = (
            make(project.directory / "runs", f"older-{number}")
            .submitted(f"{9000 + number}")
            .started(f"{9000 + number}")
        )
        made.steps(1, 400).ended("finished", steps=400)
    for name in set(_ENDS) - {"forgotten"}:
        # A look costs less than the question below.
        project.runs[name].wait_until(project.runs[name].run.result.exists, f"the end of {name}")
    for name, state in {**_ENDS, "running 1": "running", "running 2": "running", "requeued": "requeued"}.items():
        project.wait_for(name, state)


def _wait_for_work(tracked: TrackedRun) -> None:
    wait_for_text(tracked.run.attempt(0).rank_log(0), "at work")


def _kill(project: Project, tracked: TrackedRun) -> None:
    """Kill all processes of the job, so that nobody is left to say why."""
    found = processes_with(f"SLURM_SUBMIT_DIR={project.directory}")
    mine = [process for process in found if process.environment["SLURM_JOB_ID"] == tracked.job_id]
    # A process that is stopped writes nothing about the end of another one.
    for signum in (signal.SIGSTOP, signal.SIGKILL):
        for process in mine:
            # The death of one process may have ended another.
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signum)


_LARGER_THAN_ITS_PARTITION = {"nodes": 3, "partition": "narrow"}
_WAITING: dict[str, dict[str, Any]] = {
    "too large": {"nodes": 4, "exclusive": True},
    "larger than its partition": _LARGER_THAN_ITS_PARTITION,
    "not yet": {"sbatch": {"begin": "now+1hour"}},
}
_ENDS = {
    "timed out": "timed out", "failed": "failed", "finished": "finished", "cancelled": "cancelled", "forgotten": "lost",
}  # fmt: skip


def _recording(directory: Path) -> tuple[dict[str, str], Path]:
    """Return a PATH on which each of Slurm's commands writes down that it was called, and where."""
    calls = directory / "calls"
    folder = directory / "recording"
    folder.mkdir()
    for command in _COMMANDS:
        path = folder / command
        path.write_text(f'#!/bin/bash\necho "{command} $*" >>{calls}\nexec {shutil.which(command)} "$@"\n')
        path.chmod(0o700)
    calls.write_text("")
    return {"PATH": f"{folder}:/usr/bin:/bin"}, calls


def test_two_hundred_runs_are_shown_as_they_are_by_one_question_to_slurm(project: Project, tmp_path: Path) -> None:
    path, calls = _recording(tmp_path)
    # The index of the session has runs of other tests too.
    environment = {**path, "XDG_STATE_HOME": str(tmp_path / "state")}
    document = json.loads(project.hpcddp("status", "--all", "--json", env=environment))
    assert Counter(run["state"] for run in document["runs"]) == EXPECTED
    assert [line.split()[0] for line in calls.read_text().splitlines()] == ["squeue"]


def test_only_the_newest_and_those_that_live_are_shown_unless_all_are_wanted(project: Project) -> None:
    lines = project.hpcddp("status").splitlines()
    assert sum("older-" in line for line in lines) == 20
    run_ids = tuple(tracked.run.run_id for tracked in project.runs.values())
    # Notes about runs that are silent follow the table.
    shown = [line for line in lines if line.startswith(run_ids)]
    # What has ended is older than the twenty that were made after it.
    assert len(shown) == 6, "\n".join(shown)
    assert lines[-1] == f"{ALL - 26} older runs have ended; --all shows them too"


def test_a_run_that_waits_is_explained(project: Project) -> None:
    why = {name: project.hpcddp("why", project.runs[name].run.run_id) for name in _WAITING}
    too_wide = why["larger than its partition"]
    assert "it waits to start, because it asks for more nodes than its partition allows" in too_wide
    assert "its earliest start time has not come" in why["not yet"]
    assert "Slurm expects it to start at" in why["not yet"]
    requeued = project.hpcddp("why", project.runs["requeued"].run.run_id)
    assert "it waits to run again, because" in requeued
    assert "to be requeued: preempted" in requeued


def test_a_run_that_has_ended_is_explained(project: Project) -> None:
    why = {name: project.hpcddp("why", project.runs[name].run.run_id) for name in _ENDS}
    assert "rank 0 on" in why["failed"]
    assert why["failed"].splitlines()[-1] == f"next: hpcddp logs {project.runs['failed'].run.run_id} --first-error"
    assert "ran out of time: the time limit of job" in why["timed out"]
    assert "is unknown to Slurm" in why["forgotten"]
    for name in ("timed out", "forgotten", "cancelled"):
        assert why[name].splitlines()[-1] == f"next: hpcddp submit --resume {project.runs[name].run.path}"


def test_a_live_training_that_is_requeued_loses_no_step(project: Project) -> None:
    tracked = _start(project, "asked", epochs=6, steps_s=0.1)
    tracked.wait_for_steps(30)
    said = project.hpcddp("requeue", tracked.run.run_id)
    assert said.startswith(f"run {tracked.run.run_id} stops at the end of a step and saves")
    tracked.wait_for_attempt(1)
    tracked.wait_until(tracked.run.result.exists, "the end of the run")
    total = 6 * 23
    assert [record["step"] for record in records(tracked.run)] == list(range(1, total + 1))
    computed = [trace_file(tracked.run.attempt(number), 0).read_bytes().count(b"\n") for number in (0, 1)]
    assert sum(computed) == total
    (requeue,) = [event for event in read_events(tracked.run.events) if event.kind == "requeue"]
    assert (requeue.cause, requeue.by) == ("requeued", "user")
    refused = project.hpcddp("requeue", tracked.run.run_id, check=False)
    assert "has finished; there is nothing left to run" in refused


def test_a_run_that_waits_is_cancelled_for_good(project: Project) -> None:
    tracked = _start(project, "unwanted", resources=_LARGER_THAN_ITS_PARTITION)
    said = project.hpcddp("cancel", tracked.run.run_id)
    assert said.startswith(f"run {tracked.run.run_id} is cancelled (job {tracked.job_id}); it had not saved a step")
    # Also when Slurm has forgotten the job.
    squeue = ("squeue", "--states=all", "--noheader", "--format=%i")
    wait_until(lambda: tracked.job_id not in project.sandbox.run(*squeue).stdout.split(), "Slurm forgets the job")
    assert project.state("unwanted") == "cancelled"
    again = project.hpcddp("cancel", tracked.run.run_id)
    assert again == f"run {tracked.run.run_id} has ended already (cancelled); there is nothing to cancel\n"


def test_a_sweep_is_shown_explained_and_cancelled_as_one(project: Project) -> None:
    """Its elements are programs that only wait, on the one host that is left to nobody else."""
    document = {
        "name": "waits", "command": ["sleep", "600"], "resources": {"nodelist": "n3"},
        "requeue": {"causes": ["time_limit"]}, "max_parallel": 2, "sweep": {"environment.env.NUMBER": ["1", "2", "3"]},
    }  # fmt: skip
    (project.directory / "sweep.yaml").write_text(json.dumps(document))
    sweep_id = json.loads(project.hpcddp("submit", "sweep.yaml", "--json"))["sweep_id"]

    def status() -> str:
        return project.hpcddp("status", sweep_id)

    wait_until(lambda: "1 pending, 2 running" in project.hpcddp("status", sweep_id), status, 300)
    assert "1 pending, 2 running" in project.hpcddp("status")
    assert "it waits to start, because as many elements of its array run as may" in project.hpcddp("why", sweep_id)
    assert project.hpcddp("why", f"{sweep_id}_2").startswith(f"{sweep_id}_2 (waits): it waits to start")
    assert project.hpcddp("cancel", f"{sweep_id}_2").startswith(f"run {sweep_id}_2 is cancelled")
    wait_until(lambda: "2 running, 1 cancelled" in project.hpcddp("status", sweep_id), status, 120)
    assert project.hpcddp("requeue", sweep_id).count("is requeued: the program of run") == 2
    # Slurm's own delay of two minutes applies to an element whose end takes longer than hpcddp allows for.
    wait_until(lambda: all(attempts == [0, 1] for attempts in _attempts(project, sweep_id)), status, 480)
    assert project.hpcddp("cancel", sweep_id).startswith(f"2 elements of sweep {sweep_id} are being cancelled")
    wait_until(lambda: "3 cancelled" in project.hpcddp("status", sweep_id), status, 120)


def _attempts(project: Project, sweep_id: str) -> list[list[int]]:
    runs = [project.directory / "runs" / "waits" / f"{sweep_id}_{index}" for index in (0, 1)]
    return [sorted(RunDirectory(run).attempt_numbers()) for run in runs]
