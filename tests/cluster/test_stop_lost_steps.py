"""A host whose tasks and slurmstepd die together: srun never hears of their end, and the run goes on all the same."""

from __future__ import annotations

import random
import sys
from typing import Any

import pytest

from hpcddp.run.job_records import known_hosts
from tests.cluster.commands import script, start
from tests.cluster.comparison import RunComparison
from tests.cluster.jobs import HPCDDP
from tests.cluster.scenarios import OTHER_HOSTS, ScenarioContext, ScenarioResult, after_scenario
from tests.cluster.slurm_faults import kill_step_on_host, start_anew
from tests.cluster.tracked_run import TrackedRun
from tests.waiting import wait_for_text

_TRIALS = 8
# Its ranks do not wait for each other, so that none of them notices the loss of another one.
_WORKS = """
    import os, time
    print("at work", flush=True)
    if os.environ["HPCDDP_ATTEMPT"] == "0":
        time.sleep(1200)
"""


def host_killed(
    context: ScenarioContext, name: str = "run", *, steps: int = 40, hosts: str = OTHER_HOSTS
) -> ScenarioResult:
    """The tasks and the slurmstepd of the second host are killed; the first rank loses its peer."""
    tracked = context.start(name, on=hosts, sections={"requeue": {"max_failures": 1}})
    tracked.wait_for_steps(steps)
    kill_step_on_host(tracked.ranks()[1])
    return tracked, context.compare("tasks and slurmstepd of a host killed", tracked)


def start_alone(context: ScenarioContext, name: str, *words: str) -> TrackedRun:
    """Start a command on two hosts whose ranks do not wait for each other, and wait until both are at work."""
    directory = context.directory / name
    directory.mkdir(parents=True)
    nodes = ("--nodes", "2", "--tasks-per-node", "1")
    program = (sys.executable, script(directory, _WORKS))
    tracked = start(context.sandbox, directory, *nodes, *words, "--", *program)
    for rank in range(2):
        wait_for_text(tracked.run.attempts / "0" / f"rank-{rank}.log", "at work")
    return tracked


def killed_before_the_limit(context: ScenarioContext) -> TrackedRun:
    """The tasks and the slurmstepd of a host are killed, nobody notices, and the time limit comes."""
    tracked = start_alone(context, "limit", "--time", "1", "--set", "requeue.max_failures=1")
    kill_step_on_host(tracked.ranks()[1])
    tracked.wait_until_finished()
    return tracked


def stuck_at_the_limit(context: ScenarioContext) -> TrackedRun:
    """A rank is stuck when the time limit comes, and the timeout of the watchdog is not over yet."""
    sections: dict[str, dict[str, Any]] = {"resources": {"time_limit": 1}, "requeue": {"signal_lead": "20s"}}
    tracked = context.start("stuck", nodes=1, behaviour={"rank": 0, "stuck_at": 40}, sections=sections)
    tracked.wait_until(lambda: tracked.attempts == 2, "a second attempt", timeout_s=200)
    context.sandbox.run("scancel", tracked.job_id)
    return tracked


def started_anew(context: ScenarioContext) -> TrackedRun:
    """The machine of the second host is started anew, faster than Slurm misses it, and nobody notices."""
    tracked = start_alone(context, "anew", "--time", "20")
    host = read_hosts(tracked)[1]
    kill_step_on_host(tracked.ranks()[1])
    start_anew(context.sandbox, host)
    tracked.wait_until_finished()
    return tracked


def read_hosts(tracked: TrackedRun) -> list[str]:
    hosts = known_hosts(tracked.run.attempt(0))
    assert hosts is not None
    return hosts


def why(tracked: TrackedRun) -> str:
    return tracked.sandbox.run(*HPCDDP, "why", str(tracked.run.path), check=False).stdout


@after_scenario(host_killed, own_slurm=True)
def test_a_host_whose_tasks_and_slurmstepd_are_killed_does_not_hold_the_job(scenario_result: ScenarioResult) -> None:
    tracked, comparison = scenario_result
    assert_went_on(tracked, comparison)


def assert_went_on(tracked: TrackedRun, comparison: RunComparison) -> None:
    assert comparison.has_same_result, comparison
    assert comparison.attempts == 2
    (requeue,) = tracked.events("requeue")
    assert requeue.cause == "crash"
    assert f"rank 1 on {read_hosts(tracked)[1]} ended without an error message" in (requeue.reason or "")


@after_scenario(killed_before_the_limit, own_slurm=True)
def test_at_the_time_limit_the_requeue_is_decided_although_srun_waits(scenario_result: TrackedRun) -> None:
    (requeue,) = scenario_result.events("requeue")
    assert requeue.cause == "crash"
    assert f"on {read_hosts(scenario_result)[1]} ended without an error message" in (requeue.reason or "")
    assert "the job's time is over, and srun still waits" in scenario_result.log()


@after_scenario(stuck_at_the_limit, own_slurm=True)
def test_ranks_that_are_stuck_at_the_time_limit_are_requeued(scenario_result: TrackedRun) -> None:
    (requeue,) = scenario_result.events("requeue")
    assert requeue.cause == "time_limit"


@pytest.mark.long
@after_scenario(started_anew, own_slurm=True)
def test_a_host_that_was_started_anew_unnoticed_counts_as_lost(scenario_result: TrackedRun) -> None:
    (requeue,) = scenario_result.events("requeue")
    assert requeue.cause == "node_failure"
    assert f"node {read_hosts(scenario_result)[1]} was lost" in (requeue.reason or "")


def hosts_killed(context: ScenarioContext) -> list[ScenarioResult]:
    return [
        host_killed(context, f"trial-{trial}", steps=random.Random(trial).randrange(10, 100))
        for trial in range(_TRIALS)
    ]


@pytest.mark.long
@after_scenario(hosts_killed, long=True, own_slurm=True)
def test_hosts_whose_tasks_and_slurmstepd_are_killed_do_not_hold_the_job_again_and_again(
    scenario_result: list[ScenarioResult],
) -> None:
    for tracked, comparison in scenario_result:
        assert_went_on(tracked, comparison)
