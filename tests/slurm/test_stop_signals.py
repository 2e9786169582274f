"""Signals of every kind and the end of the time limit: one save, one requeue, nothing lost."""

from __future__ import annotations

import random
import signal
import time
from typing import Any

import pytest

from tests.slurm.account import Account
from tests.slurm.life import Life
from tests.slurm.play import UNDISTURBED, Place, looks_at

Played = tuple[Life, Account]
Sections = dict[str, dict[str, Any]]


def storm(place: Place) -> Played:
    """A hundred signals within two seconds, to both ranks in no order."""
    life = place.start("storm", on=UNDISTURBED)
    life.wait_for_steps(40)
    dice, ranks = random.Random(0), life.ranks()
    for _ in range(100):
        life.signal(dice.randrange(2), dice.choice([signal.SIGUSR2, signal.SIGTERM]), ranks)
        time.sleep(0.02)
    return life, place.account("storm of signals", life)


def one_rank_only(place: Place) -> Played:
    """Only the quicker one of two ranks of different speed is warned."""
    life = place.start("one-rank", on=UNDISTURBED, behaviour={"slow_rank": 0}, seconds=0.015)
    life.wait_for_steps(40)
    life.signal(1, signal.SIGUSR2)
    return life, place.account("signal to one rank only, ranks at different speed", life)


def before_torch(place: Place) -> Played:
    """The warning comes as soon as a task is there, long before it can have imported anything."""
    life = place.start("early", on=UNDISTURBED)
    life.wait_until(lambda: life.attempts and life.ranks(), "a task")
    for _ in range(10):
        for rank in (0, 1):
            life.signal(rank, signal.SIGUSR2)
        time.sleep(0.1)
    return life, place.account("signal before torch is imported", life)


def requeued_by_the_user(place: Place) -> Played:
    life = place.start("requeued", on=UNDISTURBED)
    life.wait_for_steps(40)
    place.sandbox.run("scontrol", "requeue", life.job_id)
    return life, place.account("scontrol requeue by the user", life)


def out_of_time(place: Place) -> Played:
    """A run of more than a minute under a limit of one, with no signal but its own clock."""
    sections: Sections = {"resources": {"time_limit": 1}, "requeue": {"signal_lead": None}}
    life = place.start("unwarned", on=UNDISTURBED, seconds=0.13, sections=sections)
    return life, place.account("time limit, without Slurm's signal", life)


def warned_of_the_limit(place: Place) -> Played:
    """A run of two minutes under a limit of two, and Slurm's warning, which comes up to a minute early."""
    sections: Sections = {"resources": {"time_limit": 2}, "requeue": {"signal_lead": "10s"}}
    life = place.start("warned", on=UNDISTURBED, seconds=0.22, sections=sections)
    return life, place.account("time limit, with Slurm's signal", life)


@looks_at(storm)
def test_a_storm_of_signals_is_one_save_and_one_requeue(played: Played) -> None:
    life, account = played
    assert account.is_unhurt, account
    assert account.attempts == 2
    assert len([event for event in life.events("save") if event["reason"] == "stop"]) == 1
    assert len(life.events("requeue")) == 1


@looks_at(one_rank_only)
def test_ranks_of_different_speed_stop_after_the_same_step_when_one_of_them_is_warned(played: Played) -> None:
    life, account = played
    assert account.is_unhurt, account
    assert account.attempts == 2
    assert len(life.events("requeue")) == 1


@looks_at(before_torch)
def test_a_signal_before_torch_is_imported_is_at_most_one_stop_and_never_an_end(played: Played) -> None:
    life, account = played
    assert account.is_unhurt, account
    assert account.attempts <= 2
    assert len(life.events("requeue")) == account.attempts - 1


@looks_at(requeued_by_the_user)
def test_a_requeue_by_the_user_loses_nothing_and_restarts_once(played: Played) -> None:
    life, account = played
    assert account.is_unhurt, account
    assert (account.attempts, life.sandbox.job(life.job_id)["Restarts"]) == (2, "1")


@pytest.mark.parametrize(
    "reason",
    [
        pytest.param("warned", marks=looks_at(warned_of_the_limit, long=True), id="warned by Slurm"),
        pytest.param("deadline", marks=looks_at(out_of_time, long=True), id="by the ranks' clock"),
    ],
)
def test_a_time_limit_loses_nothing(played: Played, reason: str) -> None:
    life, account = played
    assert reason in [event["reason"] for event in life.events("stop")]
    assert account.is_unhurt, account
    assert account.attempts >= 2
    assert {event["cause"] for event in life.events("requeue")} == {"time_limit"}
    assert len(life.events("requeue")) == account.attempts - 1
