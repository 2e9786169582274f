"""The report of a real run of three attempts, compared with sums over the lines of its logs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import hpcddp

pytestmark = pytest.mark.depends_on("hpcddp/manage", "hpcddp/run", "hpcddp/supervise", "hpcddp/train", "tests/manage")

# 23 steps in an epoch, and a checkpoint after each: a rank is killed after step 30, an exception follows after step 60.
JOB = """\
name: real
resources: {tasks_per_node: 2}
batch: {global_batch_size: 64}
learning_rate: {base: 0.1}
train: {model: "small:build", dataset: digits, epochs: 3}
environment: {env: {HPCDDP_FAULTS: "kill@step:30,rank=1,attempt=0;exception@step:60,attempt=1"}}
trackers: {use: []}
"""
MODEL = """\
from torch import nn

def build(num_classes):
    return nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(192, num_classes))
"""


def called(directory: Path, *words: str, code: int = 0) -> str:
    done = hpcddp(directory, *words)
    assert (done.returncode == 0) == (code == 0), done.stdout + done.stderr
    return done.stdout


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("real")
    (directory / "job.yaml").write_text(JOB)
    (directory / "small.py").write_text(MODEL)
    called(directory, "submit", "job.yaml", "--cluster", "local", "--follow", code=1)
    (run,) = (directory / "runs" / "real").iterdir()
    called(directory, "submit", "--resume", str(run), "--follow", code=1)
    called(directory, "submit", "--resume", str(run), "--follow")
    return run


@pytest.fixture(scope="module")
def report(run: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(called(run.parent, "report", str(run), "--json"))
    (found,) = document["runs"]
    return dict(found)


def test_the_attempts_go_on_where_a_checkpoint_was(report: dict[str, Any]) -> None:
    rows = [(one["resumed_from"], one["last_step"], one["ranks"], one["outcome"]) for one in report["attempts"]]
    assert rows == [(0, 23, 2, "crash"), (23, 46, 2, "crash"), (46, 69, 2, "finished")]
    # A rank learns of a step up to one later.
    lost = [one["lost_steps"] for one in report["attempts"]]
    assert lost[0] in {6, 7}
    assert lost[1] in {13, 14}
    assert lost[2] == 0


@pytest.mark.parametrize("number", [0, 1, 2])
def test_the_parts_of_each_attempt_are_sums_over_its_lines(run: Path, report: dict[str, Any], number: int) -> None:
    events, metrics = lines(run / "events.jsonl"), lines(run / "metrics.jsonl")
    attempt = report["attempts"][number]
    own = [event for event in events if event["attempt"] == number and event["event"] != "resume"]
    began, trained = (next(event["time"] for event in own if event["event"] == kind) for kind in ("start", "train"))
    steps = [line for line in metrics if 23 * number < line["step"] <= 23 * (number + 1)]
    # The batch of 64 samples, but for the last one of an epoch.
    training = sum(64 / line["samples_per_s"] for line in steps if "loss" in line and line["step"] % 23)
    training += (1437 - 22 * 64) / steps[-2]["samples_per_s"]
    assert attempt["seconds"]["start_up"] == pytest.approx(trained - began, abs=2e-3)
    assert attempt["seconds"]["training"] == pytest.approx(training, abs=2e-3)
    assert attempt["seconds"]["evaluation"] == pytest.approx(steps[-1]["eval_s"], abs=2e-3)
    assert attempt["ended"] == max(event["time"] for event in own)
    on_nodes = sum(seconds for phase, seconds in attempt["seconds"].items() if phase != "queue")
    assert on_nodes == pytest.approx(attempt["ended"] - attempt["began"], abs=1e-2)


def test_the_goodput_is_the_part_of_the_training(report: dict[str, Any]) -> None:
    whole = sum(attempt["ended"] - attempt["began"] for attempt in report["attempts"])
    training = sum(attempt["seconds"]["training"] for attempt in report["attempts"])
    assert report["goodput"] == pytest.approx(training / whole, abs=1e-3)
    assert report["device_hours"] == pytest.approx(2 * whole / 3600)
    assert report["device"] == "CPU rank"


def test_the_wait_for_data_is_the_sum_over_the_attempts(run: Path, report: dict[str, Any]) -> None:
    accounts = [event for event in lines(run / "events.jsonl") if event["event"] == "account"]
    assert [(one["attempt"], one["step"]) for one in accounts] == [(0, 23), (1, 46), (2, 69)]
    seconds = sum(one["wait_s"] for one in accounts)
    assert report["data_wait"]["seconds"] == pytest.approx(seconds)
    assert report["data_wait"]["share"] == pytest.approx(seconds / sum(one["train_s"] for one in accounts))
    slowest = report["slowest_rank"]
    assert slowest["attempt"] == 2
    assert slowest["rank"] in {0, 1}
    assert slowest["data_wait_s"] + slowest["forward_s"] >= slowest["median_s"]


def test_the_first_error_is_the_one_that_was_raised_last(report: dict[str, Any]) -> None:
    assert report["first_error"]["attempt"] == 1
    assert "InjectedError" in report["first_error"]["sentence"]
