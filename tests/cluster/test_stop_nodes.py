"""Nodes and the controller go away: the run goes on elsewhere or afterwards, and no generation disturbs the next."""

from __future__ import annotations

import json
import signal
import threading
import time
from pathlib import Path

import pytest

from hpcddp.run import checkpoints
from hpcddp.run.checkpoints import LATEST
from hpcddp.run.events import read_events
from hpcddp.run.job_records import known_hosts
from hpcddp.slurm.hostlist import expand
from tests.cluster.comparison import RunComparison
from tests.cluster.scenarios import OTHER_HOSTS, STEPS_PER_EPOCH, ScenarioContext, ScenarioResult, after_scenario
from tests.cluster.slurm_faults import (
    daemon_pid,
    kill_after_requeue,
    kill_step_daemon,
    link_cut,
    without_controller,
    without_slurmd,
)
from tests.cluster.tracked_run import TrackedRun

# How long a lost slurmctld stays away: longer than a call waits for it.
_AWAY_S = 15


class LatestWatch:
    """Notes every step that ``latest`` ever names."""

    def __init__(self, directory: Path) -> None:
        self._path, self._ended = directory / LATEST, threading.Event()
        self.steps: list[int] = []
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def wait_for_end(self) -> list[int]:
        """Return the steps in the order in which they were named."""
        self._ended.set()
        self._thread.join()
        return self.steps

    def _watch(self) -> None:
        while not self._ended.wait(0.02):
            text = self._path.read_text().strip() if self._path.exists() else ""
            step = int(text.removeprefix("step-")) if text else None
            if step is not None and step not in self.steps[-1:]:
                self.steps.append(step)


def nodes_lost(context: ScenarioContext) -> tuple[TrackedRun, RunComparison, list[int], ScenarioResult]:
    """The cable of one run's first host is cut until the run has gone on; slurmd on another run's host is killed.

    Rank 0 and the batch script live on in the host that is cut off, and reach the run directory. Slurm ends what is
    left of them when the host is back.
    """
    cut, killed = (start_on(context, name, hosts) for name, hosts in (("cut", "n1,n2"), ("killed", "n3,n4")))
    latest = LatestWatch(cut.run.checkpoints)
    for tracked in (cut, killed):
        tracked.wait_for_steps(30)
    with link_cut(context.sandbox, "n1"), without_slurmd(context.sandbox, "n4"):
        for tracked in (cut, killed):
            tracked.wait_for_attempt(1)
        context.sandbox.wait(cut.job_id, timeout=300)
    cut.wait_until(lambda: not cut.processes(), "the end of the old generation")
    comparison = context.compare("link of the first node cut", cut)
    return cut, comparison, latest.wait_for_end(), (killed, context.compare("slurmd killed", killed))


def step_daemon_killed(context: ScenarioContext) -> ScenarioResult:
    """One of the two slurmstepd of the step is killed; the tasks live on, and srun never hears of their end."""
    tracked = context.start("run", on=OTHER_HOSTS)
    tracked.wait_for_steps(40)
    kill_step_daemon(tracked.ranks()[1])
    return tracked, context.compare("slurmstepd killed", tracked)


def node_fails_twice(context: ScenarioContext) -> tuple[TrackedRun, RunComparison, str]:
    """The rank on one node is killed twice in a run that avoids failing nodes; its user has excluded another node."""
    requeue = {"max_failures": 3, "avoid_failed_nodes": True}
    tracked = context.start("twice", sections={"requeue": requeue, "resources": {"exclude": "n1"}})
    for attempt in range(2):
        tracked.wait_for_steps(30, attempt=attempt)
        tracked.wait_until(lambda: len(tracked.ranks()) == 2, "both ranks")
        tracked.signal(1, signal.SIGKILL)
        tracked.wait_for_attempt(attempt + 1)
    comparison = context.compare("a node fails twice", tracked)
    return tracked, comparison, context.sandbox.job(tracked.job_id)["ExcNodeList"]


def start_on(context: ScenarioContext, name: str, hosts: str) -> TrackedRun:
    """Start a run on hosts that it is not bound to: the others take no new job for the moment."""
    others = ",".join(node for node in context.sandbox.nodes if node not in hosts.split(","))
    context.sandbox.run("scontrol", "update", f"NodeName={others}", "State=DRAIN", "Reason=test")
    # It is still at work when Slurm gives up a node that does not answer (SlurmdTimeout).
    tracked = context.start(name, seconds=0.35, sections={"launch": {"hang_timeout": "20s"}})
    tracked.wait_until(lambda: tracked.attempts, "a start")
    context.sandbox.run("scontrol", "update", f"NodeName={others}", "State=RESUME")
    return tracked


def controller_ended(context: ScenarioContext) -> ScenarioResult:
    """slurmctld is away when the run wants to be requeued, and comes back."""
    tracked = context.start("ended", nodes=1)
    tracked.wait_for_steps(30)
    with without_controller(context.sandbox):
        tracked.signal(0, signal.SIGUSR2)
        time.sleep(_AWAY_S)
    return tracked, context.compare("slurmctld away at requeue time, back after 15 s", tracked, nodes=1)


def controller_away_at_start(context: ScenarioContext) -> ScenarioResult:
    """slurmctld goes away when the batch script starts, and comes back; srun then waits for two minutes."""
    tracked = context.start("start")
    tracked.wait_until(lambda: tracked.sandbox.job(tracked.job_id)["JobState"] == "RUNNING", "the start")
    with without_controller(context.sandbox):
        time.sleep(_AWAY_S)
    return tracked, context.compare("slurmctld away at the start, back after 15 s", tracked)


def controller_killed(context: ScenarioContext) -> ScenarioResult:
    # The script of a job with Requeue=0 stays, because Slurm does not repair a requeue of it that was forgotten.
    tracked = context.start("killed", nodes=1, sections={"requeue": {"causes": ["time_limit"]}})
    tracked.wait_for_steps(30)
    tracked.signal(0, signal.SIGUSR2)
    kill_after_requeue(tracked)
    return tracked, context.compare("slurmctld killed after the requeue, back after 2 s", tracked, nodes=1)


def controller_hangs(context: ScenarioContext) -> ScenarioResult:
    """slurmctld takes connections and does not answer, when the run wants to be requeued."""
    tracked = context.start("hangs")
    tracked.wait_for_steps(30)
    pid = str(daemon_pid(context.sandbox, "slurmctld"))
    context.sandbox.inside("kill", "-STOP", pid)
    try:
        tracked.signal(1, signal.SIGUSR2)
        time.sleep(_AWAY_S)
    finally:
        context.sandbox.inside("kill", "-CONT", pid)
    return tracked, context.compare("slurmctld does not answer at requeue time for 15 s", tracked)


@after_scenario(nodes_lost, own_slurm=True)
def test_a_run_whose_node_is_cut_off_goes_on_and_the_old_generation_publishes_nothing(
    scenario_result: tuple[TrackedRun, RunComparison, list[int], ScenarioResult],
) -> None:
    tracked, comparison, latest, _ = scenario_result
    assert comparison.has_same_result, comparison
    assert comparison.steps_lost <= STEPS_PER_EPOCH + 1
    assert latest == sorted(latest)
    assert comparison.attempts == 2
    newest = checkpoints.newest_valid(tracked.run.checkpoints, expected=True, warn=pytest.fail)
    assert newest is not None
    assert newest.manifest.attempt == 1
    (began,) = (event.time for event in tracked.events("start") if event.attempt == 1)
    late = [event for event in read_events(tracked.run.events) if event.attempt == 0 and event.time > began]
    assert late == []
    assert tracked.result["status"] == "finished"


@after_scenario(nodes_lost, own_slurm=True)
def test_a_run_whose_node_lost_its_slurmd_is_requeued_and_comes_out_the_same(
    scenario_result: tuple[TrackedRun, RunComparison, list[int], ScenarioResult],
) -> None:
    _, comparison = scenario_result[-1]
    assert comparison.has_same_result, comparison
    assert comparison.attempts == 2


@after_scenario(node_fails_twice, own_slurm=True)
def test_a_node_that_fails_twice_is_excluded_by_the_requeue(
    scenario_result: tuple[TrackedRun, RunComparison, str],
) -> None:
    tracked, comparison, excluded = scenario_result
    assert comparison.has_same_result, comparison
    assert [event.by for event in tracked.events("restart")] == ["hpcddp"]
    assert len(tracked.events("requeue")) == 1
    failed = known_hosts(tracked.run.attempt(0))
    assert failed == known_hosts(tracked.run.attempt(1))
    hosts = known_hosts(tracked.run.attempt(2))
    assert failed is not None
    assert hosts is not None
    assert not {"n1", failed[1]} & set(hosts)
    (exclusion,) = tracked.events("exclusion")
    assert exclusion.facts["nodes"] == [failed[1]]
    assert failed[1] in str(exclusion.reason)
    assert expand(excluded) == ["n1", failed[1]]


@pytest.mark.long
@after_scenario(controller_away_at_start, own_slurm=True)
def test_a_controller_that_is_away_at_the_start_costs_nothing(scenario_result: ScenarioResult) -> None:
    _, comparison = scenario_result
    assert comparison.lost_nothing, comparison
    assert comparison.attempts == 1


@after_scenario(controller_killed, own_slurm=True)
def test_a_requeue_that_a_killed_controller_has_forgotten_is_repeated(scenario_result: ScenarioResult) -> None:
    tracked, comparison = scenario_result
    assert comparison.lost_nothing, comparison
    assert comparison.attempts == 2
    assert len(tracked.events("requeue")) == 1


@pytest.mark.parametrize(
    "words",
    [
        pytest.param("ended", marks=after_scenario(controller_ended, own_slurm=True), id="ended"),
        pytest.param("silent", marks=[after_scenario(controller_hangs, own_slurm=True), pytest.mark.long], id="silent"),
    ],
)
def test_a_controller_that_is_away_at_requeue_time_delays_the_run_and_costs_nothing(
    scenario_result: ScenarioResult, words: str
) -> None:
    tracked, comparison = scenario_result
    assert comparison.lost_nothing, (words, comparison)
    assert comparison.attempts == 2
    decision = json.loads((tracked.run.attempt(0).path / "decision.json").read_text())
    assert decision["saved"] is True


@after_scenario(step_daemon_killed, own_slurm=True)
def test_srun_that_waits_for_a_killed_slurmstepd_does_not_hold_the_nodes(scenario_result: ScenarioResult) -> None:
    tracked, comparison = scenario_result
    assert comparison.lost_nothing, comparison
    assert comparison.attempts == 1
    assert "srun still waits 60 s later; it is ended" in tracked.log()
