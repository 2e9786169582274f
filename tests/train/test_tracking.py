"""What a run writes is shown by each tracker once, over all its attempts."""

from __future__ import annotations

import itertools
import json
import logging
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcddp.stop.reasons import StopReason
from hpcddp.train.errors import StoppedError
from tests.distributed.training import evaluations, steps
from tests.train.conftest import Training

NewTraining = Callable[[str], Training]
BLOCK = 32768
Curves = dict[str, list[tuple[int, float]]]

# 100 samples in batches of 32: 4 steps per epoch, 12 in all.
JOB: dict[str, Any] = {"checkpoint": {"every": {"steps": 3}}, "train__epochs": 3}


def shown_by_tensorboard(run: Path) -> Curves:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {
        name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]
    }


def written(run: Path) -> Curves:
    """Return the curves of metrics.jsonl under the trackers' names."""
    train = {
        f"train/{name}": [(record["step"], record[name]) for record in steps(run)]
        for name in ("epoch", "loss", "lr", "samples_seen", "samples_per_s")
    }
    val = {
        f"val/{name}": [(record["step"], record[f"val_{name}"]) for record in evaluations(run)]
        for name in ("loss", "accuracy", "top5")
    }
    return {**train, **val}


def same(found: Curves, expected: Curves) -> None:
    assert sorted(found) == sorted(expected)
    for name, points in expected.items():
        assert [step for step, _ in found[name]] == [step for step, _ in points], name
        assert [value for _, value in found[name]] == pytest.approx([value for _, value in points], rel=1e-6), name


def stop(training: Training, *, after: int, attempt: int = 0, **changes: Any) -> None:
    calls = iter(range(after - 1))
    with pytest.raises(StoppedError):
        training.train(
            attempt=attempt, should_stop=lambda: 0 if next(calls, None) is not None else StopReason.TERMINATED, **changes
        )


def test_tensorboard_shows_the_metrics_without_being_asked(training: Training) -> None:
    training.train(**JOB)
    same(shown_by_tensorboard(training.run.path), written(training.run.path))


def test_no_tracker_is_used_where_none_is_wanted(training: Training) -> None:
    training.train(**JOB, trackers={"use": []})
    assert not training.run.tensorboard.exists()
    assert not training.run.tracker("tensorboard").parent.exists()


def test_tensorboard_shows_a_stopped_and_resumed_run_as_one_curve(training: Training) -> None:
    stop(training, after=5, **JOB)
    training.train(attempt=1, **JOB)
    same(shown_by_tensorboard(training.run.path), written(training.run.path))


def test_tensorboard_shows_steps_once_that_were_computed_twice(training: Training) -> None:
    # A clock on which every record is due to be written at once.
    training.crash(steps=7, monotonic=itertools.count(0.0, 3.0).__next__, **JOB)
    assert shown_by_tensorboard(training.run.path)["train/loss"][-1][0] == 7
    training.train(attempt=1, **JOB)
    assert "going on after step 6" in "\n".join(training.said)
    same(shown_by_tensorboard(training.run.path), written(training.run.path))


def test_tensorboard_shows_a_run_that_began_anew_from_its_beginning(training: Training) -> None:
    training.crash(steps=3, **{**JOB, "checkpoint": {"every": {"steps": 100}}})
    training.train(attempt=1, **JOB)
    same(shown_by_tensorboard(training.run.path), written(training.run.path))


def test_evaluation_that_is_made_up_for_is_shown(training: Training) -> None:
    stop(training, after=4, **JOB)
    assert evaluations(training.run.path) == []
    training.train(attempt=1, **JOB)
    same(shown_by_tensorboard(training.run.path), written(training.run.path))


WANDB = {**JOB, "trackers": {"use": ["wandb"], "project": "shapes", "entity": "lab"}}


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DISABLE_GIT", "true")
    for name in ("CONFIG", "CACHE", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / name))


def payloads(content: bytes) -> Iterator[bytes]:
    """Yield the records of LevelDB's log format, which W&B writes after seven bytes of its own."""
    whole, position = b"", 7
    while position + 7 <= len(content):
        left = BLOCK - position % BLOCK
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        whole += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # the only part of a record, or its last one
            yield whole
            whole = b""


def wandb_records(run: Path) -> list[tuple[str, Any]]:
    """Return what W&B would upload, of all attempts in their order: each record's kind and content."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for path in sorted(run.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        for payload in payloads(path.read_bytes()):
            record = Record.FromString(payload)
            kind = str(record.WhichOneof("record_type"))
            found.append((kind, getattr(record, kind)))
    return found


def shown_by_wandb(run: Path) -> Curves:
    curves: Curves = {}
    for kind, record in wandb_records(run):
        if kind != "history":
            continue
        row = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.item}
        for name, value in row.items():
            if "/" in name:
                axis = "step" if name.startswith("train/") else "evaluated_step"
                curves.setdefault(name, []).append((row[axis], value))
    return curves


@pytest.mark.usefixtures("offline")
def test_wandb_shows_the_attempts_of_a_run_as_one(training: Training) -> None:
    stop(training, after=5, **WANDB)
    training.crash(steps=4, attempt=1, **WANDB)
    training.train(attempt=2, **WANDB)
    same(shown_by_wandb(training.run.path), written(training.run.path))
    runs = [record for kind, record in wandb_records(training.run.path) if kind == "run"]
    assert {(run.run_id, run.project, run.entity, run.display_name) for run in runs} == {
        (json.loads(training.run.tracker("wandb").read_text())["run_id"], "shapes", "lab", "run")
    }
    assert runs[0].run_id.startswith("run-")


@pytest.mark.usefixtures("offline")
def test_wandb_is_told_how_each_attempt_ended(training: Training) -> None:
    stop(training, after=5, **WANDB)
    training.crash(steps=4, attempt=1, **WANDB)
    training.train(attempt=2, **WANDB)
    kinds = [(kind, record) for kind, record in wandb_records(training.run.path) if kind in ("exit", "preempting")]
    assert [(kind, getattr(record, "exit_code", None)) for kind, record in kinds] == [
        ("preempting", None), ("exit", 75), ("exit", 1), ("exit", 0),
    ]  # fmt: skip


SECRET = "a-secret-value"  # noqa: S105


@pytest.mark.usefixtures("offline")
def test_wandb_gets_the_job_without_its_secrets(training: Training) -> None:
    environment = {"env": {"TOKEN": SECRET}, "setup": [f"export KEY={SECRET}"], "pass_env": ["WANDB_API_KEY"]}
    training.train(**{**WANDB, "environment": environment})
    runs = [record for kind, record in wandb_records(training.run.path) if kind == "run"]
    config = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    assert config["batch"]["global_batch_size"] == 32
    assert config["environment"]["pass_env"] == ["WANDB_API_KEY"]
    assert not [path for path in training.run.path.rglob("*.wandb") if SECRET.encode() in path.read_bytes()]
