"""Signals that end a command: at once, or when a submission is recorded."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from hpcddp.errors import UserError
from hpcddp.submission.interrupts import interrupted_by_signals, interruptible, uninterrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def rehearse(signum: signal.Signals, done: list[str]) -> None:
    with interrupted_by_signals():
        os.kill(os.getpid(), signum)
        done.append("went on")


def submit_in_rehearsal(signum: signal.Signals, done: list[str], error: Exception | None = None) -> None:
    with interrupted_by_signals():
        with uninterrupted(), uninterrupted("the inner block"):
            os.kill(os.getpid(), signum)
            done.append("recorded")
            if error is not None:
                raise error
        done.append("went on")


@pytest.fixture(autouse=True)
def heard_signals() -> Iterator[None]:
    """Let SIGHUP end this process, also where the tests run under nohup."""
    handler_before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, handler_before)


@pytest.fixture
def done() -> list[str]:
    return []


@pytest.mark.parametrize("signum", SIGNALS)
def test_a_signal_interrupts_at_once(signum: signal.Signals, done: list[str]) -> None:
    handlers = [signal.getsignal(number) for number in SIGNALS]
    with pytest.raises(KeyboardInterrupt):
        rehearse(signum, done)
    assert done == []
    assert [signal.getsignal(number) for number in SIGNALS] == handlers


@pytest.mark.parametrize("signum", SIGNALS)
@pytest.mark.parametrize("error", [None, UserError("sbatch has ended")])
def test_a_signal_in_a_submission_interrupts_after_it(
    signum: signal.Signals, error: Exception | None, done: list[str]
) -> None:
    with pytest.raises(KeyboardInterrupt):
        submit_in_rehearsal(signum, done, error)
    assert done == ["recorded"]


def signal_twice(signum: signal.Signals) -> None:
    with uninterrupted("it was done"):
        os.kill(os.getpid(), signum)
        os.kill(os.getpid(), signum)


def signal_a_part(signum: signal.Signals, done: list[str], *, before: bool) -> None:
    with uninterrupted("it was done"):
        if before:
            os.kill(os.getpid(), signum)
            done.append("held")
        with interruptible():
            os.kill(os.getpid(), signum)
            done.append("went on")


@pytest.mark.parametrize("signum", SIGNALS)
def test_what_was_done_all_the_same_is_told(signum: signal.Signals, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt, match=r"^it was done$"):
        signal_twice(signum)
    assert capfd.readouterr().err.splitlines() == [
        f"hpcddp: {signum.name}: the command ends as soon as the submission is complete or undone"
    ]


@pytest.mark.parametrize("signum", SIGNALS)
def test_a_part_that_may_take_long_is_interrupted(signum: signal.Signals, done: list[str]) -> None:
    for before in (True, False):
        with pytest.raises(KeyboardInterrupt, match=r"^$"):
            signal_a_part(signum, done, before=before)
    assert done == ["held"]


def signal_in_inner_block(signum: signal.Signals, done: list[str]) -> None:
    with uninterrupted("it was done"):
        for name in ("first", "second"):
            with uninterrupted("the inner block"), interruptible():
                os.kill(os.getpid(), signum)
                done.append(name)


@pytest.mark.parametrize("signum", SIGNALS)
def test_a_part_of_an_inner_block_waits_for_the_end_of_the_outer_one(signum: signal.Signals, done: list[str]) -> None:
    with pytest.raises(KeyboardInterrupt, match=r"^it was done$"):
        signal_in_inner_block(signum, done)
    assert done == ["first", "second"]


@pytest.mark.parametrize("signum", SIGNALS)
def test_a_signal_that_is_ignored_interrupts_nothing(signum: signal.Signals, done: list[str]) -> None:
    """As SIGHUP under nohup."""
    handler_before = signal.signal(signum, signal.SIG_IGN)
    try:
        rehearse(signum, done)
        submit_in_rehearsal(signum, done)
        assert signal.getsignal(signum) is signal.SIG_IGN
    finally:
        signal.signal(signum, handler_before)
    assert done == ["went on", "recorded", "went on"]


def test_without_a_signal_nothing_is_interrupted() -> None:
    with interrupted_by_signals(), uninterrupted():
        pass
