"""What the batch shell does at the end of an attempt."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from hpcddp.run.events import append_event, read_events
from hpcddp.run.failure import beginning, cause_in_log
from hpcddp.run.files import read_json, write_json
from hpcddp.run.job_records import read_start
from hpcddp.run.record import write_record
from hpcddp.run.result import Result
from hpcddp.slurm import commands
from hpcddp.stop.reasons import Cause, StopReason
from hpcddp.supervise import end as supervisor
from hpcddp.supervise.refusals import BudgetError
from tests.facts import assert_facts
from tests.messages import GoldenMessages
from tests.supervise.attempts import LOCAL, PREEMPTED, SLURM, Scenario
from tests.supervise.fake_slurm import AWAY, MISSING, NOW, REFUSED, FakeSlurm


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm(monkeypatch)
    monkeypatch.setattr("time.monotonic", lambda: fake.waited)
    return fake


@pytest.fixture
def scenario(tmp_path: Path, slurm: FakeSlurm) -> Scenario:
    del slurm
    return Scenario(tmp_path, SLURM)


def test_a_preempted_and_saved_attempt_is_requeued_and_hurried(
    scenario: Scenario, slurm: FakeSlurm, golden: GoldenMessages
) -> None:
    slurm.become("RUNNING", **PREEMPTED)
    scenario.stop()
    ending = scenario.end()
    assert (ending.exit_code, slurm.start_times[-1:], slurm.calls) == (75, [2], ["requeue 7"])
    start = time.strftime("%H:%M:%S", time.localtime(NOW + 2))
    text = golden.message(ending.text, {start: "HH:MM:SS"})
    assert_facts(text, "attempt 0 of run r1", "job 7 was preempted", "step 12 is saved in 0.4 s")
    assert_facts(text, f"Slurm runs job 7 again at {start}", "resumes from that step")
    assert scenario.events() == [("start", None), ("save", None), ("stop", "preemption"), ("requeue", "preemption")]
    assert scenario.result is None


def test_the_warning_before_the_time_limit_is_the_time_limit(
    scenario: Scenario, slurm: FakeSlurm, golden: GoldenMessages
) -> None:
    scenario.stop(reason=StopReason.WARNED, cause=None)
    ending = scenario.end()
    assert (ending.exit_code, slurm.calls) == (75, ["requeue 7"])
    assert_facts(golden.message(ending.text), "attempt 0 of run r1", "the time limit of job 7", "step 12 is saved")
    assert scenario.events()[-1] == ("requeue", "time_limit")


def test_a_requeue_that_its_user_asked_for_is_done_whatever_the_budgets_say(
    tmp_path: Path, slurm: FakeSlurm, golden: GoldenMessages
) -> None:
    scenario = Scenario(tmp_path, SLURM, "requeue: {causes: [preemption], max_time_limits: 0}\n")
    write_json(scenario.attempt.requeue_request, {})
    scenario.stop(reason=StopReason.WARNED, cause="requeued")
    ending = scenario.end()
    assert (ending.exit_code, slurm.start_times[-1:], slurm.calls) == (75, [2], ["requeue 7"])
    text = golden.message(ending.text)
    assert_facts(text, "its user requested the requeue of job 7", "step 12 is saved in 0.4 s", "Slurm runs")
    (event,) = [event for event in read_events(scenario.attempt.run.events) if event.kind == "requeue"]
    assert (event.cause, event.by) == ("requeued", "user")


def test_what_happens_to_a_job_comes_before_what_its_user_asked_for(scenario: Scenario, slurm: FakeSlurm) -> None:
    write_json(scenario.attempt.requeue_request, {})
    slurm.become("COMPLETING")
    scenario.stop(reason=StopReason.WARNED, cause="requeued")
    assert scenario.end().exit_code == 130
    assert slurm.calls == []
    assert scenario.result is not None
    assert scenario.result["status"] == "cancelled"


def test_what_slurm_requeues_itself_is_only_hurried(scenario: Scenario, slurm: FakeSlurm) -> None:
    scenario.stop(cause="requeued")
    slurm.become_requeued()
    ending = scenario.end()
    assert (ending.exit_code, slurm.start_times[-1:], slurm.calls) == (75, [2], [])
    assert scenario.events()[-1] == ("requeue", "requeued")


def test_a_stop_without_a_decision_is_written_down_here(scenario: Scenario, slurm: FakeSlurm) -> None:
    slurm.become("RUNNING", **PREEMPTED)
    scenario.end()
    assert scenario.events() == [("start", None), ("stop", "preemption"), ("requeue", "preemption")]


def test_a_preemption_that_the_ranks_saw_is_counted_as_one_when_slurm_shows_it_no_more(
    scenario: Scenario, slurm: FakeSlurm
) -> None:
    scenario.stop(cause="preemption")
    slurm.become_requeued()
    scenario.end()
    assert scenario.events()[-1] == ("requeue", "preemption")


def test_a_cancelled_job_is_never_requeued(scenario: Scenario, slurm: FakeSlurm, golden: GoldenMessages) -> None:
    scenario.stop(cause="preemption")
    slurm.become("COMPLETING")
    ending = scenario.end()
    assert (ending.exit_code, slurm.start_times, slurm.calls) == (130, [], [])
    text = golden.message(ending.text)
    assert_facts(text, "job 7 was cancelled", "step 12 is saved in 0.4 s", f"To resume: {scenario.resume}")
    assert scenario.result == {
        "status": "cancelled",
        "reason": "cancelled by a signal to the job",
        "exit_code": 130,
        "format": 1,
        "attempts": 1,
        "saved_step": 12,
        "resume": scenario.resume,
        "final": True,
    }


def test_a_job_cancelled_between_the_save_and_the_requeue_is_cancelled(
    scenario: Scenario, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.become("RUNNING", **PREEMPTED)
    scenario.stop()
    monkeypatch.setattr("hpcddp.slurm.commands.requeue", lambda _: slurm.become("COMPLETING", PreemptTime="None"))
    assert scenario.end().exit_code == 130
    assert scenario.events()[-1] == ("stop", "cancelled")


NOTICE = "slurmstepd-n1: error: *** {what} ON n1 CANCELLED AT 2026-11-22T05:17:38{why} ***\n"


def write_log(scenario: Scenario, *notices: str) -> None:
    """Write the batch log of the attempt."""
    scenario.attempt.run.batch_log.write_text(beginning(scenario.attempt) + "".join(notices))


@pytest.mark.parametrize(("requeue", "why"), [("1", ""), ("0", " DUE to SIGNAL Terminated")])
def test_a_job_cancelled_in_the_grace_time_of_a_preemption_is_cancelled(
    scenario: Scenario, slurm: FakeSlurm, requeue: str, why: str
) -> None:
    scenario.stop()
    slurm.become("COMPLETING", Requeue=requeue, **PREEMPTED)
    # The preemption told the step, the cancel the whole job.
    write_log(scenario, NOTICE.format(what="STEP 7.0", why=why), NOTICE.format(what="JOB 7", why=why))
    assert (scenario.end().exit_code, slurm.calls) == (130, [])
    assert scenario.result is not None
    assert scenario.result["status"] == "cancelled"


def test_a_notice_that_comes_late_shows_the_cancel_after_a_requeue_without_effect(
    scenario: Scenario, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario.stop()
    slurm.become("COMPLETING", **PREEMPTED)
    cancelled = NOTICE.format(what="JOB 7", why="")
    monkeypatch.setattr("hpcddp.slurm.commands.requeue", lambda _: write_log(scenario, cancelled))
    assert scenario.end().exit_code == 130
    assert scenario.events()[-1] == ("stop", "cancelled")


def test_a_job_that_preempt_mode_cancel_has_ended_was_not_cancelled_by_its_user(
    scenario: Scenario, slurm: FakeSlurm
) -> None:
    scenario.stop()
    slurm.become("COMPLETING", **PREEMPTED)
    write_log(scenario, NOTICE.format(what="STEP 7.0", why=""), NOTICE.format(what="JOB 7", why=" DUE TO PREEMPTION"))
    assert scenario.end().exit_code == 75
    assert scenario.result is not None
    assert scenario.result["status"] == "stopped"


def test_a_job_cancelled_after_its_requeue_is_cancelled(
    scenario: Scenario, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.become("RUNNING", **PREEMPTED)
    scenario.stop()

    def update_job(_: str, **__: str) -> None:
        slurm.become("COMPLETING", PreemptTime="None")

    monkeypatch.setattr("hpcddp.slurm.commands.update_job", update_job)
    ending = scenario.end()
    assert (ending.exit_code, slurm.calls) == (130, ["requeue 7"])
    assert scenario.events()[-1] == ("stop", "cancelled")


@pytest.mark.parametrize("causes", ["[time_limit]", "[time_limit, preemption]"])
def test_the_script_stays_only_where_slurm_does_not_repair_a_lost_requeue(
    tmp_path: Path, slurm: FakeSlurm, causes: str
) -> None:
    scenario = Scenario(tmp_path, SLURM, f"requeue: {{causes: {causes}}}\n")
    scenario.stop(reason=StopReason.WARNED, cause=None)
    assert (scenario.end().exit_code, scenario.events()[-1]) == (75, ("requeue", "time_limit"))
    assert slurm.waited == (0 if "preemption" in causes else 7)


def test_a_job_with_requeue_0_is_requeued_when_slurmctld_is_back_after_minutes(
    tmp_path: Path, slurm: FakeSlurm
) -> None:
    scenario = Scenario(tmp_path, SLURM, "requeue: {causes: [time_limit]}\n")
    scenario.stop(reason=StopReason.WARNED, cause=None)
    slurm.errors = [AWAY] * 60
    assert (scenario.end().exit_code, scenario.events()[-1]) == (75, ("requeue", "time_limit"))
    assert slurm.waited > 100
    assert slurm.calls[-2:] == ["update 7 {'Requeue': '1'}", "requeue 7"]


def test_a_job_whose_requeue_count_went_back_is_requeued(scenario: Scenario, slurm: FakeSlurm) -> None:
    """A slurmctld that was killed has forgotten the requeue that led to this attempt."""
    write_json(scenario.attempt.start, {**read_json(scenario.attempt.start), "restart_count": 1})
    slurm.become("RUNNING", **PREEMPTED)
    scenario.stop()
    assert (scenario.end().exit_code, slurm.calls) == (75, ["requeue 7"])


def test_the_users_error_is_never_requeued_and_comes_with_its_traceback(
    scenario: Scenario, slurm: FakeSlurm, golden: GoldenMessages
) -> None:
    slurm.become("RUNNING", **PREEMPTED)
    scenario.fail(1, exit_code=70)
    scenario.fail(0, exit_code=71, secondary=True)
    ending = scenario.end()
    assert (ending.exit_code, slurm.calls) == (70, [])
    assert ending.text.startswith("rank 1 on n2 failed first: ")
    assert_facts(golden.message(ending.text), "ValueError: boom")
    assert scenario.result is not None
    assert (scenario.result["status"], scenario.result["exit_code"]) == ("failed", 70)


def test_tasks_that_end_with_no_word_at_all_are_never_a_success(scenario: Scenario, golden: GoldenMessages) -> None:
    ending = scenario.end()
    assert ending.exit_code == 71
    assert_facts(golden.message(ending.text), "requeue.max_failures is 0", f"To resume: {scenario.resume}")
    assert scenario.result is not None
    assert scenario.result["reason"].endswith("; not requeued, because requeue.max_failures is 0")


def test_an_infrastructure_failure_within_its_budget_is_requeued(tmp_path: Path, slurm: FakeSlurm) -> None:
    scenario = Scenario(tmp_path, SLURM, "requeue: {max_failures: 1}\n")
    scenario.fail(0, exit_code=71, secondary=True)
    assert scenario.end().exit_code == 75
    assert scenario.events()[-1] == ("requeue", "crash")
    slurm.become("RUNNING")
    scenario.attempt = scenario.begin({**SLURM, "SLURM_RESTART_COUNT": "1"})
    append_event(scenario.attempt.run.events, kind="save", time=0.0, attempt=1, step=3)
    ending = scenario.end()
    assert ending.exit_code == 71
    why = "requeue.max_failures is 1, and that is used up"
    assert f"The run is not requeued: {why}. " in ending.text
    failure = read_events(scenario.attempt.run.events)[-1]
    assert scenario.result is not None
    assert scenario.result["reason"] == failure.reason
    assert str(failure.reason).endswith(f"; not requeued, because {why}")


def test_a_lost_node_is_no_failure_of_the_run(
    scenario: Scenario, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, golden: GoldenMessages
) -> None:
    asked: list[dict[str, Any]] = []

    def lost_nodes(environment: dict[str, str], **facts: Any) -> list[str]:
        asked.append({"environment": environment, **facts})
        return ["n2"]

    monkeypatch.setattr("hpcddp.supervise.attempt_facts.lost_nodes", lost_nodes)
    scenario.fail(0, exit_code=71, secondary=True)
    ending = scenario.end()
    assert (ending.exit_code, slurm.calls) == (75, ["requeue 7"])
    assert_facts(golden.message(ending.text), "node n2 was lost", "no step is saved yet")
    start = read_start(scenario.attempt)
    assert start is not None
    assert asked == [{"environment": SLURM, "tasks_per_node": 1, "recorded": [0], "started_at": start.time}]
    assert scenario.events()[-1] == ("requeue", "node_failure")


def test_a_lost_node_without_a_name_is_told(scenario: Scenario, slurm: FakeSlurm) -> None:
    slurm.become("NODE_FAIL")
    assert "has ended: a node was lost; " in scenario.end().text


def test_a_node_that_the_others_waited_for_in_vain_is_lost_and_no_hang(
    scenario: Scenario, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcddp.supervise.attempt_facts.lost_nodes", lambda *_, **__: ["n2"])
    scenario.fail(0, exit_code=124, waiting=True)
    assert (scenario.end().exit_code, slurm.calls) == (75, ["requeue 7"])
    assert scenario.events()[-1] == ("requeue", "node_failure")


@pytest.mark.parametrize(
    ("left_s", "state", "last"),
    [
        (2, "RUNNING", ("requeue", "time_limit")),
        (60, "RUNNING", ("failure", "crash")),
        (0, "COMPLETING", ("stop", "cancelled")),
    ],
    ids=["over", "not over", "cancelled"],
)
def test_ranks_that_say_nothing_when_the_time_is_over_are_at_their_time_limit(
    scenario: Scenario, slurm: FakeSlurm, left_s: float, state: str, last: tuple[str, str]
) -> None:
    end_time = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + left_s))
    slurm.become(state, EndTime=end_time, TimeLimit="00:10:00")
    scenario.end()
    assert scenario.events()[-1] == last


@pytest.mark.parametrize("noticed_by", ["watch", "Slurm", "a rank"])
def test_a_time_limit_that_nobody_stopped_before_has_been_reached(
    scenario: Scenario, slurm: FakeSlurm, noticed_by: str, golden: GoldenMessages
) -> None:
    if noticed_by == "watch":
        over = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime())
        slurm.become("RUNNING", EndTime=over, TimeLimit="00:10:00")
    elif noticed_by == "Slurm":
        slurm.become("COMPLETING", Reason="TimeLimit", PreemptTime="None")
    else:
        scenario.stop(reason=StopReason.TERMINATED, cause="time_limit")
    ending = scenario.end()
    assert scenario.events()[-1][1] == "time_limit"
    assert_facts(golden.message(ending.text), "attempt 0 of run r1", "job 7 has reached its time limit")
    assert "is near" not in ending.text


def test_a_failure_comes_before_the_time_limit(scenario: Scenario, slurm: FakeSlurm) -> None:
    end_time = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 1))
    slurm.become("RUNNING", EndTime=end_time, TimeLimit="00:10:00")
    scenario.fail(0, exit_code=71, secondary=True)
    scenario.end()
    assert scenario.events()[-1] == ("failure", "crash")


def test_two_attempts_that_save_nothing_new_end_the_run(
    scenario: Scenario, slurm: FakeSlurm, golden: GoldenMessages
) -> None:
    scenario.stop(step=5)
    slurm.become("RUNNING", **PREEMPTED)
    scenario.end()
    for count in ("1", "2"):
        slurm.become("RUNNING", Restarts=count, **PREEMPTED)
        scenario.attempt = scenario.begin({**SLURM, "SLURM_RESTART_COUNT": count})
        append_event(scenario.attempt.run.events, kind="train", time=0.0, attempt=int(count), step=5)
        scenario.stop(step=5)
        ending = scenario.end()
    assert (ending.exit_code, len(slurm.calls)) == (93, 2)
    why = ("the last 2 attempts", "requeue.max_attempts_without_progress is 2")
    assert_facts(golden.message(ending.text), "not requeued", *why, f"To resume: {scenario.resume}")
    assert scenario.result is not None
    assert scenario.result["exit_code"] == 93
    assert_facts(golden.message(scenario.result["reason"]), "job 7 was preempted", *why)


def test_a_cause_that_the_user_did_not_name_stops_the_run(
    tmp_path: Path, slurm: FakeSlurm, golden: GoldenMessages
) -> None:
    scenario = Scenario(tmp_path, SLURM, "requeue: {causes: [preemption]}\n")
    scenario.stop(reason=StopReason.DEADLINE, cause="time_limit")
    ending = scenario.end()
    assert (ending.exit_code, slurm.calls) == (75, [])
    assert scenario.result is not None
    assert (scenario.result["status"], scenario.result["saved_step"]) == ("stopped", 12)
    text = golden.message(ending.text)
    assert_facts(text, "requeue.causes does not name time_limit", f"To resume: {scenario.resume}")


def test_slurm_that_was_kept_off_is_let_in_for_a_cause_that_is_named(tmp_path: Path, slurm: FakeSlurm) -> None:
    scenario = Scenario(tmp_path, SLURM, "requeue: {causes: [time_limit]}\n")
    slurm.become("RUNNING", Requeue="0")
    scenario.stop(reason=StopReason.WARNED, cause=None)
    assert scenario.end().exit_code == 75
    assert slurm.calls == ["update 7 {'Requeue': '1'}", "requeue 7"]
    slurm.become("RUNNING", Requeue="1")
    scenario.begin({**SLURM, "SLURM_RESTART_COUNT": "1"})
    assert slurm.is_forbidden


def test_where_requeue_is_forbidden_the_command_that_continues_is_told(
    scenario: Scenario, slurm: FakeSlurm, golden: GoldenMessages
) -> None:
    slurm.become("RUNNING", Requeue="0", **PREEMPTED)
    scenario.stop()
    ending = scenario.end()
    assert (ending.exit_code, slurm.calls) == (75, [])
    text = golden.message(ending.text)
    assert_facts(text, "not allowed to requeue it (Requeue=0)", f"To resume: {scenario.resume}")


def test_without_scontrol_the_run_is_marked_and_the_command_is_told(
    scenario: Scenario, slurm: FakeSlurm, golden: GoldenMessages
) -> None:
    scenario.stop(reason=StopReason.WARNED, cause=None)
    slurm.errors = [MISSING] * 1000
    ending = scenario.end()
    assert ending.exit_code == 75
    assert scenario.result is not None
    assert scenario.result["status"] == "stopped"
    assert_facts(golden.message(ending.text), MISSING.message, f"To resume: {scenario.resume}")


def test_a_controller_that_is_away_for_half_a_minute_is_waited_for(scenario: Scenario, slurm: FakeSlurm) -> None:
    slurm.become("RUNNING", **PREEMPTED)
    scenario.stop()
    slurm.errors = [AWAY] * 15
    assert (scenario.end().exit_code, scenario.events()[-1]) == (75, ("requeue", "preemption"))


def test_ranks_that_were_told_to_end_and_did_not_agree_are_a_failure_once_slurm_answers(
    scenario: Scenario, slurm: FakeSlurm
) -> None:
    append_event(scenario.attempt.run.events, kind="signal", time=0.0, attempt=0, reason="terminated")
    slurm.errors = [AWAY] * 100
    assert (scenario.end().exit_code, slurm.calls) == (71, [])


def test_a_preemption_that_a_controller_shows_only_later_is_requeued(scenario: Scenario, slurm: FakeSlurm) -> None:
    append_event(scenario.attempt.run.events, kind="signal", time=0.0, attempt=0, reason="terminated")
    slurm.become("RUNNING", **PREEMPTED)
    slurm.errors = [AWAY] * 100
    assert (scenario.end().exit_code, slurm.calls) == (75, ["requeue 7"])
    assert scenario.events()[-1] == ("requeue", "preemption")


def test_a_preemption_without_a_grace_time_is_counted_as_one(
    tmp_path: Path, slurm: FakeSlurm, golden: GoldenMessages
) -> None:
    scenario = Scenario(tmp_path, SLURM, "requeue: {max_preemptions: 0}\n")
    scenario.attempt.run.batch_log.write_text(
        f"{beginning(scenario.attempt)}"
        "slurmstepd-n1: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-22T05:17:38 DUE TO PREEMPTION ***\n"
    )
    slurm.become_requeued()
    scenario.stop(cause="requeued")
    ending = scenario.end()
    assert_facts(golden.message(ending.text), "job 7 was preempted", "step 12 is saved")
    assert scenario.events()[-1] == ("requeue", "preemption")
    slurm.become("RUNNING")
    with pytest.raises(BudgetError) as caught:
        scenario.begin({**SLURM, "SLURM_RESTART_COUNT": "1"})
    assert_facts(golden.message(caught.value), "requeue.max_preemptions is 0", "one more")


def test_a_requeue_that_is_refused_outlasts_the_grace_time(
    scenario: Scenario, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.become("RUNNING", **PREEMPTED)
    scenario.stop()
    slurm.errors = [None, REFUSED]
    seen: list[dict[str, Any] | None] = []

    def sleep(_: float) -> None:
        if not seen:
            slurm.become_requeued()
        seen.append(scenario.result)

    monkeypatch.setattr("time.sleep", sleep)
    assert scenario.end().exit_code == 75
    # Until the end of the grace time.
    assert [marker and marker["status"] for marker in seen] == ["stopped"]
    assert (scenario.result, scenario.events()[-1]) == (None, ("requeue", "preemption"))


def test_a_fenced_attempt_writes_nothing(scenario: Scenario, slurm: FakeSlurm, golden: GoldenMessages) -> None:
    scenario.stop()
    scenario.attempt.run.attempt(1).path.mkdir()
    before = scenario.events()
    ending = scenario.end()
    assert (ending.exit_code, slurm.calls, scenario.events(), scenario.result) == (76, [], before, None)
    assert_facts(golden.message(ending.text), "attempt 1 owns the run r1", "attempt 0 ends here and writes nothing")


def test_an_attempt_that_is_overtaken_while_slurm_does_not_answer_writes_nothing(
    scenario: Scenario, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sleep(seconds: float) -> None:
        slurm.sleep(seconds)
        scenario.attempt.run.attempt(1).path.mkdir(exist_ok=True)

    slurm.become("RUNNING", **PREEMPTED)
    slurm.errors = [AWAY] * 1000
    scenario.stop()
    before = scenario.events()
    monkeypatch.setattr("time.sleep", sleep)
    assert (scenario.end().exit_code, scenario.events(), scenario.result) == (76, before, None)


def test_the_end_of_a_finished_run_is_0_whatever_srun_said(scenario: Scenario) -> None:
    write_record(scenario.attempt.run.result, Result(status="finished"))
    assert scenario.end().exit_code == 0


def test_a_full_disk_keeps_no_job_from_its_requeue(
    scenario: Scenario,
    slurm: FakeSlurm,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    golden: GoldenMessages,
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    slurm.become("RUNNING", **PREEMPTED)
    scenario.stop()
    monkeypatch.setattr(supervisor, "append_event", full)
    assert scenario.end().exit_code == 75
    assert slurm.calls == ["requeue 7"]
    assert_facts(golden.message(capsys.readouterr().err), str(scenario.attempt.run.events), "No space left on device")


def test_a_local_run_that_its_user_ended_is_cancelled_and_resumable(tmp_path: Path) -> None:
    scenario = Scenario(tmp_path, LOCAL)
    scenario.stop(cause=None)
    ending = scenario.end(cancelled=True)
    assert ending.exit_code == 130
    assert scenario.result is not None
    assert (scenario.result["status"], scenario.result["saved_step"]) == ("cancelled", 12)
    assert scenario.result["reason"] == "cancelled by its user"
    assert scenario.resume in ending.text


def test_a_local_run_of_which_only_the_ranks_got_a_signal_does_not_say_that_its_user_cancelled_it(
    tmp_path: Path,
) -> None:
    scenario = Scenario(tmp_path, LOCAL)
    scenario.stop(cause=None)
    assert scenario.end().exit_code == 130
    assert scenario.result is not None
    assert scenario.result["reason"] == "cancelled, or its processes received SIGTERM"


def test_a_job_that_hpcddp_cancel_has_ended_is_cancelled_by_its_user(scenario: Scenario, slurm: FakeSlurm) -> None:
    append_event(scenario.attempt.run.events, kind="cancel", time=0.0, attempt=scenario.attempt.number)
    scenario.stop(cause="cancelled")
    slurm.become("COMPLETING")
    scenario.end()
    assert scenario.result is not None
    assert scenario.result["reason"] == "cancelled by its user"


def test_a_job_whose_tasks_were_interrupted_is_cancelled_and_says_so(scenario: Scenario, slurm: FakeSlurm) -> None:
    slurm.become("RUNNING")
    scenario.stop(reason=StopReason.INTERRUPTED, cause=None)
    assert scenario.end().exit_code == 130
    assert scenario.result is not None
    assert scenario.result["reason"] == "cancelled by SIGINT to its tasks"


def test_the_time_limit_of_a_local_run_stops_it(tmp_path: Path, golden: GoldenMessages) -> None:
    scenario = Scenario(tmp_path, LOCAL)
    scenario.stop(reason=StopReason.WARNED, cause=None)
    ending = scenario.end()
    assert ending.exit_code == 75
    text = golden.message(ending.text)
    assert_facts(text, "attempt 0 of run r1", "the time limit of this run", "step 12 is saved in 0.4 s")
    assert_facts(text, "runs on this machine are not requeued", f"To resume: {scenario.resume}")


HERE = {**LOCAL, "SLURM_JOB_ID": "7"}


@pytest.mark.parametrize(
    ("state", "fields"),
    [("COMPLETING", {}), ("COMPLETED", {}), ("CANCELLED", {}), ("TIMEOUT", {}), ("RUNNING", PREEMPTED)],
)
def test_a_run_whose_allocation_ends_is_stopped_and_resumable(
    tmp_path: Path, slurm: FakeSlurm, state: str, fields: dict[str, str], golden: GoldenMessages
) -> None:
    scenario = Scenario(tmp_path, HERE)
    scenario.stop(cause=None)
    slurm.become(state, **fields)
    # Slurm signals the shell too where salloc has opened it on a node.
    ending = scenario.end(cancelled=True)
    assert (ending.exit_code, slurm.calls) == (75, [])
    assert scenario.result is not None
    assert (scenario.result["status"], scenario.result["saved_step"]) == ("stopped", 12)
    assert scenario.result["resume"] == scenario.resume
    text = golden.message(ending.text)
    assert_facts(text, "attempt 0 of run r1", "the allocation of this run, job 7", "step 12 is saved in 0.4 s")
    assert_facts(text, "runs in an allocation are not requeued", f"To resume: {scenario.resume}")


def test_a_run_whose_allocation_goes_on_ends_as_a_local_one(tmp_path: Path, slurm: FakeSlurm) -> None:
    scenario = Scenario(tmp_path, HERE)
    scenario.stop(cause=None)
    assert (scenario.end(cancelled=True).exit_code, slurm.calls) == (130, [])
    assert scenario.result is not None
    assert (scenario.result["status"], scenario.result["reason"]) == ("cancelled", "cancelled by its user")


def test_a_rank_that_fails_in_an_allocation_that_ends_later_has_failed(tmp_path: Path, slurm: FakeSlurm) -> None:
    scenario = Scenario(tmp_path, HERE)
    scenario.fail(1, exit_code=70)
    slurm.become("COMPLETED")
    assert scenario.end().exit_code == 70
    assert scenario.result is not None
    assert scenario.result["status"] == "failed"


@pytest.mark.parametrize("state", ["RUNNING", "COMPLETING"])
def test_the_time_limit_of_a_run_in_an_allocation_stops_it(
    tmp_path: Path, slurm: FakeSlurm, state: str, golden: GoldenMessages
) -> None:
    scenario = Scenario(tmp_path, HERE)
    scenario.stop(reason=StopReason.WARNED, cause=None)
    slurm.become(state)
    assert scenario.end().exit_code == 75
    assert scenario.result is not None
    reason = golden.message(scenario.result["reason"])
    assert_facts(reason, "the time limit of this run", "in an allocation are not requeued")


def test_a_step_that_could_not_be_saved_says_what_there_is(
    scenario: Scenario, slurm: FakeSlurm, golden: GoldenMessages
) -> None:
    slurm.become("RUNNING", **PREEMPTED)
    append_event(scenario.attempt.run.events, kind="save", time=0.0, attempt=0, step=9)
    scenario.stop(saved=False)
    text = golden.message(scenario.end().text)
    assert_facts(text, "step 12 could not be saved", "checkpoint is of step 9", "Slurm runs")


def test_a_requeue_whose_answer_came_too_late_is_seen(
    scenario: Scenario, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def requeue(job_id: str) -> None:
        slurm.calls.append(f"requeue {job_id}")
        if len(slurm.calls) == 1:
            slurm.become_requeued()
            raise commands.SlurmUnavailableError("scontrol did not answer within 60 s; try again later")
        raise commands.SlurmCommandError("scontrol requeue failed: Job is pending execution", returncode=1)

    monkeypatch.setattr(commands, "requeue", requeue)
    scenario.stop(reason=StopReason.WARNED, cause="time_limit")
    assert (scenario.end(code=75).exit_code, scenario.result) == (75, None)


def test_an_attempt_that_is_preempted_before_it_trains_does_not_count(tmp_path: Path, slurm: FakeSlurm) -> None:
    scenario = Scenario(tmp_path, SLURM, "requeue: {max_attempts_without_progress: 1}\n")
    slurm.become("RUNNING", **PREEMPTED)
    scenario.stop(step=0, saved=False)
    assert scenario.end(code=75).exit_code == 75


def test_a_time_limit_of_another_step_is_not_that_of_the_job(scenario: Scenario) -> None:
    step = "slurmstepd-n1: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-22T05:17:38 DUE TO TIME LIMIT ***\n"
    scenario.attempt.run.batch_log.write_text(f"{beginning(scenario.attempt)}{step}")
    assert cause_in_log(scenario.attempt) is None
    with scenario.attempt.run.batch_log.open("a") as log:
        log.write(step.replace("STEP 7.0", "JOB 7"))
    assert cause_in_log(scenario.attempt) is Cause.TIME_LIMIT


def test_a_new_container_may_give_the_number_of_an_earlier_process(tmp_path: Path, slurm: FakeSlurm) -> None:
    del slurm
    scenario = Scenario(tmp_path, LOCAL)
    append_event(scenario.attempt.run.events, kind="resume", time=1.0, attempt=0)
    assert scenario.begin(LOCAL).number == 1
