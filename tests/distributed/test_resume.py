"""Real ranks that are killed, also during a save, or stopped, and what the next attempt makes of it."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from hpcddp.run.checkpoints import Checkpoint, Manifest, newest_valid
from hpcddp.run.directory import RunDirectory
from hpcddp.run.job_records import read_decision
from hpcddp.run.publish import publish
from hpcddp.stop.faults import SAVE_POINTS
from hpcddp.stop.reasons import StopReason
from hpcddp.train.checkpoint import writer
from hpcddp.train.loop import loop
from tests.distributed.rank import main
from tests.distributed.training import evaluations, job_document, records, result, run_ranks, without_times

CHANGES: dict[str, dict[str, Any]] = {
    "fp64": {"train__optimizer": {"name": "sgd", "momentum": 0.9}},
    "norm": {
        "train__model": "tests.distributed.own_code:norm_model",
        "train__precision": "fp32",
        "batch__max_per_device_batch_size": 5,
        "batch__tail": "drop",
    },
    "complex": {
        "train__model": "tests.distributed.own_code:complex_model",
        "train__optimizer": {"name": "adamw"},
        "train__ema_decay": 0.8,
        "learning_rate__base": 0.01,
    },
}


def spec(case: str) -> dict[str, Any]:
    return job_document(train__epochs=3, checkpoint={"every": {"steps": 3}}, **CHANGES[case])


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kill every rank of two ranks in step 8, once for each case, and run the same jobs without a kill."""
    root = tmp_path_factory.mktemp("killed")
    whole = [{"run": root / f"whole-{case}", "spec": spec(case)} for case in CHANGES]
    assert run_ranks(root / "reference", 2, whole).codes == [0, 0]
    for case in CHANGES:
        job = {"run": root / case, "spec": spec(case), "kill_after_calls": 7}
        assert run_ranks(root / f"kill-{case}", 2, [job]).codes == [-9, -9]
    shutil.copytree(root / "fp64", root / "spare")
    return root


@pytest.fixture(scope="module")
def resumed(killed: Path) -> Path:
    """Start the killed runs again."""
    again = [{"run": killed / case, "spec": spec(case), "attempt": 1} for case in CHANGES]
    outcome = run_ranks(killed / "again", 2, again)
    assert outcome.codes == [0, 0], outcome.outputs
    # The write after step 6 may have been killed, too.
    assert re.search(r"going on after step [36] ", outcome.outputs[0])
    return killed


@pytest.mark.parametrize("case", CHANGES)
def test_killed_run_comes_out_bit_for_bit_as_if_it_had_not_been(resumed: Path, case: str) -> None:
    assert result(resumed / case)["parameters_sha256"] == result(resumed / f"whole-{case}")["parameters_sha256"]
    assert without_times(resumed / case) == without_times(resumed / f"whole-{case}")


def test_every_rank_says_that_there_is_no_valid_checkpoint(killed: Path) -> None:
    run = killed / "spare"
    for path in run.glob("checkpoints/step-*/optimizer.pt"):
        path.write_bytes(path.read_bytes()[:-1])
    outcome = run_ranks(killed / "rotten", 2, [{"run": run, "spec": spec("fp64"), "attempt": 1}])
    assert outcome.codes == [65, 65]
    assert "is skipped" in outcome.outputs[0]
    assert "optimizer.pt has" in outcome.outputs[0]


# The ranks have 9 and 8 batches of 16 validation samples, and ask each other once.
EVALUATING: dict[str, Any] = {"train__epochs": 2, "train__dataset_args": {"val": 257}}


def test_ranks_with_different_shares_leave_an_evaluation_together(tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    jobs = [
        {"run": whole, "spec": job_document(**EVALUATING)},
        # Four steps, then the first question of the evaluation, which rank 1 answers.
        {"run": stopped, "spec": job_document(**EVALUATING), "stop_after_calls": 4, "stop_rank": 1},
        {"run": stopped, "spec": job_document(**EVALUATING), "attempt": 1},
    ]
    outcome = run_ranks(tmp_path / "ranks", 2, jobs)
    assert outcome.codes == [0, 0], outcome.outputs
    assert {error["kind"] for error in outcome.errors.values()} == {"stopped"}
    decision = read_decision(RunDirectory(stopped).attempt(0))
    assert decision is not None
    assert (decision.step, decision.reason, decision.saved) == (4, StopReason.WARNED, True)
    assert len(evaluations(stopped)) == 2
    assert without_times(stopped) == without_times(whole)
    assert result(stopped)["parameters_sha256"] == result(whole)["parameters_sha256"]


def test_a_stop_in_an_evaluation_saves_the_statistics_of_each_rank(tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    document = job_document(
        train__epochs=2,
        train__model="tests.distributed.own_code:norm_model",
        train__dataset_args={"val": 200},
        batch__max_per_device_batch_size=8,
        batch__tail="drop",
        checkpoint={"every": {"epochs": 10}},
    )
    jobs = [
        {"run": whole, "spec": document},
        # Three steps, then the first question of the evaluation, in which the ranks have merged statistics.
        {"run": stopped, "spec": document, "stop_after_calls": 3, "stop_rank": 1},
        {"run": stopped, "spec": document, "attempt": 1},
    ]
    outcome = run_ranks(tmp_path / "ranks", 2, jobs)
    assert outcome.codes == [0, 0], outcome.outputs
    assert (stopped / "checkpoints" / "step-000003" / "ranks.pt").exists()
    assert without_times(stopped) == without_times(whole)
    assert result(stopped)["parameters_sha256"] == result(whole)["parameters_sha256"]


def test_ranks_that_agree_once_per_block_stop_together_within_a_block(tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    document = job_document(train__epochs=2, batch__global_batch_size=8)
    jobs = [
        {"run": whole, "spec": document, "block_length": 1},
        # The third question is that of steps 7 to 9, whose answer is read after step 10, the first one of a block.
        {"run": stopped, "spec": document, "block_length": 3, "stop_after_calls": 2, "stop_rank": 1},
        {"run": stopped, "spec": document, "attempt": 1, "block_length": 5},
    ]
    outcome = run_ranks(tmp_path / "ranks", 2, jobs)
    assert outcome.codes == [0, 0], outcome.outputs
    decision = read_decision(RunDirectory(stopped).attempt(0))
    assert decision is not None
    assert (decision.step, decision.reason, decision.saved) == (10, StopReason.WARNED, True)
    assert without_times(stopped) == without_times(whole)
    assert result(stopped)["parameters_sha256"] == result(whole)["parameters_sha256"]


def test_a_loss_that_is_not_finite_ends_the_run_at_its_step_within_a_block(tmp_path: Path) -> None:
    run = tmp_path / "run"
    document = job_document(batch__global_batch_size=8, learning_rate__base=1e308)
    outcome = run_ranks(tmp_path / "ranks", 2, [{"run": run, "spec": document, "block_length": 4}])
    assert outcome.codes == [70, 70]
    first = next(record["step"] for record in records(run) if record["loss"] is None)
    assert all(f"the loss of step {first} " in error["message"] for error in outcome.errors.values())
    assert not list(run.glob("checkpoints/step-*"))


# Saves after steps 2, 4, 6 and 8; the first, one in the middle of an epoch, and one that removes an old one.
SAVED_STEPS = (2, 6, 8)


def saving_spec() -> dict[str, Any]:
    return job_document(
        train__epochs=3,
        checkpoint={"every": {"steps": 2}, "keep": 2},
        train__optimizer={"name": "sgd", "momentum": 0.9},
    )


def no_warning(text: str) -> None:
    raise AssertionError(text)


def kill_and_resume(folder: Path, trials: Sequence[tuple[str, int]]) -> None:
    runs = {trial: folder / f"{trial[0]}-{trial[1]}" for trial in trials}
    for (point, step), run in runs.items():
        job = {"run": run, "spec": saving_spec(), "faults": f"kill@{point}:{step},rank=0"}
        outcome = run_ranks(folder / f"kill-{run.name}", 2, [job])
        assert outcome.codes[0] == -9
        assert outcome.codes[1] != 0
        saved = step if point in ("save.latest", "save.prune") else step - 2
        newest = newest_valid(run / "checkpoints", expected=saved > 0, warn=no_warning)
        assert (newest.manifest.step if newest else 0) == saved
    again = [{"run": run, "spec": saving_spec(), "attempt": 1} for run in runs.values()]
    whole = {"run": folder / "whole", "spec": saving_spec()}
    assert run_ranks(folder / "again", 2, [whole, *again]).codes == [0, 0]
    for run in runs.values():
        assert result(run)["parameters_sha256"] == result(folder / "whole")["parameters_sha256"]
        assert without_times(run) == without_times(folder / "whole")


def test_killed_just_before_its_checkpoint_gets_its_name(tmp_path: Path) -> None:
    kill_and_resume(tmp_path, [("save.rename", 6)])


@pytest.mark.long
def test_killed_at_any_point_of_any_save(tmp_path: Path) -> None:
    kill_and_resume(tmp_path, list(product(SAVE_POINTS, SAVED_STEPS)))


def train_on_a_disk_that_refuses_step_12_twice(plan: Path, rank: int) -> int:
    """Run one rank of two."""
    refusals = iter(range(2))

    def refuse_or_publish(directory: Path, manifest: Manifest, *rest: Any, **options: Any) -> Checkpoint:
        if manifest.step == 12 and next(refusals, None) is not None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return publish(directory, manifest, *rest, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "publish", refuse_or_publish)
        patch.setattr(loop, "_SAVE_AGAIN_S", 0.0)
        return main(plan, rank)


def test_all_ranks_wait_until_the_disk_takes_the_last_step(tmp_path: Path) -> None:
    run = tmp_path / "run"
    jobs = [{"run": run, "spec": saving_spec()}]
    outcome = run_ranks(tmp_path / "ranks", 2, jobs, main=train_on_a_disk_that_refuses_step_12_twice)
    assert outcome.codes == [0, 0], outcome.outputs
    assert outcome.outputs[0].count("saving after step 12 failed") == 2
    newest = newest_valid(run / "checkpoints", expected=True, warn=no_warning)
    assert newest is not None
    assert newest.manifest.step == 12
    assert result(run)["status"] == "finished"
