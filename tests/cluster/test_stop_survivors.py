"""A rank dies or hangs: those that are left save their last step, and the same job goes on from it."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

import pytest

from tests.cluster.scenarios import OTHER_HOSTS, ScenarioContext, ScenarioResult, after_scenario


def killed(context: ScenarioContext) -> ScenarioResult:
    return _survived(context, "SIGKILL of a rank, max_failures 1", signal.SIGKILL)


def crashed(context: ScenarioContext) -> ScenarioResult:
    return _survived(context, "segmentation fault of rank 0, max_failures 1", signal.SIGSEGV, rank=0)


def stopped(context: ScenarioContext) -> ScenarioResult:
    hang = {"launch": {"hang_timeout": "10s"}}
    return _survived(context, "SIGSTOP of a rank, max_failures 1", signal.SIGSTOP, sections=hang)


def _survived(
    context: ScenarioContext,
    fault: str,
    number: signal.Signals,
    *,
    rank: int = 1,
    sections: Mapping[str, Mapping[str, Any]] | None = None,
) -> ScenarioResult:
    """A signal ends or stops a rank between two saves."""
    tracked = context.start("run", on=OTHER_HOSTS, sections={"requeue": {"max_failures": 1}, **(sections or {})})
    tracked.wait_for_steps(40)
    tracked.signal(rank, number)
    return tracked, context.compare(fault, tracked)


@pytest.mark.parametrize(
    "signal_name",
    [
        pytest.param("SIGKILL", marks=after_scenario(killed)),
        pytest.param("SIGSEGV", marks=after_scenario(crashed)),
        pytest.param("SIGSTOP", marks=after_scenario(stopped)),
    ],
)
def test_the_rank_that_is_left_saves_its_step_and_the_job_goes_on_from_it(
    scenario_result: ScenarioResult, signal_name: str
) -> None:
    tracked, comparison = scenario_result
    (restart,) = tracked.events("restart")
    assert restart.cause == "crash", signal_name
    (saved,) = [event for event in tracked.events("save") if event.reason == "other ranks have gone"]
    assert [event.step for event in tracked.events("train")] == [0, saved.step]
    # The step in which the rank died was begun twice.
    assert comparison.steps_lost <= 1
    assert comparison.has_same_result, comparison
