"""A run that Slurm starts twice is one run in every tracker."""

from __future__ import annotations

import pytest

from tests.cluster.scenarios import OTHER_HOSTS, ScenarioContext, ScenarioResult, after_scenario
from tests.train.shown import (
    MLFLOW_OPENS_FILES,
    same,
    shown_by_mlflow,
    shown_by_tensorboard,
    shown_by_wandb,
    wandb_records,
    written,
)

TRACKERS = ["tensorboard", "wandb", "mlflow"]


def requeued(context: ScenarioContext) -> ScenarioResult:
    """A requeue sends SIGTERM to every process of the job: to that of W&B too, which dies of it."""
    tracked = context.start(
        "tracked",
        on=OTHER_HOSTS,
        sections={
            "environment": {"env": {"WANDB_MODE": "offline"}},
            "trackers": {"use": TRACKERS, "tracking_uri": f"file:{context.directory}/mlruns"},
        },
    )
    tracked.wait_for_steps(40)
    # On a busy machine their imports take longer than a stop waits for them.
    for tracker in TRACKERS:
        tracked.wait_until(tracked.run.tracker(tracker).exists, f"the first point in {tracker}")
    context.sandbox.run("scontrol", "requeue", tracked.job_id)
    return tracked, context.compare("scontrol requeue by the user", tracked)


scenario = after_scenario(requeued)


@scenario
def test_a_requeue_by_the_user_loses_nothing_and_restarts_once(scenario_result: ScenarioResult) -> None:
    tracked, comparison = scenario_result
    assert comparison.lost_nothing, comparison
    assert (comparison.attempts, tracked.sandbox.job(tracked.job_id)["Restarts"]) == (2, "1")


@scenario
def test_tensorboard_shows_one_curve(scenario_result: ScenarioResult) -> None:
    path = scenario_result[0].run.path
    same(shown_by_tensorboard(path), written(path))


@scenario
def test_wandb_shows_one_run(scenario_result: ScenarioResult) -> None:
    path = scenario_result[0].run.path
    same(shown_by_wandb(path), written(path))
    records = wandb_records(path)
    assert len({record.run_id for kind, record in records if kind == "run"}) == 1
    assert [record.exit_code for kind, record in records if kind == "exit"] == [75, 0]


@pytest.mark.filterwarnings(MLFLOW_OPENS_FILES)
@scenario
def test_mlflow_shows_one_run(scenario_result: ScenarioResult) -> None:
    tracked, _ = scenario_result
    (run,), curves = shown_by_mlflow(f"file:{tracked.job.parent.parent}/mlruns")
    assert run.info.status == "FINISHED"
    same(curves, written(tracked.run.path))
