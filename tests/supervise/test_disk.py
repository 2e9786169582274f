"""The start and the end of an attempt when the disk is full, or the run directory is away for a time."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcddp.run.directory import RunDirectory
from hpcddp.run.events import append_event, read_events
from hpcddp.run.failure import read_failures
from hpcddp.run.job_records import read_decision, read_start
from hpcddp.run.result import FINISHED, Result, finish_run, read_result
from hpcddp.stop.reasons import StopReason
from hpcddp.supervise.__main__ import main
from hpcddp.supervise.begin import DiskFullError
from tests.facts import assert_facts
from tests.messages import GoldenMessages
from tests.small_disk import FILLS, make_room, small_disk
from tests.supervise.attempts import LOCAL, PREEMPTED, SLURM, Scenario
from tests.supervise.fake_slurm import FakeSlurm
from tests.supervise.stdin import stdin_of

Fill = Callable[[Path], None]
STOPPED = 75


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm(monkeypatch)
    monkeypatch.setattr("time.monotonic", lambda: fake.waited)
    return fake


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk") as mounted:
        yield mounted


@pytest.fixture(params=FILLS)
def fill(request: pytest.FixtureRequest) -> Fill:
    return FILLS[request.param]


@pytest.fixture
def scenario(disk: Path, slurm: FakeSlurm) -> Scenario:
    del slurm
    return Scenario(disk, SLURM)


def full_disk(scenario: Scenario) -> str:
    return f"the disk of {scenario.attempt.run.path} is full"


def after(seconds: float, slurm: FakeSlurm, action: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let something happen when so much has been slept."""
    done: list[object] = []

    def sleep(duration: float) -> None:
        slurm.sleep(duration)
        if slurm.waited >= seconds and not done:
            done.append(action())

    monkeypatch.setattr("time.sleep", sleep)


def test_a_stop_on_a_full_disk_is_requeued(
    scenario: Scenario, disk: Path, slurm: FakeSlurm, fill: Fill, golden: GoldenMessages
) -> None:
    append_event(scenario.attempt.run.events, kind="save", time=0.0, attempt=0, step=12)
    fill(disk)
    slurm.become("RUNNING", **PREEMPTED)
    # The events cannot be relied on: the last block of their file may have room or not.
    scenario.decide()
    decision = read_decision(scenario.attempt)
    assert decision is not None
    assert (decision.step, decision.cause) == (12, "preemption")
    ending = scenario.end(code=STOPPED)
    assert (ending.exit_code, slurm.start_times[-1:], slurm.calls) == (STOPPED, [2], ["requeue 7"])
    assert_facts(golden.message(ending.text), "resumes from that step", full_disk(scenario))
    assert scenario.result is None


def test_ranks_that_exit_with_75_have_stopped_even_without_a_record(
    scenario: Scenario, slurm: FakeSlurm, golden: GoldenMessages
) -> None:
    append_event(scenario.attempt.run.events, kind="save", time=0.0, attempt=0, step=12)
    append_event(scenario.attempt.run.events, kind="signal", time=0.0, attempt=0, reason="warned")
    ending = scenario.end(code=STOPPED)
    assert (ending.exit_code, slurm.calls) == (STOPPED, ["requeue 7"])
    assert_facts(
        golden.message(ending.text), "attempt 0 of run r1", "the time limit of job 7", "checkpoint is of step 12"
    )
    assert scenario.events()[-2:] == [("stop", "time_limit"), ("requeue", "time_limit")]


def test_the_event_of_a_stop_stands_for_a_record_that_could_not_be_written(
    scenario: Scenario, slurm: FakeSlurm
) -> None:
    word = StopReason.TERMINATED.word
    append_event(
        scenario.attempt.run.events,
        kind="stop", time=0.0, attempt=0, step=12, reason=word, cause="preemption", saved=True, save_s=0.4,
    )  # fmt: skip
    ending = scenario.end(code=137)
    assert (ending.exit_code, slurm.calls) == (STOPPED, ["requeue 7"])
    assert scenario.events()[-2:] == [("stop", "preemption"), ("requeue", "preemption")]


def test_an_error_comes_before_the_exit_code_of_the_other_ranks(scenario: Scenario, slurm: FakeSlurm) -> None:
    scenario.fail(0, exit_code=70)
    ending = scenario.end(code=STOPPED)
    assert (ending.exit_code, slurm.calls) == (70, [])


def test_the_result_names_the_full_disk(scenario: Scenario, disk: Path, fill: Fill, golden: GoldenMessages) -> None:
    fill(disk)
    scenario.fail(1, exit_code=71)
    (record,) = read_failures(scenario.attempt)
    assert record.rank == 1
    ending = scenario.end()
    assert ending.exit_code == 71
    assert_facts(ending.text, full_disk(scenario))
    result = read_result(scenario.attempt.run)
    assert result is not None
    assert_facts(golden.message(result.reason), "rank 1 on n2", "ValueError: boom", full_disk(scenario))


def test_a_run_that_finishes_on_a_full_disk_has_its_result(scenario: Scenario, disk: Path, fill: Fill) -> None:
    fill(disk)
    finish_run(scenario.attempt.run, Result(status=FINISHED, attempts=1, steps=3), attempt=0)
    assert scenario.end(code=0).exit_code == 0
    result = read_result(scenario.attempt.run)
    assert result is not None
    assert (result.status, result.steps) == (FINISHED, 3)


def test_a_start_waits_for_space(
    scenario: Scenario,
    disk: Path,
    slurm: FakeSlurm,
    fill: Fill,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    golden: GoldenMessages,
) -> None:
    fill(disk)
    after(60, slurm, lambda: make_room(disk), monkeypatch)
    slurm.become("RUNNING", Restarts="1")
    attempt = scenario.begin({**SLURM, "SLURM_RESTART_COUNT": "1"})
    assert attempt.number == 1
    start = read_start(attempt)
    assert start is not None
    assert start.restart_count == 1
    assert [event.attempt for event in read_events(attempt.run.events) if event.kind == "start"] == [0, 1]
    assert_facts(golden.message(capsys.readouterr().err), full_disk(scenario), "waiting up to 10 minutes")


def test_a_first_start_waits_for_space(
    disk: Path, slurm: FakeSlurm, fill: Fill, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    elsewhere = Scenario(tmp_path, SLURM)
    elsewhere.directory = disk
    fill(disk)
    after(60, slurm, lambda: make_room(disk), monkeypatch)
    assert elsewhere.begin(SLURM).number == 0


def test_a_disk_that_stays_full_ends_the_start_with_one_sentence(
    scenario: Scenario,
    disk: Path,
    slurm: FakeSlurm,
    fill: Fill,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    golden: GoldenMessages,
) -> None:
    slurm.become("RUNNING", Restarts="1")
    fill(disk)
    monkeypatch.setattr(sys, "stdin", stdin_of(scenario.text.encode()))
    words = ["begin", f"--run-root={disk / 'runs'}", "--name=demo", "--run-id=r1"]
    code = main(words, {**SLURM, "SLURM_RESTART_COUNT": "1"})
    run = scenario.attempt.run
    assert code == 71
    assert slurm.waited == pytest.approx(600, abs=10)
    said = capsys.readouterr()
    assert said.out == ""
    _, sentence = golden.message(said.err).splitlines()
    assert_facts(sentence, "run r1 is not started", full_disk(scenario), "10 minutes", "make room", scenario.resume)
    result = read_result(run)
    assert result is not None
    assert (result.status, result.exit_code) == ("stopped", 71)
    assert_facts(golden.message(result.reason), "not started again", full_disk(scenario), "10 minutes")
    assert run.newest_attempt() == 0


def test_a_start_on_this_machine_which_no_signal_reaches_waits_for_a_minute(
    disk: Path, slurm: FakeSlurm, fill: Fill, tmp_path: Path
) -> None:
    elsewhere = Scenario(tmp_path, LOCAL)
    elsewhere.directory = disk
    fill(disk)
    with pytest.raises(DiskFullError, match="no space became free in 1 minute; make room"):
        elsewhere.begin(LOCAL)
    assert slurm.waited == pytest.approx(60, abs=5)


def test_a_directory_that_is_away_for_a_time_is_waited_for(
    tmp_path: Path,
    slurm: FakeSlurm,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    golden: GoldenMessages,
) -> None:
    scenario = Scenario(tmp_path, SLURM)
    slurm.become("RUNNING", **PREEMPTED)
    scenario.stop()
    run, away = scenario.attempt.run.path, tmp_path / "away"
    run.rename(away)
    after(20, slurm, lambda: away.rename(run), monkeypatch)
    ending = scenario.end()
    assert (ending.exit_code, slurm.calls) == (STOPPED, ["requeue 7"])
    said = golden.message(capsys.readouterr().err)
    assert_facts(said, f"{scenario.attempt.path} is missing", "file server", "waiting up to 10 minutes")


@pytest.mark.parametrize(("away_s", "start_times"), [(25, [120]), (70, [120] * 2)], ids=["short", "long"])
def test_a_job_that_slurm_requeues_while_its_directory_is_away_starts_later(
    tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, away_s: float, start_times: list[float]
) -> None:
    scenario = Scenario(tmp_path, SLURM)
    slurm.become("RUNNING", **PREEMPTED)
    scenario.stop()
    run, away = scenario.attempt.run.path, tmp_path / "away"
    run.rename(away)
    set_while_away: list[float] = []

    def sleep(duration: float) -> None:
        slurm.sleep(duration)
        # The grace time is over.
        if slurm.waited == 5:
            slurm.become_requeued()
        if slurm.waited >= away_s and away.exists():
            set_while_away.extend(slurm.start_times)
            away.rename(run)

    monkeypatch.setattr("time.sleep", sleep)
    assert scenario.end().exit_code == STOPPED
    assert set_while_away == start_times
    assert slurm.calls == []


def test_the_start_of_a_job_that_runs_is_not_moved_while_its_directory_is_away(
    tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = Scenario(tmp_path, SLURM)
    slurm.become("RUNNING", **PREEMPTED)
    scenario.stop()
    run, away = scenario.attempt.run.path, tmp_path / "away"
    run.rename(away)

    def come_back() -> None:
        assert slurm.start_times == []
        away.rename(run)

    after(20, slurm, come_back, monkeypatch)
    assert scenario.end().exit_code == STOPPED


@pytest.mark.parametrize("record", ["decision.json", "start.json", "events.jsonl"])
def test_a_record_whose_file_server_does_not_answer_is_waited_for(
    tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, record: str
) -> None:
    scenario = Scenario(tmp_path, SLURM)
    slurm.become("RUNNING", **PREEMPTED)
    scenario.stop()
    open_file, away = open, {record}

    def open_or_fail(path: Any, *args: Any, **options: Any) -> Any:
        if Path(path).name in away:
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return open_file(path, *args, **options)

    monkeypatch.setattr("builtins.open", open_or_fail)
    after(20, slurm, away.clear, monkeypatch)
    ending = scenario.end()
    assert (ending.exit_code, slurm.calls) == (STOPPED, ["requeue 7"])


def test_a_directory_that_stays_away_ends_the_attempt_with_one_sentence(
    tmp_path: Path, slurm: FakeSlurm, golden: GoldenMessages
) -> None:
    scenario = Scenario(tmp_path, SLURM)
    scenario.stop()
    scenario.attempt.run.path.rename(tmp_path / "away")
    ending = scenario.end()
    assert (ending.exit_code, slurm.calls) == (71, [])
    assert slurm.waited == pytest.approx(600, abs=2)
    text = golden.message(ending.text)
    resume = f"resume: hpcddp submit JOB --resume {scenario.attempt.run.path}"
    assert_facts(text, "will not be requeued", str(scenario.attempt.path), "10 minutes", resume)


def test_a_requeued_run_waits_for_its_directory(
    tmp_path: Path,
    slurm: FakeSlurm,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    golden: GoldenMessages,
) -> None:
    scenario = Scenario(tmp_path, SLURM)
    slurm.become("RUNNING", Restarts="1")
    run, away = scenario.attempt.run.path, tmp_path / "away"
    run.rename(away)
    after(20, slurm, lambda: away.rename(run), monkeypatch)
    assert scenario.begin({**SLURM, "SLURM_RESTART_COUNT": "1"}).number == 1
    assert_facts(golden.message(capsys.readouterr().err), f"{run} is not there", "waiting up to 10 minutes")


@pytest.mark.parametrize("has_log", [False, True])
@pytest.mark.parametrize("known", [{"SLURM_RESTART_COUNT": "1"}, {"HPCDDP_PICKLE_SHA256": "0" * 64}])
def test_a_run_whose_directory_stays_away_does_not_begin_anew(
    known: dict[str, str],
    tmp_path: Path,
    slurm: FakeSlurm,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    golden: GoldenMessages,
    *,
    has_log: bool,
) -> None:
    scenario = Scenario(tmp_path, SLURM)
    slurm.become("RUNNING", Restarts="1")
    run = scenario.attempt.run.path
    run.rename(tmp_path / "away")
    if has_log:
        # Newer versions of Slurm make the directory of the batch log.
        run.mkdir()
        (run / "batch.log").touch()
    monkeypatch.setattr(sys, "stdin", stdin_of(scenario.text.encode()))
    assert main(["begin", f"--run-root={run.parents[1]}", "--name=demo", "--run-id=r1"], {**SLURM, **known}) == 71
    assert slurm.waited == pytest.approx(600, abs=10)
    said = golden.message(capsys.readouterr().err)
    assert_facts(said, f"{run} is not there after 10 minutes", "mount its file system again", "submit the job again")
    assert run.exists() is has_log
    assert not (run / "attempts").exists()


def test_a_directory_that_goes_away_during_the_requeue_is_no_newer_attempt(
    tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = Scenario(tmp_path, SLURM)
    slurm.become("RUNNING", **PREEMPTED)
    scenario.stop()
    run, away = scenario.attempt.run.path, tmp_path / "away"

    def requeue(job_id: str) -> None:
        run.rename(away)
        slurm.requeue(job_id)

    monkeypatch.setattr("hpcddp.slurm.commands.requeue", requeue)
    assert scenario.end().exit_code == STOPPED


@pytest.mark.parametrize("away", [False, True])
def test_a_job_whose_directory_is_away_starts_late(
    tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, *, away: bool
) -> None:
    scenario = Scenario(tmp_path, SLURM)
    scenario.stop()
    slurm.become("RUNNING", **PREEMPTED)
    monkeypatch.setattr("signal.signal", lambda *_: None)

    def requeue(job_id: str) -> None:
        if away:
            scenario.attempt.run.path.rename(tmp_path / "away")
        slurm.requeue(job_id)

    monkeypatch.setattr("hpcddp.slurm.commands.requeue", requeue)
    environment = {**SLURM, "HPCDDP_ATTEMPT_DIR": str(scenario.attempt.path)}
    assert main(["end", "--code", "75"], environment) == STOPPED
    assert slurm.start_times[-1] == (120 if away else 2)


def test_the_result_of_a_run_waits_for_its_directory(
    tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, away = RunDirectory(tmp_path / "run"), tmp_path / "away"
    away.mkdir()
    after(20, slurm, lambda: away.rename(run.path), monkeypatch)
    finish_run(run, Result(status=FINISHED, attempts=1), attempt=0)
    assert [event.kind for event in read_events(run.events)] == ["finish"]


def test_a_log_that_cannot_be_written_does_not_end_the_supervisor(tmp_path: Path) -> None:
    scenario = Scenario(tmp_path, LOCAL)
    scenario.stop(reason=StopReason.REQUESTED, cause=None)
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "hpcddp.supervise", "end", "--code", str(STOPPED)],
            env={**os.environ, "HPCDDP_ATTEMPT_DIR": str(scenario.attempt.path), **LOCAL},
            stderr=full,
            check=False,
        )
    assert done.returncode == STOPPED
    assert scenario.result is not None
    assert scenario.result["status"] == "stopped"
