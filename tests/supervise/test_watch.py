"""Watching srun: it is ended only when all tasks have ended and it still waits."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hpcddp.run.failure import FailureRecord, write_failure
from hpcddp.run.job_records import ProgramExit, read_start, write_exit, write_start
from hpcddp.run.result import FINISHED, Result, write_result
from hpcddp.supervise.watch import tasks_have_ended, watch
from tests.supervise.attempts import LOCAL, Scenario
from tests.waiting import wait_until


@pytest.fixture
def scenario(tmp_path: Path) -> Scenario:
    """An attempt of two ranks."""
    return Scenario(tmp_path, LOCAL)


@pytest.fixture
def srun() -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits for ever, as srun does for a slurmstepd that was killed."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def exit_of(rank: int) -> ProgramExit:
    return ProgramExit(rank=rank, host="n1", time=0.0, code=0)


def error_of(rank: int) -> FailureRecord:
    return FailureRecord(
        rank=rank, host="n1", time=0.0, kind="k", message="m", traceback="", exit_code=71, secondary=True
    )


def end_each_rank(scenario: Scenario) -> None:
    write_exit(scenario.attempt, exit_of(0))
    write_failure(scenario.attempt, error_of(1))


@pytest.mark.parametrize(
    "record",
    [
        lambda scenario: write_result(scenario.attempt.run, Result(status=FINISHED, attempts=1)),
        lambda scenario: scenario.decide(),
        end_each_rank,
    ],
    ids=["result", "decision", "records of all ranks"],
)
def test_srun_that_waits_for_tasks_that_have_ended_is_ended(
    scenario: Scenario,
    srun: subprocess.Popen[bytes],
    record: Callable[[Scenario], object],
    capsys: pytest.CaptureFixture[str],
) -> None:
    record(scenario)
    watch(scenario.attempt, srun.pid, patience_s=0.2, poll_s=0.05)
    assert srun.wait(timeout=10) == -signal.SIGTERM
    assert "and srun still waits; it is ended" in capsys.readouterr().err


def test_one_rank_that_still_works_keeps_srun(scenario: Scenario) -> None:
    write_exit(scenario.attempt, exit_of(0))
    assert not tasks_have_ended(scenario.attempt, tasks=2)


@pytest.mark.parametrize(("attempts", "ended"), [(0, False), (1, True), (2, False)])
def test_the_result_of_another_attempt_keeps_srun(scenario: Scenario, attempts: int, *, ended: bool) -> None:
    write_result(scenario.attempt.run, Result(status="stopped", attempts=attempts))
    assert tasks_have_ended(scenario.attempt, tasks=2) is ended


def test_a_run_directory_that_is_away_keeps_srun(scenario: Scenario, tmp_path: Path) -> None:
    scenario.attempt.run.path.rename(tmp_path / "away")
    assert not tasks_have_ended(scenario.attempt, tasks=2)


def test_a_damaged_job_file_does_not_end_the_watch(
    scenario: Scenario, srun: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    scenario.attempt.run.job_file.write_text("name: [")
    end_each_rank(scenario)
    threading.Timer(0.5, scenario.decide).start()
    watch(scenario.attempt, srun.pid, patience_s=0.2, poll_s=0.05)
    assert srun.wait(timeout=10) == -signal.SIGTERM
    assert f"{scenario.attempt.run.job_file} is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("warn", [True, False])
def test_the_tasks_are_warned_before_the_end(scenario: Scenario, tmp_path: Path, *, warn: bool) -> None:
    start = read_start(scenario.attempt)
    assert start is not None
    # The default lead of two minutes is not over yet.
    write_start(scenario.attempt, replace(start, end_time=time.time() + 60))
    text = f'trap "exit 7" USR2; touch {tmp_path}/ready; while [[ ! -e {tmp_path}/end ]]; do sleep 0.02; done'
    with subprocess.Popen(["bash", "-c", text]) as srun:
        wait_until((tmp_path / "ready").exists, "the trap", 30)
        thread = threading.Thread(
            target=watch, args=(scenario.attempt, srun.pid), kwargs={"warn": warn, "poll_s": 0.02}
        )
        thread.start()
        if not warn:
            (tmp_path / "end").touch()
        assert srun.wait(timeout=30) == (7 if warn else 0)
        thread.join()


def test_the_watch_ends_with_srun(scenario: Scenario, srun: subprocess.Popen[bytes]) -> None:
    srun.kill()
    srun.wait()
    watch(scenario.attempt, srun.pid, poll_s=0.05)
