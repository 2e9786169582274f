"""What holds once by luck is done again and again, at random moments, on more ranks and on Slurms of other settings."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from hpcddp.run import checkpoints
from hpcddp.stop.faults import SAVE_POINTS
from tests.slurm.account import Account, report
from tests.slurm.life import Life
from tests.slurm.play import PREEMPTED, UNDISTURBED, Place, References, looks_at
from tests.slurm.sandboxes import QUICK, sandbox_with
from tests.slurm.test_stop_checkpoints import killed_in_saves

pytestmark = pytest.mark.long

# From the submission to the end an undisturbed run takes about this long here.
_LIFE_S = 28
_AT_ONCE = 2


def again(place: Place, trials: int, trial: Callable[[Place, str, random.Random], Any]) -> list[Any]:
    """Do a trial many times, a few at once, each with its own dice."""
    with ThreadPoolExecutor(_AT_ONCE) as lanes:
        futures = [lanes.submit(trial, place, f"trial{number}", random.Random(number)) for number in range(trials)]
        return [future.result() for future in futures]


def warned_at_any_moment(place: Place) -> list[Account]:
    return again(place, 50, _warned)


def _warned(place: Place, name: str, dice: random.Random) -> Account:
    """A warning to one rank or to all, or a storm, at any moment of the run's life."""
    life = place.start(name, on=UNDISTURBED)
    time.sleep(dice.uniform(0, _LIFE_S))
    how = dice.choice(["one", "all", "storm"])
    if how == "all":
        place.sandbox.run("scancel", "--signal=USR2", life.job_id, check=False)
    ranks = life.ranks() if life.attempts else {}
    for _ in range({"one": 1, "all": 0, "storm": 30}[how]):
        life.signal(dice.randrange(2), signal.SIGUSR2, ranks)
    return place.account("signals at random moments", life)


def cancelled_at_any_moment(place: Place) -> list[Life]:
    return again(place, 20, _cancelled)


def _cancelled(place: Place, name: str, dice: random.Random) -> Life:
    """Cancelled at any moment after the first save; every other time the run is just stopping of its own."""
    life = place.start(name, on=UNDISTURBED)
    life.wait_until(lambda: life.events("save"), "a save")
    time.sleep(dice.uniform(0, 8))
    if dice.random() < 0.5:
        life.signal(1, signal.SIGUSR2)
        time.sleep(dice.uniform(0, 4))
    place.sandbox.run("scancel", life.job_id)
    life.end("CANCELLED", timeout_s=60)
    time.sleep(10)
    report("scancel at random moments", life)
    return life


def killed_at_any_moment(place: Place) -> list[Account]:
    return again(place, 20, _killed)


def _killed(place: Place, name: str, dice: random.Random) -> Account:
    life = place.start(name, on=UNDISTURBED, sections={"requeue": {"max_failures": 1}})
    if dice.random() < 0.3:
        life.wait_until(lambda: life.attempts and life.ranks(), "a task")
    else:
        life.wait_for_steps(dice.randrange(20, 500))
    time.sleep(dice.uniform(0, 2))
    life.signal(dice.randrange(2), signal.SIGKILL)
    return place.account("SIGKILL of a rank at random moments, max_failures 1", life)


def preempted_at_any_moment(place: Place) -> list[Account]:
    # One after the other: they would preempt each other.
    return [_preempted(place, f"trial{number}", random.Random(number)) for number in range(15)]


def _preempted(place: Place, name: str, dice: random.Random) -> Account:
    partition = dice.choice(["low", "low0", "lowc"])
    life = place.start(name, on=PREEMPTED, partition=partition)
    life.wait_until(lambda: life.attempts, "a start")
    time.sleep(dice.uniform(0, 18))
    place.preempt()
    return place.account(f"preemption at random moments, partition {partition}", life)


def killed_in_saves_again(place: Place) -> list[tuple[Life, Account]]:
    """Three times at every point of a save."""
    return [killed_in_saves(place, points) for points in ((*SAVE_POINTS, *SAVE_POINTS), tuple(reversed(SAVE_POINTS)))]


def preempted_on_eight_ranks(place: Place) -> tuple[Life, Account]:
    life = place.start("eight", nodes=4, tasks=2)
    life.wait_for_steps(60)
    place.preempt("n1,n2,n3,n4")
    return life, place.account("preemption, 4 hosts x 2 ranks", life, nodes=4, tasks=2)


def five_preemptions_and_a_time_limit(place: Place) -> tuple[Life, Account]:
    limit: dict[str, dict[str, Any]] = {"resources": {"time_limit": 3}, "requeue": {"signal_lead": "10s"}}
    life = place.start("life", on=PREEMPTED, seconds=0.4, sections=limit)
    for attempt in range(5):
        life.wait_for_steps(15, attempt=attempt)
        place.preempt()
        life.wait_for_attempt(attempt + 1)
    return life, place.account("five preemptions, then a time limit", life)


@looks_at(warned_at_any_moment)
def test_a_warning_at_any_moment_loses_nothing(played: list[Account]) -> None:
    assert [account for account in played if not account.is_unhurt or account.attempts > 2] == []
    assert len(played) == 50


@looks_at(cancelled_at_any_moment)
def test_a_cancel_at_any_moment_is_final_and_leaves_a_checkpoint(played: list[Life]) -> None:
    for life in played:
        assert life.sandbox.job(life.job_id)["JobState"] == "CANCELLED"
        assert checkpoints.newest_valid(life.run.checkpoints, expected=True, warn=lambda _: None) is not None
    assert len(played) == 20


@looks_at(killed_at_any_moment)
def test_death_at_any_moment_costs_at_most_the_steps_since_the_last_checkpoint(played: list[Account]) -> None:
    assert [account for account in played if not account.came_out_the_same or account.steps_lost > 24] == []


@looks_at(preempted_at_any_moment, apart=True)
def test_preemption_at_any_moment_loses_nothing(played: list[Account]) -> None:
    assert [account for account in played if not account.came_out_the_same or account.attempts != 2] == []
    # A run that is taken away before it has a handler is not asked to save; then there is nothing to lose either.
    assert [account.steps_lost for account in played] == [0] * len(played)


@looks_at(killed_in_saves_again)
def test_death_three_times_at_every_point_of_a_save(played: list[tuple[Life, Account]]) -> None:
    assert [account for _, account in played if not account.came_out_the_same] == []


@looks_at(preempted_on_eight_ranks, apart=True)
def test_preemption_of_eight_ranks_on_four_hosts_costs_nothing(played: tuple[Life, Account]) -> None:
    _, account = played
    assert account.is_unhurt, account
    assert account.attempts == 2


@looks_at(five_preemptions_and_a_time_limit, apart=True)
def test_five_preemptions_and_a_time_limit_cost_nothing(played: tuple[Life, Account]) -> None:
    life, account = played
    assert account.is_unhurt, account
    causes = [event["cause"] for event in life.events("requeue")]
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
) -> Iterator[tuple[str, Place]]:
    """A Slurm with other settings."""
    settings = SETTINGS[request.param]
    directory = tmp_path_factory.mktemp("place")
    with sandbox_with(*(() if settings is None else (*QUICK, *settings))) as sandbox:
        yield request.param, Place(sandbox=sandbox, directory=directory, references=References(sandbox, directory))


def test_preemption_with_loader_workers_costs_nothing_under_other_settings(other_place: tuple[str, Place]) -> None:
    name, place = other_place
    place.references.of(2, 1)
    life = place.start("life", on=PREEMPTED, sections={"train": {"num_workers": 2}})
    life.wait_for_steps(40)
    place.preempt()
    account = place.account(f"preemption, 2 workers, {name}", life)
    assert account.is_unhurt, account
    assert account.attempts == 2
