"""Real ranks of which one is killed: those that are left save the last step, and the next attempt goes on from it."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hpcddp.run.directory import RunDirectory
from hpcddp.run.events import read_events
from tests.distributed.rank import STATE
from tests.distributed.training import Outcome, job_document, records, result, run_ranks, steps, without_times
from tests.waiting import wait_until

RANKS = 3
OWN = "tests.distributed.own_code"
CASES: dict[str, dict[str, Any]] = {
    "sgd": {"train__optimizer": {"name": "sgd", "momentum": 0.9}},
    "adamw, averaged weights, accumulation": {
        "train__optimizer": {"name": "adamw"},
        "train__ema_decay": 0.8,
        "learning_rate__base": 0.01,
        "batch__max_per_device_batch_size": 5,
        "train__num_workers": 2,
    },
    "synchronised BatchNorm": {
        "train__model": f"{OWN}:norm_model",
        "train__batch_norm": "sync",
        "train__optimizer": {"name": "adamw"},
        "learning_rate__base": 0.01,
    },
    "micro-batches of a fixed size": {
        "train__model": f"{OWN}:norm_model",
        "batch__global_batch_size": 30,
        "batch__per_device_batch_size": 5,
        "train__dataset_args": {"train": 120},
    },
    "local BatchNorm": {"train__model": f"{OWN}:norm_model", "batch__tail": "wrap", "train__precision": "fp32"},
    "fp16": {"train__precision": "fp16"},
    "skip": {"train__nonfinite_loss": "skip"},
}
# Where a rank dies, and the steps that are saved then. Batches: 4 in an epoch of 100 samples.
PLACES = {"step:6": 6, "backward:6": 6, "update:6": 7, "evaluation:8": 8}


def spec(case: str, *, max_failures: int = 1) -> dict[str, Any]:
    return job_document(train__epochs=3, requeue__max_failures=max_failures, **CASES[case])


def saves(run: Path) -> dict[int, str | None]:
    """Return the reasons of all saves, by their steps."""
    events = read_events(RunDirectory(run).events)
    return {event.step: event.reason for event in events if event.kind == "save" and event.step is not None}


def kill(run: Path, job: dict[str, Any], place: str, rank: int) -> Outcome:
    """Kill a rank of a new run at a place."""
    outcome = run_ranks(
        run.with_name(f"kill-{run.name}"), RANKS, [{"run": run, "spec": job, "faults": f"kill@{place},rank={rank}"}]
    )
    assert outcome.codes[rank] == -9, outcome.outputs
    return outcome


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a run of each case that keeps no steps, and loses no rank."""
    root = tmp_path_factory.mktemp("undisturbed")
    runs = {case: root / str(number) for number, case in enumerate(CASES)}
    jobs = [{"run": run, "spec": spec(case, max_failures=0)} for case, run in runs.items()]
    assert run_ranks(root / "ranks", RANKS, jobs).codes == [0] * RANKS
    return runs


@pytest.mark.parametrize(("place", "rank"), [("step:6", 1), ("backward:6", 0), ("update:6", 0), ("evaluation:8", 2)])
@pytest.mark.parametrize("case", CASES)
def test_run_that_loses_a_rank_loses_no_step_and_comes_out_bit_for_bit(
    undisturbed: dict[str, Path], tmp_path: Path, case: str, place: str, rank: int
) -> None:
    run = tmp_path / "run"
    outcome = kill(run, spec(case), place, rank)
    saved = PLACES[place]
    states = [line for output in outcome.outputs for line in output.splitlines() if line.startswith(STATE)]
    assert len(states) == RANKS - 1
    assert len(set(states)) == 1, states
    assert states[0].startswith(f"{STATE} {saved}: ")
    assert saves(run)[saved] == "other ranks have gone", outcome.outputs
    again = run_ranks(tmp_path / "again", RANKS, [{"run": run, "spec": spec(case), "attempt": 1}])
    assert again.codes == [0] * RANKS, again.outputs
    assert f"going on after step {saved} " in again.outputs[0]
    assert result(run)["parameters_sha256"] == result(undisturbed[case])["parameters_sha256"]
    assert without_times(run) == without_times(undisturbed[case])


def test_one_of_the_ranks_that_are_left_saves_and_each_says_what_it_does(tmp_path: Path) -> None:
    outcome = kill(tmp_path / "run", spec("sgd"), "step:6", 2)
    said = sorted(line for output in outcome.outputs for line in output.splitlines() if "have gone" in line)
    assert said == ["hpcddp: other ranks have gone; another rank saves step 6", said[1]]
    assert said[1].startswith("hpcddp: other ranks have gone; step 6 is saved in ")


def test_lines_that_rank_0_could_not_write_are_in_the_metrics_afterwards(tmp_path: Path) -> None:
    run = tmp_path / "run"
    kill(run, spec("sgd"), "update:6", 0)
    assert [record["step"] for record in steps(run)] == [1, 2, 3, 4, 5, 6]
    # It was killed while it wrote a line.
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 7, "epo')
    again = [{"run": run, "spec": spec("sgd"), "attempt": 1}]
    assert run_ranks(tmp_path / "again", RANKS, again).codes == [0] * RANKS
    assert [record["step"] for record in steps(run)] == list(range(1, 13))
    assert len(records(run)) == 12 + 3


def test_step_is_saved_when_the_run_directory_is_back(tmp_path: Path) -> None:
    run = tmp_path / "run"
    away = tmp_path / "away"
    faults = "sleep=3@step:6,rank=2;kill@step:6,rank=2"
    job = {"run": run, "spec": spec("sgd"), "faults": faults}
    with ThreadPoolExecutor(1) as pool:
        killed = pool.submit(run_ranks, tmp_path / "killed", RANKS, [job])
        metrics = run / "metrics.jsonl"
        wait_until(lambda: metrics.exists() and metrics.read_bytes().count(b'"loss"') == 6, "the steps before", 120)
        run.rename(away)
        # Longer than the rank lives.
        time.sleep(5)
        away.rename(run)
        outcome = killed.result()
    assert saves(run)[6] == "other ranks have gone", outcome.outputs


def test_step_is_not_saved_where_only_the_dead_rank_had_its_buffers(tmp_path: Path) -> None:
    run = tmp_path / "run"
    model = {"train__model": f"{OWN}:norm_model", "batch__tail": "drop", "train__ema_decay": 0.8}
    outcome = kill(run, job_document(train__epochs=3, requeue__max_failures=1, **model), "step:5", 1)
    assert list(saves(run)) == [3]
    assert "step 5 is not saved, because 1.running_mean differs between ranks" in outcome.outputs[0]


def test_nothing_is_saved_before_a_step_was_made(tmp_path: Path) -> None:
    outcome = kill(tmp_path / "run", spec("sgd"), "step:0", 1)
    assert "other ranks have gone; no step was made" in outcome.outputs[0]


def test_nothing_is_kept_for_a_run_that_may_not_go_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    outcome = kill(run, spec("sgd", max_failures=0), "step:6", 1)
    assert "have gone" not in outcome.outputs[0]
    assert list(saves(run)) == [4]
