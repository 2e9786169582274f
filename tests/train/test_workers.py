"""Loader processes that are ended from outside, or end themselves."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from hpcddp.stop.listener import signals_held
from hpcddp.train.data.workers import LostWorkerError, lost_worker, register_workers, start_worker
from tests.forked_python import ForkedPython, run_python
from tests.messages import GoldenMessages
from tests.waiting import wait_until

HOLD_S = 60.0
PARENT = """
import sys
from pathlib import Path
from torch.utils.data import DataLoader
from hpcddp.train.data.workers import start_worker
from tests.train.test_workers import Slow
iterator = iter(DataLoader(Slow(), num_workers=1, worker_init_fn=start_worker, multiprocessing_context="fork"))
pid = int(next(iterator))
Path(sys.argv[1]).write_text(f"{pid}\\n")
next(iterator)
"""


# Its loader process begins when the parent has ended.
KILLED_PARENT = """
import os, signal, time
from multiprocessing import get_context
from hpcddp.train.data.workers import start_worker

def work(parent):
    while os.getppid() == parent:
        time.sleep(0.01)
    start_worker(0)
    print("goes on", flush=True)

get_context("fork").Process(target=work, args=(os.getpid(),)).start()
os.kill(os.getpid(), signal.SIGKILL)
"""


class Slow(Dataset[Any]):
    """Tells its process id first, then takes long."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        if index > 0:
            time.sleep(HOLD_S)
        return torch.tensor(os.getpid())


def test_a_worker_whose_parent_was_killed_before_it_began_ends() -> None:
    done = run_python(KILLED_PARENT)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGKILL, "", "")


@contextmanager
def loader_process() -> Iterator[tuple[Any, int]]:
    loader = DataLoader(Slow(), num_workers=1, worker_init_fn=start_worker, multiprocessing_context="fork")
    with signals_held():
        iterator: Any = iter(loader)
    # torch installs it once for each process.
    handler = signal.getsignal(signal.SIGCHLD)
    register_workers(iterator)
    yield iterator, int(next(iterator))
    iterator._shutdown_workers()
    signal.signal(signal.SIGCHLD, handler)


@pytest.fixture
def worker() -> Iterator[tuple[Any, int]]:
    """Start a loader process and return the iterator and the process's id."""
    with loader_process() as started:
        yield started


def is_there(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR2, signal.SIGINT])
def test_a_worker_ignores_what_asks_the_job_for_a_save(worker: tuple[Any, int], signum: signal.Signals) -> None:
    _, pid = worker
    # From somebody else than its parent: Slurm's daemon.
    assert os.spawnlp(os.P_WAIT, "sh", "sh", "-c", f"kill -{signum.value} {pid}") == 0
    time.sleep(0.3)
    assert is_there(pid)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("signum", "facts"),
    [
        (signal.SIGKILL, ("ended by SIGKILL", "the memory", "ask for more with resources.mem", "train.num_workers")),
        (signal.SIGSEGV, ("ended by SIGSEGV", "a crash in native code")),
        (signal.SIGBUS, ("ended by SIGBUS", "/dev/shm is full", "train.num_workers")),
        # A real-time signal has no name.
        (40, ("ended by signal 40", "another process has sent")),
    ],
)
def test_a_killed_worker_is_named_with_the_likely_reason(
    golden: GoldenMessages, worker: tuple[Any, int], signum: int, facts: tuple[str, ...]
) -> None:
    iterator, pid = worker
    os.spawnlp(os.P_WAIT, "sh", "sh", "-c", f"(sleep 0.2; kill -{int(signum)} {pid}) &")
    with pytest.raises(RuntimeError) as caught:
        next(iterator)
    lost = lost_worker(caught.value)
    assert lost is not None
    message = golden.message(lost, {f"pid {pid}": "pid PID"})
    for fact in (f"loader worker 0 (pid {pid})", *facts):
        assert fact in message
    assert isinstance(lost, LostWorkerError)
    assert (lost.kind, lost.exit_code) == ("loader_worker", 71)


def test_the_next_killed_worker_does_not_take_the_place_of_the_first(worker: tuple[Any, int]) -> None:
    iterator, pid = worker
    with loader_process() as (_, other_pid):
        os.spawnlp(os.P_WAIT, "sh", "sh", "-c", f"(sleep 0.2; kill -KILL {pid}) &")
        with pytest.raises(RuntimeError) as caught:
            next(iterator)
        assert f"(pid {pid}) was ended by SIGKILL" in str(lost_worker(caught.value))
        os.kill(other_pid, signal.SIGKILL)
        wait_until(lambda: not is_there(other_pid), "the end of the other worker")
        # SIGCHLD may come a moment later.
        time.sleep(0.5)


def test_another_error_is_no_lost_worker() -> None:
    assert lost_worker(RuntimeError("Connection closed by peer")) is None


def test_an_unknown_worker_is_named_by_its_process_id(golden: GoldenMessages) -> None:
    lost = lost_worker(RuntimeError("DataLoader worker (pid(s) 999999999) exited unexpectedly"))
    message = golden.message(lost)
    assert "loader worker (pid 999999999) ended" in message
    assert "look above for what it printed" in message


def test_a_worker_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    parent = ForkedPython(PARENT, str(told))
    try:
        wait_until(lambda: told.exists() and told.read_text().endswith("\n"), "the other process")
    finally:
        parent.kill()
        parent.wait()
        parent.communicate()
    wait_until(lambda: not is_there(int(told.read_text())), "the other process")
