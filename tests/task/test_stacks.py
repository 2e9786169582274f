"""The stacks of processes that go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hpcddp.task import stacks
from hpcddp.task.stacks import ProcessStacks, lines_of, parse_lines, stacks_of_host
from tests.facts import assert_facts
from tests.messages import GoldenMessages
from tests.waiting import wait_until

LISTENING = """
import sys, time
from hpcddp.task.signals import show_stacks_on_request

def waits_in_a_function():
    print("ready", flush=True)
    time.sleep(600)

if "--deaf" not in sys.argv:
    show_stacks_on_request()
waits_in_a_function()
"""
STARTING = """
import subprocess, sys
subprocess.run([sys.executable, "-c", "import time; print('ready', flush=True); time.sleep(600)"])
"""
# A loader process is forked.
LOADER = """
import multiprocessing, time

def hangs():
    print("ready", flush=True)
    time.sleep(600)

worker = multiprocessing.get_context("fork").Process(target=hangs)
"""
TRAINS = "worker.start()\nworker.join()\n"
LISTENS = "from hpcddp.task.signals import show_stacks_on_request\nshow_stacks_on_request()\n"
SPAWNING = """
import multiprocessing, sys, time
if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[-1])
    process = context.Process(target=time.sleep, args=(600,))
    process.start()
    print("ready", flush=True)
    process.join()
"""


@contextmanager
def task(attempt: Path, code: str, *words: str, rank: int = 0, path: str = "") -> Iterator[subprocess.Popen[str]]:
    """Start a process that looks like a task of an attempt, and kill it and its child at the end."""
    environment = {**os.environ, "HPCDDP_ATTEMPT_DIR": str(attempt), "RANK": str(rank), "SLURMD_NODENAME": "n1"}
    environment["PATH"] = f"{path}:{os.environ['PATH']}" if path else os.environ["PATH"]
    process = subprocess.Popen(
        [sys.executable, "-c", code, "hpcddp.task", *words],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)


def seen(attempt: Path, *, node: str | None = "n1", programs: bool = False) -> list[ProcessStacks]:
    return list(stacks_of_host(str(attempt), node=node, programs=programs, host="n1"))


def test_a_task_shows_where_it_is_again_and_again_and_goes_on(tmp_path: Path) -> None:
    with task(tmp_path, LISTENING, rank=3) as process:
        for _ in range(2):
            (found,) = seen(tmp_path)
            assert (found.rank, found.host, found.pid) == (3, "n1", process.pid)
            assert sum("in waits_in_a_function" in line for line in found.lines) == 1
        assert process.poll() is None


def test_only_the_tasks_of_the_attempt_and_of_the_node_are_asked(tmp_path: Path) -> None:
    with task(tmp_path, LISTENING):
        assert seen(tmp_path / "another") == []
        assert seen(tmp_path, node="n2") == []
        assert len(seen(tmp_path, node=None)) == 1


def test_the_service_that_starts_new_tasks_is_no_rank(tmp_path: Path) -> None:
    with task(tmp_path, LISTENING, rank=3) as process, task(tmp_path, LISTENING, "--deaf", "hpcddp.supervise"):
        assert [found.pid for found in seen(tmp_path)] == [process.pid]


def test_a_task_that_does_not_listen_is_not_ended_by_the_signal(tmp_path: Path) -> None:
    with task(tmp_path, LISTENING, "--deaf") as process:
        (found,) = seen(tmp_path)
        assert "does not show its stacks" in found.lines[0]
        assert process.poll() is None


def test_a_task_that_is_stopped_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: GoldenMessages
) -> None:
    monkeypatch.setattr(stacks, "_ANSWER_TIMEOUT_S", 0.3)
    with task(tmp_path, LISTENING) as process:
        process.send_signal(signal.SIGSTOP)
        (found,) = seen(tmp_path)
        (line,) = found.lines
        assert_facts(golden.message(line), "does not answer within 0.3 s", "it may be stopped")


def test_the_program_of_a_command_is_read_by_py_spy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: GoldenMessages
) -> None:
    with task(tmp_path, STARTING, path=str(tmp_path)):
        with monkeypatch.context() as patch:
            patch.setattr(stacks, "find_py_spy", lambda _: None)
            (found,) = seen(tmp_path, programs=True)
        (line,) = found.lines
        assert_facts(golden.message(line), "need py-spy", "run: pip install py-spy")
        py_spy = tmp_path / "py-spy"
        py_spy.write_text('#!/bin/sh\necho "$@"\n')
        py_spy.chmod(0o755)
        (found,) = seen(tmp_path, programs=True)
        assert found.lines == (f"dump --full-filenames --pid {found.pid}",)
        py_spy.write_text("#!/bin/sh\necho Permission denied >&2\nexit 1\n")
        (found,) = seen(tmp_path, programs=True)
        (line,) = found.lines
        assert_facts(golden.message(line), "py-spy could not read", "Permission denied")


@pytest.fixture
def old(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count a process as one that has run for a while."""
    monkeypatch.setattr(stacks, "_NEW_S", 0.0)


@pytest.mark.usefixtures("old")
def test_a_loader_process_of_a_training_shows_where_it_hangs(tmp_path: Path) -> None:
    with task(tmp_path, LISTENS + LOADER + TRAINS, rank=3):
        rank, worker = seen(tmp_path)
        assert (rank.rank, rank.is_child, worker.rank, worker.is_child) == (3, False, 3, True)
        assert not any("in hangs" in line for line in rank.lines)
        assert any("in hangs" in line for line in worker.lines)


@pytest.mark.usefixtures("old")
def test_a_loader_process_of_a_command_is_a_child_of_its_rank(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOADER + TRAINS)
    starting = f"import subprocess, sys\nsubprocess.run([sys.executable, {str(tmp_path / 'train.py')!r}])"
    with task(tmp_path, starting, rank=3):
        rank, worker = seen(tmp_path, programs=True)
        assert (rank.rank, rank.is_child, worker.rank, worker.is_child) == (3, False, 3, True)
        assert any("hangs (" in line for line in worker.lines)


@pytest.mark.usefixtures("old")
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_process_that_multiprocessing_has_started_is_a_child_of_its_rank(tmp_path: Path, method: str) -> None:
    (tmp_path / "train.py").write_text(SPAWNING)
    words = [str(tmp_path / "train.py"), method]
    with task(tmp_path, f"import subprocess, sys\nsubprocess.run([sys.executable, *{words}])"):
        wait_until(lambda: len(seen(tmp_path, programs=True)) > 1, "the child", 60)
        assert [each.is_child for each in seen(tmp_path, programs=True)] == [False, True]


def test_a_fork_that_may_be_about_to_run_another_program_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "_NEW_S", 3600.0)
    with task(tmp_path, LISTENS + LOADER + TRAINS):
        (rank,) = seen(tmp_path)
        assert not rank.is_child


def test_a_command_without_python_is_told_by_what_it_runs(tmp_path: Path, golden: GoldenMessages) -> None:
    waiting = "import subprocess\nsubprocess.run(['bash', '-c', 'echo ready; sleep 600; true'])"
    with task(tmp_path, waiting, rank=3):
        wait_until(lambda: seen(tmp_path, programs=True)[0].command == "sleep 600", "the program", 60)
        (found,) = seen(tmp_path, programs=True)
        assert (found.rank, found.is_known) == (3, False)
        assert golden.message(found.lines[0]).endswith("its program runs sleep 600")


def test_lines_of_several_nodes_are_put_together_in_the_order_of_the_ranks() -> None:
    one = ProcessStacks(rank=10, host="n2", pid=7, command="python a.py", lines=("x", "", "y\tz"))
    two = ProcessStacks(rank=2, host="n1", pid=7, command="python", lines=("w" * 2000,))
    launcher = ProcessStacks(rank=None, host="n1", pid=3, command="torchrun", lines=())
    mixed = [
        line for pair in zip(lines_of(one), [*lines_of(two), *lines_of(launcher), ""], strict=True) for line in pair
    ]
    worker = ProcessStacks(rank=2, host="n1", pid=8, is_child=True, command="python", lines=("x",))
    found = parse_lines(["a line of the site's own", "a\tline\twith\tfour\ttabs", *lines_of(worker), *mixed])
    assert [(each.rank, each.is_child) for each in found] == [(2, False), (2, True), (10, False), (None, False)]
    assert found.pop(1) == worker
    assert found[1].lines == ("x", "", "y z")
    assert max(map(len, mixed)) < 1024
