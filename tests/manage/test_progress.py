"""How far a run is, by the end of its metrics."""

from __future__ import annotations

import json
import os
from pathlib import Path

from hpcddp.manage.run_files import read_run_files
from hpcddp.manage.run_progress import RunProgress
from hpcddp.run.directory import RunDirectory
from tests.manage.runs import NOON, make


def progress(run: RunDirectory) -> RunProgress | None:
    return read_run_files(run).progress


def test_a_run_without_steps_has_no_progress(tmp_path: Path) -> None:
    assert progress(make(tmp_path).run) is None


def test_the_speed_is_that_of_the_last_steps(tmp_path: Path) -> None:
    made = make(tmp_path).steps(1, 4000, seconds=0.5)
    found = progress(made.run)
    assert found is not None
    assert (found.step, found.samples_per_s, found.steps_per_s) == (4000, 128, 2)
    assert found.loss == 1 / 4000


def test_time_between_attempts_does_not_count(tmp_path: Path) -> None:
    made = make(tmp_path).steps(1, 10).steps(11, 15, at=10000)
    found = progress(made.started(at=9000).run)
    assert found is not None
    assert found.steps_per_s == 1


def test_an_evaluation_is_no_step(tmp_path: Path) -> None:
    made = make(tmp_path).steps(1, 10)
    with made.run.metrics.open("a") as stream:
        stream.write(json.dumps({"step": 10, "val_loss": 1.0, "val_samples": 5}) + "\n")
    found = progress(made.run)
    assert found is not None
    assert found.step == 10


def test_a_function_of_ones_own_need_not_count_samples_nor_know_a_loss(tmp_path: Path) -> None:
    made = make(tmp_path)
    made.run.metrics.write_text("".join(f'{{"step": {n}, "loss": 0.5, "time": {NOON + n}}}\n' for n in range(1, 5)))
    found = progress(made.run)
    assert found is not None
    assert (found.step, found.loss, found.samples_per_s, found.steps_per_s) == (4, 0.5, None, 1)
    made.run.metrics.write_text(f'{{"step": 7, "reward": 2, "time": {NOON}}}\n')
    found = progress(made.run)
    assert found is not None
    assert (found.step, found.loss) == (7, None)


def test_a_program_may_log_lines_without_a_time_and_its_own_name_of_a_loss(tmp_path: Path) -> None:
    made = make(tmp_path)
    lines = ["nonsense", *(f'{{"step": {n}, "train_loss": {1 / n}}}' for n in (1, 2)), '{"step": 2, "val_f1": 0.5}', ""]
    made.run.metrics.write_text("\n".join(lines))
    os.utime(made.run.metrics, (NOON, NOON + 7))
    found = progress(made.run)
    assert found == RunProgress(step=2, loss=0.5, samples_per_s=None, steps_per_s=None, time=NOON + 7)


def test_steps_that_go_back_have_no_speed_below_zero(tmp_path: Path) -> None:
    found = progress(make(tmp_path).steps(90, 100).steps(50, 55, at=200).run)
    assert found is not None
    assert (found.step, found.steps_per_s) == (55, None)


def test_one_step_has_its_own_speed_and_no_estimate(tmp_path: Path) -> None:
    found = progress(make(tmp_path).steps(1, 1).run)
    assert found is not None
    assert (found.samples_per_s, found.eta_s(400, NOON)) == (64, None)


def test_steps_that_were_recorded_at_once_have_their_own_speed(tmp_path: Path) -> None:
    made = make(tmp_path)
    lines = [
        {"step": n, "loss": 1.0, "samples_seen": 64 * n, "samples_per_s": 40.0, "time": NOON + n * 1e-4} for n in (1, 2)
    ]
    made.run.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    found = progress(made.run)
    assert found is not None
    assert (found.samples_per_s, found.steps_per_s) == (40, None)


def test_the_time_that_is_left_runs_on_between_two_looks() -> None:
    progress = RunProgress(step=300, loss=1.0, samples_per_s=64, steps_per_s=2, time=NOON)
    assert progress.eta_s(400, NOON) == 50
    assert progress.eta_s(400, NOON + 20) == 30
    assert progress.eta_s(400, NOON + 90) == 0
    assert progress.eta_s(None, NOON) is None
