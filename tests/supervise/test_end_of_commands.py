"""What the batch shell does at the end of a command: nobody but the records and Slurm say why it ended."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from hpcddp.run.events import EventKind, append_event
from hpcddp.run.files import write_json
from hpcddp.run.job_records import Start, StopNotice, read_start, write_start
from hpcddp.supervise.refusals import BudgetError
from tests.facts import assert_facts
from tests.messages import GoldenMessages
from tests.supervise.attempts import LOCAL, PREEMPTED, SLURM, Command
from tests.supervise.fake_slurm import AWAY, FakeSlurm


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm(monkeypatch)
    monkeypatch.setattr("time.monotonic", lambda: fake.waited)
    return fake


@pytest.fixture
def command(tmp_path: Path, slurm: FakeSlurm) -> Command:
    del slurm
    return Command(tmp_path, SLURM)


def test_a_command_that_ended_well_has_finished(command: Command, slurm: FakeSlurm) -> None:
    command.leave(0, 0)
    assert (command.end().exit_code, slurm.calls) == (0, [])
    assert command.result is not None
    assert (command.result["status"], command.result["world_size"]) == ("finished", 2)
    assert command.events()[-1] == ("finish", None)


@pytest.mark.parametrize("end", ["requeue", "stop", "failure", "slurm", "none"])
def test_the_time_of_a_command_is_that_of_its_attempts(command: Command, end: str) -> None:
    run, ended = command.attempt.run, 1_000_000.0
    first = replace(cast("Start", read_start(run.attempt(0))), time=ended - 5000)
    write_start(run.attempt(0), first)
    append_event(run.events, kind="train", time=ended - 4000, attempt=0)
    if end in {"requeue", "stop", "failure"}:
        append_event(run.events, kind=cast("EventKind", end), time=ended, attempt=0)
        # The run is cancelled while it waits, and resumed.
        append_event(run.events, kind="stop", time=ended + 9000, attempt=0)
        append_event(run.events, kind="resume", time=ended + 9000, attempt=0)
    began = time.time() - 3000
    requeued = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(ended)) if end == "slurm" else None
    run.attempt(1).path.mkdir()
    write_start(run.attempt(1), replace(first, time=began, submit_time=requeued))
    append_event(run.events, kind="requeue", time=began, attempt=0)
    command.attempt = run.attempt(1)
    command.leave(0, 0)
    command.end()
    assert command.result is not None
    # If nothing says when it ended, the last event counts.
    expected = 1000 if end == "none" else 5000
    assert expected + 3000 <= command.result["wall_s"] < expected + 9000


@pytest.mark.parametrize("codes", [(0, 0), (1, 143), (-15, -15), (75, 0), (3,)])
def test_a_preempted_command_is_requeued_whatever_its_exit_code(
    command: Command, slurm: FakeSlurm, codes: tuple[int, ...], golden: GoldenMessages
) -> None:
    slurm.become("RUNNING", **PREEMPTED)
    command.leave(*codes, notice="terminated")
    ending = command.end()
    assert (ending.exit_code, slurm.calls) == (75, ["requeue 7"])
    text = golden.message(ending.text)
    assert_facts(
        text, "attempt 0 of run r1", "job 7 was preempted", "Slurm runs job 7 again", "the program starts again"
    )
    assert command.last("requeue").cause == "preemption"


@pytest.mark.parametrize(("codes", "notice"), [((0, 0), "warned"), ((-15, -15), "deadline")])
def test_a_command_that_is_out_of_time_is_requeued(
    command: Command, slurm: FakeSlurm, codes: tuple[int, ...], notice: StopNotice
) -> None:
    command.leave(*codes, notice=notice)
    assert (command.end().exit_code, slurm.calls) == (75, ["requeue 7"])
    assert command.last("requeue").cause == "time_limit"


def test_a_command_that_asks_to_go_on_is_requeued_and_says_so(
    command: Command, slurm: FakeSlurm, golden: GoldenMessages
) -> None:
    command.leave(75, 0)
    ending = command.end()
    assert (ending.exit_code, slurm.calls) == (75, ["requeue 7"])
    text = golden.message(ending.text)
    assert_facts(text, "the command requested a requeue", "exit code 75", "HPCDDP_REQUEUE_FILE")
    assert command.last("requeue").cause == "unknown"


def test_a_file_asks_as_well_as_an_exit_code(command: Command, slurm: FakeSlurm) -> None:
    command.leave(0, 0)
    command.attempt.requeue_file.touch()
    assert (command.end().exit_code, slurm.calls) == (75, ["requeue 7"])


def test_a_cancelled_command_is_never_requeued(command: Command, slurm: FakeSlurm) -> None:
    slurm.become("COMPLETING")
    command.leave(75, 75, notice="terminated")
    assert (command.end().exit_code, slurm.calls) == (130, [])
    assert command.result is not None
    assert command.result["status"] == "cancelled"


def test_a_failure_comes_before_what_the_others_were_told(
    command: Command, slurm: FakeSlurm, golden: GoldenMessages
) -> None:
    command.fail(1, exit_code=70)
    command.leave(-15, 1, notice="terminated")
    ending = command.end()
    assert (ending.exit_code, slurm.calls) == (70, [])
    assert ending.text.startswith("rank 1 on n2 failed first: ")
    assert_facts(golden.message(ending.text), "ValueError: boom")


def test_ranks_that_only_lost_their_peers_do_not_hide_a_preemption(command: Command, slurm: FakeSlurm) -> None:
    slurm.become("RUNNING", **PREEMPTED)
    command.fail(1, exit_code=71, secondary=True)
    command.leave(-15, notice="terminated")
    assert (command.end().exit_code, slurm.calls) == (75, ["requeue 7"])


def test_a_killed_task_is_a_failure_of_the_infrastructure(command: Command) -> None:
    command.leave(0)
    ending = command.end()
    assert ending.exit_code == 71
    assert "rank 1 ended without an error message" in ending.text


@pytest.mark.parametrize("code", [0, -15, 75])
def test_a_task_that_left_no_record_is_a_failure_whatever_its_peers_were_told(
    command: Command, slurm: FakeSlurm, code: int, golden: GoldenMessages
) -> None:
    """srun tells the others to end when one task has failed (--kill-on-bad-exit)."""
    command.leave(code, notice="terminated")
    ending = command.end()
    assert (ending.exit_code, slurm.calls) == (71, [])
    assert ending.text.startswith("rank 1 ended without an error message")
    assert_facts(golden.message(ending.text), "requeue.max_failures is 0")


def test_tasks_that_are_killed_each_time_are_run_again_as_often_as_max_failures_says(
    tmp_path: Path, slurm: FakeSlurm
) -> None:
    command = Command(tmp_path, SLURM, "requeue: {max_failures: 1, max_attempts_without_progress: 9}\n")
    command.leave(-15, notice="terminated")
    assert command.end().exit_code == 75
    assert command.last("requeue").cause == "crash"
    again(command, slurm, 1)
    command.leave(-15, notice="terminated")
    ending = command.end()
    assert (ending.exit_code, slurm.calls) == (71, ["requeue 7"])
    assert "requeue.max_failures is 1, and that is used up" in ending.text


def test_tasks_that_were_told_to_end_while_slurm_shows_no_reason_are_a_failure(
    command: Command, slurm: FakeSlurm, golden: GoldenMessages
) -> None:
    command.leave(0, -15, notice="terminated")
    ending = command.end()
    assert (ending.exit_code, slurm.calls) == (71, [])
    assert ending.text.startswith("the tasks received SIGTERM")
    assert_facts(golden.message(ending.text), "the sender of SIGTERM is unknown")


def test_a_preemption_takes_tasks_that_leave_no_record(command: Command, slurm: FakeSlurm) -> None:
    slurm.become("RUNNING", **PREEMPTED)
    command.leave(-15, notice="terminated")
    assert (command.end().exit_code, slurm.calls) == (75, ["requeue 7"])


def test_a_node_that_is_lost_is_no_failure_of_the_command_until_it_makes_no_progress(
    command: Command, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, golden: GoldenMessages
) -> None:
    recorded: list[list[int]] = []

    def lost_nodes(_: dict[str, str], **facts: Any) -> list[str]:
        recorded.append(facts["recorded"])
        return ["n2"]

    monkeypatch.setattr("hpcddp.supervise.attempt_facts.lost_nodes", lost_nodes)
    command.leave(-15, notice="terminated")
    ending = command.end()
    assert (ending.exit_code, recorded) == (75, [[0]])
    assert_facts(golden.message(ending.text), "node n2 was lost", "Slurm runs job 7 again")
    assert command.last("requeue").cause == "node_failure"
    again(command, slurm, 1)
    command.leave(-15, notice="terminated")
    ending = command.end()
    assert (ending.exit_code, slurm.calls) == (93, ["requeue 7"])
    assert "requeue.max_attempts_without_progress is 2" in ending.text


def test_a_controller_that_comes_back_late_proves_the_preemption(
    command: Command, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    statuses: list[Any] = []

    def sleep(seconds: float) -> None:
        slurm.sleep(seconds)
        statuses.append(command.result and command.result["status"])

    monkeypatch.setattr("time.sleep", sleep)
    slurm.become("RUNNING", **PREEMPTED)
    slurm.errors = [AWAY] * 100
    command.leave(-15, -15, notice="terminated")
    assert (command.end().exit_code, slurm.calls) == (75, ["requeue 7"])
    assert command.last("requeue").cause == "preemption"
    # Slurm may end the batch script while it waits.
    assert statuses[-1] == "stopped"
    assert command.result is None


def test_a_controller_that_comes_back_late_and_knows_no_reason_leaves_a_failure(
    command: Command, slurm: FakeSlurm
) -> None:
    slurm.errors = [AWAY] * 100
    command.leave(-15, -15, notice="terminated")
    assert (command.end().exit_code, slurm.calls) == (71, [])


def test_what_slurmstepd_says_of_a_preemption_counts_while_the_controller_is_away(
    command: Command, slurm: FakeSlurm
) -> None:
    command.slurm_says("PREEMPTION")
    slurm.errors = [AWAY] * 35
    command.leave(-15, -15, notice="terminated")
    assert (command.end().exit_code, slurm.calls[-1:]) == (75, ["requeue 7"])
    assert command.last("requeue").cause == "preemption"


def test_on_this_machine_nothing_runs_it_again(tmp_path: Path) -> None:
    command = Command(tmp_path, LOCAL)
    command.leave(75, 75)
    assert command.end().exit_code == 75
    assert command.result is not None
    assert command.result["status"] == "stopped"


def test_failures_of_a_silent_command_count_as_attempts_without_progress(tmp_path: Path, slurm: FakeSlurm) -> None:
    command = Command(tmp_path, SLURM, "requeue: {max_failures: 9}\n")
    command.leave(-9, -15, notice="terminated")
    assert command.end().exit_code == 75
    again(command, slurm, 1)
    command.leave(-9, -15, notice="terminated")
    assert command.end().exit_code == 93


def again(command: Command, slurm: FakeSlurm, restarts: int) -> None:
    """Slurm runs the job again."""
    slurm.become("RUNNING", Restarts=str(restarts), PreemptTime="None")
    command.attempt = command.begin({**SLURM, "SLURM_RESTART_COUNT": str(restarts)})
    for rank in range(2):
        command.attempt.rank_log(rank).touch()


def test_preemptions_say_nothing_against_a_command_that_is_silent_about_its_progress(
    command: Command, slurm: FakeSlurm
) -> None:
    for restarts in range(1, 6):
        slurm.become("RUNNING", **PREEMPTED)
        command.leave(0, 0, notice="terminated")
        assert command.end().exit_code == 75
        again(command, slurm, restarts)


def test_a_command_that_only_asks_is_ended_by_the_budget(command: Command, slurm: FakeSlurm) -> None:
    command.leave(75, 75)
    assert command.end().exit_code == 75
    again(command, slurm, 1)
    command.leave(75, 75)
    assert command.end().exit_code == 93


def test_a_command_that_asks_and_comes_further_goes_on(command: Command, slurm: FakeSlurm) -> None:
    for restarts in range(1, 6):
        command.attempt.run.progress.write_text(str(restarts))
        command.leave(75, 75)
        assert command.end().exit_code == 75
        again(command, slurm, restarts)


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_progress_of_an_attempt_counts_at_its_own_end(tmp_path: Path, slurm: FakeSlurm, limit: int) -> None:
    command = Command(tmp_path, SLURM, f"requeue: {{max_attempts_without_progress: {limit}}}\n")
    for attempt in range(2 * limit):
        if attempt % limit == limit - 1:
            command.attempt.run.progress.write_text(str(attempt))
        command.leave(75, 0)
        assert command.end().exit_code == 75
        again(command, slurm, attempt + 1)


def test_a_command_that_has_told_its_progress_once_is_taken_at_its_word(command: Command, slurm: FakeSlurm) -> None:
    command.attempt.run.progress.touch()
    for restarts in range(1, 4):
        slurm.become("RUNNING", **PREEMPTED)
        command.leave(0, 0, notice="terminated")
        code = command.end().exit_code
        if code == 93:
            break
        again(command, slurm, restarts)
    assert (code, restarts) == (93, 3)


def test_a_preemption_without_a_grace_time_says_nothing_against_a_silent_command(
    command: Command, slurm: FakeSlurm
) -> None:
    """Slurm requeues it by itself, whether the batch script lives to see it or not, and then forgets why."""
    for restarts in range(1, 6):
        command.slurm_says("PREEMPTION")
        if restarts % 2:
            slurm.become_requeued()
            command.leave(-15, -15, notice="terminated")
            assert command.end().exit_code == 75
        again(command, slurm, restarts)
        assert (command.last("requeue").cause, command.last("requeue").by) == ("preemption", "slurm")


@pytest.mark.parametrize("notices", [[], ["JOB REQUEUE"], ["NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS"]])
def test_any_other_requeue_by_slurm_itself_counts_toward_attempts_without_progress(
    command: Command, slurm: FakeSlurm, notices: list[str]
) -> None:
    for notice in notices:
        command.slurm_says(notice)
    again(command, slurm, 1)
    assert command.last("requeue").cause == ("node_failure" if notices and "NODE" in notices[0] else "requeued")
    with pytest.raises(BudgetError, match=r"requeue\.max_attempts_without_progress is 2"):
        again(command, slurm, 2)


@pytest.mark.parametrize("survives", [True, False])
def test_a_requeue_that_its_user_asked_for_counts_toward_nothing(
    command: Command, slurm: FakeSlurm, golden: GoldenMessages, *, survives: bool
) -> None:
    for restarts in range(1, 6):
        write_json(command.attempt.requeue_request, {})
        if survives:
            slurm.become_requeued()
            command.leave(-15, -15, notice="terminated")
            assert_facts(golden.message(command.end().text), "its user requested the requeue")
        again(command, slurm, restarts)
        assert command.last("requeue").by == "user"


def test_a_command_that_asks_to_go_on_whenever_it_is_told_to_end_is_ended_by_the_budget(
    command: Command, slurm: FakeSlurm
) -> None:
    command.leave(75, 75, notice="terminated")
    assert command.end().exit_code == 75
    again(command, slurm, 1)
    command.leave(75, 75, notice="terminated")
    assert (command.end().exit_code, slurm.calls) == (93, ["requeue 7"])


def test_what_slurm_takes_from_a_command_that_tells_its_progress_is_counted(command: Command, slurm: FakeSlurm) -> None:
    command.attempt.run.progress.touch()
    again(command, slurm, 1)
    again(command, slurm, 2)
    with pytest.raises(BudgetError):
        again(command, slurm, 3)
