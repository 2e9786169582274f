"""Starts real ranks for a test and reads what they leave."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hpcddp.train.buffers import as_real
from tests.distributed import rank
from tests.ranks import run_forked


@dataclass
class Outcome:
    """Exit codes, outputs and error records of the ranks."""

    codes: list[int]
    outputs: list[str]
    errors: dict[int, dict[str, Any]] = field(default_factory=dict)


def job_document(**changes: Any) -> dict[str, Any]:
    """Return a small digits job as the job file has it; keys such as ``train__epochs`` change single values."""
    document: dict[str, Any] = {
        "name": "digits",
        "batch": {"global_batch_size": 32},
        "learning_rate": {"base": 0.1},
        "train": {
            "model": "tests.distributed.own_code:linear_model",
            "dataset": "tests.distributed.own_code:few_digits",
            "precision": "fp64",
        },
        "trackers": {"use": []},
    }
    for key, value in changes.items():
        *sections, name = key.split("__")
        place = document
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return document


def run_ranks(
    folder: Path, world_size: int, jobs: Sequence[dict[str, Any]], *, main: Callable[[Path, int], int] = rank.main
) -> Outcome:
    """Run jobs one after the other in the same ``world_size`` processes; each job has ``run`` and ``spec``."""
    folder.mkdir(parents=True, exist_ok=True)
    for job in jobs:
        Path(job["run"]).mkdir(parents=True, exist_ok=True)
        job["spec"].setdefault("resources", {})["tasks_per_node"] = world_size
        if "stop_after_calls" in job or "kill_after_calls" in job:
            # A rank is asked once per block of steps.
            job.setdefault("block_length", 1)
    plan = folder / "plan.json"
    store = folder / f"store-{len(list(folder.iterdir()))}"
    plan.write_text(json.dumps({"world_size": world_size, "store": str(store), "jobs": jobs}, default=str))
    ended = run_forked(main, [plan], world_size=world_size, logs=folder)
    errors = {
        number: json.loads(path.read_text())
        for number in range(world_size)
        if (path := folder / f"error-{number}.json").exists()
    }
    return Outcome(ended.codes, ended.outputs, errors)


def records(run: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def steps(run: Path) -> list[dict[str, Any]]:
    return [record for record in records(run) if "loss" in record]


def evaluations(run: Path) -> list[dict[str, Any]]:
    return [record for record in records(run) if "val_samples" in record]


def result(run: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((run / "result.json").read_text())
    return document


def without_times(run: Path) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in record.items() if name not in ("time", "samples_per_s", "eval_s")}
        for record in records(run)
    ]


def parameters(run: Path, step: int) -> torch.Tensor:
    """Return everything that the model of a checkpoint holds, as one vector; complex numbers are pairs."""
    state = torch.load(run / "checkpoints" / f"step-{step:06d}" / "model.pt", weights_only=True)
    return torch.cat([as_real(tensor).double().reshape(-1) for tensor in state.values()])
