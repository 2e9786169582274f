"""A job of higher priority takes the nodes: nothing is lost, and the run comes back once."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from hpcddp.run.directory import RunDirectory
from tests.cluster.comparison import RunComparison
from tests.cluster.jobs import HPCDDP, write_job
from tests.cluster.scenarios import EPOCHS, PREEMPTED_HOSTS, STEP_S, ScenarioContext, after_scenario
from tests.cluster.tracked_run import TrackedRun

# The runs that are cancelled in place of a requeue do not end as COMPLETED, for which all tests here wait.

SLOW_STEP_S = 1.5
HOSTS = PREEMPTED_HOSTS.split(",")
# low: ten seconds of grace; low0: none; lowc: twenty, and then cancelled instead of requeued.
PARTITIONS = {"low": HOSTS, "low0": HOSTS[:1], "lowc": HOSTS[1:]}


def preempted(context: ScenarioContext) -> dict[str, tuple[TrackedRun, RunComparison]]:
    """One job of ``high`` preempts three runs at once."""
    tracked_runs = {
        # So slow that none finishes before the last one has begun, on any machine.
        partition: context.start(
            partition, nodes=len(hosts), on=",".join(hosts), partition=partition, seconds=SLOW_STEP_S
        )
        for partition, hosts in PARTITIONS.items()
    }
    for tracked in tracked_runs.values():
        tracked.wait_for_steps(5)
    context.preempt()
    comparisons = {}
    for partition, tracked in tracked_runs.items():
        nodes = len(PARTITIONS[partition])
        comparison = context.compare(f"preemption on partition {partition}", tracked, nodes=nodes)
        comparisons[partition] = (tracked, comparison)
    return comparisons


def element_preempted(context: ScenarioContext) -> list[tuple[RunComparison, str]]:
    """One of two elements of a job array is preempted; of each, the comparison and how often Slurm restarted it."""
    elements = start_array(context)
    elements[0].wait_for_steps(5)
    context.preempt(HOSTS[0])
    comparisons = [context.compare("preemption of an array element", tracked, nodes=1) for tracked in elements]
    restarts = [context.sandbox.job(tracked.job_id)["Restarts"] for tracked in elements]
    return list(zip(comparisons, restarts, strict=True))


def start_array(context: ScenarioContext) -> list[TrackedRun]:
    """Submit the rendered script, by hand, as an array of two jobs of one host: one here, one where nobody preempts."""
    directory = context.directory / "array"
    directory.mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("traced_model.py"), directory)
    train = {"model_args": {"seconds": STEP_S}}
    job = write_job(directory, model="traced_model:build", nodes=1, epochs=EPOCHS, sections={"train": train})
    context.sandbox.run(*HPCDDP, "render", str(job), "-o", "job.sbatch", cwd=directory)
    array = context.sandbox.submit("--array=0-1", "--hold", "job.sbatch", cwd=directory)
    for number, host in enumerate((HOSTS[0], "n4")):
        context.sandbox.run("scontrol", "update", f"JobId={array}_{number}", f"ReqNodeList={host}")
    context.sandbox.run("scontrol", "release", array)
    runs = [RunDirectory(directory / "runs" / "digits" / f"sandbox-{array}_{number}") for number in range(2)]
    return [
        TrackedRun(sandbox=context.sandbox, job=job, run=run, job_id=f"{array}_{number}")
        for number, run in enumerate(runs)
    ]


scenario = after_scenario(preempted, long=True)


@scenario
@pytest.mark.parametrize("partition", PARTITIONS)
def test_preemption_costs_no_step_and_one_restart(scenario_result: dict[str, Any], partition: str) -> None:
    tracked, comparison = scenario_result[partition]
    assert comparison.lost_nothing, comparison
    assert (comparison.attempts, tracked.sandbox.job(tracked.job_id)["Restarts"]) == (2, "1")


@scenario
def test_the_event_log_tells_the_stop_the_save_and_the_requeue(scenario_result: dict[str, Any]) -> None:
    tracked, _ = scenario_result["low"]
    (stop,) = (event for event in tracked.events("stop") if event.saved)
    (requeue,) = tracked.events("requeue")
    assert requeue.cause == "preemption"
    assert stop.step in [event.step for event in tracked.events("save")]
    assert [event.step for event in tracked.events("train")] == [0, stop.step]


# The same of a sweep: test_sweeps.py.
@pytest.mark.long
@after_scenario(element_preempted, own_slurm=True)
def test_only_the_array_element_that_is_preempted_is_requeued(
    scenario_result: list[tuple[RunComparison, str]],
) -> None:
    assert [(comparison.attempts, restarts) for comparison, restarts in scenario_result] == [(2, "1"), (1, "0")]
    assert all(comparison.lost_nothing for comparison, _ in scenario_result)
