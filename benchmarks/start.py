"""Measure the CPU time of a rank from the start of its interpreter to its first step, beside a script with DDP.

    python -m benchmarks.start [--rounds 3] [--output FILE]

The contenders ``hpcddp`` and ``ddp`` are those of ``benchmarks.step``, here with a small model and two steps. They open
gloo, and end without tearing anything down.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks.step import run_ranks
from benchmarks.turns import Case, cpu_of_children, in_turn, main


def cpu_s(way: str, ranks: int) -> float:
    """Return the CPU seconds of one rank."""
    with tempfile.TemporaryDirectory() as directory:
        return cpu_of_children(lambda: run_ranks(way, "mlp", ranks, Path(directory), steps=2)) / ranks


def cases(rounds: int) -> Iterator[Case]:
    """Yield the comparisons."""
    for ranks in (1, 2, 8):
        yield in_turn(
            f"first step of {ranks} rank{'s' if ranks > 1 else ''}",
            {way: partial(cpu_s, way, ranks) for way in ("hpcddp", "ddp")},
            base="ddp",
            unit="s of CPU per rank",
            rounds=rounds,
        )


if __name__ == "__main__":
    main("benchmarks.start", __doc__, cases, rounds=3)
