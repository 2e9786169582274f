"""After an infrastructure failure the tasks are started again in the same job, where that is possible."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from hpcddp.jobfile.job import JobSpec
from hpcddp.run.directory import AttemptDirectory
from hpcddp.run.events import append_event
from hpcddp.run.job_records import Rank, Start, read_start, write_ranks
from hpcddp.run.ownership import RunDirectoryError
from hpcddp.supervise.begin import begin_again
from tests.facts import assert_facts
from tests.messages import GoldenMessages
from tests.supervise.attempts import LOCAL, SLURM, Scenario
from tests.supervise.fake_slurm import FakeSlurm

BUDGET = "requeue: {max_failures: 2, signal_lead: 2min}\n"


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm(monkeypatch)
    monkeypatch.setattr("time.monotonic", lambda: fake.waited)
    return fake


@pytest.fixture
def scenario(tmp_path: Path, slurm: FakeSlurm) -> Scenario:
    del slurm
    scenario = Scenario(tmp_path, SLURM, BUDGET)
    work(scenario)
    return scenario


def work(scenario: Scenario) -> None:
    """The ranks have met, and one of them has lost the other."""
    attempt = scenario.attempt
    write_ranks(attempt, [Rank(host="n1"), Rank(host="n2")])
    attempt.step.write_text("7.0\n")
    append_event(attempt.run.events, kind="train", time=start_of(attempt).time + 10, attempt=attempt.number, step=0)
    scenario.fail(0, exit_code=71, secondary=True)


def start_of(attempt: AttemptDirectory) -> Start:
    start = read_start(attempt)
    assert start is not None
    return start


def ends_in(slurm: FakeSlurm, seconds: float) -> None:
    """Set how long the job still has."""
    end_time = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + seconds))
    slurm.become("RUNNING", EndTime=end_time, TimeLimit="01:00:00")


def test_an_infrastructure_failure_starts_the_tasks_again_in_the_same_job(
    scenario: Scenario, slurm: FakeSlurm, golden: GoldenMessages
) -> None:
    append_event(scenario.attempt.run.events, kind="save", time=0.0, attempt=0, step=12)
    ending = scenario.end()
    assert ending.next_attempt == scenario.attempt.run.attempt(1)
    assert (slurm.calls, slurm.is_forbidden, scenario.result) == ([], False, None)
    before, after = start_of(scenario.attempt), start_of(ending.next_attempt)
    assert (after.job_id, after.restart_count, after.start_number) == ("7", before.restart_count, 1)
    assert after.token != before.token
    assert [kind for kind, _ in scenario.events()][-3:] == ["stop", "restart", "start"]
    assert_facts(golden.message(ending.text), "the newest checkpoint is of step 12", "started again in job 7")


def test_restarts_and_requeues_have_one_budget(scenario: Scenario) -> None:
    for number in range(2):
        append_event(scenario.attempt.run.events, kind="save", time=0.0, attempt=number, step=number + 1)
        ending = scenario.end()
        assert ending.next_attempt is not None
        scenario.attempt = ending.next_attempt
        work(scenario)
    append_event(scenario.attempt.run.events, kind="save", time=0.0, attempt=2, step=3)
    ending = scenario.end()
    assert (ending.exit_code, ending.next_attempt) == (71, None)
    assert "requeue.max_failures is 2, and that is used up" in ending.text


def test_a_restart_that_did_not_help_is_followed_by_a_requeue(scenario: Scenario, slurm: FakeSlurm) -> None:
    append_event(scenario.attempt.run.events, kind="save", time=0.0, attempt=0, step=12)
    ending = scenario.end()
    assert ending.next_attempt is not None
    scenario.attempt = ending.next_attempt
    work(scenario)
    assert scenario.end().next_attempt is None
    assert (slurm.calls, scenario.events()[-1]) == (["requeue 7"], ("requeue", "crash"))


def test_tasks_that_never_met_are_not_started_on_the_same_nodes(scenario: Scenario, slurm: FakeSlurm) -> None:
    scenario.attempt.ranks.unlink()
    assert scenario.end().next_attempt is None
    assert slurm.calls == ["requeue 7"]


@pytest.mark.parametrize("step", ["7.0\n", "", "7.", "7.0", "x\n", "7.0\n" * 50, None])
def test_a_step_that_may_still_run_is_ended_by_a_requeue(
    scenario: Scenario, slurm: FakeSlurm, step: str | None
) -> None:
    """Where a slurmstepd was killed, Slurm would let the next step wait for it. The record may also be damaged."""
    slurm.running_steps = ["7.0"]
    if step is None:
        scenario.attempt.step.unlink()
    else:
        scenario.attempt.step.write_text(step)
    assert scenario.end().next_attempt is None
    assert slurm.calls == ["requeue 7"]


def test_a_pipe_in_place_of_the_record_of_the_step_is_not_waited_for(scenario: Scenario, slurm: FakeSlurm) -> None:
    scenario.attempt.step.unlink()
    os.mkfifo(scenario.attempt.step)
    assert scenario.end().next_attempt is None
    assert slurm.calls == ["requeue 7"]


def test_a_script_that_cannot_start_the_tasks_again_is_requeued(scenario: Scenario, slurm: FakeSlurm) -> None:
    scenario.may_restart = False
    assert scenario.end().next_attempt is None
    assert slurm.calls == ["requeue 7"]


def test_an_attempt_that_cannot_be_created_stops_the_run(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch, golden: GoldenMessages
) -> None:
    def fail(*_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("hpcddp.supervise.begin.write_start", fail)
    ending = scenario.end()
    assert (ending.exit_code, ending.next_attempt) == (75, None)
    assert_facts(
        golden.message(ending.text), "the next attempt cannot be created", "Permission denied", scenario.resume
    )
    assert scenario.result is not None
    assert scenario.result["status"] == "stopped"
    assert [kind for kind, _ in scenario.events()][-2:] == ["restart", "stop"]


@pytest.mark.parametrize(("seconds", "is_restarted"), [(185, False), (200, True)])
def test_a_job_whose_end_is_near_is_requeued(
    scenario: Scenario, slurm: FakeSlurm, seconds: float, *, is_restarted: bool
) -> None:
    """The start took 10 s, the warning comes 120 s before the end, and Slurm may send it 60 s too early."""
    ends_in(slurm, seconds)
    assert (scenario.end().next_attempt is not None) == is_restarted
    assert slurm.calls == ([] if is_restarted else ["requeue 7"])


def test_the_user_may_want_a_requeue(tmp_path: Path, slurm: FakeSlurm) -> None:
    scenario = Scenario(tmp_path, SLURM, "requeue: {max_failures: 1, recovery: requeue}\n")
    work(scenario)
    assert scenario.end().next_attempt is None
    assert slurm.calls == ["requeue 7"]


def test_a_run_on_this_machine_is_restarted_too(tmp_path: Path, slurm: FakeSlurm) -> None:
    del slurm
    scenario = Scenario(tmp_path, LOCAL, BUDGET)
    work(scenario)
    ending = scenario.end()
    assert ending.next_attempt is not None
    assert start_of(ending.next_attempt).is_local


def test_no_other_script_of_the_same_start_of_the_job_may_begin(scenario: Scenario) -> None:
    assert scenario.end().next_attempt is not None
    with pytest.raises(RunDirectoryError, match="it belongs to another job 7"):
        scenario.begin(SLURM)


def test_a_script_whose_next_attempt_was_begun_by_another_one_ends(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken(attempt: AttemptDirectory, spec: JobSpec, environment: dict[str, str]) -> AttemptDirectory:
        attempt.run.attempt(1).path.mkdir()
        attempt.run.attempt(1).start.write_text("{}")
        return begin_again(attempt, spec, environment)

    monkeypatch.setattr("hpcddp.supervise.begin.begin_again", taken)
    ending = scenario.end()
    assert (ending.exit_code, ending.next_attempt) == (76, None)
