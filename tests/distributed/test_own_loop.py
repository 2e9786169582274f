"""The example of a loop of one's own: stopped by a signal to one rank, started again, it loses no step."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import IO

import pytest

from hpcddp.run.checkpoints import list_checkpoints
from tests.forked_python import ForkedPython, run_python

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop.py"
# Loading torch's compiler, as DDP does, would take longer than the training.
RUN_EXAMPLE = """
import runpy, sys
from hpcddp.train.model.replica import leave_compiler_out

leave_compiler_out()
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""
STEPS = 24
_LINE = re.compile(r"step (\d+)  loss (\S+)")


def start(run: Path, ranks: int, *options: str) -> list[ForkedPython]:
    """Start the example as torchrun does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # What a launcher around the tests may have set is none of the example's business.
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "HPCDDP_"))}
    clean |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    words = (str(EXAMPLE), str(run), "--steps", str(STEPS), "--save-every", "10", *options)
    return [
        ForkedPython(
            RUN_EXAMPLE,
            *words,
            env=clean | (group | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}),
        )
        for rank in range(ranks)
    ]


def end(processes: Sequence[ForkedPython]) -> tuple[list[int], list[str]]:
    try:
        outputs = [process.communicate()[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.wait() for process in processes], outputs


def steps(output: str) -> list[tuple[str, str]]:
    return _LINE.findall(output)


def read_until(stream: IO[str], text: str) -> str:
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
    processes = start(run, ranks, "--pause", "0.2")
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
    done = run_python(EXAMPLE, str(tmp_path / "run"), env={**os.environ, "WORLD_SIZE": "2"})
    assert done.returncode == 1
    assert "WORLD_SIZE is 2" in done.stderr
    assert "no process group is open" in done.stderr
    assert "call torch.distributed.init_process_group first" in done.stderr
