"""A job of a chain: when it begins, and what it leaves to the next one."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hpcddp.run.events import append_event, read_events
from hpcddp.run.failure import beginning
from hpcddp.run.files import write_json
from hpcddp.run.job_records import SubmissionRecord, read_start, write_start, write_submission_record
from hpcddp.run.ownership import RunDirectoryError
from hpcddp.run.record import write_record
from hpcddp.run.result import Result
from hpcddp.slurm import commands
from hpcddp.slurm.job_environment import Dependency
from hpcddp.stop.reasons import StopReason
from hpcddp.supervise.__main__ import main
from hpcddp.supervise.refusals import PATIENCE_S, BudgetError, CancelledError
from tests.facts import assert_facts
from tests.messages import GoldenMessages
from tests.supervise.attempts import PREEMPTED, SLURM, Scenario
from tests.supervise.fake_slurm import AWAY, FakeSlurm
from tests.supervise.stdin import stdin_of

NEXT = {"SLURM_JOB_ID": "8", "SLURM_JOB_NAME": "demo-r1"}


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm(monkeypatch, Requeue="0")
    now = time.monotonic()
    monkeypatch.setattr("time.monotonic", lambda: now + fake.waited)
    monkeypatch.setattr("hpcddp.supervise.begin.lost_nodes", lambda *_, **__: [])
    # The job before is 7; 8 is the one that asks.
    monkeypatch.setattr(commands, "show_job", lambda job_id: fake.show_job("7") if job_id == "7" else {})
    return fake


def chained(tmp_path: Path, *chain: str, more: str = "") -> Scenario:
    scenario = Scenario(tmp_path, SLURM, more)
    record = SubmissionRecord(
        cluster="slurm", job_id=chain[0], directory="/", python="python", time=0.0,
        run_dir=str(scenario.attempt.run.path), chain=chain,
    )  # fmt: skip
    write_submission_record(scenario.attempt.run, record)
    return scenario


@pytest.mark.parametrize("more", ["", "requeue: {causes: []}\n", "requeue: {causes: [time_limit]}\n"])
def test_a_job_of_a_chain_asks_for_no_requeue_and_names_the_next(
    tmp_path: Path, slurm: FakeSlurm, golden: GoldenMessages, more: str
) -> None:
    scenario = chained(tmp_path, "7", "8", "9", more=more)
    scenario.stop(reason=StopReason.WARNED, cause="time_limit")
    ending = scenario.end()
    assert (ending.exit_code, slurm.calls, slurm.start_times) == (75, [], [])
    assert_facts(golden.message(ending.text), "Job 8", "the run resumes from that step")
    assert scenario.events()[-2:] == [("stop", "time_limit"), ("requeue", "time_limit")]
    assert scenario.result is None
    slurm.become("FAILED")
    assert scenario.begin(NEXT).number == 1


def test_the_next_job_of_a_chain_is_kept_away_from_failing_nodes(
    tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = chained(tmp_path, "7", "8", more="requeue: {avoid_failed_nodes: true}\n")
    kept_away = []
    monkeypatch.setattr("hpcddp.supervise.end.avoid_failing_nodes", lambda _, job_id, __: kept_away.append(job_id))
    scenario.stop(reason=StopReason.WARNED, cause="time_limit")
    assert (scenario.end().exit_code, kept_away, slurm.calls) == (75, ["8"], [])


def test_the_last_job_of_a_chain_says_so_and_what_to_type(
    tmp_path: Path, slurm: FakeSlurm, golden: GoldenMessages
) -> None:
    scenario = chained(tmp_path, "6", "7", more="requeue: {causes: [time_limit]}\n")
    scenario.stop(reason=StopReason.WARNED, cause="time_limit")
    ending = scenario.end()
    assert (ending.exit_code, slurm.calls) == (75, [])
    assert_facts(golden.message(ending.text), "the last of its chain", f"To resume: {scenario.resume} --chain 2")
    assert scenario.result is not None
    assert (scenario.result["status"], scenario.result["resume"]) == ("stopped", f"{scenario.resume} --chain 2")


def test_a_budget_ends_a_chain(tmp_path: Path, slurm: FakeSlurm) -> None:
    scenario = chained(tmp_path, "7", "8", more="requeue: {max_time_limits: 0}\n")
    scenario.stop(reason=StopReason.WARNED, cause="time_limit")
    assert (scenario.end().exit_code, slurm.calls) == (93, [])
    assert scenario.result is not None
    assert (scenario.result["status"], scenario.result["final"]) == ("failed", True)


def test_a_job_that_is_killed_while_slurm_is_away_leaves_the_run_to_the_next(tmp_path: Path, slurm: FakeSlurm) -> None:
    """A result of an end that is not known yet would end the chain."""
    scenario = chained(tmp_path, "7", "8")
    append_event(scenario.attempt.run.events, kind="signal", time=0.0, attempt=0, reason="terminated")
    results = []
    answers = slurm.show_job

    def show_job(job_id: str) -> dict[str, str] | None:
        results.append(scenario.result)
        return answers(job_id)

    slurm.errors = [AWAY] * 100
    slurm.become("RUNNING", **PREEMPTED)
    slurm.show_job = show_job  # type: ignore[method-assign]
    assert scenario.end().exit_code == 75
    assert len(results) > 50
    assert set(map(str, results)) == {"None"}


@pytest.mark.parametrize("status", ["finished", "failed", "cancelled", "stopped"])
def test_the_jobs_after_the_end_of_a_run_end_at_once_and_well(
    tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], status: str
) -> None:
    scenario = chained(tmp_path, "7", "8")
    run = scenario.attempt.run
    slurm.become("FAILED")
    write_record(run.result, Result(status=status, reason="a reason"))
    monkeypatch.setattr("sys.stdin", stdin_of(scenario.text.encode()))
    words = ["begin", f"--run-root={tmp_path / 'runs'}", "--name=demo", "--run-id=r1"]
    assert main(words, NEXT) == 0
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("", "hpcddp: this run has ended already; nothing to do\n")
    assert scenario.result is not None
    assert (scenario.result["status"], run.newest_attempt()) == (status, 0)


def test_a_job_waits_for_the_submission_of_the_whole_chain(
    tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = chained(tmp_path, "7", "8")
    record = scenario.attempt.run.submission.read_bytes()
    scenario.attempt.run.submission.unlink()
    slurm.become("FAILED")
    monkeypatch.setattr("time.sleep", lambda _: scenario.attempt.run.submission.write_bytes(record))
    assert scenario.begin(NEXT).number == 1


def test_a_job_of_a_chain_that_was_not_submitted_as_a_whole_changes_nothing(
    tmp_path: Path, slurm: FakeSlurm, golden: GoldenMessages
) -> None:
    scenario = chained(tmp_path, "7", "9")
    slurm.become("FAILED")
    shutil.rmtree(scenario.attempt.run.attempts)
    with pytest.raises(RunDirectoryError) as caught:
        scenario.begin(NEXT)
    assert_facts(golden.message(caught.value), "does not name job 8")
    assert PATIENCE_S <= slurm.waited < PATIENCE_S + 10
    assert not scenario.attempt.run.attempts.exists()


@pytest.mark.parametrize(
    ("why", "cause"),
    [(" DUE TO TIME LIMIT", "time_limit"), (" DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS", "node_failure")],
)
def test_a_job_that_was_killed_before_it_recorded_its_end_counts_as_one_that_did(
    tmp_path: Path, slurm: FakeSlurm, why: str, cause: str
) -> None:
    scenario = chained(tmp_path, "7", "8", more="requeue: {max_time_limits: 0}\n")
    slurm.become("TIMEOUT")
    notice = f"slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-22T05:17:38{why} ***\n"
    scenario.attempt.run.batch_log.write_text(f"{beginning(scenario.attempt)}{notice}")
    if cause == "time_limit":
        with pytest.raises(BudgetError, match="max_time_limits is 0"):
            scenario.begin(NEXT)
    else:
        assert scenario.begin(NEXT).number == 1
    (requeue,) = [event for event in read_events(scenario.attempt.run.events) if event.kind == "requeue"]
    assert (requeue.by, requeue.cause, requeue.facts["job_id"]) == ("chain", cause, "8")


def test_a_job_does_not_begin_after_one_that_was_cancelled_and_killed(
    tmp_path: Path, slurm: FakeSlurm, golden: GoldenMessages
) -> None:
    scenario = chained(tmp_path, "7", "8")
    slurm.become("CANCELLED")
    monday = "2026-11-23T05:17:38"
    notice = f"slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT {monday} ***\n"
    scenario.attempt.run.batch_log.write_text(f"{beginning(scenario.attempt)}{notice}")
    with pytest.raises(CancelledError) as caught:
        scenario.begin(NEXT)
    golden.message(caught.value)
    assert scenario.result is not None
    assert scenario.result["status"] == "cancelled"


def test_a_job_begins_when_the_one_before_it_has_ended(
    tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm starts a singleton when the job before it is over its limit, and its script may still end."""
    scenario = chained(tmp_path, "7", "8")
    start = read_start(scenario.attempt)
    assert start is not None
    write_start(scenario.attempt, replace(start, submit_time="then"))
    slurm.become("COMPLETING", SubmitTime="then")

    def sleep(seconds: float) -> None:
        slurm.waited += seconds
        if slurm.waited > 60:
            slurm.become("TIMEOUT")

    monkeypatch.setattr("time.sleep", sleep)
    assert scenario.begin(NEXT).number == 1
    assert 60 < slurm.waited < 120


def test_a_job_before_that_does_not_end_is_waited_for_ten_minutes(
    tmp_path: Path, slurm: FakeSlurm, golden: GoldenMessages
) -> None:
    scenario = chained(tmp_path, "7", "8")
    slurm.become("COMPLETING")
    with pytest.raises(RunDirectoryError) as caught:
        scenario.begin(NEXT)
    assert "job 7 is still using it" in golden.message(caught.value)
    assert slurm.waited >= PATIENCE_S


def test_a_job_that_is_none_of_the_chain_is_refused_at_once(tmp_path: Path, slurm: FakeSlurm) -> None:
    scenario = chained(tmp_path, "7", "9")
    with pytest.raises(RunDirectoryError, match="job 7 is still using it"):
        scenario.begin({"SLURM_JOB_ID": "8", "SLURM_JOB_NAME": "demo"})
    assert slurm.waited == 0


def test_the_runs_before_a_chain_may_be_gone_when_it_goes_on(tmp_path: Path, slurm: FakeSlurm) -> None:
    scenario = chained(tmp_path, "7", "8")
    slurm.become("FAILED")
    gone = Dependency(runs=(str(tmp_path / "gone"),)).environment
    assert scenario.begin({**NEXT, **gone}).number == 1


def test_a_damaged_submission_makes_a_job_like_any_other(tmp_path: Path, slurm: FakeSlurm) -> None:
    scenario = chained(tmp_path, "7", "8")
    write_json(scenario.attempt.run.submission, {})
    scenario.stop(reason=StopReason.WARNED, cause="time_limit")
    assert scenario.end().exit_code == 75
    assert scenario.result is not None
    assert "Requeue=0" in scenario.result["reason"]
    assert slurm.calls == []
