"""The parts of a step in which a rank waits for no other, measured on real ranks."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from hpcddp.run.directory import RunDirectory
from hpcddp.run.events import Account, accounts_of, read_events
from tests.distributed.own_code import SLOW_S
from tests.distributed.training import job_document, run_ranks, steps

RANKS, BATCH = 3, 32


def measured(folder: Path, **changes: object) -> Account:
    run = RunDirectory(folder / "runs" / "digits" / "run")
    document = job_document(train__num_workers=0, train__epochs=2, **changes)
    assert run_ranks(folder, RANKS, [{"run": run.path, "spec": document}]).codes == [0] * RANKS
    accounts = accounts_of(read_events(run.events))
    # Four steps in each of two epochs, and a save after each epoch.
    assert [account.step for account in accounts] == [4, 8]
    times = [record["samples_seen"] for record in steps(run.path)]
    durations = [
        (after - before) / record["samples_per_s"]
        for (before, after), record in zip(pairwise([0, *times]), steps(run.path), strict=True)
    ]
    assert accounts[-1].train_s == pytest.approx(sum(durations), abs=2e-3)
    assert 0 < accounts[0].eval_s < accounts[1].eval_s
    return accounts[-1]


def test_the_rank_whose_data_is_slow_waits_although_all_steps_take_equally_long(tmp_path: Path) -> None:
    account = measured(tmp_path, train__dataset="tests.distributed.own_code:slow_digits")
    slowest = account.slowest
    assert slowest is not None
    # The last step of an epoch has 4 samples, the others have 32: 11 or 10 of them on each rank.
    assert slowest.rank == 1
    assert slowest.data_wait_s > SLOW_S * (6 * 10 + 2 * 1) / 8
    # All steps but the first are measured.
    assert account.wait_s == pytest.approx(7 * slowest.data_wait_s, abs=1e-3)
    assert account.train_s > account.wait_s / 2
    assert slowest.forward_s is not None
    assert 0 < slowest.forward_s < account.train_s / 8
    assert 0 < slowest.median_s < slowest.data_wait_s


def test_a_forward_that_waits_for_other_ranks_is_not_measured(tmp_path: Path) -> None:
    model = "tests.distributed.own_code:norm_model"
    account = measured(tmp_path, train__model=model, train__batch_norm="sync")
    assert account.slowest is not None
    assert account.slowest.forward_s is None
    assert account.wait_s > 0


def test_the_time_of_a_record_is_that_of_its_step_and_not_of_the_agreement(tmp_path: Path) -> None:
    run = tmp_path / "run"
    document = job_document(train__num_workers=0, train__dataset="tests.distributed.own_code:slow_digits")
    outcome = run_ranks(tmp_path / "ranks", 2, [{"run": run, "spec": document, "block_length": 4}])
    assert outcome.codes == [0, 0], outcome.outputs
    for before, record in pairwise(steps(run)):
        step_s = (record["samples_seen"] - before["samples_seen"]) / record["samples_per_s"]
        assert record["time"] - before["time"] == pytest.approx(step_s, rel=0.5)
