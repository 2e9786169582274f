"""What holds once by luck is done again and again, at random moments, on more ranks and on Slurms of other settings."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from hpcddp.run import checkpoints
from hpcddp.run.job_records import read_decision
from hpcddp.stop.faults import SAVE_POINTS
from tests.cluster.cancel_scenarios import assert_cancelled_and_told, cancelled_and_preempted
from tests.cluster.comparison import RunComparison, report
from tests.cluster.sandboxes import QUICK, sandbox_with
from tests.cluster.save_scenarios import killed_in_saves
from tests.cluster.scenarios import (
    OTHER_HOSTS,
    PREEMPTED_HOSTS,
    References,
    ScenarioContext,
    ScenarioResult,
    after_scenario,
)
from tests.cluster.slurm_faults import kill_after_requeue, kill_step_daemon
from tests.cluster.tracked_run import TrackedRun
from tests.slurm.programs import program

pytestmark = pytest.mark.long

# From the submission to the end an undisturbed run takes about this long here.
_LIFE_S = 28


def again(
    context: ScenarioContext, trials: int, trial: Callable[[ScenarioContext, str, random.Random], Any]
) -> list[Any]:
    """Do a trial many times, each with its own dice."""
    # One after the other: some scenarios run at once already, and more ranks would only wait for each other.
    return [trial(context, f"trial{number}", random.Random(number)) for number in range(trials)]


def warned_at_any_moment(context: ScenarioContext) -> list[RunComparison]:
    return again(context, 50, _warned)


def _warned(context: ScenarioContext, name: str, dice: random.Random) -> RunComparison:
    """A warning to one rank or to all, or a storm, at any moment of the run's life."""
    tracked = context.start(name, on=OTHER_HOSTS)
    time.sleep(dice.uniform(0, _LIFE_S))
    how = dice.choice(["one", "all", "storm"])
    if how == "all":
        context.sandbox.run("scancel", "--signal=USR2", tracked.job_id, check=False)
    ranks = tracked.ranks() if tracked.attempts else {}
    for _ in range({"one": 1, "all": 0, "storm": 30}[how]):
        tracked.signal(dice.randrange(2), signal.SIGUSR2, ranks)
    return context.compare("signals at random moments", tracked)


def ends_moved_at_any_moment(context: ScenarioContext) -> list[RunComparison]:
    return again(context, 10, _end_moved)


def _end_moved(context: ScenarioContext, name: str, dice: random.Random) -> RunComparison:
    """A limit of two minutes that is raised for a longer run, or a run that is suspended, at any moment."""
    is_raised = dice.random() < 0.5
    sections: dict[str, dict[str, Any]] = {"resources": {"time_limit": 2}, "requeue": {"signal_lead": None}}
    seconds = 0.75 if is_raised else 0.3
    tracked = context.start(name, on=OTHER_HOSTS, seconds=seconds, sections=sections)
    tracked.wait_for_steps(dice.randrange(4, 65))
    if is_raised:
        context.sandbox.run("scontrol", "update", f"JobId={tracked.job_id}", "TimeLimit=+5")
    else:
        context.sandbox.run("scontrol", "suspend", tracked.job_id)
        time.sleep(dice.uniform(5, 180))
        context.sandbox.run("scontrol", "resume", tracked.job_id)
    return context.compare("time limit raised, or suspended, at random moments", tracked)


def cancelled_at_any_moment(context: ScenarioContext) -> list[TrackedRun]:
    return again(context, 20, _cancelled)


def _cancelled(context: ScenarioContext, name: str, dice: random.Random) -> TrackedRun:
    """Cancelled at any moment after the first save; every other time the run is just stopping of its own."""
    tracked = context.start(name, on=OTHER_HOSTS)
    tracked.wait_until(lambda: tracked.events("save"), "a save")
    time.sleep(dice.uniform(0, 8))
    if dice.random() < 0.5:
        tracked.signal(1, signal.SIGUSR2)
        time.sleep(dice.uniform(0, 4))
    context.sandbox.run("scancel", tracked.job_id)
    tracked.wait_for_end("CANCELLED", timeout_s=60)
    time.sleep(10)
    # Slurm forgets a job an hour after its end, and the test may come later.
    assert tracked.sandbox.job(tracked.job_id)["JobState"] == "CANCELLED"
    report("scancel at random moments", tracked)
    return tracked


def killed_at_any_moment(context: ScenarioContext) -> list[RunComparison]:
    return again(context, 20, _killed)


def _killed(context: ScenarioContext, name: str, dice: random.Random) -> RunComparison:
    tracked = context.start(name, on=OTHER_HOSTS, sections={"requeue": {"max_failures": 1}})
    if dice.random() < 0.3:
        tracked.wait_until(lambda: tracked.attempts and tracked.ranks(), "a task")
    else:
        tracked.wait_for_steps(dice.randrange(7, 165))
    time.sleep(dice.uniform(0, 2))
    tracked.signal(dice.randrange(2), signal.SIGKILL)
    return context.compare("SIGKILL of a rank at random moments, max_failures 1", tracked)


def step_daemon_killed_at_any_moment(context: ScenarioContext) -> list[RunComparison]:
    return again(context, 10, _step_daemon_killed)


def _step_daemon_killed(context: ScenarioContext, name: str, dice: random.Random) -> RunComparison:
    tracked = context.start(name, on=OTHER_HOSTS)
    tracked.wait_for_steps(dice.randrange(1, 165))
    kill_step_daemon(tracked.ranks()[dice.randrange(2)])
    return context.compare("slurmstepd killed at random moments", tracked)


def preempted_at_any_moment(context: ScenarioContext) -> list[RunComparison]:
    # One after the other: they would preempt each other.
    return [_preempted(context, f"trial{number}", random.Random(number)) for number in range(15)]


def _preempted(context: ScenarioContext, name: str, dice: random.Random) -> RunComparison:
    partition = dice.choice(["low", "low0", "lowc"])
    tracked = context.start(name, on=PREEMPTED_HOSTS, partition=partition)
    tracked.wait_until(lambda: tracked.attempts, "a start")
    time.sleep(dice.uniform(0, 18))
    context.preempt()
    return context.compare(f"preemption at random moments, partition {partition}", tracked)


def cancelled_and_preempted_again(context: ScenarioContext) -> list[TrackedRun]:
    return cancelled_and_preempted(context, times=4)


def controller_killed_after_requeues(context: ScenarioContext) -> list[ScenarioResult]:
    return [result for number in range(5) for result in _controller_killed(context, number, random.Random(number))]


def _controller_killed(context: ScenarioContext, number: int, dice: random.Random) -> list[ScenarioResult]:
    """Two runs stop at once, and slurmctld is killed at most five seconds after it has requeued both."""
    # The script of a job with Requeue=0 stays until slurmctld has saved the requeue.
    stays = {"requeue": {"causes": ["time_limit"]}}
    tracked_runs = [
        context.start(f"trial{number}-{hosts}", on=hosts, sections=stays) for hosts in (PREEMPTED_HOSTS, OTHER_HOSTS)
    ]
    for tracked in tracked_runs:
        tracked.wait_for_steps(40)
    for tracked in tracked_runs:
        tracked.signal(1, signal.SIGUSR2)
    kill_after_requeue(*tracked_runs, after_s=dice.choice([0, dice.uniform(0, 5)]), away_s=dice.uniform(0, 4))
    fault = "slurmctld killed after the requeue"
    return [(tracked, context.compare(fault, tracked)) for tracked in tracked_runs]


def questions_ended_by_a_signal(context: ScenarioContext) -> list[TrackedRun]:
    with ThreadPoolExecutor(2) as executor:
        lanes = executor.map(lambda hosts: _questions_ended(context, hosts), (PREEMPTED_HOSTS, OTHER_HOSTS))
        return [tracked for lane in lanes for tracked in lane]


def _questions_ended(context: ScenarioContext, hosts: str) -> list[TrackedRun]:
    return [_question_ended(context, f"{hosts}-{number}", hosts) for number in range(5)]


def _question_ended(context: ScenarioContext, name: str, hosts: str) -> TrackedRun:
    """Preempted; SIGTERM ends the first two commands with which rank 0 asks Slurm why."""
    programs, real = context.directory / f"{name}-bin", shutil.which("scontrol")
    programs.mkdir(parents=True)
    calls = programs / "calls"
    end_first_two = f"[[ $SLURM_STEP_NUM_TASKS ]] && echo >>{calls} && (($(wc -l <{calls}) <= 2)) && kill -TERM $$"
    program(programs, "scontrol", f'{end_first_two}\nexec {real} "$@"')
    path = {"PATH": f"{programs}:{os.environ['PATH']}"}
    tracked = context.start(name, on=hosts, sections={"environment": {"env": path}})
    tracked.wait_for_steps(40)
    context.preempt(hosts)
    tracked.wait_until((tracked.run.attempt(0).path / "decision.json").exists, "the decision to stop")
    tracked.sandbox.run("scancel", tracked.job_id)
    tracked.wait_for_end("CANCELLED", timeout_s=60)
    assert len(calls.read_text()) > 2
    return tracked


def killed_in_saves_again(context: ScenarioContext) -> list[tuple[TrackedRun, RunComparison]]:
    """Three times at every point of a save."""
    orders = (SAVE_POINTS, SAVE_POINTS, tuple(reversed(SAVE_POINTS)))
    return [killed_in_saves(context, points, f"killed-{number}") for number, points in enumerate(orders)]


def preempted_on_eight_ranks(context: ScenarioContext) -> tuple[TrackedRun, RunComparison]:
    tracked = context.start("eight", nodes=4, tasks=2)
    tracked.wait_for_steps(60)
    context.preempt("n1,n2,n3,n4")
    return tracked, context.compare("preemption, 4 hosts x 2 ranks", tracked, nodes=4, tasks=2)


def five_preemptions_and_a_time_limit(context: ScenarioContext) -> tuple[TrackedRun, RunComparison]:
    limit: dict[str, dict[str, Any]] = {"resources": {"time_limit": 3}, "requeue": {"signal_lead": "10s"}}
    tracked = context.start("run", on=PREEMPTED_HOSTS, seconds=1.2, sections=limit)
    for attempt in range(5):
        tracked.wait_for_steps(6, attempt=attempt)
        context.preempt()
        tracked.wait_for_attempt(attempt + 1)
    return tracked, context.compare("five preemptions, then a time limit", tracked)


@after_scenario(warned_at_any_moment)
def test_a_warning_at_any_moment_loses_nothing(scenario_result: list[RunComparison]) -> None:
    assert [
        comparison for comparison in scenario_result if not comparison.lost_nothing or comparison.attempts > 2
    ] == []
    assert len(scenario_result) == 50


@after_scenario(ends_moved_at_any_moment, own_slurm=True)
def test_an_end_that_moves_at_any_moment_stops_nothing(scenario_result: list[RunComparison]) -> None:
    assert [
        comparison for comparison in scenario_result if not comparison.lost_nothing or comparison.attempts != 1
    ] == []
    assert len(scenario_result) == 10


@after_scenario(cancelled_at_any_moment)
def test_a_cancel_at_any_moment_is_final_and_leaves_a_checkpoint(scenario_result: list[TrackedRun]) -> None:
    for tracked in scenario_result:
        assert checkpoints.newest_valid(tracked.run.checkpoints, expected=True, warn=lambda _: None) is not None
    assert len(scenario_result) == 20


@after_scenario(killed_at_any_moment)
def test_death_at_any_moment_costs_no_step_that_was_made(scenario_result: list[RunComparison]) -> None:
    # The step in which a rank dies is begun twice.
    assert [
        comparison for comparison in scenario_result if not comparison.has_same_result or comparison.steps_lost > 1
    ] == []


@after_scenario(step_daemon_killed_at_any_moment, own_slurm=True)
def test_a_slurmstepd_that_is_killed_at_any_moment_costs_a_minute(scenario_result: list[RunComparison]) -> None:
    assert [
        comparison for comparison in scenario_result if not comparison.lost_nothing or comparison.attempts != 1
    ] == []
    assert len(scenario_result) == 10


@after_scenario(preempted_at_any_moment, own_slurm=True)
def test_preemption_at_any_moment_loses_nothing(scenario_result: list[RunComparison]) -> None:
    assert [
        comparison for comparison in scenario_result if not comparison.has_same_result or comparison.attempts != 2
    ] == []
    # A run that is taken away before it has a handler is not asked to save; then there is nothing to lose either.
    assert [comparison.steps_lost for comparison in scenario_result] == [0] * len(scenario_result)


@after_scenario(cancelled_and_preempted_again, own_slurm=True)
def test_a_cancel_wins_before_in_and_after_a_preemption_each_time(scenario_result: list[TrackedRun]) -> None:
    for tracked in scenario_result:
        assert_cancelled_and_told(tracked)
    assert len(scenario_result) == 12


@after_scenario(controller_killed_after_requeues, own_slurm=True)
def test_a_controller_that_is_killed_after_the_requeue_costs_nothing_each_time(
    scenario_result: list[ScenarioResult],
) -> None:
    assert [comparison for _, comparison in scenario_result if not comparison.lost_nothing] == []
    assert [comparison.attempts for _, comparison in scenario_result] == [2] * 10
    assert [len(tracked.events("requeue")) for tracked, _ in scenario_result] == [1] * 10


@after_scenario(questions_ended_by_a_signal, own_slurm=True)
def test_a_rank_learns_the_cause_although_a_signal_ends_its_question(scenario_result: list[TrackedRun]) -> None:
    decisions = [read_decision(tracked.run.attempt(0)) for tracked in scenario_result]
    assert [decision and decision.cause for decision in decisions] == ["preemption"] * 10


@after_scenario(killed_in_saves_again)
def test_death_three_times_at_every_point_of_a_save(scenario_result: list[tuple[TrackedRun, RunComparison]]) -> None:
    assert [comparison for _, comparison in scenario_result if not comparison.has_same_result] == []


@after_scenario(preempted_on_eight_ranks, own_slurm=True)
def test_preemption_of_eight_ranks_on_four_hosts_costs_nothing(
    scenario_result: tuple[TrackedRun, RunComparison],
) -> None:
    _, comparison = scenario_result
    assert comparison.lost_nothing, comparison
    assert comparison.attempts == 2


@after_scenario(five_preemptions_and_a_time_limit, own_slurm=True)
def test_five_preemptions_and_a_time_limit_cost_nothing(scenario_result: tuple[TrackedRun, RunComparison]) -> None:
    tracked, comparison = scenario_result
    assert comparison.lost_nothing, comparison
    causes = [event.cause for event in tracked.events("requeue")]
    assert causes[:5] == ["preemption"] * 5
    assert set(causes[5:]) == {"time_limit"}


SETTINGS = {
    "linuxproc": (),
    "linuxproc, told by the warning signal": ("SlurmctldParameters=preempt_send_user_signal",),
    "cgroup": ("ProctrackType=proctrack/cgroup",),
    "cgroup, told by the warning signal": (
        "ProctrackType=proctrack/cgroup",
        "SlurmctldParameters=preempt_send_user_signal",
    ),
    "Slurm's own waits": None,
}


@pytest.fixture(params=SETTINGS, scope="module")
def other_place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, ScenarioContext]]:
    """A Slurm with other settings."""
    settings = SETTINGS[request.param]
    directory = tmp_path_factory.mktemp("place")
    with sandbox_with(*(() if settings is None else (*QUICK, *settings))) as sandbox:
        yield (
            request.param,
            ScenarioContext(sandbox=sandbox, directory=directory, references=References(sandbox, directory)),
        )


def test_preemption_with_loader_workers_costs_nothing_under_other_settings(
    other_place: tuple[str, ScenarioContext],
) -> None:
    name, context = other_place
    context.references.of(2, 1)
    tracked = context.start("run", on=PREEMPTED_HOSTS, sections={"train": {"num_workers": 2}})
    tracked.wait_for_steps(40)
    context.preempt()
    comparison = context.compare(f"preemption, 2 workers, {name}", tracked)
    assert comparison.lost_nothing, comparison
    assert comparison.attempts == 2
