"""The example of a loop of one's own: stopped by a signal to one rank, started again, it loses no step."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import IO

import pytest

from hpcddp.run.checkpoints import list_checkpoints

ROOT = Path(__file__).parents[2]
STEPS = 24
_LINE = re.compile(r"step (\d+)  loss (\S+)")


def start(run: Path, ranks: int, *options: str) -> list[subprocess.Popen[str]]:
    """Start the example as torchrun does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # What a launcher around the tests may have set is none of the example's business.
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "HPCDDP_"))}
    clean |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    return [
        subprocess.Popen(
            [sys.executable, "examples/own_loop.py", str(run), "--steps", str(STEPS), "--save-every", "10", *options],
            env=clean | (group | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]


def end(processes: Sequence[subprocess.Popen[str]]) -> tuple[list[int], list[str]]:
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [process.returncode for process in processes], outputs


def steps(output: str) -> list[tuple[str, str]]:
    return _LINE.findall(output)


def read_until(stream: IO[str] | None, text: str) -> str:
    assert stream is not None
    seen = ""
    while text not in seen:
        line = stream.readline()
        assert line, seen
        seen += line
    return seen


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], str]:
    """Return a function with what an undisturbed training of so many ranks prints."""

    @cache
    def train(ranks: int) -> str:
        codes, said = end(start(tmp_path_factory.mktemp("whole") / "run", ranks))
        assert codes == [0] * ranks, said
        assert [step for step, _ in steps(said[0])] == [str(step + 1) for step in range(STEPS)]
        return said[0]

    return train


@pytest.mark.parametrize(
    ("ranks", "told", "number"),
    [
        pytest.param(1, 0, signal.SIGTERM, marks=pytest.mark.long("two ranks stop in the same way")),
        pytest.param(1, 0, signal.SIGINT, marks=pytest.mark.long("two ranks stop in the same way")),
        (2, 1, signal.SIGUSR2),
    ],
    ids=["one process, TERM", "one process, Ctrl-C", "two ranks, USR2 to the second"],
)
def test_example_stops_with_all_its_ranks_and_loses_no_step(
    tmp_path: Path, whole: Callable[[int], str], ranks: int, told: int, number: signal.Signals
) -> None:
    run = tmp_path / "run"
    processes = start(run, ranks, "--pause", "0.05")
    before = read_until(processes[0].stdout, "step 5  ")
    processes[told].send_signal(number)
    codes, said = end(processes)
    assert codes == [75] * ranks, said
    before += said[0]
    stopped_at = int(steps(before)[-1][0])
    assert list_checkpoints(run / "checkpoints")[0].name == f"step-{stopped_at:06d}"
    codes, said = end(start(run, ranks))
    assert codes == [0] * ranks, said
    assert steps(before) + steps(said[0]) == steps(whole(ranks))


def test_example_refuses_to_go_on_without_a_group(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "examples/own_loop.py", str(tmp_path / "run")],
        env={**os.environ, "WORLD_SIZE": "2"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 1
    assert "WORLD_SIZE is 2" in done.stderr
    assert "no process group is open" in done.stderr
    assert "call torch.distributed.init_process_group first" in done.stderr
