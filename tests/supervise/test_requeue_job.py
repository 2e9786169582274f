"""Having Slurm run a job again, and making sure that it does."""

import time
from pathlib import Path

import pytest

from hpcddp.run.directory import AttemptDirectory, RunDirectory
from hpcddp.run.events import EventKind, append_event
from hpcddp.slurm import commands
from hpcddp.slurm.commands import SlurmCommandError
from hpcddp.supervise.requeue_job import (
    RequeueOutcome,
    RequeueResult,
    leave,
    requeue,
    start_delay_s,
    stay_until_saved,
    wait_and_requeue,
)
from tests.facts import assert_facts
from tests.messages import GoldenMessages
from tests.supervise.fake_slurm import AWAY, MISSING, NOW, REFUSED, FakeSlurm


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm(monkeypatch)
    monkeypatch.setattr(time, "monotonic", lambda: fake.waited)
    return fake


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDirectory:
    return RunDirectory(tmp_path).attempt(0)


def test_a_requeue_is_done_when_the_restart_count_is_raised(slurm: FakeSlurm, attempt: AttemptDirectory) -> None:
    assert requeue("7", attempt=attempt, restarts=0, set_requeue_flag=False) == RequeueResult(
        outcome=RequeueOutcome.REQUEUED
    )
    assert slurm.calls == ["requeue 7"]


def test_slurm_says_nothing_either_way_so_it_is_asked_three_times(slurm: FakeSlurm, attempt: AttemptDirectory) -> None:
    slurm.ignored_requeues = 2
    assert requeue("7", attempt=attempt, restarts=0, set_requeue_flag=False).outcome is RequeueOutcome.REQUEUED
    assert slurm.calls == ["requeue 7"] * 3


def test_three_requeues_that_do_nothing_are_told(
    slurm: FakeSlurm, attempt: AttemptDirectory, golden: GoldenMessages
) -> None:
    slurm.ignored_requeues = 9
    done = requeue("7", attempt=attempt, restarts=0, set_requeue_flag=False)
    assert done.outcome is RequeueOutcome.REFUSED
    assert_facts(golden.message(done.why), "scontrol requeue", "3 times", "nothing happened")


def test_a_job_that_was_cancelled_meanwhile_is_left_alone(slurm: FakeSlurm, attempt: AttemptDirectory) -> None:
    slurm.become("COMPLETING")
    assert requeue("7", attempt=attempt, restarts=0, set_requeue_flag=False) == RequeueResult(
        outcome=RequeueOutcome.CANCELLED
    )
    assert slurm.calls == ["requeue 7"]


def test_a_controller_that_comes_back_is_asked_again(slurm: FakeSlurm, attempt: AttemptDirectory) -> None:
    slurm.errors = [AWAY, AWAY, None]
    assert requeue("7", attempt=attempt, restarts=0, set_requeue_flag=False).outcome is RequeueOutcome.REQUEUED


def test_a_controller_that_stays_away_is_waited_for_a_minute(slurm: FakeSlurm, attempt: AttemptDirectory) -> None:
    slurm.errors = [AWAY] * 100
    done = requeue("7", attempt=attempt, restarts=0, set_requeue_flag=False, patience_s=60.0)
    assert done == RequeueResult(
        outcome=RequeueOutcome.UNREACHABLE, why="scontrol failed: Unable to contact slurm controller"
    )
    assert 60 <= slurm.waited < 65


@pytest.mark.parametrize(
    ("error", "outcome"), [(MISSING, RequeueOutcome.NO_SCONTROL), (REFUSED, RequeueOutcome.REFUSED)]
)
def test_what_does_not_change_is_not_waited_for(
    slurm: FakeSlurm, attempt: AttemptDirectory, error: SlurmCommandError, outcome: RequeueOutcome
) -> None:
    slurm.errors = [error]
    assert requeue("7", attempt=attempt, restarts=0, set_requeue_flag=False) == RequeueResult(
        outcome=outcome, why=error.message
    )
    assert slurm.waited == 0


def test_a_job_that_slurm_was_kept_from_requeueing_is_allowed_this_once(
    slurm: FakeSlurm, attempt: AttemptDirectory
) -> None:
    requeue("7", attempt=attempt, restarts=0, set_requeue_flag=True)
    assert slurm.calls == ["update 7 {'Requeue': '1'}", "requeue 7"]


def left(attempt: AttemptDirectory) -> str:
    done = leave("7", attempt=attempt, restarts=0, set_requeue_flag=False)
    assert done.outcome is RequeueOutcome.REQUEUED
    return done.start


def test_the_start_is_two_seconds_on_by_slurms_clock_and_never_now(slurm: FakeSlurm, attempt: AttemptDirectory) -> None:
    slurm.become_requeued()
    assert left(attempt).startswith(f"at {time.strftime('%H:%M:%S', time.localtime(NOW + 2))}, ")
    assert (slurm.start_times, slurm.waited) == ([2], 0)


def test_a_start_time_that_took_long_to_set_is_set_again(
    slurm: FakeSlurm, attempt: AttemptDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def update_job(job_id: str, **fields: str) -> None:
        slurm.update_job(job_id, **fields)
        slurm.waited += 3 if len(slurm.start_times) == 1 else 0

    slurm.become_requeued()
    monkeypatch.setattr(commands, "update_job", update_job)
    assert left(attempt).startswith("at ")
    assert slurm.start_times == [2, 2]


def test_a_requeue_that_is_forgotten_before_the_script_leaves_is_made_again(
    slurm: FakeSlurm, attempt: AttemptDirectory, capsys: pytest.CaptureFixture[str], golden: GoldenMessages
) -> None:
    assert left(attempt).startswith("at ")
    assert (slurm.calls, slurm.start_times) == (["requeue 7"], [2, 2])
    assert_facts(golden.message(capsys.readouterr().err), "lost the requeue of job 7", "requeued again")


def test_a_requeue_that_is_forgotten_and_then_refused_is_told(slurm: FakeSlurm, attempt: AttemptDirectory) -> None:
    slurm.errors = [None, None, REFUSED]
    done = leave("7", attempt=attempt, restarts=0, set_requeue_flag=False)
    assert done == RequeueResult(outcome=RequeueOutcome.REFUSED, why=REFUSED.message)


def test_a_script_does_not_leave_while_slurmctld_is_away(
    slurm: FakeSlurm, attempt: AttemptDirectory, capsys: pytest.CaptureFixture[str], golden: GoldenMessages
) -> None:
    slurm.become_requeued()
    slurm.errors = [AWAY] * 10
    assert left(attempt).startswith("at ")
    assert slurm.waited == 20
    assert_facts(golden.message(capsys.readouterr().err), "slurmctld does not answer", "60 s")


def test_a_slurmctld_that_stays_away_for_a_minute_is_left(
    slurm: FakeSlurm, attempt: AttemptDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.errors = [AWAY] * 100
    assert left(attempt).startswith("after Slurm's delay")
    assert 60 <= slurm.waited < 65
    assert AWAY.message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("times", "delay_s"),
    [
        ((), 2),
        ((("requeue", 100), ("start", 106)), 2),
        # The nodes were busy: the time is not Slurm's own.
        ((("requeue", 100), ("start", 4000)), 2),
        ((("requeue", 100), ("start", 223.5)), 15),
        ((("requeue", 100), ("start", 223.5), ("requeue", 400), ("start", 420)), 15),
        ((("requeue", 100), ("cancel", 110), ("resume", 200), ("start", 223)), 2),
    ],
)
def test_a_run_that_has_waited_for_slurms_own_delay_gets_more_time_to_end(
    attempt: AttemptDirectory, times: tuple[tuple[EventKind, float], ...], delay_s: int
) -> None:
    for kind, seconds in times:
        append_event(attempt.run.events, kind=kind, time=1.7e9 + seconds, attempt=0)
    assert start_delay_s(attempt.run, slurms_delay_s=121) == delay_s


def test_the_delay_of_a_requeue_that_is_found_at_the_next_start_is_slurms_own(attempt: AttemptDirectory) -> None:
    append_event(attempt.run.events, kind="requeue", time=1.7e9, attempt=0, found_at_start=True)
    append_event(attempt.run.events, kind="start", time=1.7e9 + 123, attempt=1)
    assert start_delay_s(attempt.run, slurms_delay_s=121) == 2


def test_a_damaged_event_log_does_not_hold_up_the_end(attempt: AttemptDirectory) -> None:
    attempt.run.events.mkdir()
    assert start_delay_s(attempt.run, slurms_delay_s=121) == 2


def stay(attempt: AttemptDirectory) -> RequeueResult:
    return stay_until_saved("7", attempt=attempt, restarts=0)


def test_the_script_stays_until_slurm_has_saved_the_requeue(slurm: FakeSlurm, attempt: AttemptDirectory) -> None:
    slurm.become_requeued()
    assert stay(attempt) == RequeueResult(outcome=RequeueOutcome.REQUEUED)
    assert (slurm.waited, slurm.start_times, slurm.calls) == (7, [9], [])


def test_a_controller_that_keeps_forgetting_is_asked_three_times_more(
    slurm: FakeSlurm,
    attempt: AttemptDirectory,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    golden: GoldenMessages,
) -> None:
    def sleep(seconds: float) -> None:
        slurm.sleep(seconds)
        slurm.become("RUNNING", Restarts="0")

    monkeypatch.setattr(time, "sleep", sleep)
    assert stay(attempt).outcome is RequeueOutcome.REQUEUED
    assert slurm.calls == ["update 7 {'Requeue': '1'}", "requeue 7"] * 3
    assert_facts(golden.message(capsys.readouterr().err), "lost the requeue of job 7", "requeued again")


def test_a_controller_that_is_away_when_it_is_looked_at_is_waited_for(
    slurm: FakeSlurm, attempt: AttemptDirectory
) -> None:
    slurm.errors = [None, AWAY, AWAY]
    assert stay(attempt).outcome is RequeueOutcome.REQUEUED
    assert slurm.calls == ["update 7 {'Requeue': '1'}", "requeue 7"]


def test_a_requeue_that_slurm_has_forgotten_and_now_refuses_is_told(
    slurm: FakeSlurm, attempt: AttemptDirectory
) -> None:
    slurm.errors = [None, None, REFUSED]
    assert stay(attempt) == RequeueResult(outcome=RequeueOutcome.REFUSED, why=REFUSED.message)


def test_a_preempted_job_stays_until_slurm_takes_it_or_it_would_never_be_requeued(
    slurm: FakeSlurm, attempt: AttemptDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.become("RUNNING", PreemptTime="2026-01-01T00:00:00")

    def sleep(seconds: float) -> None:
        slurm.waited += seconds
        if slurm.waited > 10:
            slurm.become_requeued()

    monkeypatch.setattr(time, "sleep", sleep)
    before = RequeueResult(outcome=RequeueOutcome.REFUSED, why="no")
    assert wait_and_requeue("7", attempt=attempt, restarts=0, set_requeue_flag=False, before=before) == RequeueResult(
        outcome=RequeueOutcome.REQUEUED
    )
    assert slurm.calls == []


@pytest.mark.parametrize("preempt_time", ["2026-01-01T00:00:00", "None"])
def test_a_controller_that_comes_back_is_asked_for_the_requeue(
    slurm: FakeSlurm, attempt: AttemptDirectory, preempt_time: str
) -> None:
    slurm.errors = [AWAY, AWAY]
    slurm.become("RUNNING", PreemptTime=preempt_time)
    before = RequeueResult(outcome=RequeueOutcome.UNREACHABLE, why="away")
    assert (
        wait_and_requeue("7", attempt=attempt, restarts=0, set_requeue_flag=False, before=before).outcome
        is RequeueOutcome.REQUEUED
    )


def test_nobody_waits_for_a_grace_time_that_is_none(slurm: FakeSlurm, attempt: AttemptDirectory) -> None:
    before = RequeueResult(outcome=RequeueOutcome.REFUSED, why="no")
    assert wait_and_requeue("7", attempt=attempt, restarts=0, set_requeue_flag=False, before=before) is before
    assert slurm.waited < 5
