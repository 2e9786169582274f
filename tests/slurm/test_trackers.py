"""A run that Slurm starts twice is one run in every tracker."""

from __future__ import annotations

from tests.slurm.life import Life
from tests.slurm.play import UNDISTURBED, Place, looks_at
from tests.train.shown import same, shown_by_mlflow, shown_by_tensorboard, shown_by_wandb, wandb_records, written


def requeued(place: Place) -> Life:
    """A requeue sends SIGTERM to every process of the job: to that of W&B too, which dies of it."""
    life = place.start(
        "tracked",
        on=UNDISTURBED,
        epochs=12,
        sections={
            "environment": {"env": {"WANDB_MODE": "offline"}},
            "trackers": {"use": ["tensorboard", "wandb", "mlflow"], "tracking_uri": f"file:{place.directory}/mlruns"},
        },
    )
    life.wait_for_steps(40)
    place.sandbox.run("scontrol", "requeue", life.job_id)
    life.finish()
    return life


play = looks_at(requeued)


@play
def test_tensorboard_shows_one_curve(played: Life) -> None:
    assert played.attempts == 2
    same(shown_by_tensorboard(played.run.path), written(played.run.path))


@play
def test_wandb_shows_one_run(played: Life) -> None:
    same(shown_by_wandb(played.run.path), written(played.run.path))
    records = wandb_records(played.run.path)
    assert len({record.run_id for kind, record in records if kind == "run"}) == 1
    assert [record.exit_code for kind, record in records if kind == "exit"] == [75, 0]


@play
def test_mlflow_shows_one_run(played: Life) -> None:
    (run,), curves = shown_by_mlflow(f"file:{played.job.parent.parent}/mlruns")
    assert run.info.status == "FINISHED"
    same(curves, written(played.run.path))
