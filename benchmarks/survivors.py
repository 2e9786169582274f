"""Kill ranks of trainings on a real Slurm, and compare what comes of them with undisturbed runs.

    python -m benchmarks.survivors [--runs 10] [--nodes 4] [--tasks 2] [--what single|pair|cut] [--output FILE]

As root: the hosts are network namespaces. In each run four ranks are killed, one after the other: in every other run
at named places of a step (before its backward, before its update, between steps, in an evaluation, in a save), in the
others at random moments. A new process takes the place of the dead one before the next kill. With ``pair`` two ranks
die, the second one at most 50 ms after the first: often while the others leave their generation or form the next. With
``cut`` a host is cut off, once in each run, and the job allows one node less.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from tests.cluster.recoveries import difference
from tests.cluster.sandboxes import QUICK, sandbox_with
from tests.cluster.scenarios import STEPS_PER_EPOCH, References, ScenarioContext
from tests.cluster.slurm_faults import link_cut
from tests.cluster.tracked_run import TrackedRun, records

PLACES: Final = ("backward", "update", "step", "evaluation", "save.file")
_KILLS: Final = 4


def faults_of(dice: random.Random, ranks: int) -> str:
    """Return kills at named places, far enough apart for a new process to join between two of them."""
    faults = []
    for number in range(_KILLS):
        place = dice.choice(PLACES)
        epoch = 1 + 2 * number
        step = (
            epoch * STEPS_PER_EPOCH
            if place in {"evaluation", "save.file"}
            else epoch * STEPS_PER_EPOCH + dice.randrange(1, 20)
        )
        # Rank 0 alone saves.
        rank = 0 if place == "save.file" else dice.randrange(ranks)
        faults.append(f"kill@{place}:{step},rank={rank}")
    return ";".join(faults)


def wait_for_moment(tracked: TrackedRun, dice: random.Random, number: int) -> None:
    """Wait until a random moment, far enough from those of other numbers for a new process to join between them."""
    target = (1 + 2 * number) * STEPS_PER_EPOCH + dice.uniform(1, 20)
    while steps_recorded(tracked) < target:
        time.sleep(0.02)
    time.sleep(dice.uniform(0, 0.2))


def kill_at_random(tracked: TrackedRun, dice: random.Random, ranks: int, *, at_once: int) -> list[float]:
    """Kill ranks at random moments, several within 50 ms; return when."""
    moments = []
    for number in range(_KILLS):
        wait_for_moment(tracked, dice, number)
        pids = tracked.ranks()
        moments.append(time.time())
        for rank in dice.sample(range(ranks), at_once):
            tracked.signal(rank, signal.SIGKILL, pids)
            time.sleep(dice.uniform(0, 0.05) if at_once > 1 else 0)
    return moments


def cut_a_host(tracked: TrackedRun, dice: random.Random, nodes: int) -> list[float]:
    """Cut a host off, but not that of the batch script, until the job has ended; return when."""
    wait_for_moment(tracked, dice, 0)
    moment = time.time()
    with link_cut(tracked.sandbox, f"n{dice.randrange(2, nodes + 1)}"):
        tracked.wait_until(lambda: tracked.sandbox.job(tracked.job_id)["JobState"] == "COMPLETED", "the end of the job")
    return [moment]


def steps_recorded(tracked: TrackedRun) -> int:
    """Return how many steps a run has recorded."""
    path = tracked.run.metrics
    return path.read_bytes().count(b'"loss"') if path.exists() else 0


def result_of(tracked: TrackedRun, reference: TrackedRun, moments: list[float]) -> dict[str, Any]:
    """Return what came of a run."""
    found = difference(tracked, reference)
    times = {record["step"]: record["time"] for record in records(tracked.run)}
    recoveries = tracked.events("recovery")
    broken = [event for event in recoveries if event.cause]
    joins = [event for event in recoveries if not event.cause and "seconds" in event.facts]
    pauses = []
    for index, event in enumerate(broken):
        killed_at = moments[index] if index < len(moments) else event.time - event.facts["seconds"]
        pauses.append(round(times[(event.step or 0) + 1] - killed_at, 3))
    return {
        "status": tracked.result["status"],
        "attempts": tracked.attempts,
        "restarts": len(tracked.events("restart")) + len(tracked.events("requeue")),
        "broken_generations": len(broken),
        "joins": len(joins),
        "without_success": [event.reason for event in recoveries if event not in broken and event not in joins],
        "each_step_once": found.each_once,
        "largest_loss_difference": found.loss,
        "largest_parameter_difference": found.parameters,
        "death_to_next_step_s": pauses,
        "join_s": [round(event.facts["seconds"], 3) for event in joins],
    }


def main() -> None:
    """Run the trials, print and write what came of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--tasks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.1)
    parser.add_argument("--what", choices=("single", "pair", "cut"), default="single")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    ranks = options.nodes * options.tasks
    results = []
    with tempfile.TemporaryDirectory(prefix="hpcddp-survivors-") as text, sandbox_with(*QUICK) as sandbox:
        directory = Path(text)
        references = References(sandbox, directory)
        context = ScenarioContext(sandbox=sandbox, directory=directory, references=references)
        reference = references.of(options.nodes, options.tasks)
        for number in range(options.first, options.first + options.runs):
            dice = random.Random(number)
            faults = faults_of(dice, ranks) if options.what == "single" and number % 2 == 0 else None
            sections: dict[str, Any] = {"requeue": {"max_failures": 20}}
            if options.what == "cut":
                sections["resources"] = {"min_nodes": options.nodes - 1}
            if faults is not None:
                sections["environment"] = {"env": {"HPCDDP_FAULTS": faults}}
            tracked = context.start(
                f"run-{number}", nodes=options.nodes, tasks=options.tasks, seconds=options.seconds, sections=sections
            )
            moments: list[float] = []
            if options.what == "cut":
                moments = cut_a_host(tracked, dice, options.nodes)
            elif faults is None:
                moments = kill_at_random(tracked, dice, ranks, at_once=2 if options.what == "pair" else 1)
            tracked.wait_for_end("COMPLETED", timeout_s=400)
            result = {"run": number, "faults": faults or "random moments", **result_of(tracked, reference, moments)}
            results.append(result)
            print(json.dumps(result), flush=True)
            if options.output is not None:
                options.output.write_text(
                    json.dumps({"what": __doc__.splitlines()[0], "ranks": ranks, "runs": results}, indent=1) + "\n"
                )
    pauses = [pause for result in results for pause in result["death_to_next_step_s"]]
    if pauses:
        middle = statistics.median(pauses)
        print(f"{len(pauses)} deaths: next step after {min(pauses):.3f} / {middle:.3f} / {max(pauses):.3f} s")


if __name__ == "__main__":
    main()
