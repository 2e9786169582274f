"""Death during a save, full disks, rotten files, another number of ranks: what a run goes on from is always whole."""

from __future__ import annotations

import json
from pathlib import Path

from hpcddp.run import checkpoints
from tests.cluster.comparison import report
from tests.cluster.jobs import HPCDDP
from tests.cluster.save_scenarios import SOME_POINTS, faults, killed_in_saves
from tests.cluster.scenarios import OTHER_HOSTS, ScenarioContext, ScenarioResult, after_scenario
from tests.cluster.tracked_run import TrackedRun, records


def disk_trouble(context: ScenarioContext) -> ScenarioResult:
    """Four saves fail, each in another way, with good ones between."""
    places = {"ENOSPC": "file:23", "EROFS": "begin:69", "ESTALE": "rename:115", "EIO": "manifest:161"}
    texts = [f"oserror={error}@save.{point}" for error, point in places.items()]
    tracked = context.start("disk", on=OTHER_HOSTS, seconds=0.01, sections=faults(*texts))
    return tracked, context.compare("disk full, read-only, stale handle, I/O error", tracked)


def folder_gone(context: ScenarioContext) -> ScenarioResult:
    """The folder of checkpoints is taken away while it trains."""
    tracked = context.start("gone", on=OTHER_HOSTS)
    tracked.wait_until(lambda: len(tracked.events("save")) >= 2, "two saves")
    tracked.run.checkpoints.rename(tracked.run.path / "elsewhere")
    return tracked, context.compare("checkpoint directory gone", tracked)


def rotten(context: ScenarioContext) -> ScenarioResult:
    """The newest checkpoint is damaged between two attempts."""
    tracked = context.start("rotten", on=OTHER_HOSTS)
    tracked.wait_until(lambda: len(tracked.events("save")) >= 3, "three saves")
    context.sandbox.run("scancel", tracked.job_id)
    tracked.wait_for_end("CANCELLED")
    newest = checkpoints.list_checkpoints(tracked.run.checkpoints)[0] / "model.pt"
    damaged = bytearray(newest.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    newest.write_bytes(damaged)
    resumed = resume(tracked)
    return resumed, context.compare("newest checkpoint damaged", resumed)


def other_world_size(context: ScenarioContext) -> tuple[TrackedRun, TrackedRun]:
    """Two ranks begin, four go on."""
    tracked = context.start("two", on=OTHER_HOSTS)
    tracked.wait_until(lambda: len(tracked.events("save")) >= 2, "two saves")
    context.sandbox.run("scancel", tracked.job_id)
    tracked.wait_for_end("CANCELLED")
    document = json.loads(tracked.job.read_text())
    document["resources"]["tasks_per_node"] = 2
    job = tracked.job.with_name("four.yaml")
    job.write_text(json.dumps(document))
    resumed = resume(tracked, job)
    resumed.wait_until_finished()
    report("another world size on resume", resumed)
    return resumed, context.references.of(2, 1)


def resume(tracked: TrackedRun, *job: Path) -> TrackedRun:
    """Continue a run that has ended, under a new job id."""
    done = tracked.sandbox.run(*HPCDDP, "submit", *job, "--resume", tracked.run.path, "--json", cwd=tracked.job.parent)
    document = json.loads(done.stdout)
    return TrackedRun(sandbox=tracked.sandbox, job=tracked.job, run=tracked.run, job_id=document["job_id"])


@after_scenario(killed_in_saves, long=True)
def test_death_at_a_point_of_a_save_leaves_a_checkpoint_to_go_on_from(scenario_result: ScenarioResult) -> None:
    tracked, comparison = scenario_result
    assert comparison.has_same_result, comparison
    assert comparison.attempts == len(SOME_POINTS) + 1
    assert all(event.step for event in tracked.events("train")[1:])


@after_scenario(disk_trouble)
def test_saves_that_fail_now_and_then_cost_nothing_but_a_warning(scenario_result: ScenarioResult) -> None:
    tracked, comparison = scenario_result
    assert comparison.lost_nothing, comparison
    assert comparison.attempts == 1
    for words in ("No space left on device", "Read-only file system", "Stale file handle", "Input/output error"):
        assert words in tracked.log()


@after_scenario(folder_gone)
def test_a_folder_of_checkpoints_that_is_gone_does_not_end_the_training(scenario_result: ScenarioResult) -> None:
    _, comparison = scenario_result
    assert comparison.lost_nothing, comparison
    assert comparison.attempts == 1


@after_scenario(rotten)
def test_a_rotten_checkpoint_is_passed_over_by_name_for_the_one_before_it(scenario_result: ScenarioResult) -> None:
    tracked, comparison = scenario_result
    assert comparison.has_same_result, comparison
    assert "is skipped" in tracked.log()
    assert "sha256" in tracked.log()
    assert list(Path(tracked.run.checkpoints).glob("invalid-step-*"))


@after_scenario(other_world_size)
def test_twice_as_many_ranks_go_on_with_the_same_batches_to_rounding(
    scenario_result: tuple[TrackedRun, TrackedRun],
) -> None:
    tracked, reference = scenario_result
    assert tracked.result["world_size"] == 4
    ours, theirs = ([(one["step"], one["samples_seen"]) for one in records(run.run)] for run in scenario_result)
    assert ours == theirs
    losses = ([one["loss"] for one in records(run.run)] for run in (tracked, reference))
    assert [abs(one - other) < 1e-9 for one, other in zip(*losses, strict=True)] == [True] * len(ours)
