"""A full disk around a stop and the next start, and a run directory that is away for seconds: the run goes on."""

from __future__ import annotations

import random
import signal
import sys
import time
from collections.abc import Iterator

import pytest

from tests.cluster.commands import script, start
from tests.cluster.comparison import RunComparison
from tests.cluster.sandboxes import QUICK, sandbox_with
from tests.cluster.scenarios import (
    ONE_HOST,
    OTHER_HOSTS,
    PREEMPTED_HOSTS,
    STEPS_PER_EPOCH,
    References,
    ScenarioContext,
    ScenarioResult,
    after_scenario,
)
from tests.cluster.tracked_run import TrackedRun, take_directory_away, trace_file
from tests.small_disk import FILLS, make_room, small_disk

_PAGE = 4096
_TRIALS = 10


@pytest.fixture(scope="module")
def on_small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScenarioContext]:
    """A Slurm whose hosts see a small disk; they do not see what is mounted later."""
    disk = tmp_path_factory.mktemp("disk")
    with small_disk(disk, size="32m", inodes=2000), sandbox_with(*QUICK) as sandbox:
        references = References(sandbox, tmp_path_factory.mktemp("references"))
        yield ScenarioContext(sandbox=sandbox, directory=disk, references=references)


def stopped_on_full_disk(
    context: ScenarioContext, name: str, kind: str, *, nodes: int = 1, steps: int = 40
) -> ScenarioResult:
    """The disk is full from just before a stop until the next start has waited for a time."""
    tracked = context.start(name, nodes=nodes, seconds=0.15)
    tracked.wait_for_steps(steps)
    traces = [trace_file(tracked.attempt, rank) for rank in range(nodes)]
    # The model that is under test writes one more line in each step, into the last page of these files.
    tracked.wait_until(lambda: all(path.stat().st_size % _PAGE < _PAGE // 2 for path in traces), "room for the traces")
    FILLS[kind](context.directory)
    try:
        tracked.signal(nodes - 1, signal.SIGUSR2)
        tracked.wait_until(lambda: int(context.sandbox.job(tracked.job_id)["Restarts"]) == 1, "the requeue")
        context.sandbox.wait(tracked.job_id, states={"RUNNING"})
        time.sleep(10)
    finally:
        make_room(context.directory)
    return tracked, context.compare(f"disk full at a stop and the next start, {kind}", tracked, nodes=nodes)


def full_before_a_program_starts(context: ScenarioContext) -> TrackedRun:
    """The disk is full from just before a command's tasks begin until they have waited for space."""
    directory = context.directory / "program"
    directory.mkdir()
    gate = directory / "gate"
    # slurmstepd runs it just before each task.
    prolog = directory / "prolog"
    prolog.write_text(f"#!/bin/sh\n: >{directory}/waits-$SLURM_PROCID\nuntil [ -e {gate} ]; do sleep 0.1; done\n")
    prolog.chmod(0o700)
    setup = f"environment.setup=['export SLURM_TASK_PROLOG={prolog}']"
    program = (sys.executable, script(directory, "print('at work')"))
    words = ("--nodes", "2", "--nodelist", OTHER_HOSTS, "--time", "5", "--set", setup, "--", *program)
    tracked = start(context.sandbox, directory, *words)
    tracked.wait_until(lambda: len(list(directory.glob("waits-*"))) == 2, "the prologs of the tasks")
    FILLS["bytes"](context.directory)
    try:
        gate.touch()
        meeting = tracked.run.attempt(0).ranks
        tracked.wait_until(meeting.exists, "the meeting of the ranks")
        for _ in range(10):
            # What an earlier run still removes is no space for this one.
            FILLS["bytes"](context.directory)
            time.sleep(1)
        assert not list(tracked.attempt.path.glob("e*-rank-*.json")), "no rank has ended"
    finally:
        make_room(context.directory)
    tracked.wait_until_finished()
    return tracked


def away_at_the_end(context: ScenarioContext, name: str = "end", seconds: float = 8) -> ScenarioResult:
    """The run directory is away when the attempt ends."""
    tracked = context.start(name, nodes=1, on=ONE_HOST)
    tracked.wait_for_steps(40)
    tracked.signal(0, signal.SIGUSR2)
    tracked.wait_until(tracked.attempt.decision.exists, "the decision")
    take_directory_away(tracked, seconds)
    return tracked, context.compare("run directory away at the end of an attempt", tracked, nodes=1)


def away_at_a_preemption(context: ScenarioContext) -> ScenarioResult:
    """The run directory goes away when Slurm preempts the job, for longer than KillWait and the delay of a requeue."""
    tracked = context.start("preemption", on=PREEMPTED_HOSTS)
    tracked.wait_for_steps(40)
    context.preempt()
    tracked.wait_until(tracked.attempt.decision.exists, "the decision")
    take_directory_away(tracked, 25)
    return tracked, context.compare("run directory away for 25 s at a preemption", tracked)


def away_at_a_save(context: ScenarioContext) -> ScenarioResult:
    """The run directory is away for longer than it takes from one save to the next."""
    tracked = context.start("save", on=OTHER_HOSTS)
    tracked.wait_for_steps(2 * STEPS_PER_EPOCH - 5)
    take_directory_away(tracked, 3)
    return tracked, context.compare("run directory away at a save", tracked)


def assert_went_on(tracked: TrackedRun, comparison: RunComparison) -> None:
    assert comparison.has_same_result, comparison
    assert comparison.attempts == 2
    # The save at the stop had no space; those before it stay.
    assert comparison.steps_lost <= 2 * STEPS_PER_EPOCH
    assert [event.kind for event in tracked.events("failure")] == []


@pytest.mark.parametrize(
    "kind", ["bytes", pytest.param("inodes", marks=pytest.mark.long("both are one error of the kernel"))]
)
def test_a_full_disk_at_a_stop_and_the_next_start_does_not_end_the_run(
    on_small_disk: ScenarioContext, kind: str
) -> None:
    assert_went_on(*stopped_on_full_disk(on_small_disk, kind, kind))


def test_a_program_waits_for_space_on_a_disk_that_was_full_before_it_started(on_small_disk: ScenarioContext) -> None:
    tracked = full_before_a_program_starts(on_small_disk)
    assert tracked.attempts == 1
    assert tracked.result["status"] == "finished"


@after_scenario(away_at_the_end)
def test_a_run_directory_that_is_away_at_the_end_of_an_attempt_costs_nothing(scenario_result: ScenarioResult) -> None:
    _, comparison = scenario_result
    assert comparison.lost_nothing, comparison
    assert comparison.attempts == 2


@pytest.mark.long
@after_scenario(away_at_a_preemption)
def test_a_run_directory_that_is_away_at_a_preemption_fails_no_job(scenario_result: ScenarioResult) -> None:
    _, comparison = scenario_result
    assert comparison.lost_nothing, comparison
    assert comparison.attempts == 2


@after_scenario(away_at_a_save)
def test_a_run_directory_that_is_away_at_a_save_costs_nothing(scenario_result: ScenarioResult) -> None:
    tracked, comparison = scenario_result
    assert comparison.lost_nothing, comparison
    assert comparison.attempts == 1
    assert "the training goes on" in tracked.log()


@pytest.mark.long
@pytest.mark.parametrize("trial", range(_TRIALS))
def test_a_full_disk_at_any_stop_does_not_end_the_run(on_small_disk: ScenarioContext, trial: int) -> None:
    dice = random.Random(trial)
    kind = dice.choice(list(FILLS))
    assert_went_on(*stopped_on_full_disk(on_small_disk, f"trial-{trial}", kind, nodes=2, steps=dice.randrange(10, 100)))


def away_at_many_ends(context: ScenarioContext) -> list[ScenarioResult]:
    return [
        away_at_the_end(context, f"trial-{trial}", random.Random(trial).uniform(0.5, 15)) for trial in range(_TRIALS)
    ]


@pytest.mark.long
@after_scenario(away_at_many_ends, long=True)
def test_a_run_directory_that_is_away_at_the_end_costs_nothing_again_and_again(
    scenario_result: list[ScenarioResult],
) -> None:
    assert [comparison for _, comparison in scenario_result if not comparison.lost_nothing] == []
    assert [comparison.attempts for _, comparison in scenario_result] == [2] * _TRIALS
