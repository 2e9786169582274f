"""A run that Slurm starts twice is one run in every tracker."""

from __future__ import annotations

import pytest

from tests.cluster.scenarios import OTHER_HOSTS, ScenarioContext, after_scenario
from tests.cluster.tracked_run import TrackedRun
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


def requeued(context: ScenarioContext) -> TrackedRun:
    """A requeue sends SIGTERM to every process of the job: to that of W&B too, which dies of it."""
    tracked = context.start(
        "tracked",
        on=OTHER_HOSTS,
        epochs=7,
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
    tracked.wait_until_finished()
    return tracked


scenario = after_scenario(requeued)


@scenario
def test_tensorboard_shows_one_curve(scenario_result: TrackedRun) -> None:
    assert scenario_result.attempts == 2
    same(shown_by_tensorboard(scenario_result.run.path), written(scenario_result.run.path))


@scenario
def test_wandb_shows_one_run(scenario_result: TrackedRun) -> None:
    same(shown_by_wandb(scenario_result.run.path), written(scenario_result.run.path))
    records = wandb_records(scenario_result.run.path)
    assert len({record.run_id for kind, record in records if kind == "run"}) == 1
    assert [record.exit_code for kind, record in records if kind == "exit"] == [75, 0]


@pytest.mark.filterwarnings(MLFLOW_OPENS_FILES)
@scenario
def test_mlflow_shows_one_run(scenario_result: TrackedRun) -> None:
    (run,), curves = shown_by_mlflow(f"file:{scenario_result.job.parent.parent}/mlruns")
    assert run.info.status == "FINISHED"
    same(curves, written(scenario_result.run.path))
