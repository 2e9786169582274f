"""Death during a save, full disks, rotten files, another number of ranks: what a run goes on from is always whole."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cluster.comparison import report
from tests.cluster.save_scenarios import SOME_POINTS, cancelled_then_damaged, faults, killed_in_saves, resume
from tests.cluster.scenarios import ONE_HOST, OTHER_HOSTS, ScenarioContext, ScenarioResult, after_scenario
from tests.cluster.tracked_run import TrackedRun, records


def disk_trouble(context: ScenarioContext) -> ScenarioResult:
    """Four saves fail, each in another way, with good ones between; the folder of checkpoints is taken away too."""
    places = {"ENOSPC": "file:23", "EROFS": "begin:69", "ESTALE": "rename:115", "EIO": "manifest:161"}
    texts = [f"oserror={error}@save.{point}" for error, point in places.items()]
    tracked = context.start("disk", on=OTHER_HOSTS, sections=faults(*texts))
    tracked.wait_until(lambda: tracked.events("save"), "a save")
    tracked.run.checkpoints.rename(tracked.run.path / "elsewhere")
    return tracked, context.compare("disk full, read-only, stale handle, I/O error, checkpoint directory gone", tracked)


def other_world_size(context: ScenarioContext) -> tuple[TrackedRun, TrackedRun]:
    """One rank begins, two go on."""
    tracked = context.start("one", nodes=1, on=ONE_HOST)
    tracked.wait_until(lambda: len(tracked.events("save")) >= 2, "two saves")
    context.sandbox.run("scancel", tracked.job_id)
    tracked.wait_for_end("CANCELLED")
    document = json.loads(tracked.job.read_text())
    document["resources"]["tasks_per_node"] = 2
    job = tracked.job.with_name("two.yaml")
    job.write_text(json.dumps(document))
    resumed = resume(tracked, job)
    resumed.wait_until_finished()
    report("another world size on resume", resumed)
    return resumed, context.references.of(1, 1)


@after_scenario(killed_in_saves, long=True)
def test_death_at_a_point_of_a_save_leaves_a_checkpoint_to_go_on_from(scenario_result: ScenarioResult) -> None:
    tracked, comparison = scenario_result
    assert comparison.has_same_result, comparison
    assert comparison.attempts == len(SOME_POINTS) + 1
    assert all(event.step for event in tracked.events("train")[1:])


@after_scenario(disk_trouble)
def test_saves_that_fail_and_a_folder_that_is_gone_cost_nothing_but_warnings(
    scenario_result: ScenarioResult,
) -> None:
    tracked, comparison = scenario_result
    assert comparison.lost_nothing, comparison
    assert comparison.attempts == 1
    for words in ("No space left on device", "Read-only file system", "Stale file handle", "Input/output error"):
        assert words in tracked.log()


@after_scenario(cancelled_then_damaged)
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
    assert tracked.result["world_size"] == 2
    ours, theirs = ([(one["step"], one["samples_seen"]) for one in records(run.run)] for run in scenario_result)
    assert ours == theirs
    losses = ([one["loss"] for one in records(run.run)] for run in (tracked, reference))
    assert [abs(one - other) < 1e-9 for one, other in zip(*losses, strict=True)] == [True] * len(ours)
