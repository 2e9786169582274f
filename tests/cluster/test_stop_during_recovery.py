"""A second fault comes while the ranks that are left recover from a death: each ends as docs/design/members.md says."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest

from tests.cluster.recoveries import assert_same, wait_for_world
from tests.cluster.scenarios import ScenarioContext, after_scenario
from tests.cluster.slurm_faults import kill_step_daemon, link_cut, without_controller
from tests.cluster.tracked_run import TrackedRun

pytestmark = pytest.mark.long("recoveries from faults that take minutes to be noticed")

# The others wait for a new process, so that the recovery lasts as long as its imports.
_WAITS: dict[str, float] = {"depends_on_ranks": 1}


def start(
    context: ScenarioContext, *, behaviour: dict[str, float] | None = None, resources: dict[str, int] | None = None
) -> TrackedRun:
    """Start a training of three nodes, and wait until it is at work."""
    sections: dict[str, dict[str, Any]] = {
        "resources": resources or {},
        "requeue": {"max_failures": 3},
        "launch": {"hang_timeout": "20s"},
    }
    tracked = context.start("run", nodes=3, seconds=0.3, behaviour=behaviour, sections=sections)
    tracked.wait_for_steps(10)
    return tracked


def finish(
    context: ScenarioContext, tracked: TrackedRun, behaviour: dict[str, float] | None = None
) -> tuple[TrackedRun, TrackedRun]:
    """Wait for the end of a run; return it, and the undisturbed one."""
    tracked.hurry()
    reference = context.references.of(3, 1, behaviour)
    tracked.wait_until_finished()
    return tracked, reference


def kill_rank_1(tracked: TrackedRun) -> None:
    """Kill a rank, and let the others leave its generation."""
    tracked.signal(1, signal.SIGKILL)
    time.sleep(1)


def assert_same_bits(tracked: TrackedRun, reference: TrackedRun) -> None:
    """Assert that a run whose ranks waited has the numbers of the undisturbed run, bit for bit."""
    assert_same(tracked, reference)
    assert tracked.result["parameters_sha256"] == reference.result["parameters_sha256"]


def host_cut_off(context: ScenarioContext) -> tuple[TrackedRun, TrackedRun]:
    """A host is cut off when a rank of another one dies; its own rank lives on, and reaches the run directory."""
    tracked = start(context, resources={"min_nodes": 2})
    with link_cut(context.sandbox, "n3"):
        tracked.signal(1, signal.SIGKILL)
        wait_for_world(tracked, 2)
        tracked.hurry()
        tracked.wait_until(lambda: tracked.sandbox.job(tracked.job_id)["JobState"] == "COMPLETED", "the end of the job")
    return finish(context, tracked)


@after_scenario(host_cut_off, own_slurm=True)
def test_a_host_that_is_cut_off_while_the_others_leave_is_lost_as_at_any_other_time(
    scenario_result: tuple[TrackedRun, TrackedRun],
) -> None:
    tracked, reference = scenario_result
    assert (tracked.attempts, tracked.result["status"]) == (1, "finished")
    death, join = tracked.events("recovery")
    assert death.facts["dead"] == [1, 2]
    assert join.facts["world_size"] == 2
    assert_same(tracked, reference)


def rank_stopped(context: ScenarioContext) -> tuple[TrackedRun, TrackedRun]:
    """A rank that is left is stopped while the others wait for the new process: it never forms the generation."""
    tracked = start(context, behaviour=_WAITS)
    kill_rank_1(tracked)
    tracked.signal(2, signal.SIGSTOP)
    return finish(context, tracked, _WAITS)


@after_scenario(rank_stopped)
def test_a_rank_that_is_stopped_while_the_others_wait_ends_in_a_restart(
    scenario_result: tuple[TrackedRun, TrackedRun],
) -> None:
    tracked, reference = scenario_result
    assert tracked.events("recovery") == []
    assert [event.cause for event in tracked.events("restart")] == ["crash"]
    assert_same_bits(tracked, reference)


def step_daemon_killed(context: ScenarioContext) -> tuple[TrackedRun, TrackedRun]:
    """The slurmstepd of a rank that waits is killed; the rank lives on without it."""
    tracked = start(context, behaviour=_WAITS)
    kill_rank_1(tracked)
    kill_step_daemon(tracked.ranks()[2])
    return finish(context, tracked, _WAITS)


@after_scenario(step_daemon_killed)
def test_a_slurmstepd_that_is_killed_while_the_others_wait_changes_nothing(
    scenario_result: tuple[TrackedRun, TrackedRun],
) -> None:
    tracked, reference = scenario_result
    assert tracked.attempts == 1
    (recovery,) = tracked.events("recovery")
    assert recovery.facts["world_size"] == 3
    assert_same_bits(tracked, reference)


def controller_away(context: ScenarioContext) -> tuple[TrackedRun, TrackedRun]:
    """slurmctld is away when a rank dies, so that the new process cannot be started at once, or not at all."""
    tracked = start(context, behaviour=_WAITS)
    with without_controller(context.sandbox):
        kill_rank_1(tracked)
        time.sleep(4)
    return finish(context, tracked, _WAITS)


@after_scenario(controller_away, own_slurm=True)
def test_a_death_while_slurmctld_is_away_costs_no_step(
    scenario_result: tuple[TrackedRun, TrackedRun],
) -> None:
    tracked, reference = scenario_result
    assert tracked.events("requeue") == []
    assert [event.cause for event in tracked.events("restart")] in ([], ["crash"])
    assert_same_bits(tracked, reference)
