"""Runs that are cancelled in every order with a preemption."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

from hpcddp.run import checkpoints
from tests.cluster.comparison import report
from tests.cluster.jobs import HPCDDP
from tests.cluster.scenarios import ScenarioContext
from tests.cluster.tracked_run import TrackedRun

# Longer than a requeued job waits here before it starts again.
_SECOND_LIFE_S = 10


def cancel(tracked: TrackedRun) -> TrackedRun:
    """Cancel a job, and give it the time to come back."""
    tracked.sandbox.run("scancel", tracked.job_id)
    tracked.wait_for_end("CANCELLED")
    time.sleep(_SECOND_LIFE_S)
    assert tracked.sandbox.job(tracked.job_id)["JobState"] == "CANCELLED"
    return tracked


def start_slow_save(context: ScenarioContext, name: str, on: str) -> TrackedRun:
    """Start a run whose saves take four seconds."""
    slow = {"environment": {"env": {"HPCDDP_FAULTS": "sleep=4@save.rename"}}}
    tracked = context.start(name, nodes=1, on=on, sections=slow)
    tracked.wait_for_steps(10)
    return tracked


def preempted_then_cancelled(context: ScenarioContext, name: str, on: str) -> TrackedRun:
    """Cancelled in the grace time, while the ranks save."""
    tracked = start_slow_save(context, name, on)
    context.preempt(on)
    tracked.wait_until(lambda: tracked.events("signal"), "the signal of the preemption")
    return cancel(tracked)


def cancelled_then_preempted(context: ScenarioContext, name: str, on: str) -> TrackedRun:
    """Preempted while the ranks save, because the job was cancelled."""
    tracked = start_slow_save(context, name, on)
    tracked.sandbox.run("scancel", tracked.job_id)
    context.preempt(on)
    return cancel(tracked)


def cancelled_in_the_requeue(context: ScenarioContext, name: str, on: str) -> TrackedRun:
    """Cancelled as soon as Slurm shows that the job is requeued."""
    tracked = context.start(name, nodes=1, on=on)
    tracked.wait_for_steps(40)
    # It cannot start again at once, however slow the machine is.
    context.preempt(on, seconds=8)
    tracked.wait_until(lambda: tracked.sandbox.job(tracked.job_id)["Restarts"] == "1", "the requeue")
    cancel(tracked)
    answer = json.loads(tracked.sandbox.run(*HPCDDP, "why", "--json", tracked.run.path).stdout)
    assert answer["state"] == "cancelled", answer
    return tracked


CANCELS = (preempted_then_cancelled, cancelled_then_preempted, cancelled_in_the_requeue)


def cancelled_and_preempted(context: ScenarioContext, times: int = 1) -> list[TrackedRun]:
    """Cancel runs in every order with a preemption, on two hosts at once."""
    trials = list(enumerate(CANCELS * times))

    def lane(number: int, host: str) -> list[TrackedRun]:
        return [trial(context, f"trial{index}", host) for index, trial in trials[number::2]]

    with ThreadPoolExecutor(2) as executor:
        lanes = executor.map(lane, (0, 1), context.sandbox.nodes[:2])
        tracked_runs = [tracked for one in lanes for tracked in one]
    for tracked in tracked_runs:
        report("scancel before, in and after a preemption", tracked)
    return tracked_runs


def assert_cancelled_for_good(tracked: TrackedRun) -> None:
    assert tracked.attempts == 1
    newest = checkpoints.newest_valid(tracked.run.checkpoints, expected=True, warn=lambda _: None)
    assert newest is not None


def assert_cancelled_and_told(tracked: TrackedRun) -> None:
    assert_cancelled_for_good(tracked)
    if tracked.events("requeue") and not tracked.run.result.exists():
        # The script had ended, and Slurm alone knows of the cancel.
        return
    assert (tracked.result["status"], tracked.result["exit_code"]) == ("cancelled", 130), tracked.result
