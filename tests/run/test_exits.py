"""How a rank ended that left no record."""

from pathlib import Path

import pytest

from hpcddp.run.directory import AttemptDirectory, RunDirectory
from hpcddp.run.failure import beginning, cause_in_log, exit_of, exits_in, failure_sentence, never_started
from hpcddp.stop.reasons import Cause
from tests.facts import assert_facts
from tests.messages import GoldenMessages


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("srun: error: n2: task 1: Killed\n", {1: "Killed"}),
        ("srun: error: n2: task 1: Segmentation fault (core dumped)\n", {1: "Segmentation fault (core dumped)"}),
        ("srun: error: n[1-2]: tasks 0,2-3: Aborted\n", {0: "Aborted", 2: "Aborted", 3: "Aborted"}),
        # What follows is srun ending the others, and the same task again.
        ("srun: error: n2: task 1: Killed\nsrun: error: n2: task 1: Terminated\n", {1: "Killed"}),
        ("srun: Terminating StepId=12.0\n", {}),
        # Anything may print to the batch log.
        ("srun: error: n1: tasks -: Killed\nsrun: error: n1: task ,1-: Killed\n", {}),
        ("srun: error: n1: tasks 0-999999999999: Killed\n", {}),
    ],
)
def test_srun_says_how_tasks_ended(text: str, expected: dict[int, str]) -> None:
    assert exits_in(text) == expected


def attempt_in(tmp_path: Path) -> AttemptDirectory:
    attempt = RunDirectory(tmp_path / "run").attempt(1)
    attempt.path.mkdir(parents=True)
    return attempt


def test_what_srun_said_of_an_earlier_attempt_does_not_count(tmp_path: Path) -> None:
    attempt = attempt_in(tmp_path)
    earlier = "srun: error: n1: task 0: Killed\n"
    attempt.run.batch_log.write_text(f"{earlier}{beginning(attempt)}srun: error: n2: task 1: Aborted\n")
    assert exit_of(attempt, 0) is None
    assert exit_of(attempt, 1) == "Aborted"


NOTICE = "slurmstepd-n1: error: *** {} ON n1 CANCELLED AT 2026-11-22T05:17:38 DUE TO {} ***\n"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (NOTICE.format("STEP 3.0", "PREEMPTION") + NOTICE.format("JOB 3", "PREEMPTION"), Cause.PREEMPTION),
        (NOTICE.format("JOB 3", "NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS"), Cause.NODE_FAILURE),
        (NOTICE.format("JOB 3", "TIME LIMIT"), Cause.TIME_LIMIT),
        (NOTICE.format("JOB 3", "JOB REQUEUE"), None),
        ("slurmstepd-n1: error: *** STEP 5.0 ON n1 CANCELLED AT 2026-11-22T05:18:30 ***\n", None),
        ("a program says: " + NOTICE.format("JOB 3", "PREEMPTION"), None),
        ("", None),
    ],
)
# 22.05, and with each LogTimeFormat since 25.05: no time, a time, a time and the thread.
@pytest.mark.parametrize("begins", ["slurmstepd-n1: ", "", "[2026-11-22T05:17:38.123] ", "[ 17] "])
def test_slurmstepd_says_why_slurm_ends_a_job(tmp_path: Path, text: str, cause: Cause | None, begins: str) -> None:
    attempt = attempt_in(tmp_path)
    earlier = NOTICE.format("JOB 3", "TIME LIMIT")
    printed = f"{earlier}{beginning(attempt)}srun: got SIGCONT\n{text}"
    attempt.run.batch_log.write_text(printed.replace("slurmstepd-n1: ", begins))
    assert cause_in_log(attempt) is cause


@pytest.mark.parametrize(
    "said",
    [
        "sh: 3: cannot create /shared/rank-1.log: Directory nonexistent\n",
        "sh: line 3: /shared/rank-1.log: Permission denied\n",
    ],
    ids=["dash", "bash"],
)
def test_a_node_that_does_not_see_the_run_directory_is_named(tmp_path: Path, said: str, golden: GoldenMessages) -> None:
    attempt = attempt_in(tmp_path)
    attempt.rank_log(0).touch()
    ends = "srun: error: n2: task 1: Exited with exit code 2\nsrun: error: n1: task 0: Killed\n"
    attempt.run.batch_log.write_text(said + ends)
    sentence = golden.message(failure_sentence(attempt, []))
    assert sentence.startswith("rank 1 on n2 did not start")
    assert "every node see the run directory" in sentence
    # Something else may keep a task from starting.
    attempt.run.batch_log.write_text(ends)
    assert "did not start" not in failure_sentence(attempt, [])


def test_all_tasks_without_a_log_are_named_where_srun_names_several(tmp_path: Path, golden: GoldenMessages) -> None:
    attempt = attempt_in(tmp_path)
    attempt.rank_log(0).touch()
    ends = "srun: error: n[2-3]: tasks 1-2: Exited with exit code 2\nsrun: error: n1: task 0: Killed\n"
    attempt.run.batch_log.write_text(f"sh: 3: cannot create /shared/rank-2.log: Directory nonexistent\n{ends}")
    assert golden.message(failure_sentence(attempt, [])).startswith("ranks 1, 2 on n[2-3] did not start")


def test_what_only_looks_like_the_name_of_a_log_is_passed_over(tmp_path: Path) -> None:
    attempt = attempt_in(tmp_path)
    attempt.rank_log(0).touch()
    ends = "srun: error: n1: task 0: Killed\n"
    attempt.run.batch_log.write_text(f"cannot create /shared/rank-{'9' * 5000}.log: Directory nonexistent\n{ends}")
    assert failure_sentence(attempt, []).startswith("rank 0 ended without an error message")


def test_a_killed_rank_has_a_likely_reason(tmp_path: Path, golden: GoldenMessages) -> None:
    attempt = attempt_in(tmp_path)
    attempt.run.batch_log.write_text("srun: error: n2: task 1: Killed\n")
    reason = golden.message(exit_of(attempt, 1))
    assert reason.startswith("Killed (by SIGKILL")
    assert "out of memory" in reason


def test_a_crash_below_python_is_read_from_the_ranks_own_log(tmp_path: Path) -> None:
    attempt = attempt_in(tmp_path)
    attempt.rank_log(2).write_text("step 3\nFatal Python error: Segmentation fault\n\nCurrent thread 0x1\n")
    assert exit_of(attempt, 2) == "Segmentation fault"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("hpcddp: this task cannot start: python3 in the container cannot run hpcddp; install it", None),
        ("FATAL:   could not open image /i.sif: no such file", "could not open image /i.sif: no such file"),
    ],
)
def test_a_task_that_its_container_did_not_start_is_no_riddle(line: str, why: str | None, tmp_path: Path) -> None:
    attempt = attempt_in(tmp_path)
    attempt.rank_log(0).write_text(f"Traceback\n{line}\n")
    why = why or "python3 in the container cannot run hpcddp; install it"
    assert never_started(attempt, 0) == why
    assert failure_sentence(attempt, []) == f"rank 0 did not start: {why}"


def test_what_pyxis_says_is_why_no_task_has_a_log(tmp_path: Path) -> None:
    attempt = attempt_in(tmp_path)
    earlier = "slurmstepd: error: pyxis: of an earlier attempt\n"
    said = "slurmstepd-n1: error: pyxis: failed to import docker image\nslurmstepd-n1: error: pyxis: its log:\n"
    attempt.run.batch_log.write_text(f"{earlier}{beginning(attempt)}pyxis: importing docker image: x\n{said}")
    sentence = "the containers did not start: pyxis: failed to import docker image"
    assert failure_sentence(attempt, []) == sentence


def test_without_any_log_nothing_is_said(tmp_path: Path) -> None:
    assert exit_of(attempt_in(tmp_path), 0) is None


@pytest.mark.parametrize(
    "said", ["srun: forcing job termination\n", "srun: Force Terminated StepId=3.0\n", "srun: Force Terminated job 3\n"]
)
def test_tasks_that_a_signal_to_srun_has_killed_did_not_run_out_of_memory(
    tmp_path: Path, said: str, golden: GoldenMessages
) -> None:
    attempt = attempt_in(tmp_path)
    log = attempt.run.batch_log
    log.write_text(f"{beginning(attempt)}{said}srun: error: n1: task 1: Killed\n")
    reason = golden.message(exit_of(attempt, 1))
    assert reason.startswith("Killed (by srun")
    assert "scancel --full" in reason


@pytest.mark.parametrize("how", ["Killed", "Terminated"])
def test_a_task_that_worked_longer_than_srun_waits_after_the_first_end(
    tmp_path: Path, how: str, golden: GoldenMessages
) -> None:
    attempt = attempt_in(tmp_path)
    said = "srun: First task exited 10s ago\nsrun: StepId=3.0 tasks 0: running\nsrun: StepId=3.0 tasks 1: exited\n"
    attempt.run.batch_log.write_text(f"{beginning(attempt)}{said}srun: error: n1: task 0: {how}\n")
    reason = golden.message(exit_of(attempt, 0))
    assert_facts(reason, how, "by srun, 10 s after the first task had ended", "--wait=0")


def test_a_task_that_ran_out_of_memory_was_not_killed_by_srun(tmp_path: Path) -> None:
    attempt = attempt_in(tmp_path)
    log = f"{beginning(attempt)}srun: Force Terminated StepId=3.0\nsrun: error: n1: task 1: Out Of Memory\n"
    attempt.run.batch_log.write_text(log)
    assert exit_of(attempt, 1) == "Out Of Memory (its memory limit was exceeded)"


def test_a_task_that_was_killed_before_srun_ended_the_others_was_not_killed_by_srun(
    tmp_path: Path, golden: GoldenMessages
) -> None:
    attempt = attempt_in(tmp_path)
    attempt.run.batch_log.write_text(
        f"{beginning(attempt)}srun: error: n1: task 0: Killed\n"
        "srun: launch/slurm: _step_signal: Terminating StepId=1.0\n"
        "srun: error: n2: task 1: Killed\n"
        "srun: Force Terminated StepId=1.0\n"
    )
    assert golden.message(exit_of(attempt, 0)).startswith("Killed (by SIGKILL")
