"""Measure how long a run pauses at a requeue with Slurm's default ``cred_expire`` of two minutes, and why.

usage: python -m benchmarks.restart [--trials 3] [--results benchmarks/results/restart.json]

As root: the hosts are network namespaces. A run of 2 x 1 is requeued by ``hpcddp requeue``. Others are preempted: a job
of higher priority takes the nodes for three seconds; its time is not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.cluster.comparison import forwards
from tests.cluster.jobs import HPCDDP
from tests.cluster.sandboxes import sandbox_with
from tests.cluster.scenarios import References, ScenarioContext
from tests.cluster.tracked_run import TrackedRun

HELD_S = 3.0
SHAPES = ((2, 1), (4, 2))


def measure_requeue(context: ScenarioContext, name: str) -> dict[str, float]:
    """Requeue one run of two hosts, and return its pause from the last step to the next one, in seconds."""
    tracked = context.start(name, nodes=2, tasks=1)
    tracked.wait_for_steps(60)
    tracked.sandbox.run(*HPCDDP, "requeue", tracked.run.path)
    tracked.wait_until_finished()
    begins = max(event.time for event in tracked.events("start"))
    times = [forward.time for forward in forwards(tracked.run, 0)]
    pause_s = min(time for time in times if time > begins) - max(time for time in times if time < begins)
    return {"pause from the last step to the next": pause_s}


def measure(context: ScenarioContext, name: str, *, nodes: int, tasks: int) -> dict[str, float]:
    """Preempt one run and return the parts of its pause, in seconds."""
    tracked = context.start(name, nodes=nodes, tasks=tasks)
    tracked.wait_for_steps(60)
    high = context.preempt(tracked.sandbox.job(tracked.job_id)["NodeList"], seconds=HELD_S)
    tracked.wait_until_finished()
    return parts(tracked, tracked.sandbox.job(high))


def parts(tracked: TrackedRun, high: dict[str, str]) -> dict[str, float]:
    """Return the parts of the pause of a run, in seconds."""
    first = {kind: min(event.time for event in tracked.events(kind)) for kind in ("signal", "requeue")}
    second = {kind: max(event.time for event in tracked.events(kind)) for kind in ("start", "train")}
    step = next(forward.time for forward in forwards(tracked.run, 0) if forward.time > second["train"])
    taken, given = (datetime.fromisoformat(high[field]).timestamp() for field in ("StartTime", "EndTime"))
    return {
        "signal to decision": first["requeue"] - first["signal"],
        "until the nodes change hands": taken - first["requeue"],
        "until Slurm starts the run again": second["start"] - given,
        "imports, rendezvous, data, checkpoint": second["train"] - second["start"],
        "first step": step - second["train"],
        "pause without the other job's time": step - first["signal"] - (given - taken),
    }


def main() -> None:
    """Measure, print medians and write the raw numbers."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.restart", description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/restart.json"))
    options = parser.parse_args()
    found: dict[str, Any] = {}
    with sandbox_with() as sandbox, tempfile.TemporaryDirectory(prefix="hpcddp-restart-") as directory:
        context = ScenarioContext(
            sandbox=sandbox, directory=Path(directory), references=References(sandbox, Path(directory))
        )
        trials = range(options.trials)
        found["hpcddp requeue, 2 x 1"] = [measure_requeue(context, f"requeue-{n}") for n in trials]
        for nodes, tasks in SHAPES:
            found[f"{nodes} x {tasks}"] = [
                measure(context, f"{nodes}-{tasks}-{n}", nodes=nodes, tasks=tasks) for n in trials
            ]
    for case, measured in found.items():
        for part in measured[0]:
            seconds = [trial[part] for trial in measured]
            print(f"{case}: {part}: {statistics.median(seconds):.1f} s ({min(seconds):.1f}-{max(seconds):.1f})")
    options.results.parent.mkdir(parents=True, exist_ok=True)
    options.results.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
