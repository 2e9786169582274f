"""Measure ``hpcddp report`` of a run of a million steps, beside reading its log with ``json``.

    python -m benchmarks.report [--rounds 5] [--output FILE]

The log is that of the built-in training: a line for each step, and one for each evaluation after 1,000 steps, 170 MB.
``json`` is a program that parses each line and keeps nothing. A report may take 2 s of CPU and 80 MiB of memory.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from benchmarks.turns import Case, in_turn, main

_STEPS: Final = {"hpcddp": 1_000_000, "hpcddp, 1,000 steps": 1000}
# Of a small process: the memory of a child counts from its fork on, and benchmarks.all has torch.
_COST: Final = """
import os, subprocess, sys
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(process.pid, 0)
print(usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)
sys.exit(os.waitstatus_to_exitcode(status))
"""
_JSON: Final = "import json, sys\nfor line in open(sys.argv[1]): json.loads(line)"
_EVALUATED_EVERY: Final = 1000


def write_run(hpcddp: str, directory: Path, steps: int) -> Path:
    """Write the directory of a run: one that ran on this machine, with the metrics of so many steps."""
    name = f"steps-{steps}"
    words = [hpcddp, "submit", "--name", name, "--cluster", "local", "--", "true"]
    subprocess.run(words, cwd=directory, stdout=subprocess.DEVNULL, check=True)
    (run,) = (directory / "runs" / name).iterdir()
    while not (run / "result.json").exists():
        time.sleep(0.1)
    chance = random.Random(0)
    now = time.time()
    with (run / "metrics.jsonl").open("w") as stream:
        for step in range(1, steps + 1):
            step_s = 0.01 + 0.001 * chance.random()
            now += step_s
            loss = 2 / (1 + step / 1e5) + 0.1 * chance.random()
            line = {"step": step, "epoch": step // _EVALUATED_EVERY, "loss": loss, "lr": 0.1 * (1 - step / steps),
                    "samples_seen": 64 * step, "samples_per_s": 64 / step_s, "time": now}  # fmt: skip
            stream.write(json.dumps(line) + "\n")
            if step % _EVALUATED_EVERY == 0:
                line = {"step": step, "epoch": step // _EVALUATED_EVERY - 1, "val_loss": loss, "val_accuracy": 1 / loss,
                        "val_samples": 1000, "eval_s": 0.5}  # fmt: skip
                stream.write(json.dumps(line) + "\n")
    return run


def cost(words: list[str]) -> list[float]:
    """Return the CPU time of a command in seconds, and its memory in MiB."""
    done = subprocess.run([sys.executable, "-c", _COST, *words], stdout=subprocess.PIPE, text=True, check=True)
    return [float(number) for number in done.stdout.split()]


def cases(rounds: int) -> Iterator[Case]:
    """Yield the comparisons."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        hpcddp = shutil.which("hpcddp") or "hpcddp"
        runs = {way: write_run(hpcddp, directory, steps) for way, steps in _STEPS.items()}
        words = {
            way: [hpcddp, "report", str(run), "--output", f"{directory}/{run.parent.name}.html"]
            for way, run in runs.items()
        }
        words["json"] = [sys.executable, "-c", _JSON, str(runs["hpcddp"] / "metrics.jsonl")]

        def measured(way: str, place: int) -> Callable[[], float]:
            return lambda: cost(words[way])[place]

        for place, (what, unit) in enumerate((("time", "s of CPU"), ("memory", "MiB"))):
            ways = {way: measured(way, place) for way in words}
            yield in_turn(f"report of a million steps: {what}", ways, base="json", unit=unit, rounds=rounds)


if __name__ == "__main__":
    main("benchmarks.report", __doc__, cases, rounds=5)
