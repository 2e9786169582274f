"""Why a run waits, or why it ended."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcddp.manage.overview import SweepStatus, overview
from hpcddp.manage.overview_text import details
from hpcddp.manage.pending_reasons import pending_reason
from hpcddp.manage.run_files import read_run_files
from hpcddp.manage.status import RunStatus, statuses
from hpcddp.manage.why import Answer, explain, explain_sweep
from hpcddp.run.collectives import write_trace
from hpcddp.run.directory import RunDirectory
from hpcddp.run.job_records import Rank, reserve_exit, write_ranks
from hpcddp.run.sweep import Chunk, Sweep, write_sweep
from hpcddp.slurm.commands import QueuedJob
from tests.facts import assert_facts
from tests.manage.runs import NOON, FakeRun, make, queued
from tests.messages import GoldenMessages
from tests.run.traces import entry, trace
from tests.small_disk import FILLS, make_room, small_disk

# squeue(1) of 22.05, JOB REASON CODES, without those of jobs that have ended.
DOCUMENTED = (
    "AssocGrpCpuLimit", "AssociationJobLimit", "AssocMaxJobsLimit", "AssociationResourceLimit", "AssociationTimeLimit",
    "BadConstraints", "BeginTime", "Cleaning", "Dependency", "DependencyNeverSatisfied", "FrontEndDown",
    "InvalidAccount", "InvalidQOS", "JobHeldAdmin", "JobHeldUser", "JobLaunchFailure", "Licenses", "NodeDown",
    "PartitionDown", "PartitionInactive", "PartitionNodeLimit", "PartitionTimeLimit", "Priority", "Prolog",
    "QOSGrpNodeLimit", "QOSJobLimit", "QOSMaxNodePerUserLimit", "QOSMaxWallDurationPerJobLimit", "QOSResourceLimit",
    "QOSTimeLimit", "QOSUsageThreshold", "ReqNodeNotAvail", "Reservation", "Resources", "SystemFailure",
    "WaitingForScheduling", "JobArrayTaskLimit", "MaxJobsPerAccount", "launch failed requeued held",
    "ReqNodeNotAvail, UnavailableNodes:n[1-4]", "JobHoldMaxRequeue", "PartitionConfig",
    # Since then, and of 26.05.
    "Constraints", "DeadLine", "FedJobLock", "InactiveLimit", "MaxBBRunMinsPerUser", "MaxBillingRunMinsPerUser",
    "MaxCpuRunMinsPerUser", "MaxEnergyRunMinsPerUser", "MaxGRESRunMinsPerUser", "MaxLicenseRunMinsPerUser",
    "MaxMemPerLimit", "MaxMemoryRunMinsPerUser", "MaxNodeRunMinsPerUser", "MaxPoweredUpNodes",
    "MaxUnknownRunMinsPerUser", "MpiPortsBusy", "NonZeroExitCode", "NvidiaImexChannels", "OutOfMemory", "RaisedSignal",
    "ReservationInvalid", "TimeLimit",
)  # fmt: skip


def look(made: FakeRun, *jobs: QueuedJob) -> RunStatus:
    return statuses([read_run_files(made.run)], ask=lambda: jobs, now=NOON + 100).runs[0]


def why(made: FakeRun, *jobs: QueuedJob, **facts: Any) -> Answer:
    return explain(look(made, *jobs), **facts)


@pytest.fixture
def made(tmp_path: Path) -> FakeRun:
    return make(tmp_path)


@pytest.mark.parametrize("reason", DOCUMENTED)
def test_every_reason_that_slurm_documents_has_plain_words_and_advice(reason: str) -> None:
    found = pending_reason(reason, job_id="7", run="run-1")
    assert not found.why.startswith("Slurm says")
    assert found.advice
    assert "{" not in found.advice


def test_a_reason_of_tomorrow_is_told_as_slurm_says_it() -> None:
    assert pending_reason("Tired", job_id="7", run="r").why == "Slurm says Tired"


@pytest.mark.parametrize(
    ("reason", "fact"),
    [
        ("(Resources)", "are not free yet"),
        ("DependencyNeverSatisfied", "so it never starts"),
        ("Dependency", "the end of another job"),
        ("ReservationDeleted", "its reservation is gone"),
        ("ReservationInvalid", "its reservation is gone"),
        ("QOSMaxCpuMinutesPerJobLimit", "than the QOS allows one job"),
        ("QOSMaxCpuPU", "have reached the QOS limit"),
        ("MaxCpuRunMinsPerUser", "a limit for one user"),
        ("TimeLimit", "its last start ended early"),
        ("QOSMaxCpuPerUserLimit", "have reached the QOS limit"),
        ("QOSMaxNodePerJobLimit", "than the QOS allows one job"),
        ("launch_failed_requeued_held", "a node could not launch it"),
        ("job_requeued_in_held_state", "(scontrol requeuehold"),
        ("JobHoldMaxRequeue", "requeued too often"),
    ],
)
def test_reasons_that_look_alike_are_told_apart(reason: str, fact: str, golden: GoldenMessages) -> None:
    assert fact in golden.message(pending_reason(reason, job_id="7", run="r").why)


def test_a_waiting_run_says_why_when_and_what_to_do(made: FakeRun, golden: GoldenMessages) -> None:
    job = queued(state="PENDING", reason="JobArrayTaskLimit", start_time="2026-11-22T08:00:00")
    cause, reason, start, *priority, advice = why(made.submitted(), job, priority="JOBID PRIORITY\n7 100").lines()
    assert golden.message(cause).startswith("run-1 (digits): it waits to start")
    assert "elements of its array" in cause
    assert reason == "  Slurm reason: JobArrayTaskLimit (job 7)"
    assert "start at 2026-11-22 08:00:00" in golden.message(start)
    assert priority == ["  its priority, as sprio shows it:", "    JOBID PRIORITY", "    7 100"]
    assert golden.message(advice).endswith(": scontrol update JobId=7 ArrayTaskThrottle=N")


def test_a_run_that_waits_for_others_names_them(made: FakeRun, tmp_path: Path, golden: GoldenMessages) -> None:
    make(tmp_path, "run-0", "first").submitted("8")
    made.submitted()
    dependency = "afterok:8(unfulfilled),afterany:99_*(unfulfilled)"
    job = queued(state="PENDING", reason="Dependency", dependency=dependency)
    sentence = golden.message(why(made, job).why)
    assert "job 8 of the run run-0 (first)" in sentence
    assert sentence.endswith(" and job 99")
    assert why(made, job).advice == "Wait"
    job = queued(state="PENDING", reason="DependencyNeverSatisfied", dependency="afterok:8(failed)")
    sentence = golden.message(why(made, job).why)
    assert "job 8 of the run run-0 (first)" in sentence
    assert "never starts" in sentence


def test_a_held_run_has_no_start_to_expect(made: FakeRun, golden: GoldenMessages) -> None:
    job = queued(state="PENDING", reason="JobHeldUser", start_time="2026-11-22T08:00:00")
    answer = why(made.submitted(), job)
    assert "its user holds it" in golden.message(answer.why)
    assert answer.advice == "Release it: scontrol release 7"
    assert len(answer.facts) == 1


def test_a_running_run_says_where_and_how_far_it_is(made: FakeRun, golden: GoldenMessages) -> None:
    made.submitted().started().event("train").steps(1, 80, at=20)
    answer = why(made, queued(node_list="n[1-2]", used_s=90, limit_s=7200))
    assert "running on n[1-2], as job 7" in golden.message(answer.why)
    progress, used = answer.facts
    assert "step 80 of 400, about 5m19s" in golden.message(progress)
    assert used == "it has used 1m30s of its 2h"
    assert answer.command == "hpcddp logs run-1 --follow"


def test_a_failed_run_names_its_error_and_leads_to_it(made: FakeRun, golden: GoldenMessages) -> None:
    reason = "rank 3 on n1 failed first after step 20: ValueError: no"
    made.submitted().started().ended("failed", reason=reason, exit_code=70, saved_step=10, resume="hpcddp submit X")
    answer = why(made.event("failure", cause="crash"))
    assert answer.why == f"it has failed: {reason}"
    assert answer.facts == ("step 10 is saved",)
    assert answer.command == "hpcddp logs run-1 --first-error"
    assert golden.message(answer.advice).endswith(": hpcddp submit X")


def test_an_error_of_several_lines_is_shown_below_its_first(made: FakeRun) -> None:
    reason = "rank 3 on n1 failed first after step 20: ValueError: no"
    message = 'no\n\tMissing key(s) in state_dict: "fc.weight"'
    made.submitted().started().failed(3, step=20, message=message).event("train")
    below = '  Missing key(s) in state_dict: "fc.weight"'
    assert f"  {below}" in why(made, queued(state="FAILED")).facts
    answer = why(made.ended("failed", reason=reason, exit_code=70, saved_step=10).event("failure", cause="crash"))
    first, second, *_ = answer.lines()
    assert first.endswith(reason)
    assert second == f"    {below}"
    assert answer.as_json()["error"] == [below]


def test_what_the_killed_program_of_a_command_has_saved_is_not_known(made: FakeRun) -> None:
    made.submitted().started().ended("failed", reason="rank 0 was killed", exit_code=71)
    assert why(made).facts == ("no step is saved",)
    reserve_exit(made.attempt(0), 0)
    assert why(made).facts == ()


def test_a_run_that_somebody_else_ended_leads_to_its_continuation(made: FakeRun) -> None:
    made.submitted().started().ended("failed", reason="a node was lost", exit_code=71, resume="hpcddp submit X")
    assert why(made).command == "hpcddp submit X"
    assert why(made).facts == ("no step is saved",)


def test_a_cancelled_run_is_said_to_be_cancelled_once(made: FakeRun, golden: GoldenMessages) -> None:
    made.submitted().started().ended("cancelled", reason="cancelled by a signal to the job", exit_code=130)
    sentence = golden.message(why(made).why)
    assert sentence.count("cancelled") == 1
    assert sentence.endswith("by a signal to the job")


def test_a_run_of_one_step_has_one_step(made: FakeRun) -> None:
    assert why(made.submitted().started().ended("finished", steps=1)).why == "it has finished after 1 step"


def test_the_attempts_of_a_run_are_its_history(made: FakeRun, golden: GoldenMessages) -> None:
    made.submitted().started().event("requeue", at=50, step=30, cause="preemption")
    made.started(at=60, attempt=1)
    made.event("requeue", at=70, attempt=1, step=40, cause="requeued", by="user", killed=True)
    made.started(at=80, attempt=2).event("finish", at=90, attempt=2, step=400).ended("finished", steps=400)
    answer = why(made)
    assert answer.why == "it has finished after 400 steps"
    history = [line.split("  ", 1)[1] for line in answer.history]
    golden.message("\n".join(history))
    assert history[::2] == [f"attempt {number} began on n1" for number in range(3)]
    assert history[1].startswith("attempt 0 stopped after step 30")
    assert history[1].endswith("requeued: preempted")
    assert history[3].startswith("attempt 1 stopped after step 40")
    assert "user requested it; Slurm killed its tasks" in history[3]
    assert history[5] == "attempt 2 finished after step 400"


def test_a_stop_that_is_a_requeue_is_one_line(made: FakeRun) -> None:
    made.submitted().started().event("stop", at=50, reason="job 7 was preempted", cause="preemption")
    made.event("requeue", at=50, reason="job 7 was preempted", cause="preemption")
    # It is cancelled while it waits.
    made.event("stop", at=90, reason="cancelled by its user").ended("cancelled", reason="cancelled by its user")
    assert [line.split("  ", 1)[1] for line in why(made).history] == [
        "attempt 0 began on n1",
        "attempt 0 stopped, to be requeued: preempted",
        "attempt 0 stopped: cancelled by its user",
    ]


def test_the_history_does_not_say_whether_a_time_limit_was_near_or_reached(made: FakeRun) -> None:
    made.submitted().started().event("cause", at=40, cause="time_limit")
    assert why(made).history[-1].endswith("  attempt 0 ends: the time limit")
    made.event("requeue", at=50, cause="time_limit")
    assert why(made).history[-1].endswith("attempt 0 stopped, to be requeued: the time limit")


def test_a_stop_that_is_a_restart_is_one_line(made: FakeRun) -> None:
    reason = "rank 1 on n2 was killed"
    made.submitted().started().event("stop", at=50, reason=reason, cause="crash")
    made.event("restart", at=50, reason=reason, cause="crash", by="hpcddp").ended("finished", steps=400)
    assert [line.split("  ", 1)[1] for line in why(made).history] == [
        "attempt 0 began on n1",
        f"attempt 0 ended, and its tasks are started again in the same job: {reason}",
    ]


def test_lines_of_the_setup_that_failed_are_in_the_history(made: FakeRun) -> None:
    made.submitted().started().event("warning", at=51, reason="environment.setup: source a.sh ended with exit code 1")
    made.event("warning", at=52, reason="a checkpoint was not written").ended("finished", steps=400)
    assert [line.split("  ", 1)[1] for line in why(made).history] == [
        "attempt 0 began on n1",
        "environment.setup: source a.sh ended with exit code 1",
    ]


def test_an_attempt_that_ran_other_code_than_was_submitted_is_in_the_history(made: FakeRun) -> None:
    what = "train.py changed since the submission; this attempt runs the new one"
    made.submitted().started().event("code", at=51, reason=what).ended("finished", steps=400)
    assert [line.split("  ", 1)[1] for line in why(made).history] == ["attempt 0 began on n1", f"attempt 0: {what}"]


@pytest.mark.parametrize("cluster", ["slurm", "local"])
def test_a_line_of_the_setup_that_ended_the_script_is_why(made: FakeRun, cluster: str) -> None:
    said = "environment.setup: source a.sh ended with exit code 1, so that no task was started"
    made.submitted(cluster=cluster)
    made.run.batch_log.write_text(f"start\nhpcddp: {said}\ncleaned\n")
    found = why(made, *([queued(state="FAILED")] if cluster == "slurm" else []))
    assert found.why == f"its script ended before an attempt began: {said}"


def test_after_a_line_of_the_setup_the_job_is_corrected_first(made: FakeRun) -> None:
    said = "environment.setup: ls /data ended with exit code 2, so that no task was started"
    made.submitted(cluster="local")
    made.run.batch_log.write_text(f"ls: cannot access '/data'\nhpcddp: {said}\n")
    found = why(made)
    assert [fact for fact in found.facts if "last line" in fact] == [
        "the batch script's last line: ls: cannot access '/data'"
    ]
    assert found.command == f"hpcddp submit JOB --resume {made.run.path}"


def test_a_script_that_setup_has_replaced_is_told(made: FakeRun) -> None:
    answer = why(made.submitted(), queued(state="COMPLETED"))
    assert answer.why == "environment.setup has replaced the script, as exec does, so that no task was started"


def test_a_long_history_is_cut(made: FakeRun) -> None:
    made.submitted()
    for attempt in range(5):
        made.started(attempt=attempt).event("requeue", attempt=attempt, cause="preemption")
    history = why(made, queued(state="PENDING", restarts=5)).history
    assert len(history) == 7
    assert history[0] == f"... 4 earlier lines in {made.run.events}"


def test_a_forgotten_run_says_what_is_known_and_how_to_go_on(made: FakeRun, golden: GoldenMessages) -> None:
    made.submitted().started().event("train").steps(1, 30).event("save", step=20)
    made.run.batch_log.write_text("slurmstepd: error: out of memory\n")
    answer = why(made)
    assert "job 7 is unknown to Slurm" in golden.message(answer.why)
    assert "no result" in answer.why
    progress, activity, last_line, saved = answer.facts
    assert (progress, activity, saved) == ("step 30 of 400", "the last activity was 51s ago", "step 20 is saved")
    assert golden.message(last_line).endswith(": slurmstepd: error: out of memory")
    assert answer.command == f"hpcddp submit --resume {made.run.path}"


def test_a_run_that_was_forgotten_before_it_began_says_so(made: FakeRun, golden: GoldenMessages) -> None:
    sentence = golden.message(why(made.submitted()).why)
    assert sentence.startswith("it never started")
    assert "job 7 is unknown to Slurm" in sentence


@pytest.mark.parametrize("reason", ["JobLaunchFailure", "RaisedSignal:53(Real-time_signal_19)"])
def test_a_directory_that_the_nodes_do_not_see_is_told(made: FakeRun, reason: str) -> None:
    made.submitted()
    # hpcddp submit has created it.
    made.run.batch_log.write_text("")
    answer = why(made, queued(state="FAILED", reason=reason, exit_signal=53, node_list="n[1-2]"))
    assert answer.why == (
        f"its script did not start, because Slurm could not open {made.run.batch_log} on the first node of n[1-2]: "
        "that node does not see this directory, or may not write there"
    )
    assert answer.command == f"hpcddp doctor install --on-nodes --run-root {made.run.path.parent.parent}"
    assert answer.advice is not None
    assert answer.advice.endswith(
        "then submit the job again with a run_root on a file system that all nodes share, or when the nodes see the "
        f"directory again, resume with: hpcddp submit --resume {made.run.path}"
    )


def test_a_directory_that_slurm_made_on_a_node_that_does_not_see_it_is_told(made: FakeRun) -> None:
    made.submitted()
    made.run.batch_log.write_text("")
    answer = why(made, queued(state="FAILED", reason="NonZeroExitCode", node_list="n[1-2]"))
    assert answer.why == (
        f"its script has failed, and {made.run.batch_log} is empty: most likely the first node of n[1-2] does not see "
        "this directory"
    )
    assert answer.command == f"hpcddp doctor install --on-nodes --run-root {made.run.path.parent.parent}"
    made.run.batch_log.write_text("bash: line 7: no\n")
    answer = why(made, queued(state="FAILED", reason="NonZeroExitCode", node_list="n[1-2]"))
    assert "does not see" not in answer.why


@pytest.mark.parametrize("exit_signal", [53, None])
def test_a_directory_that_was_renamed_while_its_job_waited_is_told(made: FakeRun, exit_signal: int | None) -> None:
    made.submitted()
    made.run.batch_log.write_text("")
    old_path = made.run.path
    renamed = FakeRun(RunDirectory(old_path.rename(old_path.with_name("run-2"))))
    moved = f"its job looks for the run in {old_path}, and the run directory has another path now"
    answer = why(renamed, queued(state="PENDING"))
    assert f"{moved}: move it back, or cancel the run and resume it" in answer.facts
    answer = why(renamed, queued(state="FAILED", exit_signal=exit_signal))
    assert (answer.why, answer.command) == (moved, f"hpcddp submit --resume {renamed.run.path}")


def test_a_directory_that_was_lost_before_a_requeued_start_is_told(made: FakeRun) -> None:
    made.submitted().started().steps(1, 30).event("save", at=45, step=20)
    made.run.batch_log.write_text("hpcddp: attempt 0 of run run-1 begins\n")
    answer = why(made, queued(state="FAILED", reason="JobLaunchFailure", exit_signal=53, restarts=1))
    assert answer.why.startswith("its script did not start again, because Slurm could not open")
    assert "step 20 is saved" in answer.facts
    assert answer.advice is not None
    assert answer.advice.endswith(
        f"when the nodes see the directory again, resume with: hpcddp submit --resume {made.run.path}"
    )


@pytest.mark.parametrize(("reason", "exit_signal"), [("JobLaunchFailure", 9), ("NonZeroExitCode", None)])
def test_a_job_that_failed_otherwise_is_not_said_to_lack_its_directory(
    made: FakeRun, reason: str, exit_signal: int | None
) -> None:
    answer = why(made.submitted(), queued(state="FAILED", reason=reason, exit_signal=exit_signal))
    assert answer.why.startswith("Slurm says that job 7 is FAILED")


@pytest.mark.parametrize(("cause", "looks"), [("preemption", False), ("crash", True)])
def test_a_run_without_progress_has_an_error_to_look_at_only_if_an_attempt_failed(
    made: FakeRun, cause: str, *, looks: bool
) -> None:
    made.submitted().started().event("requeue", cause=cause)
    answer = why(made.ended("failed", reason="no new step in 2 attempts", exit_code=93, resume="hpcddp submit X"))
    assert answer.command == ("hpcddp logs run-1 --first-error" if looks else "hpcddp submit X")
    assert (answer.advice is not None) is looks


def test_what_slurm_still_knows_of_a_run_without_a_result_is_told(made: FakeRun, golden: GoldenMessages) -> None:
    made.submitted().started().failed(3, step=20).event("train")
    answer = why(made, queued(state="OUT_OF_MEMORY"))
    assert "job 7 is OUT_OF_MEMORY" in golden.message(answer.why)
    assert "no result" in answer.why
    (first_error,) = [fact for fact in answer.facts if "failed first" in fact]
    assert golden.message(first_error).startswith("rank 3 on n1 ")
    assert first_error.endswith("step 20: ValueError: no")


@pytest.mark.parametrize(("restarts", "at", "is_lost"), [(0, 20, True), (1, 20, False), (0, 90, False)])
def test_a_requeue_that_slurmctld_has_lost_is_told(
    made: FakeRun, restarts: int, at: float, golden: GoldenMessages, *, is_lost: bool
) -> None:
    made.submitted().started().event("requeue", at=at, cause="preemption")
    answer = why(made, queued(state="RUNNING", restarts=restarts))
    assert ("lost the requeue" in golden.message(answer.why)) == is_lost


def test_a_job_that_failed_with_its_requeue_says_why(made: FakeRun, golden: GoldenMessages) -> None:
    made.submitted().started().event("requeue", cause="preemption")
    answer = why(made, queued(state="FAILED"))
    assert_facts(golden.message(answer.why), "job 7 is FAILED", "slurmctld was down", "requeue was lost")
    assert answer.command == f"hpcddp submit --resume {made.run.path}"


def test_a_run_without_a_job_was_interrupted(made: FakeRun, golden: GoldenMessages) -> None:
    assert "submission was interrupted" in golden.message(why(made).why)


def test_a_start_that_was_refused_is_in_the_history(made: FakeRun) -> None:
    made.submitted().started().event("refusal", at=60, reason="Slurm ran job 7 again").ended("failed", reason="no")
    assert why(made).history[-1].endswith("  Slurm ran job 7 again")


def test_without_an_answer_nobody_can_tell(made: FakeRun, golden: GoldenMessages) -> None:
    made.submitted(cluster="local").started(host="elsewhere")
    assert "started on another machine" in golden.message(why(made).why)
    assert why(made, unanswered=True).why.endswith("Slurm could not be queried")


def test_a_sweep_gives_each_answer_once_and_trouble_first(tmp_path: Path, golden: GoldenMessages) -> None:
    made = make(tmp_path, "sweep").submitted("50")
    elements = tuple({"train.seed": seed} for seed in range(6))
    chunks = (Chunk(job_id="50", first=0, count=6),)
    write_sweep(Sweep(sweep_id="sweep", path=made.run.path, elements=elements, chunks=chunks))
    make(tmp_path, "sweep_0").submitted("50_0").started("50_0").ended("finished", steps=400)
    for index in (1, 3):
        failed = make(tmp_path, f"sweep_{index}").submitted(f"50_{index}").started(f"50_{index}")
        failed.ended("failed", reason="no such file", exit_code=70)
    jobs = [queued(f"50_{index}", "PENDING", reason="Priority") for index in (2, 4, 5)]
    (status,) = overview(tmp_path, ask=lambda: jobs, now=NOON, everything=True).lines
    assert isinstance(status, SweepStatus)
    lines = list(explain_sweep(status, unanswered=False).lines())
    assert golden.message("\n".join(lines)).startswith("sweep (digits), a sweep of 6: ")
    assert lines[0].endswith(": 3 pending, 1 finished, 2 failed")
    assert lines[1].startswith("  elements 1, 3 failed: ")
    assert lines[1].endswith(": no such file")
    assert lines[3].startswith("  elements 2, 4-5 pending: ")
    assert "jobs of higher priority" in lines[3]
    assert lines[5] == "  element 0 finished"
    assert lines[-2] == "next: hpcddp why sweep_1"
    assert lines[-1].endswith(": hpcddp submit --resume sweep")


def test_a_script_that_ended_before_its_first_attempt_is_not_said_to_have_waited(
    made: FakeRun, golden: GoldenMessages
) -> None:
    made.submitted()
    made.run.batch_log.write_text("hpcddp: /no/python cannot run hpcddp on n1; install hpcddp for it\n")
    answer = why(made)
    assert answer.why == "its script ended before an attempt began"
    assert golden.message(answer.facts[0]).endswith("; install hpcddp for it")
    assert "last line: hpcddp: /no/python" in answer.facts[0]


def traced(made: FakeRun, rank: int, *entries: dict[str, Any]) -> None:
    write_trace(made.attempt(), rank, trace(*entries))
    made.attempt().rank_log(rank).touch()
    made.failed(rank, kind="hang", exit_code=124)


def test_a_hang_names_the_collective_and_the_ranks(made: FakeRun, golden: GoldenMessages) -> None:
    made.submitted().started().ended("failed", reason="a hang", exit_code=124, attempts=1)
    for rank in (0, 2, 3):
        traced(made, rank, entry(6), entry(7, retired=False), entry(8, retired=False))
    traced(made, 1, entry(6))
    made.attempt().rank_log(4).touch()
    hang = golden.message(why(made).facts[0])
    assert hang.startswith("collective 7 of the process group 0")
    assert "ranks 0, 2-3 in all_reduce Float[3]" in hang
    assert "rank 1 not there yet (last: 6)" in hang
    assert "rank 4 without a trace" in hang


def test_a_hang_of_ranks_that_call_different_collectives_says_so(made: FakeRun, golden: GoldenMessages) -> None:
    made.submitted().started().ended("failed", reason="a hang", exit_code=124, attempts=1)
    traced(made, 0, entry(1, retired=False))
    traced(made, 1, entry(1, retired=False, profiling_name="gloo:broadcast"))
    hang = golden.message(why(made).facts[0])
    assert hang.startswith("collective 1 of the process group 0")
    assert "rank 0 in all_reduce" in hang
    assert "rank 1 in broadcast" in hang
    assert hang.endswith("call different collectives")


def test_a_hang_outside_of_collectives_names_none(made: FakeRun) -> None:
    made.submitted().started().ended("failed", reason="a hang", exit_code=124, attempts=1)
    traced(made, 0, entry(1))
    assert why(made).facts == ("no step is saved",)


def test_a_run_in_which_nothing_moves_leads_to_its_stacks(made: FakeRun, golden: GoldenMessages) -> None:
    made.submitted().started().event("train").log(0, "epoch 0\n").log(1, "epoch 0\n").steps(1, 3)
    attempt = made.attempt()
    paths = [attempt.rank_log(0), attempt.rank_log(1), made.run.metrics]

    def written(*moments: float) -> Answer:
        for path, moment in zip(paths, moments, strict=True):
            os.utime(path, (NOON + moment, NOON + moment))
        return explain(look(made, queued()))

    for moments in ((80, 20, 20), (20, 71, 20), (20, 20, 99)):
        moving = written(*moments)
        assert moving.command == "hpcddp logs run-1 --follow"
        assert not any("no output" in line for line in moving.lines())
    hangs = written(20, 60, 50)
    assert hangs.command == "hpcddp stacks run-1"
    (sentence,) = (line for line in hangs.lines() if "no output" in line)
    assert_facts(golden.message(sentence), "40s on any rank", "hpcddp stacks run-1")
    assert hangs.status.as_json()["silent_s"] == 40
    assert any("no output for 40s" in line for line in details(hangs.status, paint=lambda text, _: text))


def test_the_rank_that_the_others_wait_for_is_named(made: FakeRun) -> None:
    made.submitted().started().event("train").event("save", at=15, step=2).log(0, "epoch 0\n").steps(1, 3)
    write_ranks(made.attempt(), [Rank(host="n1"), Rank(host="n1"), Rank(host="n2"), Rank(host="n2")])

    def facts(**waits: float) -> tuple[str, ...]:
        for path in (made.attempt().rank_log(0), made.run.metrics):
            os.utime(path, (NOON + 20, NOON + 20))
        for name, at in waits.items():
            mark = made.attempt().rank_wait(int(name.removeprefix("rank_")))
            mark.touch()
            os.utime(mark, (NOON + at, NOON + at))
        return explain(look(made, queued())).facts

    assert facts()[-1] == "step 2 is saved"
    # Marks of an earlier wait, before the newest step.
    assert not any("up rank" in fact for fact in facts(rank_0=10, rank_2=10))
    (stuck,) = (fact for fact in facts(rank_0=41, rank_1=42, rank_3=41) if "up rank" in fact)
    assert stuck.startswith("rank 2 on n2 holds up ranks 0-1, 3, which waited for other ranks at ")
    assert any(fact.startswith("all ranks wait for each other") for fact in facts(rank_2=42))


def test_progress_of_a_silent_program_is_a_sign_of_life(made: FakeRun) -> None:
    made.submitted().started().event("train").log(0, "")
    os.utime(made.attempt().rank_log(0), (NOON + 10, NOON + 10))
    assert look(made, queued()).silent_s == 90
    made.run.progress.touch()
    assert look(made, queued()).silent_s is None


@pytest.mark.parametrize("fill", FILLS.values(), ids=FILLS)
def test_of_a_run_on_a_full_disk_no_time_is_estimated(
    tmp_path: Path, fill: Callable[[Path], None], golden: GoldenMessages
) -> None:
    with small_disk(tmp_path / "disk") as disk:
        made = make(disk).submitted().started().event("train").log(0, "").steps(1, 30)
        assert look(made, queued()).eta_s is not None
        fill(disk)
        status = look(made, queued())
        assert (status.eta_s, status.silent_s) == (None, None)
        answer = explain(status)
        assert not any("to go" in line for line in answer.lines())
        (sentence,) = status.remarks
        assert_facts(golden.message(sentence), "run-1: the disk of ", "is full", "free space")
        assert f"  {sentence}" in answer.lines()
        make_room(disk)
        assert look(made, queued()).eta_s is not None


@pytest.mark.parametrize("slurm_state", ["SUSPENDED", "COMPLETING", "PENDING"])
def test_a_run_that_does_not_compute_is_not_said_to_be_silent(made: FakeRun, slurm_state: str) -> None:
    made.submitted().started().event("train").log(0, "")
    os.utime(made.attempt().rank_log(0), (NOON + 10, NOON + 10))
    assert look(made, queued(state=slurm_state)).silent_s is None


def test_the_cause_that_slurm_showed_is_all_that_is_known_of_a_killed_attempt(made: FakeRun) -> None:
    made.submitted().started().event("train").event("cause", at=40, cause="preemption")
    waits = "\n".join(why(made, queued(state="PENDING", reason="BeginTime")).lines())
    assert "attempt 0 ends: preempted" in waits
    made.event("requeue", at=50, cause="preemption")
    again = "\n".join(why(made, queued(state="PENDING", reason="BeginTime")).lines())
    assert "attempt 0 ends" not in again
    assert "to be requeued: preempted" in again


def test_the_history_of_a_run_on_this_machine_does_not_speak_of_slurm(made: FakeRun) -> None:
    made.submitted(cluster="local").started(is_local=True).event("cause", at=40, cause="crash")
    assert why(made).history[-1].endswith("  attempt 0 ends: a task failed")


def test_a_run_that_its_user_cancelled_and_slurm_killed_at_once_is_said_to_be_cancelled(made: FakeRun) -> None:
    made.submitted().started().event("train").event("cancel", at=40)
    assert why(made, queued(state="CANCELLED")).why.startswith("it was cancelled by its user, and killed")


def test_a_step_that_waits_in_its_own_task_is_told(made: FakeRun, golden: GoldenMessages) -> None:
    made.submitted().started().event("train").log(
        0, "srun: Job 7 step creation temporarily disabled, retrying (busy)\n"
    )
    said = "\n".join(why(made, queued()).lines())
    (line,) = (line for line in said.splitlines() if "calls srun" in line)
    assert_facts(golden.message(line), "until the time limit", "--overlap")
    made.log(0, "srun: Job 7 step creation temporarily disabled, retrying (busy)\nepoch 1\n")
    assert not any("calls srun" in line for line in why(made, queued()).lines())


def test_a_failing_node_is_named_with_what_is_done_about_it(made: FakeRun, golden: GoldenMessages) -> None:
    made.submitted().started()
    for attempt in range(2):
        made.event("restart", attempt=attempt, cause="crash", reason="rank 3 died", node_faults={"n2": "failure"})
    made.event("requeue", at=30, attempt=2, cause="node_failure", node_faults={"n5": "lost"})
    (n5, n2) = look(made, queued()).remarks[:2]
    assert_facts(golden.message(n5), "node n5 was lost in attempt 2", "requeue.avoid_failed_nodes")
    assert_facts(golden.message(n2), "node n2 was the first to fail in attempts 0, 1")
    made.event("exclusion", attempt=2, reason="job 7 is kept away from n5", nodes=["n5"])
    answer = why(made, queued())
    assert any("node n5 was lost in attempt 2; its job is kept" in fact for fact in answer.as_json()["facts"])
    assert any("job 7 is kept away from n5" in line for line in answer.history)


def test_a_node_that_failed_two_days_ago_is_not_named(made: FakeRun) -> None:
    made.submitted().started().event("requeue", at=-2 * 86400, cause="node_failure", node_faults={"n5": "lost"})
    assert not any("n5" in remark for remark in look(made, queued()).remarks)
