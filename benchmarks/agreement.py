"""Measure the cost of the agreement of all ranks in every step: gloo on this machine, 2 and 4 ranks.

    python benchmarks/agreement.py [--ranks 2 4] [--rounds 20] [--steps 50]

Four ways to train the same small model alternate within each round, so that other load slows all of them equally:

    loss     only the sum of losses, read one step late: every step needs it
    ride     the agreement of hpcddp: the votes are part of that sum
    late     the sum of losses, and a separate collective for the votes, read one step late
    at once  the sum of losses, and a separate collective for the votes, read in the same step

Prints one JSON document: the median time of a step of each, in milliseconds, and its ratio to ``loss``, with the
spread (quartiles of the ratio over rounds).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hpcddp.train.loop.agreement import PendingAgreement, StepPart, Votes

WAYS = ("loss", "ride", "late", "at once")
WARM_UP_STEPS = 20


class LossAlone:
    """The sum of losses, read one step late."""

    def __init__(self) -> None:
        self._pending: tuple[Tensor, dist.Work] | None = None

    def __call__(self, loss: Tensor) -> None:
        """Start this step's sum, and read the one before."""
        before, summed = self._pending, loss.reshape(1).clone()
        self._pending = summed, dist.all_reduce(summed, async_op=True)
        if before is not None:
            before[1].wait()
            before[0].tolist()


class Ride:
    """The agreement of hpcddp, read one step late."""

    def __init__(self) -> None:
        self._pending: PendingAgreement | None = None

    def __call__(self, loss: Tensor) -> None:
        """Start this step's sum, and read the one before."""
        before, self._pending = self._pending, PendingAgreement([StepPart(loss)], Votes())
        if before is not None:
            before.read()


class OwnCollective:
    """The sum of losses, and a second collective for the votes."""

    def __init__(self, group: dist.ProcessGroup, *, late: bool) -> None:
        self._loss, self._group, self._late = LossAlone(), group, late
        self._pending: tuple[Tensor, dist.Work] | None = None

    def __call__(self, loss: Tensor) -> None:
        """Start this step's sum, and read the one before."""
        self._loss(loss)
        before, vote = self._pending, torch.tensor(0)
        work = dist.all_reduce(vote, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        if not self._late:
            work.wait()
            vote.item()
            return
        self._pending = vote, work
        if before is not None:
            before[1].wait()
            before[0].item()


def measure(rounds: int, steps: int) -> dict[str, list[float]]:
    """Return milliseconds per step for each way and round, measured on this rank."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(192, 256), nn.ReLU(), nn.Linear(256, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, labels = torch.randn(32, 192), torch.randint(10, (32,))
    group: Any = dist.new_group(backend="gloo")
    ways: dict[str, Callable[[Tensor], None]] = {
        "loss": LossAlone(),
        "ride": Ride(),
        "late": OwnCollective(group, late=True),
        "at once": OwnCollective(group, late=False),
    }

    def train(agree: Callable[[Tensor], None], count: int) -> float:
        dist.barrier()
        began = time.perf_counter()
        for _ in range(count):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            agree(loss.detach().double())
        return (time.perf_counter() - began) / count * 1e3

    for agree in ways.values():
        train(agree, WARM_UP_STEPS)
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(rounds):
        # Each way is first as often as every other.
        for way in WAYS[number % len(WAYS) :] + WAYS[: number % len(WAYS)]:
            times[way].append(train(ways[way], steps))
    dist.barrier()
    return times


def summary(times: dict[str, list[float]]) -> dict[str, Any]:
    """Return medians, and ratios to ``loss`` round by round."""
    report = {}
    for way in WAYS:
        ratios = [mine / base for mine, base in zip(times[way], times["loss"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        report[way] = {
            "step_ms": round(statistics.median(times[way]), 3),
            "ratio": round(middle, 3),
            "quartiles": [round(low, 3), round(high, 3)],
        }
    return report


def be_rank(options: argparse.Namespace) -> None:
    """Run one rank; rank 0 prints its times."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{options.store}", rank=options.rank, world_size=options.of)
    times = measure(options.rounds, options.steps)
    if options.rank == 0:
        print(json.dumps(times), flush=True)
    os._exit(0)


def run(ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks and return what rank 0 measured."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, __file__, "--rounds", str(options.rounds), "--steps", str(options.steps)]
        words += ["--of", str(ranks), "--store", str(Path(folder) / "store")]
        processes = [
            subprocess.Popen([*words, "--rank", str(rank)], stdout=subprocess.PIPE if rank == 0 else None, text=True)
            for rank in range(ranks)
        ]
        answer, _ = processes[0].communicate()
        for process in processes[1:]:
            process.wait()
    return summary(json.loads(answer))


def main() -> None:
    """Measure, and print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--of", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        be_rank(options)
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "rounds": options.rounds,
        "steps": options.steps,
        "ranks": {str(ranks): run(ranks, options) for ranks in options.ranks},
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
