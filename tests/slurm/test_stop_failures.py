"""Faults that no requeue repairs: the job fails at once, says why, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Any

import pytest

from tests.slurm.account import report
from tests.slurm.life import Life
from tests.slurm.play import UNDISTURBED, Place, looks_at

Played = tuple[Life, dict[str, str]]
Sections = Mapping[str, Mapping[str, Any]]


def _failed(place: Place, fault: str, behaviour: dict[str, float], sections: Sections | None = None) -> Played:
    life = place.start(fault.replace(" ", "-"), on=UNDISTURBED, behaviour=behaviour, sections=sections)
    fields = life.end("FAILED")
    report(fault, life)
    return life, fields


def raised(place: Place) -> Played:
    return _failed(place, "exception on one rank", {"raise_at": 40})


def not_finite(place: Place) -> Played:
    return _failed(place, "NaN loss", {"nan_at": 40})


def wrong_path(place: Place) -> Played:
    return _failed(place, "wrong path on one node", {"missing_on": 1})


def left_with_zero(place: Place) -> Played:
    return _failed(place, "os._exit(0) of a rank", {"exit_at": 40})


def killed(place: Place) -> Played:
    return _ended_by(place, "SIGKILL of a rank", signal.SIGKILL)


def segmentation_fault(place: Place) -> Played:
    return _ended_by(place, "segmentation fault of a rank", signal.SIGSEGV)


def _ended_by(place: Place, fault: str, number: signal.Signals) -> Played:
    life = place.start("life", on=UNDISTURBED)
    life.wait_for_steps(40)
    life.signal(1, number)
    fields = life.end("FAILED")
    report(fault, life)
    return life, fields


def stuck(place: Place) -> Played:
    """One rank's code waits for something that never comes."""
    return _failed(place, "a rank is stuck", {"stuck_at": 40}, {"launch": {"hang_timeout": "10s"}})


def stopped(place: Place) -> Played:
    life = place.start("life", on=UNDISTURBED, sections={"launch": {"hang_timeout": "10s"}})
    life.wait_for_steps(40)
    life.signal(1, signal.SIGSTOP)
    fields = life.end("FAILED")
    report("SIGSTOP of a rank", life)
    return life, fields


def worker_killed(place: Place) -> Played:
    life = place.start("life", on=UNDISTURBED, sections={"train": {"num_workers": 2}})
    life.wait_for_steps(40)
    life.wait_until(lambda: life.workers(1), "a worker of rank 1")
    for pid in life.workers(1):
        os.kill(pid, signal.SIGKILL)
    fields = life.end("FAILED")
    report("DataLoader worker killed", life)
    return life, fields


def no_progress(place: Place) -> Played:
    """The same rank dies at the same step of each attempt, and failures would be requeued."""
    budgets = {"max_failures": 10, "max_attempts_without_progress": 2}
    return _failed(place, "fails at the same step each time", {"die_at": 5}, {"requeue": budgets})


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        pytest.param(70, "a bug in the user's model", marks=looks_at(raised), id="an exception"),
        pytest.param(70, "train.nonfinite_loss is stop", marks=looks_at(not_finite), id="a loss that is NaN"),
        pytest.param(70, "/no/such/place/weights.pt", marks=looks_at(wrong_path), id="a wrong path"),
    ],
)
def test_the_users_own_failure_is_named_and_never_requeued(played: Played, code: int, reason: str) -> None:
    life, fields = played
    assert (fields["ExitCode"], fields["Restarts"]) == (f"{code}:0", "0")
    assert life.attempts == 1
    assert (life.result["status"], life.result["exit_code"]) == ("failed", code)
    assert reason in life.result["reason"]
    assert reason in life.run.batch_log.read_text()
    assert life.events("requeue") == []


@looks_at(raised)
def test_the_first_failing_rank_and_its_host_are_named_and_not_those_that_followed(played: Played) -> None:
    life, _ = played
    assert "rank 1 on n4" in life.result["reason"]
    log = life.run.batch_log.read_text()
    assert 'raise ValueError("a bug in the user\'s model")' in log
    assert "rank 0 on n3 only followed" in log


@pytest.mark.parametrize(
    "word",
    [
        pytest.param("rank 1", marks=looks_at(killed), id="SIGKILL"),
        pytest.param("rank 1", marks=looks_at(segmentation_fault), id="a segmentation fault"),
        pytest.param("rank 1", marks=looks_at(left_with_zero), id="exit with 0"),
    ],
)
def test_a_rank_that_ends_without_a_word_is_never_a_success(played: Played, word: str) -> None:
    life, fields = played
    assert (fields["ExitCode"], fields["Restarts"]) == ("71:0", "0")
    assert life.result["status"] == "failed"
    assert word in life.result["reason"]


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param((0, 1), marks=looks_at(stuck), id="a rank is stuck"),
        # A stopped process cannot say where it stands.
        pytest.param((0,), marks=looks_at(stopped), id="a rank is stopped"),
    ],
)
def test_a_hang_ends_with_124_and_the_stacks_of_all_ranks(played: Played, ranks: tuple[int, ...]) -> None:
    life, fields = played
    assert fields["ExitCode"] == "124:0"
    assert life.result["exit_code"] == 124
    for rank in ranks:
        assert "most recent call first" in life.attempt.rank_log(rank).read_text()


@looks_at(stuck)
def test_the_stack_of_the_stuck_rank_shows_the_line_that_waits(played: Played) -> None:
    life, _ = played
    assert "_misbehave" in life.attempt.rank_log(1).read_text()


@looks_at(worker_killed)
def test_a_killed_loader_worker_is_a_clear_error_and_leaves_nothing(played: Played) -> None:
    life, fields = played
    assert fields["Restarts"] == "0"
    assert "loader worker" in life.result["reason"]
    assert "was ended by SIGKILL" in life.result["reason"]
    assert life.processes() == []


@looks_at(no_progress)
def test_a_run_that_fails_at_the_same_step_each_time_stops_after_its_budget(played: Played) -> None:
    life, fields = played
    assert fields["ExitCode"] == "93:0"
    assert life.attempts == 2
    assert (life.result["status"], life.result["exit_code"]) == ("failed", 93)
