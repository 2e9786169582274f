"""A node is lost, and the job allows fewer (resources.min_nodes): the ranks on the other nodes go on."""

from __future__ import annotations

import signal
from contextlib import ExitStack

import pytest

from tests.cluster.recoveries import assert_same, wait_for_world
from tests.cluster.scenarios import ScenarioContext, after_scenario
from tests.cluster.slurm_faults import link_cut, without_slurmd
from tests.cluster.tracked_run import TrackedRun


def start_on_three(
    context: ScenarioContext, *, min_nodes: int, max_failures: int = 0, is_element: bool = False
) -> TrackedRun:
    """Start a training of three nodes whose batch script runs on n1, and wait until it is at work."""
    sections = {"resources": {"min_nodes": min_nodes}, "requeue": {"max_failures": max_failures}}
    # It is not bound to these nodes: after a requeue it may run on others.
    context.sandbox.run("scontrol", "update", "NodeName=n4", "State=DRAIN", "Reason=test")
    start = context.start_element if is_element else context.start
    tracked = start("run", nodes=3, seconds=0.3, sections=sections)
    tracked.wait_for_steps(30)
    context.sandbox.run("scontrol", "update", "NodeName=n4", "State=RESUME")
    return tracked


def finish(context: ScenarioContext, tracked: TrackedRun) -> tuple[TrackedRun, TrackedRun]:
    """Wait for the end of a run; return it, and the undisturbed one."""
    reference = context.references.of(3, 1)
    tracked.wait_until_finished()
    return tracked, reference


def wait_for_completion(tracked: TrackedRun) -> None:
    """Wait until the job has ended; a rank that is cut off lives on until it reaches Slurm again."""
    tracked.wait_until(lambda: tracked.sandbox.job(tracked.job_id)["JobState"] == "COMPLETED", "the end of the job")


def one_node_cut(context: ScenarioContext) -> tuple[TrackedRun, TrackedRun]:
    """A node is cut off until the run has finished; its rank lives on and reaches the run directory."""
    tracked = start_on_three(context, min_nodes=2)
    with link_cut(context.sandbox, "n3"):
        wait_for_completion(tracked)
    return finish(context, tracked)


def one_node_of_element_cut(context: ScenarioContext) -> tuple[TrackedRun, TrackedRun]:
    """The run is an element of a sweep."""
    tracked = start_on_three(context, min_nodes=2, is_element=True)
    with link_cut(context.sandbox, "n3"):
        wait_for_completion(tracked)
    return finish(context, tracked)


def first_node_cut(context: ScenarioContext) -> tuple[TrackedRun, TrackedRun]:
    """The node of the batch script is cut off."""
    tracked = start_on_three(context, min_nodes=2)
    with link_cut(context.sandbox, "n1"):
        tracked.wait_for_attempt(1)
        wait_for_completion(tracked)
    return finish(context, tracked)


def two_nodes_cut(context: ScenarioContext) -> tuple[TrackedRun, TrackedRun]:
    """Two of three nodes are cut off, and two must be left."""
    # When their slurmd is back it ends what runs there, and the job may have started again by then.
    tracked = start_on_three(context, min_nodes=2, max_failures=2)
    with ExitStack() as stack:
        for node in ("n2", "n3"):
            stack.enter_context(link_cut(context.sandbox, node))
        tracked.wait_until(lambda: tracked.events("requeue"), "the requeue")
    return finish(context, tracked)


def slurmd_killed(context: ScenarioContext) -> tuple[TrackedRun, TrackedRun]:
    """Slurm gives up a node whose tasks live on, and ends them when its slurmd is back."""
    tracked = start_on_three(context, min_nodes=2)
    with without_slurmd(context.sandbox, "n3"):
        tracked.wait_until(lambda: "Node failure on n3" in tracked.log(), "the node failure")
        assert tracked.events("recovery") == []
    wait_for_world(tracked, 2)
    return finish(context, tracked)


def rank_killed_after_a_lost_node(context: ScenarioContext) -> tuple[TrackedRun, TrackedRun]:
    tracked = start_on_three(context, min_nodes=1, max_failures=1)
    with link_cut(context.sandbox, "n3"):
        wait_for_world(tracked, 2)
        tracked.signal(1, signal.SIGKILL)
        wait_for_world(tracked, 1)
        wait_for_world(tracked, 2)
        wait_for_completion(tracked)
    return finish(context, tracked)


def assert_never_ended(tracked: TrackedRun) -> None:
    """Assert that the ranks trained in one go, in one start of the job."""
    assert (tracked.attempts, tracked.result["status"]) == (1, "finished")
    assert len(tracked.events("train")) == 1


@after_scenario(one_node_cut, own_slurm=True)
def test_the_ranks_on_the_other_nodes_go_on_without_a_step_lost(
    scenario_result: tuple[TrackedRun, TrackedRun],
) -> None:
    tracked, reference = scenario_result
    assert_never_ended(tracked)
    (recovery,) = tracked.events("recovery")
    assert (recovery.cause, recovery.facts["world_size"]) == ("node_failure", 2)
    assert (recovery.reason or "").startswith("node n3 was lost (rank 2); the others went on after ")
    assert recovery.facts["seconds"] < 10
    assert_same(tracked, reference)


@pytest.mark.long("an element of a sweep has the script and the ranks of a run")
@after_scenario(one_node_of_element_cut, own_slurm=True)
def test_the_ranks_of_an_element_of_a_sweep_go_on_too(scenario_result: tuple[TrackedRun, TrackedRun]) -> None:
    tracked, reference = scenario_result
    assert_never_ended(tracked)
    assert [recovery.cause for recovery in tracked.events("recovery")] == ["node_failure"]
    assert_same(tracked, reference)


@after_scenario(first_node_cut, own_slurm=True)
def test_a_job_whose_batch_script_is_lost_is_requeued_from_its_last_step(
    scenario_result: tuple[TrackedRun, TrackedRun],
) -> None:
    tracked, reference = scenario_result
    (requeue,) = tracked.events("requeue")
    assert (requeue.cause, requeue.reason) == ("node_failure", "the node of the batch script was lost")
    (saved,) = [event for event in tracked.events("save") if event.reason == "other ranks have gone"]
    (train,) = [event for event in tracked.events("train") if event.attempt == 1]
    assert train.step == saved.step
    assert_same(tracked, reference)


@pytest.mark.long
@after_scenario(two_nodes_cut, own_slurm=True)
def test_too_few_nodes_save_their_step_and_the_job_is_requeued(
    scenario_result: tuple[TrackedRun, TrackedRun],
) -> None:
    tracked, reference = scenario_result
    assert [event for event in tracked.events("recovery") if event.attempt == 0] == []
    assert [event.cause for event in tracked.events("requeue")] == ["node_failure"]
    assert_same(tracked, reference)


@pytest.mark.long
@after_scenario(slurmd_killed, own_slurm=True)
def test_the_tasks_of_a_node_without_slurmd_go_on_until_slurm_ends_them(
    scenario_result: tuple[TrackedRun, TrackedRun],
) -> None:
    tracked, reference = scenario_result
    assert_never_ended(tracked)
    (recovery,) = tracked.events("recovery")
    assert (recovery.cause, recovery.facts["world_size"]) == ("node_failure", 2)
    assert_same(tracked, reference)


@pytest.mark.long
@after_scenario(rank_killed_after_a_lost_node, own_slurm=True)
def test_a_rank_that_dies_after_a_node_was_lost_is_replaced(
    scenario_result: tuple[TrackedRun, TrackedRun],
) -> None:
    tracked, reference = scenario_result
    assert_never_ended(tracked)
    assert [event.cause for event in tracked.events("recovery")] == ["node_failure", "crash", None]
    assert_same(tracked, reference)


def node_cut_with_a_spare(context: ScenarioContext) -> tuple[TrackedRun, TrackedRun]:
    sections = {"resources": {"spare_nodes": 1}}
    tracked = context.start("run", nodes=3, seconds=0.3, sections=sections)
    tracked.wait_for_steps(30)
    with link_cut(context.sandbox, "n3"):
        wait_for_world(tracked, 2)
        wait_for_world(tracked, 3)
        wait_for_completion(tracked)
    return finish(context, tracked)


@pytest.mark.long
@after_scenario(node_cut_with_a_spare, own_slurm=True)
def test_the_ranks_of_a_lost_node_go_on_on_a_spare_one(scenario_result: tuple[TrackedRun, TrackedRun]) -> None:
    tracked, reference = scenario_result
    assert_never_ended(tracked)
    death, join = tracked.events("recovery")
    assert death.cause == "node_failure"
    assert (join.reason or "").startswith("a new process of rank 2 on n4 joined, after a pause of ")
    assert_same(tracked, reference)
