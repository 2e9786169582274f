"""What a task does when it hears a signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hpcddp.launch import hearing
from hpcddp.launch.hearing import CauseQuestion
from hpcddp.run.decision import read_decision
from hpcddp.run.directory import AttemptDirectory, RunDirectory
from hpcddp.run.events import append_event, read_events
from hpcddp.run.failure import FailureRecord, read_failures, write_failure
from hpcddp.stop.cause import Cause
from tests.launch.local_run import ROOT, wait_for

TASK = """
import sys, threading
from hpcddp.stop.signals import LISTENER
LISTENER.install()
from hpcddp.launch.hearing import attend
from hpcddp.run.directory import AttemptDirectory
from hpcddp.launch import hearing
from hpcddp.launch.lifeline import LIFELINE
from hpcddp.stop.cause import Cause
if len(sys.argv) > 2:
    hearing.ask_cause = lambda *_, **__: Cause(sys.argv[2])
attend(AttemptDirectory.from_text(sys.argv[1]), {})
if sys.argv[3:]:
    LIFELINE.train()
    LIFELINE.saves_alone = sys.argv[3] == "a program"
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


def start_task(attempt: AttemptDirectory, *words: str, rank: int = 3) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", TASK, str(attempt.path), *words],
        cwd=ROOT,
        env={**os.environ, "RANK": str(rank), "SLURMD_NODENAME": "n4"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


def test_a_rank_in_a_collective_that_never_ends_follows_a_failed_one_after_term(attempt: AttemptDirectory) -> None:
    process = start_task(attempt)
    process.send_signal(signal.SIGTERM)
    write_failure(attempt, record())
    _, said = process.communicate(timeout=60)
    assert process.returncode == 71
    assert "rank 3 on n4 ends here: rank 1 on n2 failed, and this rank was told to end: ValueError: boom" in said
    assert [(found.rank, found.secondary) for found in read_failures(attempt)] == [(1, False), (3, True)]


def test_a_rank_that_follows_a_hang_leaves_its_stacks_too(attempt: AttemptDirectory) -> None:
    process = start_task(attempt)
    write_failure(attempt, record(kind="hang", exit_code=124))
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 124
    assert "most recent call first" in said


def test_without_a_failure_term_ends_nobody_and_is_an_event(attempt: AttemptDirectory) -> None:
    process = start_task(attempt)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    wait_for(lambda: bool(read_events(attempt.run.events)))
    assert process.poll() is None
    process.kill()
    process.communicate()
    (event,) = read_events(attempt.run.events)
    assert (event["event"], event["reason"], event["rank"], event["host"], event["signal"]) == (
        "signal",
        "terminated",
        3,
        "n4",
        "SIGTERM",
    )


def test_ranks_that_have_made_no_step_leave_at_once_when_the_job_is_preempted(attempt: AttemptDirectory) -> None:
    append_event(attempt.run.events, kind="save", time=0.0, attempt=0, step=46)
    other, first = start_task(attempt), start_task(attempt, "preemption", rank=0)
    for process in (other, first):
        process.send_signal(signal.SIGTERM)
    for process in (other, first):
        _, said = process.communicate(timeout=60)
        assert process.returncode == 75
        assert "no step was made yet, so there is nothing to save" in said
    decision = read_decision(attempt)
    assert decision is not None
    assert (decision.step, decision.saved, decision.reason, decision.cause) == (46, True, "terminated", "preemption")
    assert read_failures(attempt) == []


@pytest.mark.parametrize("words", [("preemption", "trains"), ("unknown",), ("crash",)])
def test_ranks_that_train_or_are_ended_by_a_crash_do_not_leave(attempt: AttemptDirectory, words: list[str]) -> None:
    process = start_task(attempt, *words, rank=0)
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=2.0)
    process.kill()
    process.communicate()
    assert read_decision(attempt) is None


def test_a_program_goes_on_saving_though_a_peer_that_was_told_too_has_lost_its_connection(
    attempt: AttemptDirectory,
) -> None:
    process = start_task(attempt, "preemption", "a program")
    write_failure(attempt, record(exit_code=71, secondary=True))
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=3.0)
    process.kill()
    process.communicate()


def test_a_failure_without_term_ends_nobody(attempt: AttemptDirectory) -> None:
    process = start_task(attempt)
    write_failure(attempt, record())
    process.send_signal(signal.SIGUSR2)
    wait_for(lambda: bool(read_events(attempt.run.events)))
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=2.0)
    process.kill()
    process.communicate()


def test_the_cause_is_asked_when_it_is_wanted_at_the_latest() -> None:
    asked: list[bool] = []

    def ask(warned: bool) -> Cause:  # noqa: FBT001
        asked.append(warned)
        return Cause.PREEMPTION

    assert CauseQuestion(ask).answer() == "preemption"
    assert asked == [False]


def test_an_answer_that_knows_nothing_replaces_none_that_does() -> None:
    answers = iter([Cause.TIME_LIMIT, Cause.UNKNOWN, Cause.PREEMPTION])
    question = CauseQuestion(lambda _: next(answers))
    question.put(warned=True)
    assert question.answer() == "time_limit"
    question.put(warned=False)
    assert question.answer() == "time_limit"
    question.put(warned=False)
    assert question.answer() == "preemption"


def test_a_stop_does_not_wait_for_a_controller_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hearing, "_ANSWER_S", 0.05)
    answers = threading.Event()

    def ask(_: bool) -> Cause:  # noqa: FBT001
        answers.wait(60)
        return Cause.PREEMPTION

    assert CauseQuestion(ask).answer() is None
    answers.set()
