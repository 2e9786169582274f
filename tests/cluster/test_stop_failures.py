"""Faults that no requeue repairs: the job fails at once, says why, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Any

import pytest

from tests.cluster.comparison import report
from tests.cluster.save_scenarios import faults
from tests.cluster.scenarios import ONE_HOST, OTHER_HOSTS, ScenarioContext, after_scenario
from tests.cluster.tracked_run import TrackedRun

ScenarioResult = tuple[TrackedRun, dict[str, str]]
Sections = Mapping[str, Mapping[str, Any]]


def _failed(
    context: ScenarioContext, fault: str, behaviour: dict[str, float], sections: Sections | None = None
) -> ScenarioResult:
    tracked = context.start(fault.replace(" ", "-"), on=OTHER_HOSTS, behaviour=behaviour, sections=sections)
    fields = tracked.wait_for_end("FAILED")
    report(fault, tracked)
    return tracked, fields


def raised(context: ScenarioContext) -> ScenarioResult:
    return _failed(context, "exception on one rank", {"raise_at": 40})


def not_finite(context: ScenarioContext) -> ScenarioResult:
    return _failed(context, "NaN loss", {"nan_at": 40})


def wrong_path(context: ScenarioContext) -> ScenarioResult:
    return _failed(context, "wrong path on one node", {"missing_on": 1})


def left_with_zero(context: ScenarioContext) -> ScenarioResult:
    return _failed(context, "os._exit(0) of a rank", {"exit_at": 40})


def killed(context: ScenarioContext) -> ScenarioResult:
    return _ended_by(context, "SIGKILL of a rank", signal.SIGKILL)


def segmentation_fault(context: ScenarioContext) -> ScenarioResult:
    return _ended_by(context, "segmentation fault of a rank", signal.SIGSEGV)


def _ended_by(context: ScenarioContext, fault: str, number: signal.Signals) -> ScenarioResult:
    tracked = context.start("run", on=OTHER_HOSTS)
    tracked.wait_for_steps(40)
    tracked.signal(1, number)
    fields = tracked.wait_for_end("FAILED")
    report(fault, tracked)
    return tracked, fields


def stuck(context: ScenarioContext) -> ScenarioResult:
    """One rank's code waits for something that never comes."""
    return _failed(context, "a rank is stuck", {"stuck_at": 40}, {"launch": {"hang_timeout": "10s"}})


def stopped(context: ScenarioContext) -> ScenarioResult:
    tracked = context.start("run", on=OTHER_HOSTS, sections={"launch": {"hang_timeout": "10s"}})
    tracked.wait_for_steps(40)
    tracked.signal(1, signal.SIGSTOP)
    fields = tracked.wait_for_end("FAILED")
    report("SIGSTOP of a rank", tracked)
    return tracked, fields


def worker_killed(context: ScenarioContext) -> ScenarioResult:
    tracked = context.start("run", nodes=1, on=ONE_HOST, sections={"train": {"num_workers": 2}})
    tracked.wait_for_steps(40)
    tracked.wait_until(lambda: tracked.workers(0), "a worker of the rank")
    for pid in tracked.workers(0):
        os.kill(pid, signal.SIGKILL)
    fields = tracked.wait_for_end("FAILED")
    report("DataLoader worker killed", tracked)
    return tracked, fields


def no_progress(context: ScenarioContext) -> ScenarioResult:
    """The rank dies at the same step of each attempt, and failures would be requeued."""
    budgets = {"max_failures": 10, "max_attempts_without_progress": 2}
    sections = {"requeue": budgets, **faults("kill@step:5")}
    tracked = context.start("run", nodes=1, on=ONE_HOST, sections=sections)
    fields = tracked.wait_for_end("FAILED")
    report("fails at the same step each time", tracked)
    return tracked, fields


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        pytest.param(70, "a bug in the user's model", marks=after_scenario(raised), id="an exception"),
        # Other errors of the user's code on one rank, which take the same way.
        pytest.param(
            70,
            "train.nonfinite_loss is stop",
            marks=[after_scenario(not_finite), pytest.mark.long],
            id="a loss that is NaN",
        ),
        pytest.param(
            70,
            "/no/such/place/weights.pt",
            marks=[after_scenario(wrong_path), pytest.mark.long],
            id="a wrong path",
        ),
    ],
)
def test_the_users_own_failure_is_named_and_never_requeued(
    scenario_result: ScenarioResult, code: int, reason: str
) -> None:
    tracked, fields = scenario_result
    assert (fields["ExitCode"], fields["Restarts"]) == (f"{code}:0", "0")
    assert tracked.attempts == 1
    assert (tracked.result["status"], tracked.result["exit_code"]) == ("failed", code)
    assert reason in tracked.result["reason"]
    assert reason in tracked.run.batch_log.read_text()
    assert tracked.events("requeue") == []


@after_scenario(raised)
def test_the_first_failing_rank_and_its_host_are_named_and_not_those_that_followed(
    scenario_result: ScenarioResult,
) -> None:
    tracked, _ = scenario_result
    assert "rank 1 on n4" in tracked.result["reason"]
    assert 'raise ValueError("a bug in the user\'s model")' in tracked.run.batch_log.read_text()


@pytest.mark.parametrize(
    "word",
    [
        pytest.param("rank 1", marks=after_scenario(killed), id="SIGKILL"),
        pytest.param("rank 1", marks=[after_scenario(segmentation_fault), pytest.mark.long], id="a segmentation fault"),
        pytest.param("rank 1", marks=after_scenario(left_with_zero), id="exit with 0"),
    ],
)
def test_a_rank_that_ends_without_a_word_is_never_a_success(scenario_result: ScenarioResult, word: str) -> None:
    tracked, fields = scenario_result
    assert (fields["ExitCode"], fields["Restarts"]) == ("71:0", "0")
    assert tracked.result["status"] == "failed"
    assert word in tracked.result["reason"]


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param((0, 1), marks=after_scenario(stuck), id="a rank is stuck"),
        # A stopped process cannot say where it stands; test_stop_restarts.py stops a rank too.
        pytest.param((0,), marks=[after_scenario(stopped), pytest.mark.long], id="a rank is stopped"),
    ],
)
def test_a_hang_ends_with_124_and_the_stacks_of_all_ranks(
    scenario_result: ScenarioResult, ranks: tuple[int, ...]
) -> None:
    tracked, fields = scenario_result
    assert fields["ExitCode"] == "124:0"
    assert tracked.result["exit_code"] == 124
    for rank in ranks:
        assert "most recent call first" in tracked.attempt.rank_log(rank).read_text()


@after_scenario(stuck)
def test_the_stack_of_the_stuck_rank_shows_the_line_that_waits(scenario_result: ScenarioResult) -> None:
    tracked, _ = scenario_result
    assert "_misbehave" in tracked.attempt.rank_log(1).read_text()


@after_scenario(worker_killed)
def test_a_killed_loader_worker_is_a_clear_error_and_leaves_nothing(scenario_result: ScenarioResult) -> None:
    tracked, fields = scenario_result
    assert fields["Restarts"] == "0"
    assert "loader worker" in tracked.result["reason"]
    assert "was ended by SIGKILL" in tracked.result["reason"]
    assert tracked.processes() == []


@after_scenario(no_progress)
def test_a_run_that_fails_at_the_same_step_each_time_stops_after_its_budget(scenario_result: ScenarioResult) -> None:
    tracked, fields = scenario_result
    assert fields["ExitCode"] == "93:0"
    assert tracked.attempts == 2
    assert (tracked.result["status"], tracked.result["exit_code"]) == ("failed", 93)
