"""What trackers show of a run, read from what they store."""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

Curves = dict[str, list[tuple[int, float]]]
BLOCK = 32768


def shown_by_tensorboard(run: Path) -> Curves:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def written(run: Path) -> Curves:
    """Return the curves of metrics.jsonl under the trackers' names."""
    # It imports torch, which the processes of the tests on Slurm do not need.
    from tests.distributed.training import evaluations, steps

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
    from wandb.proto import wandb_internal_pb2

    messages: Any = wandb_internal_pb2  # made at import

    found = []
    for path in sorted(run.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        for payload in payloads(path.read_bytes()):
            record = messages.Record.FromString(payload)
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


# MLflow 3.17 opens the files of its file store with codecs.open, which Python 3.14 deprecates.
MLFLOW_OPENS_FILES = r"ignore:codecs\.open\(\) is deprecated:DeprecationWarning:mlflow\.utils\."


def shown_by_mlflow(uri: str) -> tuple[list[Any], Curves]:
    """Return the runs of MLflow, and the curves of the first."""
    from mlflow import MlflowClient

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        client = MlflowClient(uri)
    runs = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    curves = {
        name: [(point.step, point.value) for point in client.get_metric_history(runs[0].info.run_id, name)]
        for name in runs[0].data.metrics
    }
    return runs, curves
