"""Reactions of a task to signals."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from hpcddp.run.directory import AttemptDirectory, RunDirectory
from hpcddp.run.events import append_event, read_events
from hpcddp.run.failure import read_failures, write_failure
from hpcddp.run.job_records import FailureRecord, read_decision
from hpcddp.stop.reasons import Cause, StopReason
from hpcddp.task import signals
from hpcddp.task.signals import CauseQuery
from tests.facts import assert_facts, line_from
from tests.forked_python import ForkedPython
from tests.messages import GoldenMessages
from tests.waiting import wait_until

TASK = """
import os, sys, threading
from hpcddp.stop.listener import LISTENER
LISTENER.install()
from hpcddp.task.signals import handle_signals
from hpcddp.run.directory import AttemptDirectory
from hpcddp.task import signals
from hpcddp.task.process_state import PROCESS_STATE
from hpcddp.stop.reasons import Cause
if len(sys.argv) > 2:
    signals.ask_cause = lambda *_, **__: Cause(sys.argv[2])
PROCESS_STATE.read_environment(os.environ)
handle_signals(AttemptDirectory.from_text(sys.argv[1]), {})
if sys.argv[3:]:
    PROCESS_STATE.start_training()
    PROCESS_STATE.saves_alone = sys.argv[3] == "a program"
print("up", flush=True)
# A collective that never ends.
lock = threading.Lock()
lock.acquire()
lock.acquire()
"""


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDirectory:
    made = RunDirectory(tmp_path / "run").attempt(0)
    made.path.mkdir(parents=True)
    return made


def record(*, kind: str = "ValueError", exit_code: int = 70, secondary: bool = False) -> FailureRecord:
    return FailureRecord(
        rank=1,
        host="n2",
        time=1.0,
        kind=kind,
        message="boom",
        traceback="",
        exit_code=exit_code,
        secondary=secondary,
    )


def start_task(attempt: AttemptDirectory, *words: str, rank: int = 3) -> ForkedPython:
    environment = {**os.environ, "RANK": str(rank), "SLURM_PROCID": str(rank), "SLURMD_NODENAME": "n4"}
    process = ForkedPython(TASK, str(attempt.path), *words, env=environment)
    assert process.stdout.readline() == "up\n"
    return process


def test_a_rank_in_a_collective_that_never_ends_follows_a_failed_one_after_term(
    attempt: AttemptDirectory, golden: GoldenMessages
) -> None:
    process = start_task(attempt)
    process.send_signal(signal.SIGTERM)
    write_failure(attempt, record())
    _, said = process.communicate(timeout=60)
    assert process.returncode == 71
    message = golden.message(line_from(said, "rank 3 on n4 ends here"))
    assert_facts(message, "rank 1 on n2 failed", "this rank was told to end", "ValueError: boom")
    assert [(found.rank, found.secondary) for found in read_failures(attempt)] == [(1, False), (3, True)]


def test_a_rank_that_ends_after_a_hang_dumps_its_stacks_too(attempt: AttemptDirectory) -> None:
    process = start_task(attempt)
    write_failure(attempt, record(kind="hang", exit_code=124))
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 124
    assert "most recent call first" in said


def test_without_a_failure_term_ends_no_rank_and_is_an_event(attempt: AttemptDirectory) -> None:
    process = start_task(attempt)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: bool(read_events(attempt.run.events)), "an event", 120)
    assert process.poll() is None
    process.kill()
    process.communicate()
    (event,) = read_events(attempt.run.events)
    assert (event.kind, event.reason, event.facts["rank"], event.host, event.facts["signal"]) == (
        "signal",
        "terminated",
        3,
        "n4",
        "SIGTERM",
    )


def test_ranks_that_have_made_no_step_exit_at_once_when_the_job_is_preempted(
    attempt: AttemptDirectory, golden: GoldenMessages
) -> None:
    append_event(attempt.run.events, kind="save", time=0.0, attempt=0, step=46)
    other, first = start_task(attempt), start_task(attempt, "preemption", rank=0)
    for process in (other, first):
        process.send_signal(signal.SIGTERM)
    for process in (other, first):
        _, said = process.communicate(timeout=60)
        assert process.returncode == 75
        assert_facts(golden.message(line_from(said, "no step was made")), "nothing to save")
    decision = read_decision(attempt)
    assert decision is not None
    assert (decision.step, decision.saved, decision.reason, decision.cause) == (
        46,
        True,
        StopReason.TERMINATED,
        "preemption",
    )
    assert read_failures(attempt) == []


@pytest.mark.parametrize("words", [("preemption", "trains"), ("unknown",), ("crash",)])
def test_ranks_that_train_or_that_get_term_for_a_crash_do_not_exit_at_once(
    attempt: AttemptDirectory, words: list[str]
) -> None:
    process = start_task(attempt, *words, rank=0)
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=2.0)
    process.kill()
    process.communicate()
    assert read_decision(attempt) is None


def test_a_program_may_go_on_saving_after_a_secondary_failure_of_a_peer(
    attempt: AttemptDirectory,
) -> None:
    process = start_task(attempt, "preemption", "a program")
    write_failure(attempt, record(exit_code=71, secondary=True))
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=3.0)
    process.kill()
    process.communicate()


def test_a_failure_without_term_ends_no_other_rank(attempt: AttemptDirectory) -> None:
    process = start_task(attempt)
    write_failure(attempt, record())
    process.send_signal(signal.SIGUSR2)
    wait_until(lambda: bool(read_events(attempt.run.events)), "an event", 120)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=2.0)
    process.kill()
    process.communicate()


def test_the_first_call_of_answer_asks_for_the_cause() -> None:
    asked: list[bool] = []

    def ask(warned: bool) -> Cause:  # noqa: FBT001
        asked.append(warned)
        return Cause.PREEMPTION

    assert CauseQuery(ask).answer() == "preemption"
    assert asked == [False]


def test_an_unknown_cause_does_not_replace_a_known_one() -> None:
    answers = iter([Cause.TIME_LIMIT, Cause.UNKNOWN, Cause.PREEMPTION])
    query = CauseQuery(lambda _: next(answers))
    query.ask(warned=True)
    assert query.answer() == "time_limit"
    query.ask(warned=False)
    assert query.answer() == "time_limit"
    query.ask(warned=False)
    assert query.answer() == "preemption"


def test_a_stop_does_not_wait_for_a_controller_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "_ANSWER_TIMEOUT_S", 0.05)
    answers = threading.Event()

    def ask(_: bool) -> Cause:  # noqa: FBT001
        answers.wait(60)
        return Cause.PREEMPTION

    assert CauseQuery(ask).answer() is None
    answers.set()


@pytest.mark.parametrize(
    ("rank", "shown", "recorded"), [("0", "preemption", ["preemption"]), ("0", "unknown", []), ("1", "preemption", [])]
)
def test_the_cause_that_slurm_shows_rank_0_is_recorded_at_once(
    attempt: AttemptDirectory, rank: str, shown: str, recorded: list[str]
) -> None:
    process = start_task(attempt, shown, "a program", rank=int(rank))
    try:
        process.send_signal(signal.SIGTERM)

        def kinds() -> list[str]:
            return [event.kind for event in read_events(attempt.run.events)]

        wait_until(lambda: "signal" in kinds() and kinds().count("cause") == len(recorded), "the events", 60)
    finally:
        process.kill()
        process.communicate()
    assert [event.cause for event in read_events(attempt.run.events) if event.kind == "cause"] == recorded
