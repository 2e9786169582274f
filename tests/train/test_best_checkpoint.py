"""``checkpoint.best``: the checkpoint of the best evaluation stays on disk as ``checkpoints/best``."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hpcddp
from hpcddp.jobfile.fields import Best
from hpcddp.run.checkpoints import best_checkpoint, list_checkpoints, newest_valid, step_of, survey, verify
from hpcddp.run.directory import RunDirectory
from hpcddp.run.evaluations import read_evaluations
from hpcddp.run.events import read_events
from hpcddp.run.job_records import Start, write_start
from hpcddp.run.result import read_result
from hpcddp.stop import faults
from hpcddp.train.checkpoint.checkpointer import Checkpointer
from hpcddp.train.errors import TrainingError
from tests.messages import GoldenMessages
from tests.train import checkpoint_process
from tests.train.conftest import Training

# 100 samples in batches of 32: 4 steps per epoch, 20 in all. Saves by epochs would leave most evaluations without one.
JOB: dict[str, Any] = {"checkpoint": {"every": {"epochs": 9}, "keep": 2}, "train__epochs": 5}


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    faults.arm(None, rank=0, attempt=0)


def job(best: object) -> dict[str, Any]:
    return {**JOB, "checkpoint": {**JOB["checkpoint"], "best": best}}


def steps_of(run: RunDirectory) -> list[int | None]:
    return [step_of(path) for path in list_checkpoints(run.checkpoints)]


def best_step(run: RunDirectory) -> int | None:
    best = best_checkpoint(run.checkpoints)
    return None if best is None else step_of(best)


@pytest.mark.parametrize("mode", ["max", "min"])
def test_training_keeps_the_checkpoint_of_its_best_evaluation(training: Training, mode: str) -> None:
    # One of the two modes takes the first evaluation for the best, whose checkpoint keep alone would remove.
    training.train(**job({"metric": "val_loss", "mode": mode}))
    values = read_evaluations(training.run.metrics)["val_loss"]
    assert list(values) == [4, 8, 12, 16, 20]
    best = (max if mode == "max" else min)(values, key=lambda step: values[step])
    assert best_step(training.run) == best
    assert steps_of(training.run) == sorted({20, 16, best}, reverse=True)
    assert verify(training.run.checkpoints / "best").manifest.step == best
    state = torch.load(training.run.checkpoints / "best" / "model.pt", weights_only=True)
    assert state.keys()
    result = read_result(training.run)
    assert result is not None
    assert result.metrics["val_loss"].last == values[20]
    newest = newest_valid(training.run.checkpoints, expected=True, warn=print)
    assert newest is not None
    assert newest.manifest.step == 20


def test_every_evaluation_is_saved_and_without_best_it_is_not(new_training: Callable[[str], Training]) -> None:
    with_best, without = new_training("with"), new_training("without")
    with_best.train(**job("val_loss"))
    without.train(**JOB)
    saves = [
        [event.step for event in read_events(training.run.events) if event.kind == "save"]
        for training in (with_best, without)
    ]
    assert saves == [[4, 8, 12, 16, 20], [20]]
    assert not (without.run.checkpoints / "best").is_symlink()


def test_training_that_is_killed_before_best_moves_makes_up_for_it(training: Training) -> None:
    document = job({"metric": "val_loss", "mode": "min"})
    training.train(**document)
    best = best_step(training.run)
    assert best is not None
    (training.run.checkpoints / "best").unlink()
    (training.run.path / "result.json").unlink()
    training.train(attempt=1, **document)
    assert best_step(training.run) == best


def test_metric_that_does_not_exist_for_these_classes_is_refused(golden: GoldenMessages, training: Training) -> None:
    arguments = {"samples": 100, "val_samples": 20, "num_classes": 3, "image_size": 32}
    data = {"train__dataset": "synthetic", "train__dataset_args": arguments}
    document = {**job("val_top5"), **data}
    with pytest.raises(TrainingError) as caught:
        training.train(**document)
    message = golden.message(caught.value)
    assert "checkpoint.best is val_top5" in message
    assert "with 3 classes" in message
    assert "val_loss, val_accuracy; write one of these" in message


def killed_or_ended(run: RunDirectory, attempt: int, *steps: int, fault: str = "") -> int | None:
    """Return the exit code of a process that saves ``steps`` and keeps the best."""
    return checkpoint_process.start(run, attempt, *steps, fault=fault, best="val_f1").wait()


AFTER_SAVE = ("save.latest", "best", "save.prune")
VALUES: Mapping[int, float] = {10: 0.5, 20: 0.9, 30: 0.1, 40: 0.95, 50: 0.2, 60: 0.3}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "run")
    run.attempt(0).path.mkdir(parents=True)
    run.metrics.write_text("".join(f"{json.dumps({'step': s, 'val_f1': v})}\n" for s, v in VALUES.items()))
    return run


@pytest.mark.parametrize(("point", "step"), [("best", 10), ("save.rename", 40), *((p, 40) for p in AFTER_SAVE)])
def test_process_killed_at_any_point_leaves_a_best_checkpoint_and_the_next_one_corrects_it(
    run: RunDirectory, point: str, step: int
) -> None:
    assert killed_or_ended(run, 0, 10, 20, 30, 40, fault=f"kill@{point}:{step}") == -signal.SIGKILL
    before = {10: None, 40: 20}[step]
    assert best_step(run) == (step if point == "save.prune" else before)
    if before is not None:
        assert verify(run.checkpoints / "best").manifest.step in {before, step}
    assert killed_or_ended(run, 1, 50, 60) == 0
    there = [known for known in steps_of(run) if known is not None]
    assert best_step(run) == max(there, key=lambda known: VALUES[known])
    if step == 40 and point in AFTER_SAVE:
        assert there == [60, 50, 40]
    assert not [path.name for path in run.checkpoints.iterdir() if path.name.startswith(".")]


def test_best_that_is_damaged_or_set_aside_is_not_named(run: RunDirectory) -> None:
    assert killed_or_ended(run, 0, 10, 20, 30, 40) == 0
    assert best_step(run) == 40
    shutil.rmtree(run.checkpoints / "step-000040")
    assert best_step(run) is None
    assert [state.is_best for state in survey(run.checkpoints)] == [False]
    assert killed_or_ended(run, 1, 50) == 0
    assert best_step(run) == 50


@pytest.mark.parametrize("target", ["../../elsewhere", "/etc", "step-000010/../step-000010", "step-10"])
def test_link_to_another_place_is_not_followed(run: RunDirectory, target: str) -> None:
    assert killed_or_ended(run, 0, 10) == 0
    (run.checkpoints / "best").unlink()
    (run.checkpoints / "best").symlink_to(target)
    assert best_checkpoint(run.checkpoints) is None


def test_copy_that_followed_the_link_is_set_aside(run: RunDirectory) -> None:
    assert killed_or_ended(run, 0, 10, 20) == 0
    (run.checkpoints / "best").unlink()
    shutil.copytree(run.checkpoints / "step-000020", run.checkpoints / "best")
    assert killed_or_ended(run, 1, 40) == 0
    assert best_step(run) == 40


def test_damaged_best_is_listed_as_such(run: RunDirectory) -> None:
    assert killed_or_ended(run, 0, 10, 20, 30) == 0
    (run.checkpoints / "step-000020" / "model.pt").write_bytes(b"state")
    states = {state.step: state for state in survey(run.checkpoints)}
    assert {step: (state.is_best, state.damage is None) for step, state in states.items()} == {
        30: (False, True),
        20: (True, False),
    }


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """Return the run of a script of one rank, as the task tells it."""
    for name in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    run = RunDirectory(tmp_path / "run")
    run.attempt(0).path.mkdir(parents=True)
    monkeypatch.setenv("HPCDDP_METRICS_FILE", str(run.metrics))
    monkeypatch.setenv("HPCDDP_ATTEMPT_DIR", str(run.attempt(0).path))
    return run


def test_loop_of_ones_own_keeps_the_best_of_what_it_logs(script: RunDirectory) -> None:
    checkpointer = Checkpointer(script.path, {"model": nn.Linear(2, 2)}, keep=2, best="val_f1")
    checkpointer.restore()
    for step, value in {1: 0.1, 2: 0.7, 3: 0.6, 4: 0.5}.items():
        checkpointer.save(step)
        # After the save: the next one, or the end, looks at it.
        hpcddp.log({"val_f1": value}, step=step)
    checkpointer.wait()
    assert (steps_of(script), best_step(script)) == ([4, 3, 2], 2)
    checkpointer.save(5)
    checkpointer.wait()
    hpcddp.log({"val_f1": 0.9}, step=5)
    checkpointer.wait()
    assert best_step(script) == 5


def test_loop_of_ones_own_may_save_elsewhere(script: RunDirectory, tmp_path: Path) -> None:
    elsewhere = RunDirectory(tmp_path / "elsewhere")
    checkpointer = Checkpointer(elsewhere.path, {"model": nn.Linear(2, 2)}, best="val_f1")
    checkpointer.restore()
    hpcddp.log({"val_f1": 0.5}, step=1)
    checkpointer.save(1)
    checkpointer.wait()
    assert script.metrics.exists()
    assert best_step(elsewhere) == 1


def test_loop_of_ones_own_may_log_before_it_restores(script: RunDirectory) -> None:
    began = time.time() - 1
    write_start(script.attempt(0), Start(job_id=None, host="n1", time=began, is_local=True, pid=1))
    hpcddp.log({"loss": 0.5}, step=0)
    assert Checkpointer(script.path, {"model": nn.Linear(2, 2)}).restore().step == 0


def test_metric_that_nobody_reports_is_a_warning_with_the_ones_that_are(
    golden: GoldenMessages, script: RunDirectory, capfd: pytest.CaptureFixture[str]
) -> None:
    checkpointer = Checkpointer(script.path, {"model": nn.Linear(2, 2)}, best="val_acuracy")
    checkpointer.restore()
    for step in (1, 2):
        hpcddp.log({"val_accuracy": 0.5, "val_loss": 1.0}, step=step)
        checkpointer.save(step)
    checkpointer.wait()
    (warning,) = (line for line in capfd.readouterr().err.splitlines() if "warning: " in line)
    golden.message(warning)
    assert "metric is val_acuracy" in warning
    assert "val_accuracy, val_loss; did you mean val_accuracy?" in warning
    assert best_step(script) is None


def test_mode_of_a_loop_of_ones_own_can_be_said(script: RunDirectory) -> None:
    for best in ({"best": "val_loss", "best_mode": "max"}, {"best": Best(metric="val_loss", mode="max")}):
        checkpointer = Checkpointer(script.path, {"model": nn.Linear(2, 2)}, **best)
        checkpointer.restore()
        for step, value in {1: 0.1, 2: 0.7, 3: 0.6}.items():
            hpcddp.log({"val_loss": value}, step=step)
            checkpointer.save(step)
        checkpointer.wait()
        assert best_step(script) == 2
