"""The heartbeat of a rank and its watchdog."""

from __future__ import annotations

import threading

import pytest

from hpcddp.stop.heartbeat import Heartbeat, HeartbeatGap


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.mark.parametrize(("configured", "first"), [(60.0, 1800.0), (300.0, 1800.0), (900.0, 5400.0)])
def test_before_the_first_step_the_timeout_is_long(clock: Clock, configured: float, first: float) -> None:
    assert Heartbeat(configured, monotonic=clock).timeout_s == first


def test_after_the_first_step_the_timeout_is_the_configured_one(clock: Clock) -> None:
    heartbeat = Heartbeat(300.0, monotonic=clock)
    clock.now += 700.0
    heartbeat.at_step(1)
    assert (heartbeat.timeout_s, heartbeat.step) == (300.0, 1)


def test_the_timeout_is_at_least_ten_times_the_slowest_wait(clock: Clock) -> None:
    heartbeat = Heartbeat(300.0, monotonic=clock)
    heartbeat.at_step(1)
    for seconds in (5.0, 45.0, 2.0):
        clock.now += seconds
        heartbeat.beat()
    assert heartbeat.timeout_s == 450.0


def test_the_timeout_is_never_longer_than_before_the_first_step(clock: Clock) -> None:
    heartbeat = Heartbeat(300.0, monotonic=clock)
    heartbeat.at_step(1)
    clock.now += 1000.0
    heartbeat.at_step(2)
    assert heartbeat.timeout_s == 1800.0


def test_a_long_wait_has_the_long_timeout_until_the_next_heartbeat(clock: Clock) -> None:
    heartbeat = Heartbeat(300.0, monotonic=clock)
    heartbeat.at_step(1)
    heartbeat.expect_long()
    assert heartbeat.timeout_s == 1800.0
    heartbeat.beat()
    assert heartbeat.timeout_s == 300.0


def test_a_wait_that_was_announced_is_no_slow_step(clock: Clock) -> None:
    heartbeat = Heartbeat(300.0, monotonic=clock)
    heartbeat.at_step(1)
    heartbeat.expect_long()
    clock.now += 120.0
    heartbeat.at_step(2)
    assert heartbeat.timeout_s == 300.0


def test_silence_counts_from_the_last_heartbeat(clock: Clock) -> None:
    heartbeat = Heartbeat(300.0, monotonic=clock)
    heartbeat.at_step(7)
    clock.now += 12.0
    assert heartbeat.gap() == HeartbeatGap(seconds=12.0, step=7)


def test_time_in_which_the_process_stood_still_counts_toward_no_timeout(clock: Clock) -> None:
    """A job that Slurm suspends for an hour and resumes is no hang."""
    heartbeat = Heartbeat(300.0, monotonic=clock)
    heartbeat.at_step(1)
    heartbeat.look()
    clock.now += 3600.0
    heartbeat.look()
    assert heartbeat.gap().seconds == 0.0
    assert heartbeat.stood_still_s() == 3600.0


def test_a_standstill_is_reported_for_a_minute_after_it(clock: Clock) -> None:
    heartbeat = Heartbeat(300.0, monotonic=clock)
    heartbeat.at_step(1)
    heartbeat.look()
    clock.now += 200.0
    heartbeat.look()
    told = []
    for _ in range(70):
        told.append(heartbeat.stood_still_s() > 0)
        clock.now += 1.0
        heartbeat.look()
    assert told == [True] * 60 + [False] * 10


@pytest.mark.parametrize("seconds", [3.0, 5.0, 140.0])
def test_a_standstill_for_which_no_watchdog_gives_a_rank_up_is_none(clock: Clock, seconds: float) -> None:
    """The host was busy, or the job was suspended: another rank failed for another reason."""
    heartbeat = Heartbeat(300.0, monotonic=clock)
    heartbeat.at_step(1)
    heartbeat.look()
    clock.now += seconds
    heartbeat.look()
    assert heartbeat.stood_still_s() == 0.0


def test_the_watchdog_calls_once_when_the_heartbeat_stops() -> None:
    hung = threading.Event()
    gaps: list[HeartbeatGap] = []

    def on_hang(gap: HeartbeatGap) -> None:
        gaps.append(gap)
        hung.set()

    heartbeat = Heartbeat(0.2, on_hang)
    heartbeat.start()
    heartbeat.at_step(3)
    assert hung.wait(30)
    assert [gap.step for gap in gaps] == [3]


def test_each_silence_is_told_once_and_only_between_steps(clock: Clock) -> None:
    silences: list[int | None] = []
    heartbeat = Heartbeat(300.0, on_silence=lambda: silences.append(heartbeat.step), monotonic=clock)

    def be_silent(seconds: int) -> None:
        for _ in range(seconds):
            clock.now += 1
            heartbeat.look()

    # Before the first step a training may compile.
    be_silent(60)
    heartbeat.at_step(1)
    be_silent(20)
    assert silences == []
    be_silent(20)
    heartbeat.at_step(2)
    be_silent(30)
    heartbeat.expect_long()
    be_silent(60)
    assert silences == [1, 2]


def test_a_stopped_watchdog_calls_nothing() -> None:
    hung = threading.Event()
    heartbeat = Heartbeat(0.2, lambda _: hung.set())
    heartbeat.start()
    heartbeat.at_step(1)
    heartbeat.stop()
    assert not hung.wait(1.0)
