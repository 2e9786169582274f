"""A wait for a collective ends when another thread says so, also where gloo would wait for ever."""

import ast
import signal
from pathlib import Path
from typing import Any, cast

import pytest
import torch.distributed as dist
from torch.futures import Future

from hpcddp.train.waits import CollectiveWaits
from tests.distributed import waiting_rank
from tests.ranks import run_forked

pytestmark = pytest.mark.distributed
ROOT = Path(__file__).parents[2]
COLLECTIVES = {
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "monitored_barrier",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
}
# Neither runs where ranks are survived: an entrypoint, and the exit of a loop of the user's own.
NOT_SURVIVED = {"train/entry.py", "train/stopper.py"}


@pytest.mark.parametrize("source", [0, 1], ids=["partly sent", "partly received"])
def test_a_wait_for_half_a_message_ends(tmp_path: Path, source: int) -> None:
    ended = run_forked(waiting_rank.wait, [tmp_path, source], world_size=2, logs=tmp_path)
    assert ended.codes == [0, -signal.SIGKILL], ended.outputs
    # Its watchdog knows that it waits for another rank.
    assert "waits True Got the following error" in ended.outputs[0]
    assert "another rank has gone" in ended.outputs[0]


class FailedWork:
    """A collective that has failed with an error that is no RuntimeError, as for want of memory."""

    def get_future(self) -> Future[Any]:
        begun: Future[Any] = Future()
        begun.set_exception(MemoryError("no memory"))
        return begun


def test_a_collective_that_fails_for_want_of_memory_ends_the_wait() -> None:
    waits = CollectiveWaits()
    waits.begin()
    with pytest.raises(RuntimeError, match="MemoryError: no memory"):
        waits.wait(cast("dist.Work", FailedWork()))


def test_a_wait_for_a_few_numbers_ends(tmp_path: Path) -> None:
    ended = run_forked(waiting_rank.wait_for_few_numbers, [tmp_path], world_size=2, logs=tmp_path)
    assert ended.codes == [0, 0], ended.outputs
    names = [line.partition(": True: ")[0] for line in ended.outputs[0].splitlines() if "another rank has gone" in line]
    assert names == [
        "numbers of rank 0",
        "reasons to stop",
        "samples",
        "hashes of replicas",
        "widths of metrics",
        "data",
        "groups",
        "barrier",
    ]


def test_no_collective_of_the_training_waits_in_gloo_itself() -> None:
    waiting = set()
    for path in (ROOT / "hpcddp/train").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {f"dist.{name}" for name in COLLECTIVES}:
                options = {option.arg for option in node.keywords}
                if "async_op" not in options:
                    waiting.add(path.relative_to(ROOT / "hpcddp").as_posix())
    assert waiting == NOT_SURVIVED


def test_a_backward_ends_that_waits_for_another_rank(tmp_path: Path) -> None:
    ended = run_forked(waiting_rank.wait_in_backward, [tmp_path], world_size=2, logs=tmp_path)
    assert ended.codes == [0, 0], ended.outputs
    assert "another rank has gone" in ended.outputs[0]
    assert ended.outputs[0].startswith("True ")


def test_the_hook_averages_with_the_bits_of_ddp(tmp_path: Path) -> None:
    ended = run_forked(waiting_rank.compare_averages, [tmp_path], world_size=3, logs=tmp_path)
    assert ended.codes == [0, 0, 0], ended.outputs
    assert all(output.endswith("True\n") for output in ended.outputs), ended.outputs
