"""A program that imports no torch, counts steps and goes on from its state: a rehearsal of it takes seconds.

Its words spoil it: ``forgets`` never loads its state, ``drifts`` computes another number after a resumption, ``random``
differs from start to start, ``fails`` ends with an error, ``waits`` never ends. ``slowly`` leaves time for a command of
Slurm, on a busy machine too, before the last step.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

STEPS = 40
# A rehearsal causes its fault after step 24 of the first attempt; the other steps need not take long.
FAULT_STEPS = range(20, 40)
RUN = Path(os.environ["HPCDDP_RUN_DIR"])
IS_FIRST = os.environ["RANK"] == "0"
told: list[bool] = []
for signum in (signal.SIGTERM, signal.SIGUSR2):
    signal.signal(signum, lambda *_: told.append(True))


def save(step: int) -> None:
    if IS_FIRST:
        temporary = RUN / f".state-{step:03d}"
        temporary.write_bytes(pickle.dumps({"step": step}))
        temporary.rename(RUN / f"state-{step:03d}")


def newest_step() -> int:
    for path in sorted(RUN.glob("state-*"), reverse=True):
        with suppress(Exception):
            return int(pickle.loads(path.read_bytes())["step"])
    return 0


def keep_step(step: int) -> None:
    """Wait for the other rank, as a collective does."""
    (RUN / f".at-{os.environ['RANK']}").write_text(str(step))
    if IS_FIRST and os.environ["WORLD_SIZE"] == "2":
        other = RUN / ".at-1"
        while not other.exists() or int(other.read_text() or 0) < step:
            time.sleep(0.005)


def pause_s(way: str, step: int, first: int) -> float:
    """Return how long a step takes, in seconds."""
    if first or step not in FAULT_STEPS:
        return 0.02
    return 0.4 if way == "slowly" else 0.05


def main(way: str) -> None:
    if way == "fails":
        sys.exit("this program always fails")
    time.sleep(600 if way == "waits" else 0)
    first = 0 if way == "forgets" else newest_step()
    for step in range(first + 1, STEPS + 1):
        loss = 1 / step
        if way == "drifts" and first:
            loss += 0.5
        if way == "random":
            loss += random.random()
        if IS_FIRST:
            with Path(os.environ["HPCDDP_METRICS_FILE"]).open("a") as stream:
                stream.write(json.dumps({"step": step, "loss": loss, "step_s": time.time()}) + "\n")
        keep_step(step)
        time.sleep(pause_s(way, step, first))
        if told:
            save(step)
            sys.exit(75)
        if step % 8 == 0:
            save(step)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
