"""Signals of every kind and the end of the time limit: one save, one requeue, nothing lost."""

from __future__ import annotations

import random
import signal
import time
from typing import Any

import pytest

from tests.cluster.comparison import RunComparison
from tests.cluster.scenarios import ONE_HOST, OTHER_HOSTS, ScenarioContext, after_scenario
from tests.cluster.tracked_run import TrackedRun

ScenarioResult = tuple[TrackedRun, RunComparison]
Sections = dict[str, dict[str, Any]]


def storm(context: ScenarioContext) -> ScenarioResult:
    """A hundred signals within two seconds, to both ranks in no order."""
    tracked = context.start("storm", on=OTHER_HOSTS)
    tracked.wait_for_steps(40)
    dice, ranks = random.Random(0), tracked.ranks()
    for _ in range(100):
        tracked.signal(dice.randrange(2), dice.choice([signal.SIGUSR2, signal.SIGTERM]), ranks)
        time.sleep(0.02)
    return tracked, context.compare("a hundred signals in two seconds", tracked)


def one_rank_only(context: ScenarioContext) -> ScenarioResult:
    """Only the quicker one of two ranks of different speed is warned."""
    tracked = context.start("one-rank", on=OTHER_HOSTS, behaviour={"slow_rank": 0}, seconds=0.045)
    tracked.wait_for_steps(40)
    tracked.signal(1, signal.SIGUSR2)
    return tracked, context.compare("signal to one rank only, ranks at different speed", tracked)


def before_torch(context: ScenarioContext) -> ScenarioResult:
    """The warning comes as soon as a task is there, long before it can have imported anything."""
    tracked = context.start("early", on=OTHER_HOSTS)
    tracked.wait_until(lambda: tracked.attempts and tracked.ranks(), "a task")
    for _ in range(10):
        for rank in (0, 1):
            tracked.signal(rank, signal.SIGUSR2)
        time.sleep(0.1)
    return tracked, context.compare("signal before torch is imported", tracked)


def out_of_time(context: ScenarioContext) -> ScenarioResult:
    """A run of two minutes under a limit of two, with no signal but its own clock."""
    sections: Sections = {"resources": {"time_limit": 2}, "requeue": {"signal_lead": None}}
    tracked = context.start("unwarned", on=OTHER_HOSTS, seconds=0.66, sections=sections)
    return tracked, context.compare("time limit, without Slurm's signal", tracked)


def warned_of_the_limit(context: ScenarioContext) -> ScenarioResult:
    """A run of two minutes under a limit of two, and Slurm's warning, which comes up to a minute early."""
    # Longer than the clock of the ranks needs: 10 s, two steps and a save.
    sections: Sections = {"resources": {"time_limit": 2}, "requeue": {"signal_lead": "20s"}}
    tracked = context.start("warned", nodes=1, on=ONE_HOST, seconds=0.66, sections=sections)
    return tracked, context.compare("time limit, with Slurm's signal", tracked, nodes=1)


def limit_raised(context: ScenarioContext) -> ScenarioResult:
    """A run of more than two minutes under a limit of two, which is raised."""
    sections: Sections = {"resources": {"time_limit": 2}, "requeue": {"signal_lead": None}}
    tracked = context.start("raised", nodes=1, on=ONE_HOST, seconds=0.75, sections=sections)
    tracked.wait_for_steps(10)
    context.sandbox.run("scontrol", "update", f"JobId={tracked.job_id}", "TimeLimit=+5")
    return tracked, context.compare("time limit raised by scontrol update", tracked, nodes=1)


def suspended(context: ScenarioContext) -> ScenarioResult:
    """A run under a limit of two minutes that is suspended for longer than that."""
    sections: Sections = {"resources": {"time_limit": 2}, "requeue": {"signal_lead": None}}
    tracked = context.start("suspended", nodes=1, on=ONE_HOST, sections=sections)
    tracked.wait_for_steps(20)
    context.sandbox.run("scontrol", "suspend", tracked.job_id)
    time.sleep(130)
    context.sandbox.run("scontrol", "resume", tracked.job_id)
    return tracked, context.compare("suspended for longer than the time limit", tracked, nodes=1)


def interrupted(context: ScenarioContext) -> TrackedRun:
    tracked = context.start("interrupted", nodes=1, on=ONE_HOST)
    tracked.wait_for_steps(40)
    context.sandbox.run("scancel", "--signal=INT", tracked.job_id)
    tracked.wait_for_end("FAILED")
    return tracked


def terminated_as_a_whole(context: ScenarioContext) -> TrackedRun:
    """SIGTERM to every process of a job: srun kills the tasks at once when it gets it."""
    tracked = context.start("terminated", nodes=1, on=ONE_HOST)
    tracked.wait_for_steps(40)
    context.sandbox.run("scancel", "--full", "--signal=TERM", tracked.job_id)
    tracked.wait_for_end("FAILED")
    return tracked


@after_scenario(storm)
def test_a_storm_of_signals_is_one_save_and_one_requeue(scenario_result: ScenarioResult) -> None:
    tracked, comparison = scenario_result
    assert comparison.lost_nothing, comparison
    assert comparison.attempts == 2
    assert len([event for event in tracked.events("save") if event.reason == "stop"]) == 1
    assert len(tracked.events("requeue")) == 1


@after_scenario(one_rank_only)
def test_ranks_of_different_speed_stop_after_the_same_step_when_one_of_them_is_warned(
    scenario_result: ScenarioResult,
) -> None:
    tracked, comparison = scenario_result
    assert comparison.lost_nothing, comparison
    assert comparison.attempts == 2
    assert len(tracked.events("requeue")) == 1


@after_scenario(before_torch)
def test_a_signal_before_torch_is_imported_is_at_most_one_stop_and_never_an_end(
    scenario_result: ScenarioResult,
) -> None:
    tracked, comparison = scenario_result
    assert comparison.lost_nothing, comparison
    assert comparison.attempts <= 2
    assert len(tracked.events("requeue")) == comparison.attempts - 1


@pytest.mark.parametrize(
    "reason",
    [
        pytest.param("warned", marks=after_scenario(warned_of_the_limit, long=True), id="warned by Slurm"),
        pytest.param("deadline", marks=after_scenario(out_of_time, long=True), id="by the ranks' clock"),
    ],
)
def test_a_time_limit_loses_nothing(scenario_result: ScenarioResult, reason: str) -> None:
    tracked, comparison = scenario_result
    assert reason in [event.reason for event in tracked.events("stop")]
    assert comparison.lost_nothing, comparison
    assert comparison.attempts >= 2
    assert {event.cause for event in tracked.events("requeue")} == {"time_limit"}
    assert len(tracked.events("requeue")) == comparison.attempts - 1


@pytest.mark.parametrize(
    "_",
    [
        pytest.param(None, marks=after_scenario(limit_raised, long=True), id="raised"),
        pytest.param(None, marks=after_scenario(suspended, long=True), id="suspended"),
    ],
)
def test_an_end_of_the_job_that_moves_back_stops_nothing(scenario_result: ScenarioResult, _: None) -> None:
    tracked, comparison = scenario_result
    assert tracked.events("stop") == []
    assert comparison.lost_nothing, comparison
    assert comparison.attempts == 1
    assert "Slurm has moved the end of the job to" in tracked.log()


@after_scenario(interrupted)
def test_an_interrupt_of_the_tasks_saves_and_cancels_the_run(scenario_result: TrackedRun) -> None:
    result = scenario_result.result
    assert (result["status"], result["exit_code"]) == ("cancelled", 130)
    assert result["reason"] == "cancelled by SIGINT to its tasks"
    assert result["saved_step"] >= 40


@after_scenario(terminated_as_a_whole)
def test_tasks_that_srun_killed_did_not_run_out_of_memory(scenario_result: TrackedRun) -> None:
    result = scenario_result.result
    assert result["exit_code"] == 71
    assert "which a signal to the whole job has ended, as scancel --full sends it" in result["reason"]
    assert "memory" not in result["reason"]
