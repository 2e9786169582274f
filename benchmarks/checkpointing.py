"""Measure how long a save stops the training: written in a thread, and waited for, in turn.

    python benchmarks/checkpointing.py [--megabytes 100] [--turns 15] [--directory DIR] [--out FILE]

The lower limit is ``torch.save`` of the same state into one file, without checksum or fsync.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import nn, optim

from hpcddp import Checkpointer

_WIDTH = 1024


def make(megabytes: int) -> tuple[nn.Module, optim.Optimizer]:
    """Return a model of about that many MB in float32, and its optimizer with one state per parameter."""
    layers = max(1, round(megabytes * 1e6 / 4 / _WIDTH**2))
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(layers)))
    return model, optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def train_step(model: nn.Module, optimizer: optim.Optimizer) -> None:
    """Make a step that touches every parameter and its state."""
    optimizer.zero_grad()
    model(torch.ones(1, _WIDTH)).mean().backward()
    optimizer.step()


def seconds(action: Callable[[], object]) -> float:
    """Return how long a call takes, in seconds."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def measure(model: nn.Module, optimizer: optim.Optimizer, directory: Path, turns: int) -> dict[str, list[float]]:
    """Return the seconds of each turn, by the kind of save."""
    checkpointer = Checkpointer(directory / "run", {"model": model, "optimizer": optimizer}, keep=2)
    checkpointer.restore()
    times: dict[str, list[float]] = {name: [] for name in ("beside", "waited", "floor", "step", "step_while_writing")}
    for turn in range(-1, turns):
        found = _one_turn(checkpointer, model, optimizer, directory, step=2 * turn + 3)
        # The first turn takes the memory.
        if turn >= 0:
            for name, value in found.items():
                times[name].append(value)
    return times


def _one_turn(
    checkpointer: Checkpointer, model: nn.Module, optimizer: optim.Optimizer, directory: Path, *, step: int
) -> dict[str, float]:
    found = {"step": seconds(lambda: train_step(model, optimizer))}
    found["beside"] = seconds(lambda: checkpointer.save(step))
    found["step_while_writing"] = seconds(lambda: train_step(model, optimizer))
    checkpointer.wait()

    def save_and_wait() -> None:
        checkpointer.save(step + 1)
        checkpointer.wait()

    found["waited"] = seconds(save_and_wait)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    found["floor"] = seconds(lambda: torch.save(state, directory / "floor.pt"))
    return found


def report(times: dict[str, list[float]], model: nn.Module) -> dict[str, object]:
    """Return the medians, the ratios of each turn, and where it was measured."""
    ratios = {
        "beside_to_waited": [a / b for a, b in zip(times["beside"], times["waited"], strict=True)],
        "beside_to_floor": [a / b for a, b in zip(times["beside"], times["floor"], strict=True)],
        "step_while_writing_to_step": [a / b for a, b in zip(times["step_while_writing"], times["step"], strict=True)],
    }
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "parameters_bytes": sum(parameter.nbytes for parameter in model.parameters()),
        "turns": len(times["beside"]),
        "median_s": {name: round(statistics.median(values), 4) for name, values in times.items()},
        "median_ratio": {name: round(statistics.median(values), 4) for name, values in ratios.items()},
        "seconds": times,
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "versions": {"torch": str(torch.__version__), "python": platform.python_version()},
    }


def main() -> None:
    """Measure, print the medians, and write all of it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=100, help="size of the parameters")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--directory", type=Path, help="where to write; else a temporary folder")
    parser.add_argument("--out", type=Path, help="the file for the raw numbers")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, optimizer = make(options.megabytes)
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        document = report(measure(model, optimizer, Path(folder), options.turns), model)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(document, indent=2) + "\n")
    print(
        json.dumps(
            {name: document[name] for name in ("parameters_bytes", "turns", "median_s", "median_ratio")}, indent=2
        )
    )


if __name__ == "__main__":
    main()
