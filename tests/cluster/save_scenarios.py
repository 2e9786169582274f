"""Runs that die or fail in saves, and those that go on from a damaged one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hpcddp.run import checkpoints
from tests.cluster.cancel_scenarios import cancel
from tests.cluster.comparison import report
from tests.cluster.jobs import HPCDDP
from tests.cluster.scenarios import ONE_HOST, OTHER_HOSTS, STEPS_PER_EPOCH, ScenarioContext, ScenarioResult
from tests.cluster.tracked_run import TrackedRun


def faults(*texts: str) -> dict[str, Any]:
    return {"environment": {"env": {"HPCDDP_FAULTS": ";".join(texts)}}}


# One before the checkpoint has its name, one between name and `latest`; the others are taken by the repetitions.
SOME_POINTS = ("save.manifest", "save.latest")


def killed_in_saves(
    context: ScenarioContext, points: tuple[str, ...] = SOME_POINTS, name: str = "killed"
) -> ScenarioResult:
    """The rank is killed at points of a save, once in each attempt, always in its second save."""
    # In an attempt that begins after epoch e, the second save comes two epochs later; before that one is published.
    texts = [
        f"kill@{point}:{STEPS_PER_EPOCH * (attempt + 2)},attempt={attempt}" for attempt, point in enumerate(points)
    ]
    budgets: dict[str, Any] = {"max_failures": len(points), "max_attempts_without_progress": len(points) + 1}
    tracked = context.start(name, nodes=1, on=ONE_HOST, seconds=0.01, sections={**faults(*texts), "requeue": budgets})
    return tracked, context.compare(f"SIGKILL at each of {len(points)} points of a save", tracked, nodes=1)


def cancelled_then_damaged(context: ScenarioContext) -> ScenarioResult:
    """Cancelled in the middle; its newest checkpoint is damaged; then continued, by a new job, to the end."""
    tracked = context.start("run", on=OTHER_HOSTS)
    tracked.wait_until(lambda: len(tracked.events("save")) >= 3, "three saves")
    report("scancel in the training", cancel(tracked))
    assert tracked.attempts == 1
    newest = checkpoints.list_checkpoints(tracked.run.checkpoints)[0] / "model.pt"
    damaged = bytearray(newest.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    newest.write_bytes(damaged)
    resumed = resume(tracked)
    return resumed, context.compare("scancel, then submit --resume with the newest checkpoint damaged", resumed)


def resume(tracked: TrackedRun, *job: Path) -> TrackedRun:
    """Continue a run that has ended, under a new job id."""
    done = tracked.sandbox.run(*HPCDDP, "submit", *job, "--resume", tracked.run.path, "--json", cwd=tracked.job.parent)
    document = json.loads(done.stdout)
    assert document["run_dir"] == str(tracked.run.path)
    return TrackedRun(sandbox=tracked.sandbox, job=tracked.job, run=tracked.run, job_id=document["job_id"])
