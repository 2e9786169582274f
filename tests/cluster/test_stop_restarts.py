"""A rank dies or hangs, and the tasks start again in the same job from the newest checkpoint."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

import pytest

from hpcddp.run.directory import RunDirectory
from tests.cluster.jobs import HPCDDP
from tests.cluster.scenarios import (
    OTHER_HOSTS,
    STEPS_PER_EPOCH,
    ScenarioContext,
    ScenarioResult,
    after_scenario,
)
from tests.cluster.tracked_run import TrackedRun
from tests.waiting import wait_until

# Behind the first save.
_STEPS = STEPS_PER_EPOCH + 17
_SECTIONS: Mapping[str, Mapping[str, Any]] = {"requeue": {"max_failures": 1}}


def rank_killed(context: ScenarioContext) -> ScenarioResult:
    tracked = context.start("run", on=OTHER_HOSTS, sections=_SECTIONS)
    return disturbed(context, tracked, "SIGKILL of a rank, max_failures 1", signal.SIGKILL)


def rank_crashed(context: ScenarioContext) -> ScenarioResult:
    tracked = context.start("run", on=OTHER_HOSTS, sections=_SECTIONS)
    return disturbed(context, tracked, "segmentation fault of rank 0, max_failures 1", signal.SIGSEGV, rank=0)


def rank_stopped(context: ScenarioContext) -> ScenarioResult:
    """The watchdog of the other rank ends the hang."""
    tracked = context.start("run", on=OTHER_HOSTS, sections={**_SECTIONS, "launch": {"hang_timeout": "10s"}})
    return disturbed(context, tracked, "SIGSTOP of a rank, max_failures 1", signal.SIGSTOP)


def rank_of_element_killed(context: ScenarioContext) -> ScenarioResult:
    """The run is an element of a sweep."""
    tracked = context.start_element("sweep", on=OTHER_HOSTS, sections=_SECTIONS)
    return disturbed(context, tracked, "SIGKILL of a rank of an element of a sweep, max_failures 1", signal.SIGKILL)


def rank_of_script_by_hand_killed(context: ScenarioContext) -> ScenarioResult:
    """The rendered script was given to sbatch."""
    job = context.write_job("by-hand", on=OTHER_HOSTS, sections=_SECTIONS)
    script = job.with_name("job.sh")
    script.write_text(context.sandbox.run(*HPCDDP, "render", str(job), cwd=job.parent).stdout)
    job_id = context.sandbox.submit(script, cwd=job.parent)
    (path,) = wait_until(lambda: list(job.parent.glob(f"runs/*/*-{job_id}")), "the run directory")
    tracked = TrackedRun(sandbox=context.sandbox, job=job, run=RunDirectory(path), job_id=job_id)
    return disturbed(context, tracked, "SIGKILL of a rank of a script by hand, max_failures 1", signal.SIGKILL)


def disturbed(
    context: ScenarioContext, tracked: TrackedRun, fault: str, number: signal.Signals, *, rank: int = 1
) -> ScenarioResult:
    """Signal a rank between two saves, and wait for the end of the run."""
    tracked.wait_for_steps(_STEPS)
    tracked.signal(rank, number)
    return tracked, context.compare(fault, tracked)


@pytest.mark.parametrize(
    "fault",
    [
        # The element of a sweep is killed in the same way.
        pytest.param("SIGKILL", marks=[after_scenario(rank_killed), pytest.mark.long]),
        pytest.param("SIGSEGV", marks=[after_scenario(rank_crashed), pytest.mark.long]),
        pytest.param("SIGSTOP", marks=after_scenario(rank_stopped)),
        pytest.param("an element of a sweep", marks=after_scenario(rank_of_element_killed)),
        pytest.param("a script by hand", marks=[after_scenario(rank_of_script_by_hand_killed), pytest.mark.long]),
    ],
)
def test_the_tasks_start_again_in_the_job_from_the_newest_checkpoint(
    scenario_result: ScenarioResult, fault: str
) -> None:
    tracked, comparison = scenario_result
    assert tracked.sandbox.job(tracked.job_id)["Restarts"] == "0", fault
    assert tracked.events("requeue") == []
    (restart,) = tracked.events("restart")
    assert restart.cause == "crash"
    first, second = (event.step or 0 for event in tracked.events("train"))
    assert first == 0
    # It may be saved while the last steps before the fault are made.
    assert second in {STEPS_PER_EPOCH, 2 * STEPS_PER_EPOCH}
    assert comparison.steps_lost <= STEPS_PER_EPOCH
    assert comparison.has_same_result, comparison


@after_scenario(rank_stopped)
def test_the_ranks_that_wait_for_one_that_is_stopped_write_their_stacks(scenario_result: ScenarioResult) -> None:
    tracked, _ = scenario_result
    assert "most recent call first" in tracked.run.attempt(0).rank_log(0).read_text()


def killed_before_the_ranks_have_met(context: ScenarioContext) -> TrackedRun:
    """A rank is killed while it imports torch."""
    tracked = context.start("run", on=OTHER_HOSTS, sections=_SECTIONS)

    def is_killed() -> bool:
        ranks = tracked.ranks()
        tracked.signal(1, signal.SIGKILL, ranks)
        return 1 in ranks

    tracked.wait_until(lambda: tracked.attempts, "the first attempt")
    tracked.wait_until(is_killed, "the process of rank 1")
    # Much earlier than at the rendezvous timeout of 5 minutes.
    tracked.wait_until(lambda: tracked.events("requeue"), "the requeue", timeout_s=60)
    context.sandbox.run("scancel", tracked.job_id)
    return tracked


@pytest.mark.long
@after_scenario(killed_before_the_ranks_have_met)
def test_ranks_do_not_wait_for_one_that_was_killed_before_they_met(scenario_result: TrackedRun) -> None:
    (requeue,) = scenario_result.events("requeue")
    assert requeue.cause == "crash"
    assert "rank 1 ended without an error message: Killed" in (requeue.reason or "")
