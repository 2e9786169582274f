"""The parts of a step in which a rank waits for no other, measured on real ranks."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from hpcddp.run.directory import RunDirectory
from hpcddp.run.job_records import RankStepTimes, read_step_times
from tests.distributed.own_code import SLOW_S
from tests.distributed.training import job_document, run_ranks, steps

RANKS, BATCH = 3, 32


def measured(folder: Path, **changes: object) -> RankStepTimes:
    run = RunDirectory(folder / "runs" / "digits" / "run")
    document = job_document(train__num_workers=0, train__epochs=2, **changes)
    assert run_ranks(folder, RANKS, [{"run": run.path, "spec": document}]).codes == [0] * RANKS
    times = read_step_times(run.attempt(0))
    assert times is not None
    # Four steps in each of two epochs, without the first one.
    assert (times.steps, len(times.data_wait_s)) == (2 * 4 - 1, RANKS)
    return times


def test_the_rank_whose_data_is_slow_waits_although_all_steps_take_equally_long(tmp_path: Path) -> None:
    times = measured(tmp_path, train__dataset="tests.distributed.own_code:slow_digits")
    # The last step of an epoch has 4 samples, the others have 32: 11 or 10 of them on each rank.
    assert times.data_wait_s[1] > SLOW_S * (6 * 10 + 2 * 1) / 8
    assert times.data_wait_s[1] == max(times.data_wait_s)
    assert times.step_s > times.data_wait_s[1] / 2
    assert times.forward_s is not None
    assert all(0 < forward_s < times.step_s for forward_s in times.forward_s)


def test_a_forward_that_waits_for_other_ranks_is_not_measured(tmp_path: Path) -> None:
    model = "tests.distributed.own_code:norm_model"
    times = measured(tmp_path, train__model=model, train__batch_norm="sync")
    assert times.forward_s is None
    assert all(times.data_wait_s)


def test_the_time_of_a_record_is_that_of_its_step_and_not_of_the_agreement(tmp_path: Path) -> None:
    run = tmp_path / "run"
    document = job_document(train__num_workers=0, train__dataset="tests.distributed.own_code:slow_digits")
    outcome = run_ranks(tmp_path / "ranks", 2, [{"run": run, "spec": document, "block_length": 4}])
    assert outcome.codes == [0, 0], outcome.outputs
    for before, record in pairwise(steps(run)):
        step_s = (record["samples_seen"] - before["samples_seen"]) / record["samples_per_s"]
        assert record["time"] - before["time"] == pytest.approx(step_s, rel=0.5)
