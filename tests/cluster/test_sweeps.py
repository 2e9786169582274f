"""Sweeps on the real Slurm: one array, many runs, and what becomes of one of them."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hpcddp.jobfile.write import parse_resolved
from hpcddp.run.directory import RunDirectory
from hpcddp.run.sweep import Sweep, read_sweep, sweep_of
from tests.cluster.jobs import HPCDDP, submit, write_job
from tests.cluster.sandbox import Sandbox
from tests.cluster.tracked_run import TrackedRun
from tests.waiting import wait_for_text

MODEL = textwrap.dedent(
    """
    import json, os, time
    from pathlib import Path
    from torch import nn

    class Slow(nn.Sequential):
        def forward(self, images):
            time.sleep(float(os.environ.get("STEP_S", 0)))
            with open(Path(os.environ["HPCDDP_ATTEMPT_DIR"]) / "trace-0", "a") as trace:
                trace.write("step\\n")
            return super().forward(images)

    def build(num_classes):
        names = ("HPCDDP_SWEEP_INDEX", "WORD")
        seen = {name: os.environ.get(name) for name in names}
        (Path(os.environ["HPCDDP_ATTEMPT_DIR"]) / "seen.json").write_text(json.dumps(seen))
        return Slow(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(192, num_classes))
    """
)
RATES = ("--sweep", "environment.env.RATE=0.05,0.1,0.2,0.4")


def job_in(directory: Path, **sections: Any) -> Path:
    """Write a small training of one task, and its model."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "small.py").write_text(MODEL)
    return write_job(directory, nodes=1, sections=sections)


def small_program(directory: Path, **sections: Any) -> Path:
    """Write a job of one small program that writes down two of its variables."""
    command = ["sh", "-c", 'printf "%s %s" "$RATE" "$WORD" >"seen-$HPCDDP_SWEEP_INDEX"']
    path = directory / "job.yaml"
    path.write_text(json.dumps({"name": "mine", "command": command, "resources": {"time_limit": 5}, **sections}))
    return path


def sweep_at(submitted: dict[str, Any]) -> Sweep:
    sweep = read_sweep(Path(submitted["sweep_dir"]))
    assert sweep is not None
    return sweep


@pytest.fixture
def count_of(sandbox: Sandbox, tmp_path: Path) -> Iterator[tuple[dict[str, str], Path]]:
    """An environment in which every call of sbatch leaves a line in a file."""
    real, calls = shutil.which("sbatch"), tmp_path / "calls"
    wrapper = tmp_path / "bin" / "sbatch"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\necho "$@" >>{calls}\nexec {real} "$@"\n')
    wrapper.chmod(0o700)
    yield {"PATH": f"{wrapper.parent}:{sandbox.environment['PATH']}"}, calls
    sandbox.cancel_all()


@dataclass(frozen=True)
class FinishedSweep:
    """A sweep of four elements that has finished, and the run that waited for it."""

    sweep: Sweep
    waiting: TrackedRun
    sandbox: Sandbox

    def tracked(self, index: int) -> TrackedRun:
        job_id = self.sweep.job_id(index)
        assert job_id is not None
        run = self.sweep.run(index)
        return TrackedRun(sandbox=self.sandbox, job=self.sweep.path, run=run, job_id=job_id)


@pytest.fixture(scope="module")
def finished_sweep(sandbox: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> FinishedSweep:
    """Run a sweep of four on a host each; the host of its element 2 is taken away for a while."""
    resources = {"nodes": 1, "tasks_per_node": 1, "exclusive": True, "partition": "low"}
    job = job_in(
        tmp_path_factory.mktemp("sweep"),
        resources=resources,
        environment={"env": {"STEP_S": "0.1"}},
        train={"epochs": 12},
    )
    words = "environment.env.WORD=\"a b\",'$HOME'"
    submitted = submit(sandbox, job, *("--sweep", "train.seed=0..1", "--sweep", words))
    finished_sweep = FinishedSweep(sweep_at(submitted), _after(sandbox, job, submitted["sweep_id"]), sandbox)
    tracked = finished_sweep.tracked(2)
    tracked.wait_for_steps(5)
    host = sandbox.job(tracked.job_id)["BatchHost"]
    sandbox.submit("--partition=high", "--exclusive", f"--nodelist={host}", "--output=/dev/null", "--wrap=sleep 2")
    for index in range(4):
        finished_sweep.tracked(index).wait_until_finished()
    finished_sweep.waiting.wait_until_finished()
    return finished_sweep


def _after(sandbox: Sandbox, job: Path, run: str) -> TrackedRun:
    words = ("--after", run, "--time", "5", "--", "true")
    done = sandbox.run(*HPCDDP, "submit", "--json", *words, cwd=job.parent)
    submitted = json.loads(done.stdout)
    run_directory = RunDirectory(Path(submitted["run_dir"]))
    return TrackedRun(sandbox=sandbox, job=job, run=run_directory, job_id=submitted["job_id"])


def test_every_element_runs_to_its_end_with_its_own_values(finished_sweep: FinishedSweep) -> None:
    for index in range(4):
        run = finished_sweep.sweep.run(index)
        spec = parse_resolved(run.job_file.read_text())
        assert (spec.train.seed if spec.train else None, spec.sweep) == (index // 2, None)
        seen = json.loads((run.attempt(0).path / "seen.json").read_text())
        assert seen == {"HPCDDP_SWEEP_INDEX": str(index), "WORD": ["a b", "$HOME"][index % 2]}
        assert finished_sweep.tracked(index).result["status"] == "finished"
    parameters = [finished_sweep.tracked(index).result["parameters_sha256"] for index in range(4)]
    assert parameters[0] == parameters[1] != parameters[2] == parameters[3]


def test_an_element_knows_its_sweep_and_keeps_its_own_log(finished_sweep: FinishedSweep) -> None:
    run = finished_sweep.sweep.run(3)
    assert sweep_of(run) == finished_sweep.sweep
    assert f"attempt 0 of run {run.run_id} begins" in run.batch_log.read_text()
    assert json.loads(run.submission.read_text())["job_id"] == finished_sweep.sweep.job_id(3)


def test_a_preempted_element_comes_back_alone_and_loses_nothing(finished_sweep: FinishedSweep) -> None:
    assert [finished_sweep.tracked(index).attempts for index in range(4)] == [1, 1, 2, 1]
    assert [finished_sweep.sandbox.job(finished_sweep.tracked(index).job_id)["Restarts"] for index in range(4)] == [
        "0",
        "0",
        "1",
        "0",
    ]
    (requeue,) = finished_sweep.tracked(2).events("requeue")
    assert requeue.cause == "preemption"
    # The same training as element 3, which nobody disturbed.
    assert (
        finished_sweep.tracked(2).result["parameters_sha256"] == finished_sweep.tracked(3).result["parameters_sha256"]
    )


def test_what_waits_for_a_sweep_starts_when_all_of_it_has_finished(finished_sweep: FinishedSweep) -> None:
    (start,) = finished_sweep.waiting.events("start")
    assert start.time >= max(finished_sweep.tracked(index).events("finish")[0].time for index in range(4))


def test_an_element_has_its_result_in_a_submitit_job(finished_sweep: FinishedSweep) -> None:
    from submitit import SlurmJob

    run, job_id = finished_sweep.sweep.run(0), finished_sweep.sweep.job_id(0)
    job: SlurmJob[Any] = SlurmJob(folder=run.submitit, job_id=str(job_id))
    assert job.result()["steps"] == finished_sweep.tracked(0).result["steps"]


def test_a_thousand_elements_are_one_call_of_sbatch_and_eight_files(
    sandbox: Sandbox, tmp_path: Path, count_of: tuple[dict[str, str], Path]
) -> None:
    environment, calls = count_of
    job = job_in(tmp_path, resources={"sbatch": {"hold": True}})
    submitted = submit(sandbox, job, "--sweep", "train.seed=0..999", "--max-parallel", "7", env=environment)
    assert len(calls.read_text().splitlines()) == 1
    runs = Path(submitted["sweep_dir"]).parent
    assert sorted(path.name for path in runs.rglob("*") if path.is_file()) == [
        "code.json", "environment.json", "job.sbatch", "job.yaml", "source.json", "submission.json", "submitted.pkl",
        "sweep.json",
    ]  # fmt: skip
    (job_id,) = submitted["job_ids"]
    listed = sandbox.run("squeue", "--noheader", "--array", f"--jobs={job_id}").stdout.splitlines()
    assert len(listed) == 1000
    assert sandbox.job(job_id)["ArrayTaskThrottle"] == "7"
    assert len(submitted["elements"]) == 1000


def test_a_sweep_longer_than_an_array_is_several_and_each_element_finds_its_values(
    sandbox: Sandbox, tmp_path: Path, count_of: tuple[dict[str, str], Path]
) -> None:
    environment, calls = count_of
    job = small_program(tmp_path, resources={"time_limit": 5, "sbatch": {"hold": True}})
    submitted = submit(sandbox, job, "--sweep", "environment.env.RATE=0..2099", env=environment)
    assert len(calls.read_text().splitlines()) == 3
    assert [(chunk["first"], chunk["count"]) for chunk in submitted["chunks"]] == [(0, 1001), (1001, 1001), (2002, 98)]
    sweep = sweep_at(submitted)
    job_id = sweep.job_id(2009)
    assert job_id == f"{submitted['job_ids'][2]}_7"
    sandbox.run("scontrol", "release", job_id)
    sandbox.wait(job_id)
    assert (tmp_path / "seen-2009").read_text() == "2009 "


@pytest.mark.long("the other sweeps of programs have values of the environment too, from a job file")
def test_a_program_is_swept_by_its_environment(sandbox: Sandbox, tmp_path: Path) -> None:
    words = ("--name", "mine", "--nodes", "1", "--time", "5", "--sweep", "environment.env.RATE=0.10,'a b'")
    program = ("sh", "-c", 'printf %s "$RATE" >"rate-$HPCDDP_SWEEP_INDEX"')
    done = sandbox.run(*HPCDDP, "submit", *words, "--json", "--", *program, cwd=tmp_path)
    sweep = sweep_at(json.loads(done.stdout))
    for index, rate in enumerate(("0.10", "a b")):
        sandbox.wait(str(sweep.job_id(index)))
        assert (tmp_path / f"rate-{index}").read_text() == rate


def test_a_program_is_swept_by_the_words_of_its_command(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import json, os, sys\nfrom pathlib import Path\n"
        "path = Path(f\"words-{os.environ['HPCDDP_SWEEP_INDEX']}.json\")\n"
        "path.write_text(json.dumps(sys.argv[1:]))\n"
    )
    words = ("--name", "mine", "--nodes", "1", "--time", "5", "--sweep", "lr=1e-3,$HOME 'x'", "--sweep", "seed=1")
    program = ("python", "train.py", "--lr={lr}", "{seed}", '{"a": {seed}}')
    done = sandbox.run(*HPCDDP, "submit", *words, "--json", "--", *program, cwd=tmp_path)
    sweep = sweep_at(json.loads(done.stdout))
    seed = 1
    for index, lr in enumerate(("1e-3", "$HOME 'x'")):
        sandbox.wait(str(sweep.job_id(index)))
        seen = json.loads((tmp_path / f"words-{index}.json").read_text())
        assert seen == [f"--lr={lr}", str(seed), f'{{"a": {seed}}}']
        assert sweep.elements[index] == {"lr": lr, "seed": seed}


def test_the_unfinished_elements_of_a_sweep_continue_in_one_array(sandbox: Sandbox, tmp_path: Path) -> None:
    # Only the first element finishes before there is a file.
    program = ("sh", "-c", 'echo "$1 begins"; test "$1" = 0 || test -e "$2"', "sh", "{seed}", str(tmp_path / "file"))
    words = ("--name", "mine", "--nodes", "1", "--time", "5", "--sweep", "seed=0..2")
    done = sandbox.run(*HPCDDP, "submit", *words, "--json", "--", *program, cwd=tmp_path)
    sweep = sweep_at(json.loads(done.stdout))
    for index in range(3):
        sandbox.wait(str(sweep.job_id(index)), {"COMPLETED", "FAILED"})
    (tmp_path / "file").touch()
    resumed = sandbox.run(*HPCDDP, "submit", "--resume", sweep.sweep_id, cwd=tmp_path)
    assert resumed.stdout.startswith("2 elements continue; 1 finished, 0 alive\n")
    for index in range(3):
        submission = json.loads(sweep.run(index).submission.read_text())
        sandbox.wait(submission["job_id"])
        wait_for_text(sweep.run(index).batch_log, "has finished")
        assert (submission["job_id"] == sweep.job_id(index)) == (index == 0)
        assert sweep.run(index).newest_attempt() == (0 if index == 0 else 1)
        assert f"attempt {int(index > 0)} of run" in sweep.run(index).batch_log.read_text()
    again = sandbox.run(*HPCDDP, "submit", "--resume", sweep.sweep_id, cwd=tmp_path, check=False)
    assert (again.returncode, again.stderr) == (
        2, f"hpcddp: the sweep {sweep.sweep_id} has no run to resume: 3 finished, 0 alive\n",
    )  # fmt: skip


def test_a_cancelled_element_is_resumed_alone_even_before_it_began(sandbox: Sandbox, tmp_path: Path) -> None:
    resources = {"time_limit": 5, "sbatch": {"hold": True}}
    job = small_program(tmp_path, resources=resources, environment={"env": {"WORD": "x"}})
    sweep = sweep_at(submit(sandbox, job, *RATES))
    alive = sandbox.run(*HPCDDP, "submit", "--resume", sweep.run_id(3), cwd=tmp_path, check=False)
    assert alive.returncode == 2
    assert f"job {sweep.job_id(3)} of the run " in alive.stderr
    sandbox.run("scancel", str(sweep.job_id(3)))
    resumed = json.loads(sandbox.run(*HPCDDP, "submit", "--resume", sweep.run_id(3), "--json", cwd=tmp_path).stdout)
    sandbox.run("scontrol", "release", resumed["job_id"])
    sandbox.wait(resumed["job_id"])
    wait_for_text(sweep.run(3).batch_log, "has finished")
    # The value of the environment is kept with the sweep alone.
    assert (tmp_path / "seen-3").read_text() == "0.4 x"
    assert not sweep.run(0).path.exists()


def test_a_rendered_sweep_runs_with_plain_sbatch(sandbox: Sandbox, tmp_path: Path) -> None:
    job = small_program(tmp_path)
    script = tmp_path / "job.sh"
    script.write_text(sandbox.run(*HPCDDP, "render", str(job), *RATES, cwd=tmp_path).stdout)
    array = sandbox.submit("--array=1-2", script, cwd=tmp_path)
    for index in (1, 2):
        sandbox.wait(f"{array}_{index}")
    (directory,) = (path.parent for path in tmp_path.glob("runs/mine/*/sweep.json"))
    sweep = read_sweep(directory)
    assert sweep is not None
    assert directory.name.endswith(f"-{array}")
    assert [sweep.run(index).result.exists() for index in range(4)] == [False, True, True, False]
    assert sweep.job_id(2) == f"{array}_2"
