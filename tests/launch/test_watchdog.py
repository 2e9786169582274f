"""A rank that has not gone on: where it is, and who waits for whom."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from hpcddp.launch.lifeline import Lifeline
from hpcddp.launch.siblings import end_tasks, tasks_of
from hpcddp.launch.watchdog import give_up, hang_record, waits_for_others, watch
from hpcddp.run.directory import AttemptDirectory, RunDirectory
from hpcddp.run.failure import read_failures
from hpcddp.stop.heartbeat import Silence
from tests.launch.local_run import wait_for


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDirectory:
    made = RunDirectory(tmp_path / "run").attempt(0)
    made.path.mkdir(parents=True)
    return made


def frame_in(path: str) -> FrameType:
    """Return a frame of a function that stands in a file of that name."""
    names: dict[str, Any] = {}
    code: CodeType = compile("import sys\ndef stand():\n    return sys._getframe()\n", path, "exec")
    exec(code, names)
    frame: FrameType = names["stand"]()
    return frame


@pytest.mark.parametrize(
    ("path", "waits"),
    [
        ("/venv/site-packages/torch/distributed/distributed_c10d.py", True),
        ("/venv/site-packages/torch/autograd/graph.py", True),
        ("/venv/site-packages/hpcddp/train/agreement.py", True),
        ("/venv/site-packages/torch/nn/modules/conv.py", False),
        ("/usr/lib/python3.11/multiprocessing/connection.py", False),
        ("/home/me/model.py", False),
    ],
)
def test_a_rank_in_a_collective_or_a_backward_waits_for_others(path: str, *, waits: bool) -> None:
    assert waits_for_others(frame_in(path)) is waits


def test_the_record_of_a_stuck_rank_names_the_place() -> None:
    record = hang_record(Silence(seconds=301.2, step=40), frame_in("/home/me/model.py"), Lifeline())
    assert record.message == ("nothing happened for 301 s after step 40; this rank is at /home/me/model.py:3 in stand")
    assert (record.kind, record.exit_code, record.waiting, record.secondary) == ("hang", 124, False, False)


def test_the_record_of_a_waiting_rank_says_so() -> None:
    record = hang_record(Silence(seconds=1801.0, step=None), frame_in("torch/distributed/c10d.py"), Lifeline())
    assert record.message == "nothing happened for 1801 s before the first step; this rank waits for other ranks"
    assert record.waiting


def test_whoever_gives_up_dumps_all_stacks_leaves_a_record_and_ends_with_124(
    attempt: AttemptDirectory, capfd: pytest.CaptureFixture[str]
) -> None:
    ended: list[tuple[int, AttemptDirectory]] = []
    give_up(
        attempt,
        Silence(seconds=5.0, step=3),
        world_size=1,
        lifeline=Lifeline(),
        end=lambda code, of: ended.append((code, of)),
    )
    assert ended == [(124, attempt)]
    assert [record.kind for record in read_failures(attempt)] == ["hang"]
    said = capfd.readouterr().err
    assert "hangs: nothing happened for 5 s after step 3" in said
    assert "the stacks of all threads:\n" in said
    assert "test_whoever_gives_up" in said


def test_the_watchdog_is_the_lifelines_heartbeat(attempt: AttemptDirectory) -> None:
    from datetime import timedelta

    lifeline = Lifeline()
    heartbeat = watch(attempt, timedelta(minutes=5), world_size=2, lifeline=lifeline)
    try:
        assert lifeline.heartbeat is heartbeat
        assert any(thread.name == "hpcddp-watchdog" for thread in threading.enumerate())
    finally:
        heartbeat.stop()


SLEEPER = """
import signal, sys, time
if sys.argv[1] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(600)
"""


@pytest.fixture
def sleepers(attempt: AttemptDirectory) -> Iterator[list[subprocess.Popen[str]]]:
    """Start two tasks of the attempt, one that a TERM does not end and one that is stopped, and one of another."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", SLEEPER, how],
            env={**os.environ, "HPCDDP_ATTEMPT_DIR": str(directory)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for how, directory in [("deaf", attempt.path), ("stopped", attempt.path), ("other", attempt.path / "other")]
    ]
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
    os.kill(started[1].pid, signal.SIGSTOP)
    yield started
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_the_tasks_of_a_failed_attempt_are_ended_and_nobody_else(
    attempt: AttemptDirectory, sleepers: list[subprocess.Popen[str]]
) -> None:
    deaf, stopped, other = sleepers
    assert tasks_of(os.getpid(), attempt) == sorted([deaf.pid, stopped.pid])
    assert tasks_of(1, attempt) == []
    end_tasks(lambda: tasks_of(os.getpid(), attempt), own_end_s=0.1, kill_wait_s=1.0)
    wait_for(lambda: deaf.poll() is not None and stopped.poll() is not None)
    assert (deaf.returncode, stopped.returncode) == (-signal.SIGKILL, -signal.SIGTERM)
    assert other.poll() is None


def test_tasks_that_have_ended_by_themselves_are_left_alone() -> None:
    asked: list[int] = []

    def nobody() -> list[int]:
        asked.append(1)
        return []

    end_tasks(nobody, own_end_s=60.0)
    assert asked == [1]
