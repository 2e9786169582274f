"""How programs of a user's own ended, taken together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hpcddp.run.directory import AttemptDirectory
from hpcddp.run.job_records import ProgramExit, StopNotice, read_program_end, reserve_exit, write_exit
from tests.small_disk import FILLS, small_disk


def attempt_of(path: Path, *ends: tuple[int, StopNotice | None]) -> AttemptDirectory:
    attempt = AttemptDirectory(path / "run" / "attempts" / "0")
    attempt.path.mkdir(parents=True)
    for rank, (code, notice) in enumerate(ends):
        write_exit(attempt, ProgramExit(rank=rank, host="n1", time=0.0, code=code, notice=notice))
    return attempt


@pytest.mark.parametrize(
    ("ends", "finished", "wants", "out_of_time"),
    [
        ([(0, None), (0, None)], True, False, False),
        # One task was killed and left no record.
        ([(0, None)], False, False, False),
        ([(0, None), (3, None)], False, False, False),
        ([(0, None), (75, None)], False, True, False),
        # Exit 0 after a signal is a stop.
        ([(0, "terminated"), (0, "terminated")], False, False, False),
        ([(0, "warned"), (0, None)], False, False, True),
        ([(-15, "deadline"), (-15, "deadline")], False, False, True),
    ],
)
def test_a_run_has_finished_only_if_every_rank_ended_well_by_itself(
    tmp_path: Path, ends: list[tuple[int, StopNotice | None]], *, finished: bool, wants: bool, out_of_time: bool
) -> None:
    end = read_program_end(attempt_of(tmp_path, *ends), tasks=2)
    assert (end.finished, end.requeue_requested, end.out_of_time) == (finished, wants, out_of_time)


def test_the_requeue_file_requests_a_requeue_whatever_the_exit_code(tmp_path: Path) -> None:
    attempt = attempt_of(tmp_path, (0, None))
    attempt.requeue_file.touch()
    end = read_program_end(attempt, tasks=1)
    assert end.requeue_requested
    assert not end.finished


@pytest.mark.parametrize("fill", FILLS.values(), ids=FILLS)
def test_a_program_that_ends_on_a_full_disk_leaves_its_record(tmp_path: Path, fill: Callable[[Path], None]) -> None:
    with small_disk(tmp_path / "disk") as disk:
        attempt = AttemptDirectory(disk / "attempts" / "0")
        attempt.path.mkdir(parents=True)
        reserve_exit(attempt, 0)
        fill(disk)
        write_exit(attempt, ProgramExit(rank=0, host="n1", time=0.0, code=0))
        assert read_program_end(attempt, tasks=1).finished
        assert [path.name for path in attempt.path.iterdir()] == ["exit-rank-0.json"]
