"""Measure the start of ranks: the CPU time of the built-in training, and the wall time of a script under a launcher.

    python -m benchmarks.start [--rounds 3] [--output FILE]

The contenders ``hpcddp`` and ``ddp`` of the first cases are those of ``benchmarks.step``, here with a small model and
two steps. They open gloo, and end without tearing anything down. In the last case, ``hpcddp submit`` and torchrun start
eight ranks of the same script; its first step ends when rank 0 has written a file.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.step import run_ranks
from benchmarks.turns import Case, cpu_of_children, in_turn, main

_SCRIPT: Final = """\
import pathlib, sys, torch
from torch import nn
import torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(4, 64)).sum().backward()
optimizer.step()
if dist.get_rank() == 0:
    pathlib.Path("done").touch()
dist.barrier()
"""
_RANKS: Final = 8


def cpu_s(way: str, ranks: int) -> float:
    """Return the CPU seconds of one rank."""
    with tempfile.TemporaryDirectory() as directory:
        return cpu_of_children(lambda: run_ranks(way, "mlp", ranks, Path(directory), steps=2)) / ranks


def wall_s(*words: str) -> float:
    """Return the seconds from the start of a launcher to the first step of the script's ranks."""
    directory = Path(tempfile.mkdtemp(prefix="hpcddp-"))
    (directory / "script.py").write_text(_SCRIPT)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    began = time.time()
    done = subprocess.run(words, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    try:
        return (directory / "done").stat().st_mtime - began
    except FileNotFoundError:
        sys.exit(f"{words[0]} ended with {done.returncode}: {done.stderr}")
    finally:
        shutil.rmtree(directory)


def cases(rounds: int) -> Iterator[Case]:
    """Yield the comparisons."""
    for ranks in (1, 2, _RANKS):
        yield in_turn(
            f"first step of {ranks} rank{'s' if ranks > 1 else ''}",
            {way: partial(cpu_s, way, ranks) for way in ("hpcddp", "ddp")},
            base="ddp",
            unit="s of CPU per rank",
            rounds=rounds,
        )
    hpcddp = (sys.executable, "-m", "hpcddp", "submit", "--cluster", "local", "--follow")
    yield in_turn(
        f"first step of {_RANKS} ranks of a script",
        {
            "hpcddp": partial(wall_s, *hpcddp, f"--tasks-per-node={_RANKS}", "--", "python", "script.py"),
            "torchrun": partial(
                wall_s, sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={_RANKS}",
                "script.py",
            ),
        },
        base="torchrun",
        unit="s",
        rounds=rounds,
    )  # fmt: skip


if __name__ == "__main__":
    main("benchmarks.start", __doc__, cases, rounds=3)
