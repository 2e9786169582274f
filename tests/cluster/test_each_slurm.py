"""What every version of Slurm must do for a run, with small programs: ``scripts/test`` runs it with another Slurm too.

The programs compute nothing and import nothing, so that the scenarios wait for Slurm alone.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hpcddp.run.directory import RunDirectory
from hpcddp.run.job_records import read_ranks
from hpcddp.run.sweep import read_sweep
from tests.cluster.allocations import result_when_ended, salloc
from tests.cluster.commands import script, start
from tests.cluster.jobs import HPCDDP
from tests.cluster.scenarios import ScenarioContext, after_scenario
from tests.cluster.slurm_faults import without_slurmd
from tests.cluster.tracked_run import TrackedRun
from tests.waiting import wait_for_text

pytestmark = pytest.mark.each_slurm

# Preemptions take the first host; nobody preempts on the others.
PREEMPTED = "n1"
ON_ONE = ("--nodelist", "n2")
ON_TWO = ("--nodes", "2", "--tasks-per-node", "2", "--nodelist", "n3,n4")
# In its first attempt it is at work until it is told to stop.
WORKS = """
    import os, signal, sys, time
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    print("at work", flush=True)
    if os.environ["HPCDDP_ATTEMPT"] == "0":
        time.sleep(600)
"""
PRINTS_JOB_NAME = "import os; print('called', os.environ['SLURM_JOB_NAME'])"
# Longer than a requeued job waits here before it starts again.
_SECOND_LIFE_S = 10


def start_working(context: ScenarioContext, name: str, *words: str, text: str = WORKS) -> TrackedRun:
    """Submit the program, and wait until it is at work."""
    tracked = start_program(context, name, *words, text=text)
    wait_for_text(tracked.run.attempts / "0" / "rank-0.log", "at work")
    return tracked


def start_program(context: ScenarioContext, name: str, *words: str, text: str = WORKS) -> TrackedRun:
    directory = directory_of(context, name)
    return start(context.sandbox, directory, "--time", "5", *words, "--", sys.executable, script(directory, text))


def directory_of(context: ScenarioContext, name: str) -> Path:
    directory = context.directory / name
    directory.mkdir(parents=True)
    return directory


def wait_for_result(tracked: TrackedRun) -> dict[str, str]:
    """Wait until the run has a result and its job has left its hosts; return what Slurm says about the job."""
    tracked.wait_until(tracked.run.result.exists, "a result")
    on_hosts = {"RUNNING", "COMPLETING"}
    tracked.wait_until(lambda: tracked.sandbox.job(tracked.job_id)["JobState"] not in on_hosts, "the end of the job")
    return tracked.sandbox.job(tracked.job_id)


def started_without_directory(context: ScenarioContext) -> tuple[TrackedRun, str]:
    """The run directory is away when the job starts; newer versions of Slurm make an empty one."""
    tracked = start_program(context, "run", "--set", "resources.sbatch.hold=true", *ON_ONE, text=PRINTS_JOB_NAME)
    away = tracked.run.path.with_name("away")
    tracked.run.path.rename(away)
    context.sandbox.run("scontrol", "release", tracked.job_id)

    def is_noticed() -> bool:
        has_failed = tracked.sandbox.job(tracked.job_id)["JobState"] == "FAILED"
        return has_failed or (tracked.run.batch_log.is_file() and "is not there" in tracked.log())

    tracked.wait_until(is_noticed, "a job that waits or has failed", timeout_s=60)
    shutil.rmtree(tracked.run.path, ignore_errors=True)
    away.rename(tracked.run.path)
    if tracked.sandbox.job(tracked.job_id)["JobState"] != "FAILED":
        wait_for_result(tracked)
    return tracked, context.sandbox.run(*HPCDDP, "why", str(tracked.run.path)).stdout


def causes(tracked: TrackedRun) -> list[str | None]:
    return [event.cause for event in tracked.events("requeue")]


def finished(context: ScenarioContext) -> TrackedRun:
    tracked = start_program(context, "run", "--name", "bash", *ON_TWO, text=PRINTS_JOB_NAME)
    wait_for_result(tracked)
    return tracked


def preempted(context: ScenarioContext) -> dict[str, tuple[TrackedRun, dict[str, str]]]:
    """One job of ``high`` preempts five runs, of which two fail afterwards; another run waits for one of these."""
    tracked_runs = {
        partition: start_working(context, partition, "--partition", partition, "--nodelist", PREEMPTED)
        for partition in ("low", "low0", "lowc")
    }
    failing = f"{WORKS}    sys.exit(3)\n"
    failed = start_working(context, "failed", "--partition", "low", "--nodelist", PREEMPTED, text=failing)
    # The script of its second attempt ends before it has begun.
    setup = """environment.setup=['[ -z "$SLURM_RESTART_COUNT" ]']"""
    not_set_up = start_working(context, "setup", "--partition", "low", "--nodelist", PREEMPTED, "--set", setup)
    after = start_program(context, "after", "--after", str(failed.run.path), *ON_ONE, text="print('here')")
    context.preempt(PREEMPTED, seconds=1)
    tracked_runs |= {"failed": failed, "after": after}
    for tracked in tracked_runs.values():
        wait_for_result(tracked)
    context.sandbox.wait(not_set_up.job_id, {"FAILED"})
    time.sleep(_SECOND_LIFE_S)
    tracked_runs["setup"] = not_set_up
    return {name: (tracked, tracked.sandbox.job(tracked.job_id)) for name, tracked in tracked_runs.items()}


def out_of_time(context: ScenarioContext) -> TrackedRun:
    tracked = start_working(context, "run", "--time", "1", *ON_ONE)
    wait_for_result(tracked)
    return tracked


def cancelled(context: ScenarioContext) -> TrackedRun:
    tracked = start_working(context, "run", *ON_ONE)
    context.sandbox.run("scancel", tracked.job_id)
    wait_for_result(tracked)
    time.sleep(_SECOND_LIFE_S)
    return tracked


def requeued_by_hpcddp(context: ScenarioContext) -> TrackedRun:
    tracked = start_working(context, "run", *ON_ONE)
    context.sandbox.run(*HPCDDP, "requeue", tracked.run.path)
    wait_for_result(tracked)
    return tracked


def requeued_by_scontrol(context: ScenarioContext) -> TrackedRun:
    tracked = start_working(context, "run", *ON_ONE)
    context.sandbox.run("scontrol", "requeue", tracked.job_id)
    wait_for_result(tracked)
    return tracked


def killed(context: ScenarioContext) -> TrackedRun:
    tracked = start_working(context, "run", *ON_TWO, "--set", "requeue.max_failures=1")
    os.kill(tracked.ranks()[1], signal.SIGKILL)
    wait_for_result(tracked)
    return tracked


def node_lost(context: ScenarioContext) -> TrackedRun:
    tracked = start_working(context, "run", "--nodes", "2")
    ranks = read_ranks(tracked.attempt)
    assert ranks is not None
    with without_slurmd(context.sandbox, ranks[1].host):
        wait_for_result(tracked)
    return tracked


def swept(context: ScenarioContext) -> Mapping[str, str]:
    """Return what the elements of a job array have written, by the name of the file."""
    directory = directory_of(context, "sweep")
    words = ("--name", "mine", "--time", "5", *ON_ONE, "--sweep", "environment.env.RATE=0.10,'a b'")
    program = ("sh", "-c", 'printf %s "$RATE" >"rate-$HPCDDP_SWEEP_INDEX"')
    done = context.sandbox.run(*HPCDDP, "submit", *words, "--json", "--", *program, cwd=directory)
    sweep = read_sweep(Path(json.loads(done.stdout)["sweep_dir"]))
    assert sweep is not None
    for index in range(2):
        context.sandbox.wait(str(sweep.job_id(index)))
    return {path.name: path.read_text() for path in directory.glob("rate-*")}


def waited(context: ScenarioContext) -> tuple[TrackedRun, TrackedRun, str]:
    """A run that waits for another one, and why it was pending while the other one was at work."""
    text = """
        import pathlib, time
        print("at work", flush=True)
        while not pathlib.Path("enough").exists():
            time.sleep(0.1)
    """
    first = start_working(context, "first", *ON_ONE, text=text)
    second = start_program(context, "second", "--after", str(first.run.path), *ON_ONE, text="print('here')")
    reason = context.sandbox.job(second.job_id)["Reason"]
    (context.directory / "first" / "enough").touch()
    wait_for_result(second)
    return first, second, reason


def ran_here(context: ScenarioContext) -> tuple[dict[str, Any], list[str], str]:
    """A run in the allocation of a shell: its result, the hosts of its ranks and the output of its program."""
    directory = directory_of(context, "here")
    options = ("--job-name=interactive", "--nodes=2", "--ntasks-per-node=2", "--time=5", "--nodelist=n3,n4")
    with salloc(context.sandbox, directory, *options) as shell:
        words = ("--nodes", "2", "--tasks-per-node", "2", "--time", "2min", "--cluster", "here")
        document = shell.submit(*words, "--run-root", directory / "runs", "--", sys.executable, "-c", PRINTS_JOB_NAME)
        run = RunDirectory(Path(document["run_dir"]))
        result = result_when_ended(run)
        ranks = read_ranks(run.attempt(0))
    assert ranks is not None
    return result, [rank.host for rank in ranks], run.attempt(0).rank_log(0).read_text()


@after_scenario(finished)
def test_a_run_starts_on_its_hosts_and_ends(scenario_result: TrackedRun) -> None:
    ranks = read_ranks(scenario_result.attempt)
    assert ranks is not None
    assert [rank.host for rank in ranks] == ["n3", "n3", "n4", "n4"]
    assert scenario_result.result["status"] == "finished"
    assert scenario_result.sandbox.job(scenario_result.job_id)["ExitCode"] == "0:0"


@after_scenario(preempted)
@pytest.mark.parametrize("partition", ["low", "low0", "lowc"])
def test_a_preempted_run_comes_back_once(
    scenario_result: dict[str, tuple[TrackedRun, dict[str, str]]], partition: str
) -> None:
    tracked, fields = scenario_result[partition]
    assert causes(tracked) == ["preemption"]
    assert (tracked.attempts, tracked.result["status"]) == (2, "finished")
    # Some versions show a job that was preempted with a grace time as preempted for ever.
    assert fields["JobState"] in {"COMPLETED", "PREEMPTED"}
    assert fields["Restarts"] == "1"


@after_scenario(preempted)
def test_a_run_that_fails_after_a_preemption_is_not_started_again(
    scenario_result: dict[str, tuple[TrackedRun, dict[str, str]]],
) -> None:
    failed, fields = scenario_result["failed"]
    assert (failed.attempts, failed.result["status"], failed.result["final"]) == (2, "failed", True)
    assert (fields["Requeue"], fields["Restarts"]) == ("0", "1")
    after, _ = scenario_result["after"]
    assert (after.attempts, after.result["status"]) == (0, "stopped")
    assert failed.run.run_id in after.result["reason"]


@after_scenario(preempted)
def test_a_failing_setup_after_a_preemption_is_not_repeated(
    scenario_result: dict[str, tuple[TrackedRun, dict[str, str]]],
) -> None:
    tracked, fields = scenario_result["setup"]
    assert tracked.attempts == 1
    assert "so that no task was started" in tracked.run.batch_log.read_text()
    assert (fields["Requeue"], fields["Restarts"]) == ("0", "1")


@after_scenario(out_of_time, long=True)
def test_a_run_at_its_time_limit_comes_back(scenario_result: TrackedRun) -> None:
    assert causes(scenario_result) == ["time_limit"]
    assert (scenario_result.attempts, scenario_result.result["status"]) == (2, "finished")


@after_scenario(started_without_directory)
def test_a_run_never_begins_in_a_directory_that_slurm_has_made(scenario_result: tuple[TrackedRun, str]) -> None:
    tracked, told = scenario_result
    if tracked.sandbox.job(tracked.job_id)["JobState"] == "FAILED":
        assert "Slurm could not open" in told
        assert tracked.attempts == 0
    else:
        assert "it has finished" in told
        assert tracked.attempts == 1


@after_scenario(cancelled)
def test_a_cancelled_run_stays_cancelled(scenario_result: TrackedRun) -> None:
    assert scenario_result.sandbox.job(scenario_result.job_id)["JobState"] == "CANCELLED"
    assert (scenario_result.attempts, scenario_result.result["status"]) == (1, "cancelled")


@after_scenario(requeued_by_hpcddp)
def test_a_run_that_its_user_requeues_comes_back_once(scenario_result: TrackedRun) -> None:
    assert [event.by for event in scenario_result.events("requeue")] == ["user"]
    assert (scenario_result.attempts, scenario_result.result["status"]) == (2, "finished")


@after_scenario(requeued_by_scontrol)
def test_a_run_that_scontrol_requeues_comes_back_once(scenario_result: TrackedRun) -> None:
    assert causes(scenario_result) == ["requeued"]
    assert (scenario_result.attempts, scenario_result.result["status"]) == (2, "finished")


@after_scenario(killed)
def test_a_run_whose_task_is_killed_starts_again_in_its_job(scenario_result: TrackedRun) -> None:
    assert [event.cause for event in scenario_result.events("restart")] == ["crash"]
    assert (scenario_result.attempts, scenario_result.result["status"]) == (2, "finished")
    job = scenario_result.sandbox.job(scenario_result.job_id)
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "0")
    steps = [scenario_result.run.attempt(number).step.read_text() for number in range(2)]
    assert steps == [f"{scenario_result.job_id}.{number}\n" for number in range(2)]


@after_scenario(node_lost, own_slurm=True)
def test_a_run_that_loses_a_host_comes_back_on_others(scenario_result: TrackedRun) -> None:
    assert causes(scenario_result) == ["node_failure"]
    assert (scenario_result.attempts, scenario_result.result["status"]) == (2, "finished")
    hosts = [read_ranks(scenario_result.run.attempt(number)) for number in range(2)]
    assert hosts[0] != hosts[1]


@after_scenario(swept)
def test_each_element_of_an_array_has_its_own_values(scenario_result: Mapping[str, str]) -> None:
    assert scenario_result == {"rate-0": "0.10", "rate-1": "a b"}


@after_scenario(waited)
def test_a_run_waits_for_another_one(scenario_result: tuple[TrackedRun, TrackedRun, str]) -> None:
    first, second, reason = scenario_result
    assert reason == "Dependency"
    assert [tracked.result["status"] for tracked in (first, second)] == ["finished", "finished"]
    assert first.run.result.stat().st_mtime < second.run.attempt(0).path.stat().st_ctime


@after_scenario(ran_here)
def test_a_run_in_an_allocation_has_its_hosts(scenario_result: tuple[dict[str, Any], list[str], str]) -> None:
    result, hosts, _ = scenario_result
    assert result["status"] == "finished"
    assert hosts == ["n3", "n3", "n4", "n4"]


@after_scenario(finished)
def test_a_program_is_not_called_as_lightning_calls_interactive_jobs(scenario_result: TrackedRun) -> None:
    assert "called command" in scenario_result.attempt.rank_log(0).read_text()


@after_scenario(ran_here)
def test_a_program_in_an_interactive_allocation_is_not_called_so(
    scenario_result: tuple[dict[str, Any], list[str], str],
) -> None:
    # Some versions of srun name the step after its program.
    assert scenario_result[2] in {"called command\n", "called sh\n"}
