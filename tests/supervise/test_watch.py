"""Watching srun: it is ended only when all tasks have ended and it still waits."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from hpcddp.run.failure import write_failure
from hpcddp.run.job_records import FailureRecord, ProgramExit, read_start, write_exit, write_start
from hpcddp.run.result import FINISHED, Result, write_result
from hpcddp.slurm import commands
from hpcddp.slurm.controller import Controller
from hpcddp.supervise import watch as watching
from hpcddp.supervise.watch import tasks_have_ended, watch
from tests.supervise.attempts import LOCAL, Scenario
from tests.supervise.fake_slurm import AWAY, MISSING
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
        end_each_rank,
    ],
    ids=["result", "records of all ranks"],
)
def test_srun_that_waits_for_tasks_that_have_ended_is_ended(
    scenario: Scenario,
    srun: subprocess.Popen[bytes],
    record: Callable[[Scenario], object],
    capsys: pytest.CaptureFixture[str],
) -> None:
    record(scenario)
    watch(scenario.attempt, srun.pid, environment=LOCAL, patience_s=0.2, poll_s=0.05)
    assert srun.wait(timeout=10) == -signal.SIGTERM
    assert "all tasks have ended, and srun still waits" in capsys.readouterr().err


def test_ranks_that_may_still_save_after_a_stop_keep_srun_for_the_lead(
    tmp_path: Path, srun: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    scenario = Scenario(tmp_path, LOCAL, more="requeue: {signal_lead: 3s}\n")
    scenario.decide()
    began = time.monotonic()
    watch(scenario.attempt, srun.pid, environment=LOCAL, patience_s=0.2, poll_s=0.05)
    assert time.monotonic() - began >= 3
    assert srun.wait(timeout=10) == -signal.SIGTERM
    assert "the ranks have stopped, and srun still waits 3 s later" in capsys.readouterr().err


def controller(kill_wait_s: float) -> Controller:
    return Controller(now=None, requeue_delay_s=121, kill_wait_s=kill_wait_s)


def test_one_failed_task_is_enough_when_srun_has_had_the_time_to_end_the_others(
    scenario: Scenario,
    srun: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(watching, "ask_controller", lambda _: controller(2.0))
    write_failure(scenario.attempt, error_of(0))
    began = time.monotonic()
    watch(scenario.attempt, srun.pid, environment=LOCAL, patience_s=0.2, poll_s=0.05)
    assert time.monotonic() - began >= 2.2
    assert srun.wait(timeout=10) == -signal.SIGTERM
    assert "a task has failed, and srun still waits" in capsys.readouterr().err


def test_the_wait_for_killed_tasks_is_slurms_own_and_asked_again_while_slurm_is_silent(
    scenario: Scenario, srun: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: Iterator[commands.SlurmCommandError | float] = iter([AWAY, AWAY, 0.5])

    def ask_controller(_: object) -> Controller:
        answer = next(answers)
        if isinstance(answer, commands.SlurmCommandError):
            raise answer
        return controller(answer)

    monkeypatch.setattr(watching, "ask_controller", ask_controller)
    write_failure(scenario.attempt, error_of(0))
    watch(scenario.attempt, srun.pid, environment=LOCAL, patience_s=0.2, poll_s=0.05)
    assert srun.wait(timeout=10) == -signal.SIGTERM
    assert next(answers, None) is None


def test_without_scontrol_the_default_of_slurm_counts(
    scenario: Scenario, srun: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask_controller(_: object) -> Controller:
        raise MISSING

    monkeypatch.setattr(watching, "ask_controller", ask_controller)
    monkeypatch.setattr(watching, "DEFAULT_KILL_WAIT_S", 0.5)
    write_failure(scenario.attempt, error_of(0))
    watch(scenario.attempt, srun.pid, environment=LOCAL, patience_s=0.2, poll_s=0.05)
    assert srun.wait(timeout=10) == -signal.SIGTERM


ON_SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURMD_NODENAME": "n1"}


def shown(seconds: float) -> str:
    """Return a time as Slurm shows it, so many seconds from now."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + seconds))


def running_until(seconds: float) -> dict[str, str]:
    """Return the record of a job that runs for so many seconds from now."""
    return {"JobState": "RUNNING", "TimeLimit": "01:00:00", "EndTime": shown(seconds)}


@pytest.fixture
def on_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scenario:
    """An attempt of two ranks in a job whose end Slurm does not say."""
    monkeypatch.setattr(commands, "show_job", lambda _: None)
    return Scenario(tmp_path, ON_SLURM)


def set_end(scenario: Scenario, seconds: float) -> None:
    """Let a job that began some time ago end in so many seconds."""
    start, now = read_start(scenario.attempt), time.time()
    assert start is not None
    write_start(scenario.attempt, replace(start, time=now - 100, end_time=now + seconds))


def test_srun_is_killed_before_the_end_of_the_job_whatever_its_tasks_do(
    on_slurm: Scenario,
    srun: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = running_until(4)
    monkeypatch.setattr(commands, "show_job", lambda _: job)
    monkeypatch.setattr(commands, "boot_times", lambda *_: {})
    set_end(on_slurm, 4)
    watch(on_slurm.attempt, srun.pid, environment=ON_SLURM, poll_s=0.05)
    # SIGTERM would let it kill the tasks, of which one may still save.
    assert srun.wait(timeout=10) == -signal.SIGKILL
    assert "the job's time is over, and srun still waits" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("job", "has_come"),
    [
        (running_until(1), True),
        (running_until(3600), False),
        ({**running_until(3600), "JobState": "SUSPENDED"}, False),
        ({**running_until(1), "PreemptTime": shown(-30)}, True),
        ({"JobState": "COMPLETING", "Reason": "TimeLimit"}, True),
        (None, False),
    ],
    ids=["near", "moved", "suspended", "grace time", "being ended", "no answer"],
)
def test_only_what_slurm_says_now_is_the_end_of_the_job(
    on_slurm: Scenario, monkeypatch: pytest.MonkeyPatch, job: dict[str, str] | None, *, has_come: bool
) -> None:
    monkeypatch.setattr(commands, "show_job", lambda _: job)
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/scontrol")
    set_end(on_slurm, 1)
    assert watching.JobEnd(read_start(on_slurm.attempt), ON_SLURM).has_come() is has_come


def test_where_slurm_cannot_be_asked_the_end_is_the_one_of_the_start(
    on_slurm: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    set_end(on_slurm, 1)
    assert watching.JobEnd(read_start(on_slurm.attempt), ON_SLURM).has_come()
    set_end(on_slurm, 60)
    assert not watching.JobEnd(read_start(on_slurm.attempt), ON_SLURM).has_come()


def test_a_job_that_ends_far_from_its_limit_is_not_near_its_end(
    on_slurm: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ranks may save until KillWait is over."""
    monkeypatch.setattr(commands, "show_job", lambda _: {"JobState": "COMPLETING", "Reason": "None"})
    set_end(on_slurm, 3600)
    end = watching.JobEnd(read_start(on_slurm.attempt), ON_SLURM)
    monkeypatch.setattr(watching, "ASK_EVERY_S", 0.0)
    assert not end.has_come()


def test_a_run_in_an_allocation_ends_with_the_allocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "show_job", lambda job_id: running_until(2) if job_id == "8" else None)
    scenario = Scenario(tmp_path, LOCAL)
    assert watching.JobEnd(read_start(scenario.attempt), {**LOCAL, "SLURM_JOB_ID": "8"}).has_come()
    assert not watching.JobEnd(read_start(scenario.attempt), LOCAL).has_come()


def test_a_host_that_was_started_anew_meanwhile_ends_srun(
    on_slurm: Scenario,
    srun: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    answers = iter([{"n2": shown(-3600)}, {"n2": shown(100)}])
    asked = []

    def boot_times(nodes: Sequence[str], _: object) -> dict[str, str]:
        asked.append(list(nodes))
        return next(answers)

    monkeypatch.setattr(commands, "boot_times", boot_times)
    monkeypatch.setattr(watching, "_ASK_BOOT_TIMES_EVERY_S", 0.3)
    watch(on_slurm.attempt, srun.pid, environment=ON_SLURM, patience_s=0.2, poll_s=0.05)
    assert srun.wait(timeout=10) == -signal.SIGTERM
    assert "n2 was started anew while the tasks ran" in capsys.readouterr().err
    assert asked[0] == ["n2"]


@pytest.mark.parametrize(
    ("first", "second"),
    [(-3600, -3590), (-7200, -3600), (-3600, None), (None, -3600)],
    ids=["reckoned anew", "before the attempt", "unknown later", "unknown at first"],
)
def test_other_boot_times_are_no_sign(
    on_slurm: Scenario, monkeypatch: pytest.MonkeyPatch, first: float | None, second: float | None
) -> None:
    answers = iter([{"n2": "None" if seconds is None else shown(seconds)} for seconds in (first, second)])
    monkeypatch.setattr(commands, "boot_times", lambda *_: next(answers))
    monkeypatch.setattr(watching, "_ASK_BOOT_TIMES_EVERY_S", 0.0)
    hosts = watching.HostBoots(read_start(on_slurm.attempt), ON_SLURM)
    assert hosts.restarted() == []
    assert hosts.restarted() == []


def test_a_controller_that_does_not_say_boot_times_is_no_sign(
    on_slurm: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    def boot_times(*_: object) -> dict[str, str]:
        raise AWAY

    monkeypatch.setattr(commands, "boot_times", boot_times)
    assert watching.HostBoots(read_start(on_slurm.attempt), ON_SLURM).restarted() == []


@pytest.mark.parametrize("others", [(), (2,), (2, 3)], ids=str)
def test_one_rank_that_still_works_keeps_srun(scenario: Scenario, others: tuple[int, ...]) -> None:
    for rank in (0, *others):
        write_exit(scenario.attempt, exit_of(rank))
    assert not tasks_have_ended(scenario.attempt, lambda: 2)
    write_exit(scenario.attempt, exit_of(1))
    assert tasks_have_ended(scenario.attempt, lambda: 2)


@pytest.mark.parametrize(("attempts", "ended"), [(0, False), (1, True), (2, False)])
def test_the_result_of_another_attempt_keeps_srun(scenario: Scenario, attempts: int, *, ended: bool) -> None:
    write_result(scenario.attempt.run, Result(status="stopped", attempts=attempts))
    assert tasks_have_ended(scenario.attempt, lambda: 2) is ended


def test_a_run_directory_that_is_away_keeps_srun(scenario: Scenario, tmp_path: Path) -> None:
    scenario.attempt.run.path.rename(tmp_path / "away")
    assert not tasks_have_ended(scenario.attempt, lambda: 2)


def test_a_damaged_job_file_does_not_end_the_watch(
    scenario: Scenario, srun: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    scenario.attempt.run.job_file.write_text("name: [")
    end_each_rank(scenario)
    threading.Timer(0.5, write_result, (scenario.attempt.run, Result(status="stopped", attempts=1))).start()
    watch(scenario.attempt, srun.pid, environment=LOCAL, patience_s=0.2, poll_s=0.05)
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
        wait_until((tmp_path / "ready").exists, "the trap")
        thread = threading.Thread(
            target=watch, args=(scenario.attempt, srun.pid), kwargs={"environment": LOCAL, "warn": warn, "poll_s": 0.02}
        )
        thread.start()
        if not warn:
            (tmp_path / "end").touch()
        assert srun.wait(timeout=30) == (7 if warn else 0)
        thread.join()


def test_the_watch_ends_with_srun(scenario: Scenario, srun: subprocess.Popen[bytes]) -> None:
    srun.kill()
    srun.wait()
    watch(scenario.attempt, srun.pid, environment=LOCAL, poll_s=0.05)
