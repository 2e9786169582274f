"""The process beside a rank that tells the membership service when the rank has begun to end, and how."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcddp.polling import wait_until
from hpcddp.task.channel import Channel, ChannelClosedError
from hpcddp.task.sentinel import exit_status

KEY = b"the token"
# A rank: it keeps some memory, says who watches it, and waits.
RANK = """
import os, sys, time
from hpcddp.task import sentinel
sentinel.start_sentinel(["127.0.0.1"], int(sys.argv[1]), "the token", process="n1 7", node="n1")
memory = bytearray(b"x") * (64 << 20)
print(sentinel._STARTED[0].pid, flush=True)
sys.stdin.readline()
os._exit(3)
"""


class Watched:
    """A rank, its sentinel, and the service's side of its connection."""

    def __init__(self, listener: socket.socket) -> None:
        port = str(listener.getsockname()[1])
        words = [sys.executable, "-c", RANK, port]
        self.rank = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        connection, _ = listener.accept()
        self.channel = Channel(connection, KEY, is_service=True)
        self.hello = self.channel.receive()
        self.channel.send({"welcome": 0})
        assert self.rank.stdout is not None
        self.sentinel = int(self.rank.stdout.readline())

    @property
    def has_ended(self) -> bool:
        """Whether the sentinel has ended; nobody waits for it after its parent."""
        try:
            stat = Path(f"/proc/{self.sentinel}/stat").read_text()
        except OSError:
            return True
        return stat.rpartition(")")[2].split()[0] in {"Z", "X"}

    def close(self) -> None:
        self.channel.close()
        self.rank.kill()
        self.rank.communicate()


@pytest.fixture
def watched() -> Iterator[Watched]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        watched = Watched(listener)
        yield watched
        watched.close()
        assert wait_until(lambda: watched.has_ended, timeout_s=20, poll_s=0.01)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_rank_that_a_signal_ends_is_told_with_the_signal(watched: Watched, number: signal.Signals) -> None:
    assert watched.hello == {"watches": "n1 7", "node": "n1"}
    watched.rank.send_signal(number)
    status = watched.channel.receive()["exit"]
    assert os.waitstatus_to_exitcode(status) == -number
    # The sentinel ends, and with it the connection.
    with pytest.raises(ChannelClosedError):
        watched.channel.receive()


def test_a_rank_that_ends_by_itself_is_told_with_its_exit_code(watched: Watched) -> None:
    assert watched.rank.stdin is not None
    watched.rank.stdin.write("\n")
    watched.rank.stdin.flush()
    assert os.waitstatus_to_exitcode(watched.channel.receive()["exit"]) == 3


def test_the_sentinel_ignores_what_slurm_sends_to_a_step_and_has_none_of_the_ranks_files(watched: Watched) -> None:
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP):
        os.kill(watched.sentinel, number)
    directory = Path(f"/proc/{watched.sentinel}/fd")
    files = {descriptor.name: str(descriptor.readlink()) for descriptor in directory.iterdir()}
    assert files.pop("1") == files.pop("2") == "/dev/null"
    assert {name.partition(":")[0] for name in files.values()} <= {"pipe", "socket", f"/proc/{watched.rank.pid}/stat"}
    assert watched.rank.stdout is not None
    own_pipe = str(Path(f"/proc/self/fd/{watched.rank.stdout.fileno()}").readlink())
    assert own_pipe not in files.values()
    watched.rank.kill()
    assert watched.channel.receive() == {"exit": int(signal.SIGKILL)}


def test_a_sentinel_whose_service_has_gone_ends_with_its_rank(watched: Watched) -> None:
    watched.channel.close()
    assert not wait_until(lambda: watched.has_ended, timeout_s=0.2, poll_s=0.05)


def test_a_sentinel_without_a_service_ends() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
    start = f'{{"pid": {os.getpid()}, "addresses": ["127.0.0.1"], "port": {port}, "key": "k", "hello": {{}}}}'
    words = [sys.executable, "-P", "-m", "hpcddp.task.sentinel"]
    for text in (start, ""):
        ended = subprocess.run(words, input=text, text=True, capture_output=True, check=False, timeout=60)
        assert (ended.returncode, ended.stdout, ended.stderr) == (1, "", "")


def test_the_sentinel_loads_no_torch_and_reads_no_job_file() -> None:
    code = "import sys, hpcddp.task.sentinel; print([name for name in ('torch', 'pydantic') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def stat_text(*, name: str = "python", state: str = "R", flags: int = 0x400000, status: int = 0) -> str:
    """Return the content of /proc/PID/stat."""
    fields = ["0"] * 50
    fields[0], fields[6], fields[49] = state, str(flags), str(status)
    return f"12 ({name}) {' '.join(fields)}\n"


@pytest.mark.parametrize(
    ("stat", "status"),
    [
        (stat_text(), None),
        (stat_text(status=9), None),
        (stat_text(flags=0x400004), None),
        (stat_text(flags=0x400004, status=9), 9),
        (stat_text(state="Z", flags=0x400004), 0),
        (stat_text(name="a) R 4 (b", flags=0x400004, status=9), 9),
    ],
    ids=["runs", "is about to end", "ends, and nobody knows how", "was killed", "has ended", "has a strange name"],
)
def test_the_status_of_a_process_is_known_when_it_has_begun_to_end(stat: str, status: int | None) -> None:
    assert exit_status(stat) == status


def test_the_status_of_a_process_that_runs_is_not_known() -> None:
    assert exit_status(Path("/proc/self/stat").read_text()) is None
