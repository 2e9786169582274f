"""Which state a run is in, by its files and by what Slurm says."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from hpcddp.manage.run_files import Job, read_run_files
from hpcddp.manage.status import RunStatus, Statuses, left_behind, statuses
from hpcddp.run.job_records import Rank, write_ranks
from hpcddp.slurm.commands import QueuedJob, SlurmUnavailableError
from hpcddp.slurm.job import State
from tests.manage.runs import NOON, FakeRun, make, queued
from tests.waiting import wait_until


def look(made: FakeRun, *jobs: QueuedJob, job: Job | None = None) -> RunStatus:
    return statuses([read_run_files(made.run, job=job)], ask=lambda: jobs, now=NOON + 100).runs[0]


def state(made: FakeRun, *jobs: QueuedJob) -> State:
    return look(made, *jobs).state


def nobody_may_be_asked() -> list[QueuedJob]:
    raise AssertionError


def slurm_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(NOON + seconds))


@pytest.fixture
def made(tmp_path: Path) -> FakeRun:
    return make(tmp_path)


@pytest.mark.parametrize(
    ("word", "reason", "expected"),
    [
        ("PENDING", "Priority", State.PENDING),
        ("PENDING", "JobHeldUser", State.HELD),
        ("PENDING", "launch failed requeued held", State.HELD),
        ("PENDING", "launch_failed_requeued_held", State.HELD),
        ("CONFIGURING", "None", State.STARTING),
        ("RUNNING", "None", State.STARTING),
        ("COMPLETING", "None", State.STOPPING),
        ("SUSPENDED", "None", State.SUSPENDED),
        ("CANCELLED", "None", State.CANCELLED),
        ("TIMEOUT", "TimeLimit", State.TIMED_OUT),
        ("NODE_FAIL", "None", State.FAILED),
        ("OUT_OF_MEMORY", "None", State.FAILED),
        ("PREEMPTED", "None", State.PREEMPTED),
        ("COMPLETED", "None", State.LOST),
        ("A_WORD_OF_TOMORROW", "None", State.UNKNOWN),
    ],
)
def test_before_its_first_attempt_a_run_is_what_its_job_is(
    made: FakeRun, word: str, reason: str, expected: State
) -> None:
    assert state(made.submitted(), queued(state=word, reason=reason)) is expected


def test_a_live_attempt_is_what_its_events_say(made: FakeRun) -> None:
    running = queued()
    assert state(made.submitted().started(), running) is State.STARTING
    assert state(made.event("train"), running) is State.RUNNING
    assert state(made.event("signal", reason="warned"), running) is State.STOPPING
    assert state(made.event("requeue", cause="preemption"), running) is State.REQUEUED


def test_a_run_whose_first_events_are_out_of_sight_is_running_by_its_steps(made: FakeRun) -> None:
    assert state(made.submitted().started().steps(1, 3), queued()) is State.RUNNING


def test_a_program_without_steps_is_running_once_its_ranks_have_met(made: FakeRun) -> None:
    made.submitted().started()
    made.run.plan.unlink()
    write_ranks(made.attempt(), [Rank(host="n1")])
    assert state(made, queued()) is State.RUNNING


def test_a_requeued_job_waits_to_run_again_under_the_same_id(made: FakeRun) -> None:
    made.submitted().started(submit_time=slurm_time(0)).event("requeue", cause="preemption")
    again: dict[str, Any] = {"restarts": 1, "submit_time": slurm_time(60)}
    assert state(made, queued(state="PENDING", **again)) is State.REQUEUED
    assert state(made, queued(state="COMPLETING", **again)) is State.REQUEUED
    assert state(made, queued(state="RUNNING", **again)) is State.STARTING
    assert state(made.started(at=70, attempt=1, submit_time=slurm_time(60)), queued(**again)) is State.STARTING
    assert state(made.event("train", attempt=1), queued(**again)) is State.RUNNING


def test_a_run_that_was_resumed_waits_under_its_new_id(made: FakeRun) -> None:
    made.submitted("7").started("7").event("stop", cause="cancelled").submitted("8", at=600)
    assert state(made, queued("7", "CANCELLED"), queued("8", "PENDING")) is State.PENDING
    assert state(made.started("8", at=610, attempt=1, restart_count=0), queued("8")) is State.STARTING


@pytest.mark.parametrize(("status", "expected"), [("finished", State.FINISHED), ("failed", State.FAILED)])
def test_what_the_files_say_of_an_end_is_final_and_nobody_is_asked(made: FakeRun, status: str, expected: State) -> None:
    made.submitted().started().ended(status)
    (found,) = statuses([read_run_files(made.run)], ask=nobody_may_be_asked, now=NOON).runs
    assert found.state is expected


def test_a_run_that_stopped_says_by_what(made: FakeRun) -> None:
    made.submitted().started().event("stop", cause="time_limit").ended("stopped", reason="the time limit is near")
    assert state(made) is State.TIMED_OUT
    assert state(made.event("stop", cause="preemption")) is State.PREEMPTED
    assert state(made.event("stop", cause="unknown")) is State.STOPPED


def test_a_job_that_slurm_has_forgotten_leaves_a_lost_run(made: FakeRun) -> None:
    assert state(made.submitted().started(), queued("8")) is State.LOST


def test_a_cancelled_run_stays_cancelled_when_slurm_has_forgotten_it(made: FakeRun) -> None:
    assert state(made.submitted().started().event("stop", cause="cancelled")) is State.CANCELLED


def test_another_job_with_the_same_id_is_not_the_runs(made: FakeRun) -> None:
    """Job ids come again after a cluster was rebuilt."""
    made.submitted()
    assert state(made, queued(submit_time=slurm_time(-5))) is State.STARTING
    assert state(made, queued(submit_time=slurm_time(40000))) is State.LOST
    assert state(made, queued(submit_time=slurm_time(-40000), restarts=3)) is State.LOST
    made.started(submit_time=slurm_time(-5))
    assert state(made, queued(submit_time=slurm_time(-5))) is State.STARTING
    assert state(made, queued(submit_time=slurm_time(4711))) is State.LOST


def test_hosts_in_other_time_zones_speak_of_the_same_job(made: FakeRun) -> None:
    made.submitted().started(submit_time=slurm_time(-5))
    assert state(made, queued(submit_time=slurm_time(-5 - 9.5 * 3600))) is State.STARTING


def test_a_script_that_was_submitted_by_hand_is_known_by_its_attempt(made: FakeRun) -> None:
    made.started("9").event("train")
    assert state(made, queued("9")) is State.RUNNING
    made.submitted("7", at=-1000)
    assert state(made, queued("9"), queued("7", "CANCELLED")) is State.RUNNING


def test_an_element_that_has_not_begun_is_known_by_the_id_it_was_given(tmp_path: Path) -> None:
    made = FakeRun(make(tmp_path).run)
    made.run.path.rmdir()
    job = Job(job_id="7_3", submitted=NOON)
    assert look(made, queued("7_3", "PENDING"), job=job).state is State.PENDING
    assert look(made, queued("7_3", "PENDING", submit_time=slurm_time(4711)), job=job).state is State.LOST


def test_a_run_that_ends_between_the_two_looks_has_ended_by_its_result(made: FakeRun) -> None:
    made.submitted().started().event("train")
    before = read_run_files(made.run)

    def ask() -> list[QueuedJob]:
        made.ended("finished", steps=400)
        return [queued(state="COMPLETED")]

    (found,) = statuses([before], ask=ask, now=NOON).runs
    assert (found.state, found.step) == (State.FINISHED, 400)


def test_without_an_answer_only_ends_are_known_and_it_is_said_why(tmp_path: Path) -> None:
    lives = make(tmp_path, "a").submitted().started().event("train")
    ended = make(tmp_path, "b").submitted().started().ended("failed")

    def ask() -> list[QueuedJob]:
        raise SlurmUnavailableError("squeue failed: Unable to contact slurm controller")

    found = statuses([read_run_files(one.run) for one in (lives, ended)], ask=ask, now=NOON)
    assert [one.state for one in found.runs] == [State.UNKNOWN, State.FAILED]
    assert found.unanswered == "squeue failed: Unable to contact slurm controller"


def test_slurm_is_asked_once_for_all(tmp_path: Path) -> None:
    runs = [make(tmp_path, f"run-{number}").submitted(str(number)) for number in range(200)]
    calls: list[None] = []

    def ask() -> list[QueuedJob]:
        calls.append(None)
        return [queued(str(number), "PENDING") for number in range(200)]

    found = statuses([read_run_files(one.run) for one in runs], ask=ask, now=NOON)
    assert {one.state for one in found.runs} == {State.PENDING}
    assert len(calls) == 1


def ask_of(made: FakeRun) -> Statuses:
    return statuses([read_run_files(made.run)], ask=nobody_may_be_asked, now=NOON)


def test_a_run_on_this_machine_is_alive_while_its_script_is(tmp_path: Path) -> None:
    lost = make(tmp_path, "lost").submitted("77777777", cluster="local")
    assert look(lost).state is State.LOST
    made = make(tmp_path, "alive")
    # Not the run's own file, which ``submitted`` writes while the shell may not have read it.
    file = tmp_path / made.run.script.name
    file.write_text("read -r line\n", encoding="utf-8")
    with subprocess.Popen(["/bin/bash", file], stdin=subprocess.PIPE) as script:
        made.submitted(str(script.pid), cluster="local")
        # The kernel shows no command line yet while it starts.
        wait_until(lambda: look(made).state is State.STARTING, "the script", 60)
        script.communicate()
    assert look(made).state is State.LOST


@pytest.mark.parametrize("cluster", ["slurm", "local", "here"])
def test_the_document_says_where_the_job_went(made: FakeRun, cluster: str) -> None:
    assert look(made.submitted(cluster=cluster)).as_json()["cluster"] == cluster


@pytest.mark.parametrize(("allocation", "is_found"), [(None, True), ("9", False)])
def test_what_a_killed_script_left_is_not_looked_for_in_an_allocation(
    made: FakeRun, allocation: str | None, *, is_found: bool
) -> None:
    made.submitted("77777777", cluster="local" if allocation is None else "here")
    made.started("77777777", host=socket.gethostname(), is_local=True, allocation=allocation)
    environment = {**os.environ, "HPCDDP_ATTEMPT_DIR": str(made.run.attempt(0).path)}
    with subprocess.Popen(["sleep", "60"], env=environment) as process:
        (status,) = ask_of(made).runs
        assert (status.state, left_behind(status)) == (State.LOST, [process.pid] if is_found else [])
        made.attempt(0).start.write_text("torn {")
        (status,) = ask_of(made).runs
        assert left_behind(status) == []
        process.kill()


def test_a_process_id_that_came_again_is_not_the_run(made: FakeRun) -> None:
    assert ask_of(made.submitted(str(os.getpid()), cluster="local")).runs[0].state is State.LOST


def test_a_run_of_another_machine_is_unknown_here(made: FakeRun) -> None:
    made.submitted(cluster="local").started(host="elsewhere")
    assert ask_of(made).runs[0].state is State.UNKNOWN


def test_torn_files_are_passed_over(made: FakeRun) -> None:
    made.submitted().started().event("train").steps(1, 5)
    for path in (made.run.plan, made.run.submission):
        path.write_text('{"job_')
    with made.run.metrics.open("a") as stream:
        stream.write('{"step": 6, "lo')
    found = look(made, queued())
    assert (found.state, found.step) == (State.RUNNING, 5)


@pytest.mark.parametrize(
    ("facts", "used", "limit"),
    [({"used_s": 70, "limit_s": 1200}, 70, 1200), ({"state": "CANCELLED", "used_s": 0, "limit_s": None}, 50, None)],
)
def test_time_is_slurms_while_it_runs_and_the_files_afterwards(
    made: FakeRun, facts: dict[str, Any], used: float, limit: float | None
) -> None:
    made.submitted().started(at=10).event("train", at=60)
    found = look(made, queued(**facts))
    assert (found.used_s, found.limit_s) == (used, limit)


def test_the_limit_of_a_run_that_slurm_has_forgotten_is_whole_minutes(made: FakeRun) -> None:
    found = look(made.submitted().started(at=10, end_time=NOON + 3607).event("train", at=20).ended("failed"))
    assert (found.used_s, found.limit_s) == (10, 3600)
