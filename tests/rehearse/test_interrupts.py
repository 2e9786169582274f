"""Signals that end a rehearsal: at once, or when a submission is recorded."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from hpcddp.errors import UserError
from hpcddp.rehearse.interrupts import interrupted_afterwards, interrupted_by_signals
from hpcddp.submission.submit import uninterrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def rehearse(signum: signal.Signals, done: list[str]) -> None:
    with interrupted_by_signals():
        os.kill(os.getpid(), signum)
        done.append("went on")


def submit_in_rehearsal(signum: signal.Signals, done: list[str], error: Exception | None = None) -> None:
    with interrupted_by_signals():
        with interrupted_afterwards(), uninterrupted():
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
    with interrupted_by_signals(), interrupted_afterwards():
        pass
