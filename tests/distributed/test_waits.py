"""A wait for a collective ends when another thread says so, also where gloo would wait for ever."""

import signal
from pathlib import Path

import pytest

from tests.distributed import waiting_rank
from tests.ranks import run_forked

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("source", [0, 1], ids=["partly sent", "partly received"])
def test_a_wait_for_half_a_message_ends(tmp_path: Path, source: int) -> None:
    ended = run_forked(waiting_rank.wait, [tmp_path, source], world_size=2, logs=tmp_path)
    assert ended.codes == [0, -signal.SIGKILL], ended.outputs
    # Its watchdog knows that it waits for another rank.
    assert "waits True Got the following error" in ended.outputs[0]
    assert "another rank has gone" in ended.outputs[0]


def test_a_collective_that_fails_for_want_of_memory_ends_the_wait() -> None:
    assert "MemoryError: no memory" in waiting_rank.wait_for_failed_work()


def test_a_backward_ends_that_waits_for_another_rank(tmp_path: Path) -> None:
    ended = run_forked(waiting_rank.wait_in_backward, [tmp_path], world_size=2, logs=tmp_path)
    assert ended.codes == [0, 0], ended.outputs
    assert "another rank has gone" in ended.outputs[0]
    assert ended.outputs[0].startswith("True ")


def test_the_hook_averages_with_the_bits_of_ddp(tmp_path: Path) -> None:
    ended = run_forked(waiting_rank.compare_averages, [tmp_path], world_size=3, logs=tmp_path)
    assert ended.codes == [0, 0, 0], ended.outputs
    assert all(output.endswith("True\n") for output in ended.outputs), ended.outputs
