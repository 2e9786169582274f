"""Loader workers, and the indices that a rank takes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hpcddp.batch.plan import plan_batch
from hpcddp.batch.sampler import GlobalBatches
from hpcddp.train.data.builtin import SyntheticImages
from hpcddp.train.data.loader import Batches, Data, Placement, choose_workers, micro_batch_keys
from hpcddp.train.randomness import SampleKeys
from tests.distributed.own_code import few_digits
from tests.forked_python import run_python
from tests.waiting import wait_until

PLACEMENT = Placement(torch.device("cpu"), torch.float32, channels_last=False)


def own_data() -> Data:
    part = few_digits("train")
    return Data(name="own:digits", train=part, val=part, classes=10, fingerprint="")


def synthetic_data() -> Data:
    part = SyntheticImages(40, image_size=8, classes=10)
    return Data(name="synthetic", train=part, val=part, classes=10, fingerprint="")


def keys_of(*batches: list[int]) -> list[SampleKeys]:
    return [SampleKeys(seed=0, split="train", epoch=0, indices=indices) for indices in batches]


def all_keys(rank: int, first_step: int = 0) -> list[SampleKeys]:
    plan = plan_batch(global_batch_size=7, world_size=3, samples=17, max_per_device_batch_size=2)
    batches = GlobalBatches(17, 7, "keep", "keyed", 0)
    return list(micro_batch_keys(batches, plan, rank, seed=7, first_step=first_step, last_step=6))


def test_ranks_together_see_every_sample_of_every_epoch_once() -> None:
    seen = sorted((keys.epoch, index) for rank in range(3) for keys in all_keys(rank) for index in keys.indices)
    assert seen == [(epoch, index) for epoch in range(2) for index in range(17)]


def test_empty_shares_are_left_out() -> None:
    assert all(keys.indices for rank in range(3) for keys in all_keys(rank))


def test_indices_can_begin_anywhere() -> None:
    whole, rest = all_keys(1), all_keys(1, first_step=2)
    assert whole[-len(rest) :] == rest
    assert 0 < len(rest) < len(whole)


@pytest.mark.parametrize(
    ("num_workers", "data", "cpus", "expected"),
    [(None, own_data, 4, 3), (None, own_data, 1, 0), (None, synthetic_data, 4, 0), (2, synthetic_data, 1, 2)],
)
def test_workers_follow_the_cpus_unless_said(
    num_workers: int | None, data: Callable[[], Data], cpus: int, expected: int
) -> None:
    assert choose_workers(num_workers, data(), cpus) == expected


def test_workers_deliver_the_same_batches_as_none() -> None:
    data, keys = own_data(), keys_of([3, 1, 4], [1, 5], [9])
    none, some = (list(Batches(data, data.train, keys, PLACEMENT, workers=count)) for count in (0, 2))
    assert [len(labels) for _, labels in none] == [3, 2, 1]
    for (left, left_labels), (right, right_labels) in zip(none, some, strict=True):
        assert torch.equal(left, right)
        assert torch.equal(left_labels, right_labels)


def test_workers_survive_the_signals_that_ask_for_a_save() -> None:
    data, others = own_data(), set(children())
    batches = iter(Batches(data, data.train, keys_of(*([index] for index in range(30))), PLACEMENT, workers=1))
    next(batches)
    (worker,) = set(children()) - others
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
        # From another process than the parent, as Slurm would send it.
        subprocess.run(["kill", f"-{number.value}", str(worker)], check=True)
    assert len(list(batches)) == 29


def test_workers_load_one_evaluation_after_the_other() -> None:
    data, others = own_data(), set(children())
    batches = Batches(data, data.val, keys_of([0, 1], [2], [3, 4]), PLACEMENT, workers=2)
    passes, workers = [], []
    for _ in range(3):
        passes.append([labels.tolist() for _, labels in batches])
        workers.append(set(children()) - others)
    assert passes[0] == passes[1] == passes[2]
    assert workers[0] == workers[1] == workers[2]
    assert len(workers[0]) == 2


def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, signal\n"
        "from tests.train.test_loader import PLACEMENT, Batches, children, keys_of, own_data\n"
        "data = own_data()\n"
        "batches = iter(Batches(data, data.train, keys_of(*([i] for i in range(99))), PLACEMENT, workers=2))\n"
        "next(batches)\n"
        "print(*children(), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = run_python(script)
    assert done.returncode == -signal.SIGKILL, done.stderr
    workers = [int(word) for word in done.stdout.split()]
    assert len(workers) == 2
    wait_until(lambda: not any(map(is_running, workers)), f"the end of {workers}")


def test_process_that_still_holds_a_loader_ends_by_itself(tmp_path: Path) -> None:
    script = tmp_path / "holder.py"
    script.write_text(
        "import builtins\n"
        "from tests.train.test_loader import PLACEMENT, Batches, keys_of, own_data\n"
        "data = own_data()\n"
        "builtins.kept = iter(Batches(data, data.train, keys_of(*([i] for i in range(99))), PLACEMENT, workers=2))\n"
        "next(builtins.kept)\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, str(script)], env={**os.environ, "PYTHONPATH": str(root)}, check=False, timeout=60
    )
    assert done.returncode == 0


def children() -> list[int]:
    """Return the process ids of this process's children; those of other tests may be among them."""
    return [int(word) for word in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
