"""The record and the end of a rank that makes no progress."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from hpcddp.run.directory import AttemptDirectory, RunDirectory
from hpcddp.run.failure import read_failures
from hpcddp.stop.heartbeat import HeartbeatGap
from hpcddp.task.local_peers import end_tasks, tasks_of
from hpcddp.task.process_state import ProcessState
from hpcddp.task.watchdog import (
    end_hung_rank,
    hang_record,
    mark_wait,
    start_watchdog,
    trace_variables,
    waits_for_others,
)
from tests.facts import assert_facts, line_from
from tests.messages import GoldenMessages
from tests.waiting import wait_until


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
        ("/venv/site-packages/hpcddp/train/loop/agreement.py", True),
        ("/venv/site-packages/torch/nn/modules/conv.py", False),
        ("/usr/lib/python3.11/multiprocessing/connection.py", False),
        ("/home/me/model.py", False),
    ],
)
def test_a_rank_in_a_collective_or_a_backward_waits_for_others(path: str, *, waits: bool) -> None:
    assert waits_for_others(frame_in(path)) is waits


def test_a_rank_that_waits_for_others_leaves_a_mark(attempt: AttemptDirectory) -> None:
    mark_wait(attempt, 1, frame_in("/venv/site-packages/torch/distributed/distributed_c10d.py"))
    mark_wait(attempt, 2, frame_in("/home/me/model.py"))
    assert [path.name for path in attempt.path.iterdir()] == ["waits-rank-1"]


def test_the_record_of_a_stuck_rank_names_the_place(golden: GoldenMessages) -> None:
    record = hang_record(HeartbeatGap(seconds=301.2, step=40), frame_in("/home/me/model.py"), ProcessState())
    message = golden.message(record.message)
    assert_facts(message, "nothing happened for 301 s after step 40", "this rank is at /home/me/model.py:3 in stand")
    assert (record.kind, record.exit_code, record.waiting, record.secondary) == ("hang", 124, False, False)


def test_the_record_of_a_waiting_rank_says_so(golden: GoldenMessages) -> None:
    record = hang_record(HeartbeatGap(seconds=1801.0, step=None), frame_in("torch/distributed/c10d.py"), ProcessState())
    message = golden.message(record.message)
    assert_facts(message, "nothing happened for 1801 s before the first step", "this rank waits for other ranks")
    assert record.waiting


def test_a_hung_rank_dumps_all_stacks_writes_a_record_and_exits_with_124(
    attempt: AttemptDirectory, capfd: pytest.CaptureFixture[str], golden: GoldenMessages
) -> None:
    ended: list[tuple[int, AttemptDirectory]] = []
    end_hung_rank(
        attempt,
        HeartbeatGap(seconds=5.0, step=3),
        world_size=1,
        process_state=ProcessState(),
        end=lambda code, of: ended.append((code, of)),
    )
    assert ended == [(124, attempt)]
    assert [record.kind for record in read_failures(attempt)] == ["hang"]
    said = capfd.readouterr().err
    sentence, _, _ = line_from(said, "hangs: ").partition("; this rank is at ")
    assert_facts(golden.message(sentence), "nothing happened for 5 s", "after step 3")
    assert "the stacks of all threads:\n" in said
    assert "test_a_hung_rank_dumps" in said


def test_a_hung_rank_keeps_its_collectives(attempt: AttemptDirectory) -> None:
    process_state = ProcessState(rank=1)
    process_state.collective_trace = lambda: json.dumps({"entries": []})
    end_hung_rank(attempt, HeartbeatGap(seconds=5.0, step=3), process_state=process_state, end=lambda *_: None)
    assert json.loads(attempt.rank_collectives(1).read_text()) == {"entries": []}


def test_a_hung_rank_ends_although_its_collectives_cannot_be_had(attempt: AttemptDirectory) -> None:
    def fail() -> str:
        raise RuntimeError("CUDA error")

    ended: list[int] = []
    process_state = ProcessState()
    process_state.collective_trace = fail
    with pytest.raises(RuntimeError, match="CUDA error"):
        end_hung_rank(
            attempt,
            HeartbeatGap(seconds=5.0, step=3),
            process_state=process_state,
            end=lambda code, _: ended.append(code),
        )
    assert ended == [124]


BLOCKED = """
import sys, time
from pathlib import Path
from hpcddp.run.directory import AttemptDirectory
from hpcddp.stop.heartbeat import HeartbeatGap
from hpcddp.task import watchdog
from hpcddp.task.process_state import ProcessState

watchdog._TRACE_TIMEOUT_S = 0.5
process_state = ProcessState()
process_state.collective_trace = lambda: time.sleep(600)
attempt, gap = AttemptDirectory(Path(sys.argv[1])), HeartbeatGap(seconds=5.0, step=3)
watchdog.end_hung_rank(attempt, gap, process_state=process_state)
"""


def test_a_recorder_that_never_answers_does_not_keep_a_hung_rank_alive(attempt: AttemptDirectory) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, str(attempt.path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1, done.stderr
    assert [record.kind for record in read_failures(attempt)] == ["hang"]


@pytest.mark.parametrize(
    ("chosen", "added"),
    [
        ({}, True),
        ({"TORCH_FR_DUMP_TEMP_FILE": "/mine"}, False),
        ({"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/mine"}, False),
    ],
)
def test_torchs_own_trace_goes_to_the_attempt_unless_the_user_chose(
    chosen: dict[str, str], attempt: AttemptDirectory, *, added: bool
) -> None:
    expected = {"TORCH_FR_DUMP_TEMP_FILE": f"{attempt.path}/torch-trace-rank-"} if added else {}
    assert trace_variables(attempt, chosen) == expected


def test_the_watchdog_watches_the_heartbeat_of_the_process_state(attempt: AttemptDirectory) -> None:
    process_state = ProcessState()
    heartbeat = start_watchdog(attempt, timedelta(minutes=5), world_size=2, process_state=process_state)
    try:
        assert process_state.heartbeat is heartbeat
        assert any(thread.name == "hpcddp-watchdog" for thread in threading.enumerate())
    finally:
        heartbeat.stop()


def test_the_watchdog_does_not_wait_for_a_file_system_that_does_not_answer(
    attempt: AttemptDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_called, answers = threading.Event(), threading.Event()

    def mark(*_: object) -> None:
        is_called.set()
        answers.wait()

    monkeypatch.setattr("hpcddp.task.watchdog.mark_wait", mark)
    monkeypatch.setattr("hpcddp.stop.heartbeat._SILENT_AFTER_S", 0.0)
    heartbeat = start_watchdog(attempt, timedelta(minutes=5), world_size=2, process_state=ProcessState())
    heartbeat.stop()
    heartbeat.at_step(1)
    watching = threading.Thread(target=heartbeat.look, daemon=True)
    watching.start()
    try:
        assert is_called.wait(30)
        watching.join(timeout=5)
        assert not watching.is_alive()
    finally:
        answers.set()


def test_the_watchdog_goes_on_where_no_thread_can_be_started_for_the_mark(
    attempt: AttemptDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at a limit of processes; an error would end the watchdog, and a hang would last until the time limit."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("hpcddp.stop.heartbeat._SILENT_AFTER_S", 0.0)
    heartbeat = start_watchdog(attempt, timedelta(minutes=5), world_size=2, process_state=ProcessState())
    heartbeat.stop()
    heartbeat.at_step(1)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    heartbeat.look()


SLEEPER = """
import signal, sys, time
if sys.argv[1] == "ignores TERM":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(600)
"""


@pytest.fixture
def sleepers(attempt: AttemptDirectory) -> Iterator[list[subprocess.Popen[str]]]:
    """Start two tasks of the attempt, one that ignores TERM and one that is stopped, and a task of another attempt."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", SLEEPER, how],
            env={**os.environ, "HPCDDP_ATTEMPT_DIR": str(directory)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for how, directory in [
            ("ignores TERM", attempt.path),
            ("stopped", attempt.path),
            ("other", attempt.path / "other"),
        ]
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
    ignoring, stopped, other = sleepers
    assert tasks_of(os.getpid(), attempt) == sorted([ignoring.pid, stopped.pid])
    assert tasks_of(1, attempt) == []
    end_tasks(lambda: tasks_of(os.getpid(), attempt), own_exit_s=0.1, kill_wait_s=1.0)
    wait_until(lambda: ignoring.poll() is not None and stopped.poll() is not None, "the end of both", 120)
    assert (ignoring.returncode, stopped.returncode) == (-signal.SIGKILL, -signal.SIGTERM)
    assert other.poll() is None


def test_tasks_that_have_ended_by_themselves_are_left_alone() -> None:
    asked: list[int] = []

    def nobody() -> list[int]:
        asked.append(1)
        return []

    end_tasks(nobody, own_exit_s=60.0)
    assert asked == [1]
