"""Asking Slurm why a job ends."""

import time
from pathlib import Path

import pytest

from hpcddp.run.directory import AttemptDirectory
from hpcddp.run.failure import write_failure
from hpcddp.run.files import write_json
from hpcddp.run.job_records import FailureRecord, Start, write_start
from hpcddp.slurm.job import ask_slurm, slurm_job_id
from hpcddp.stop.reasons import Cause
from hpcddp.task.signals import ask_cause
from tests.supervise.fake_slurm import AWAY, MISSING, REFUSED, FakeSlurm

SLURM = {"SLURM_JOB_ID": "7"}


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm(monkeypatch, Restarts="2")
    monkeypatch.setattr(time, "monotonic", lambda: fake.waited)
    return fake


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDirectory:
    made = AttemptDirectory(tmp_path / "attempts" / "2")
    made.path.mkdir(parents=True)
    write_start(made, Start(job_id="7", host="n1", time=0.0, is_local=False, restart_count=2))
    return made


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({"SLURM_JOB_ID": "7"}, "7"),
        ({"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}, "7_3"),
        ({"SLURM_JOB_ID": "7", "HPCDDP_LOCAL_JOB_ID": "123"}, None),
        ({}, None),
    ],
)
def test_an_array_element_has_a_name_of_its_own_and_a_local_run_none(
    environment: dict[str, str], name: str | None
) -> None:
    assert slurm_job_id(environment) == name


def test_the_cause_is_asked_once_and_compared_with_the_attempts_own_restart_count(
    slurm: FakeSlurm, attempt: AttemptDirectory
) -> None:
    assert ask_cause(attempt, SLURM, warned=False) is Cause.UNKNOWN
    slurm.become("RUNNING", PreemptTime="2026-01-01T00:00:00")
    assert ask_cause(attempt, SLURM, warned=True) is Cause.PREEMPTION
    slurm.become_requeued()
    assert ask_cause(attempt, SLURM, warned=False) is Cause.REQUEUED


def test_a_peers_error_record_makes_it_a_crash(slurm: FakeSlurm, attempt: AttemptDirectory) -> None:
    record = FailureRecord(
        rank=1, host="n2", time=1.0, kind="ValueError", message="boom", traceback="T", exit_code=70, secondary=False
    )
    write_failure(attempt, record)
    assert ask_cause(attempt, SLURM, warned=False) is Cause.CRASH
    assert slurm.waited == 0


def test_without_an_answer_the_cause_is_what_the_signal_says(slurm: FakeSlurm, attempt: AttemptDirectory) -> None:
    slurm.errors = [MISSING, AWAY]
    assert ask_cause(attempt, SLURM, warned=False) is Cause.UNKNOWN
    assert ask_cause(attempt, SLURM, warned=True) is Cause.TIME_LIMIT


def test_a_local_run_does_not_ask_slurm(slurm: FakeSlurm, attempt: AttemptDirectory) -> None:
    slurm.errors = [REFUSED]
    assert ask_cause(attempt, {"HPCDDP_LOCAL_JOB_ID": "1"}, warned=False) is Cause.UNKNOWN
    assert slurm.errors == [REFUSED]


def test_a_controller_that_does_not_answer_is_asked_again_within_the_patience(
    slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.errors = [AWAY] * 1000
    assert ask_slurm("7", patience_s=10.0) is None
    assert 10 <= slurm.waited < 15
    assert capsys.readouterr().err == f"hpcddp: {AWAY.message}\n"
    slurm.errors = [AWAY, AWAY]
    assert ask_slurm("7", patience_s=10.0) == slurm.job


def test_a_warning_that_the_user_sent_is_a_requeue(slurm: FakeSlurm, attempt: AttemptDirectory) -> None:
    write_json(attempt.requeue_request, {})
    assert ask_cause(attempt, SLURM, warned=True) is Cause.REQUEUED
    slurm.become("RUNNING", PreemptTime="2026-01-01T00:00:00")
    assert ask_cause(attempt, SLURM, warned=False) is Cause.PREEMPTION
