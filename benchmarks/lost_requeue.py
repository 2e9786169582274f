"""Kill slurmctld just after it has acknowledged a requeue, and see what becomes of the run.

usage: python -m benchmarks.lost_requeue [--trials 60] [--seed 1] [--at-once 5] [--results FILE]

As root: the hosts are network namespaces. Each trial draws how the requeue is made (``hpcddp requeue``, or a preemption
with a grace time), 1 or 2 hosts, when slurmctld is killed (0 to 6 s after the acknowledgement, half of them in the
first half second), and how long it is away. Prints a table, and writes a row for each trial.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any, Final

from hpcddp.slurm.job import ENDED_STATES
from tests.cluster.commands import script, start
from tests.cluster.jobs import HPCDDP
from tests.cluster.sandbox import Sandbox
from tests.cluster.sandboxes import QUICK, sandbox_with
from tests.cluster.slurm_faults import without_controller
from tests.cluster.tracked_run import TrackedRun
from tests.waiting import wait_until

AWAY_S: Final = (2, 10, 25, 40, 90)
# Slurm repairs a requeue that it has forgotten when the node registers the next time: up to SlurmdTimeout and more.
PATIENCE_S: Final = 300.0
# From the summary of the batch script to the moment when slurmctld has heard of its end.
_EXIT_S: Final = 0.5
PROGRAM: Final = """
    import os, signal, sys, time
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    print("at work", flush=True)
    if os.environ["HPCDDP_ATTEMPT"] == "0":
        time.sleep(900)
"""


def drawn_trials(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the settings of each trial."""
    dice = random.Random(seed)
    for number in range(count):
        delay_s = dice.uniform(0, 0.5) if number % 2 else dice.uniform(0.5, 6)
        yield {
            "number": number,
            "by": ("requeue", "preemption")[number // 2 % 2],
            "nodes": dice.choice([1, 2]),
            "killed_after_s": round(delay_s, 2),
            "away_s": AWAY_S[number % len(AWAY_S)],
        }


def run_trial(sandbox: Sandbox, directory: Path, trial: dict[str, Any]) -> dict[str, Any]:
    """Run one trial; return its settings and what became of it."""
    hosts = ",".join(f"n{number + 1}" for number in range(trial["nodes"]))
    words = ("--nodes", str(trial["nodes"]), "--nodelist", hosts, "--partition", "low", "--time", "20")
    tracked = start(sandbox, directory, *words, "--", sys.executable, script(directory, PROGRAM))
    logs = [tracked.run.attempts / "0" / f"rank-{rank}.log" for rank in range(trial["nodes"])]
    wait_until(lambda: all(log.exists() and "at work" in log.read_text() for log in logs), "the start", 120)
    # After a change slurmctld saves its state at once, but not again within the next six seconds.
    sandbox.submit("--hold", "--output=/dev/null", "--wrap=true")
    if trial["by"] == "requeue":
        sandbox.run(*HPCDDP, "requeue", tracked.run.path)
    else:
        count = str(trial["nodes"])
        sandbox.submit("--partition=high", "--exclusive", f"--nodelist={hosts}", f"--nodes={count}", "--wrap=sleep 1")
    wait_until(lambda: sandbox.job(tracked.job_id)["Restarts"] == "1", "the requeue", 120)
    acknowledged = time.time()
    time.sleep(trial["killed_after_s"])
    printed, killed = _summary_time(tracked), time.time()
    with without_controller(sandbox, signal="KILL"):
        time.sleep(trial["away_s"])
    back = time.time()
    window_s = None if printed is None else round(printed - acknowledged, 2)
    had_ended = printed is not None and printed < killed - _EXIT_S
    settings = {**trial, "script_had_ended": had_ended, "acknowledgement_to_end_s": window_s}
    return settings | _outcome(tracked, acknowledged, back)


def _summary_time(tracked: TrackedRun) -> float | None:
    """Return when the batch script printed its summary; None if it has not."""
    log = tracked.run.batch_log
    return log.stat().st_mtime if "Slurm runs job" in log.read_text() else None


def _outcome(tracked: TrackedRun, acknowledged: float, back: float) -> dict[str, Any]:
    """Return how the run ended, and how long it paused."""
    deadline = back + PATIENCE_S
    while time.time() < deadline:
        state = tracked.sandbox.job(tracked.job_id)["JobState"]
        if state in ENDED_STATES and tracked.attempts == 1:
            return {"outcome": state}
        if tracked.run.result.exists() and tracked.result["status"] == "finished":
            starts = [event.time for event in tracked.events("start")]
            requeues = [(event.cause, event.by) for event in tracked.events("requeue")]
            return {
                "outcome": "finished",
                "attempts": tracked.attempts,
                "requeues": requeues,
                "pause_s": round(starts[1] - acknowledged, 1),
                "repaired_by_slurm": starts[1] > back + 60,
            }
        time.sleep(0.5)
    job = tracked.sandbox.job(tracked.job_id)
    nodes = tracked.sandbox.run("sinfo", "--noheader", "--Node", "--format=%N:%T:%E").stdout.split("\n")
    return {
        "outcome": "not finished",
        "state": job["JobState"],
        "reason": job["Reason"],
        "node_states": sorted(set(nodes)),
    }


def run_trials(trials: list[dict[str, Any]], at_once: int) -> list[dict[str, Any]]:
    """Run all trials, each on one of several Slurms."""
    waiting: Queue[dict[str, Any]] = Queue()
    for trial in trials:
        waiting.put(trial)
    done: list[dict[str, Any]] = []

    def work() -> None:
        while not waiting.empty():
            # A Slurm for each trial: a node may be down after it.
            with sandbox_with(*QUICK) as sandbox, tempfile.TemporaryDirectory(prefix="hpcddp-trial-") as directory:
                row = run_trial(sandbox, Path(directory), waiting.get())
                # Not all of them: a job may not end any more.
                sandbox.run("scancel", "--user=root", check=False)
            done.append(row)
            print(json.dumps(row), flush=True)

    with ThreadPoolExecutor(at_once) as executor:
        for future in [executor.submit(work) for _ in range(at_once)]:
            future.result()
    return sorted(done, key=lambda row: row["number"])


def main() -> None:
    """Run the trials, print how they ended, and write a row for each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lost_requeue", description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=5)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/lost_requeue.json"))
    options = parser.parse_args()
    rows = run_trials(list(drawn_trials(options.trials, options.seed)), options.at_once)
    options.results.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    counts = Counter((row["script_had_ended"], row["away_s"], row["outcome"]) for row in rows)
    for (had_ended, away_s, outcome), count in sorted(counts.items()):
        when = "after the script's end" if had_ended else "before the script's end"
        print(f"killed {when}, away {away_s} s: {outcome}: {count}")


if __name__ == "__main__":
    main()
