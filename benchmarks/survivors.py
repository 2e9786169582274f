"""Kill ranks of trainings on a real Slurm, and compare what comes of them with undisturbed runs.

    python -m benchmarks.survivors [--runs 10] [--nodes 4] [--tasks 2] [--what single|pair|cut|during] [--output FILE]

As root: the hosts are network namespaces. In each run four ranks are killed, one after the other: in every other run
at named places of a step (before its backward, before its update, between steps, in an evaluation, in a save), in the
others at random moments. A new process takes the place of the dead one before the next kill. With ``pair`` two ranks
die, the second one at most 50 ms after the first: often while the others leave their generation or form the next. With
``cut`` a host is cut off, once in each run, and the job allows one node less.

With ``during``, on three hosts with one rank each, a rank dies, and a second fault comes while the others recover: a
further death, a rank that is stopped, a slurmstepd that is killed, a full disk, slurmctld away, or a host that is cut
off and lives on, in turn. In six runs of twelve the others go on with fewer, and the second fault comes within 0.3 s;
in the next six they wait for the new process, and it comes within 5 s.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from benchmarks.soak import place_of_soak
from tests.cluster.recoveries import difference
from tests.cluster.scenarios import STEPS_PER_EPOCH, ScenarioContext
from tests.cluster.slurm_faults import kill_step_daemon, link_cut, wait_for_node, without_controller
from tests.cluster.tracked_run import TrackedRun, records
from tests.small_disk import FILLS, make_room

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
    cut_until_the_end(tracked, f"n{dice.randrange(2, nodes + 1)}")
    return [moment]


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """A recovery that a second fault is to meet.

    Attributes:
        tracked: the run, with one rank on each host.
        rank: one of the ranks that are left, not on the host of the batch script.
        dice: decides.
    """

    tracked: TrackedRun
    rank: int
    dice: random.Random


def _further_death(recovery: Recovery) -> None:
    recovery.tracked.signal(recovery.rank, signal.SIGKILL)


def _rank_stopped(recovery: Recovery) -> None:
    recovery.tracked.signal(recovery.rank, signal.SIGSTOP)


def _step_daemon_killed(recovery: Recovery) -> None:
    kill_step_daemon(recovery.tracked.ranks()[recovery.rank])


def _disk_full(recovery: Recovery) -> None:
    disk = recovery.tracked.job.parents[1]
    FILLS[recovery.dice.choice(list(FILLS))](disk)
    try:
        # There is room again before the last save.
        time.sleep(recovery.dice.uniform(1, 8))
    finally:
        make_room(disk)


def _controller_away(recovery: Recovery) -> None:
    with without_controller(recovery.tracked.sandbox, signal=recovery.dice.choice(["TERM", "KILL"])):
        time.sleep(recovery.dice.uniform(1, 15))


def _host_cut_off(recovery: Recovery) -> None:
    """The host stays alone until the job has ended: its rank lives on, and reaches the run directory."""
    cut_until_the_end(recovery.tracked, f"n{recovery.rank + 1}")


SECOND_FAULTS: Final = (
    _further_death,
    _rank_stopped,
    _step_daemon_killed,
    _disk_full,
    _controller_away,
    _host_cut_off,
)


def fault_during_recovery(tracked: TrackedRun, dice: random.Random, number: int, within_s: float) -> float:
    """Kill a rank, and cause the second fault of a trial while the others recover from it; return when the first was.

    Args:
        tracked: the run.
        dice: decides.
        number: the number of the trial.
        within_s: how long after the death the second fault comes at most, in seconds.
    """
    wait_for_moment(tracked, dice, 0)
    ranks = tracked.ranks()
    dead = dice.choice(sorted(ranks))
    rank = dice.choice([rank for rank in sorted(ranks) if rank not in (0, dead)])
    moment = time.time()
    tracked.signal(dead, signal.SIGKILL, ranks)
    time.sleep(dice.uniform(0, within_s))
    second_fault(number)(Recovery(tracked=tracked, rank=rank, dice=dice))
    return moment


def second_fault(number: int) -> Callable[[Recovery], None]:
    """Return the second fault of a trial."""
    return SECOND_FAULTS[number % len(SECOND_FAULTS)]


def cut_until_the_end(tracked: TrackedRun, host: str) -> None:
    """Cut a host off until the job has ended."""
    with link_cut(tracked.sandbox, host):
        tracked.wait_until(lambda: tracked.sandbox.job(tracked.job_id)["JobState"] == "COMPLETED", "the end of the job")
    wait_for_node(tracked.sandbox, host)


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
    for event in broken:
        # A kill may have hit a new process that had not joined, which breaks nothing.
        kills_before = [moment for moment in moments if moment <= event.time]
        killed_at = kills_before[-1] if kills_before else event.time - event.facts["seconds"]
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
        "has_same_bits": tracked.result["parameters_sha256"] == reference.result["parameters_sha256"],
        "death_to_next_step_s": pauses,
        "longest_pause_s": round(max(b - a for a, b in pairwise(sorted(times.values()))), 3),
        "join_s": [round(event.facts["seconds"], 3) for event in joins],
    }


def run_trial(context: ScenarioContext, number: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run one training under faults, and return what came of it."""
    what, nodes, tasks = options.what, options.nodes, options.tasks
    dice = random.Random(number)
    sections: dict[str, Any] = {"requeue": {"max_failures": 20}, "launch": {"hang_timeout": "20s"}}
    behaviour: dict[str, float] = {}
    fault = "random moments"
    if what == "single" and number % 2 == 0:
        fault = faults_of(dice, nodes * tasks)
        sections["environment"] = {"env": {"HPCDDP_FAULTS": fault}}
    elif what == "during":
        fault = second_fault(number).__name__.strip("_")
        if number // len(SECOND_FAULTS) % 2 == 1:
            behaviour["depends_on_ranks"] = 1
    if what == "cut" or fault == "host_cut_off":
        sections["resources"] = {"min_nodes": nodes - 1}
    reference = context.references.of(nodes, tasks, behaviour)
    tracked = context.start(
        f"run-{number}", nodes=nodes, tasks=tasks, seconds=options.seconds, behaviour=behaviour, sections=sections
    )
    moments: list[float] = []
    trial = {"run": number, "faults": fault, "waits": bool(behaviour)}
    try:
        if what == "cut":
            moments = cut_a_host(tracked, dice, nodes)
        elif what == "during":
            moments = [fault_during_recovery(tracked, dice, number, 5.0 if behaviour else 0.3)]
        elif fault == "random moments":
            moments = kill_at_random(tracked, dice, nodes * tasks, at_once=2 if what == "pair" else 1)
        tracked.wait_for_end("COMPLETED", timeout_s=400)
    except AssertionError as error:
        context.sandbox.cancel_all()
        return {**trial, "problem": str(error)}
    return {**trial, **result_of(tracked, reference, moments)}


def main() -> None:
    """Run the trials, print and write what came of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--tasks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.1)
    parser.add_argument("--what", choices=("single", "pair", "cut", "during"), default="single")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.what == "during":
        options.nodes, options.tasks = 3, 1
    results = []
    with (
        tempfile.TemporaryDirectory(prefix="hpcddp-survivors-") as directory,
        place_of_soak(Path(directory)) as context,
    ):
        for number in range(options.first, options.first + options.runs):
            result = run_trial(context, number, options)
            results.append(result)
            print(json.dumps(result), flush=True)
            if options.output is not None:
                document = {
                    "what": __doc__.splitlines()[0],
                    "ranks": options.nodes * options.tasks,
                    "runs": results,
                }
                options.output.write_text(json.dumps(document, indent=1) + "\n")
    pauses = [pause for result in results for pause in result.get("death_to_next_step_s", [])]
    if pauses:
        middle = statistics.median(pauses)
        print(f"{len(pauses)} deaths: next step after {min(pauses):.3f} / {middle:.3f} / {max(pauses):.3f} s")


if __name__ == "__main__":
    main()
