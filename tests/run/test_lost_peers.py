"""Ranks that lost another one tell whether it had ended, or did not come in time."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcddp.run.directory import AttemptDirectory, RunDirectory
from hpcddp.run.failure import beginning, failure_sentence, read_failures, write_failure
from hpcddp.run.job_records import FailureRecord, ProgramExit, Rank, write_exit, write_ranks
from tests.messages import GoldenMessages

LOST = """Traceback (most recent call last):
  File "/home/me/train.py", line 54, in <module>
    loss.backward()
  File "/venv/lib/python3.11/site-packages/torch/_tensor.py", line 623, in backward
    torch.autograd.backward(
RuntimeError: Connection closed by peer [10.0.0.2]:14257"""
IN_ALL_REDUCE = """Traceback (most recent call last):
  File "/home/me/early.py", line 5, in main
    dist.all_reduce(x)
  File "/venv/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", line 83, in wrapper
    return func(*args, **kwargs)
  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3000, in all_reduce
    work.wait()
RuntimeError: Connection reset by peer"""


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDirectory:
    attempt = RunDirectory(tmp_path).attempt(0)
    attempt.path.mkdir(parents=True)
    write_ranks(attempt, [Rank(host=f"n{rank + 1}") for rank in range(3)])
    return attempt


def failed(attempt: AttemptDirectory, rank: int, traceback: str = LOST, *, secondary: bool = True) -> None:
    record = FailureRecord(
        rank=rank,
        host=f"n{rank + 1}",
        time=100.0 + rank,
        kind="RuntimeError",
        message=traceback.splitlines()[-1],
        traceback=traceback,
        exit_code=71 if secondary else 70,
        secondary=secondary,
    )
    write_failure(attempt, record)
    ended(attempt, rank, code=1)


def ended(attempt: AttemptDirectory, rank: int, *, code: int = 0, told: bool = False) -> None:
    exit_ = ProgramExit(rank=rank, host=f"n{rank + 1}", time=90.0, code=code, notice="terminated" if told else None)
    write_exit(attempt, exit_)


def sentence(attempt: AttemptDirectory) -> str:
    return failure_sentence(attempt, read_failures(attempt))


def test_ranks_that_ended_well_and_left_another_one_behind_are_named(
    attempt: AttemptDirectory, golden: GoldenMessages
) -> None:
    failed(attempt, 0)
    ended(attempt, 1)
    ended(attempt, 2)
    said = golden.message(sentence(attempt))
    assert said.startswith("ranks 1 on n2, 2 on n3 ended with exit code 0 while rank 0 on n1 was still in backward")
    assert "(train.py:54)" in said
    assert "different numbers of steps" in said


def test_the_function_of_torch_is_named_and_not_its_decorator(attempt: AttemptDirectory) -> None:
    ended(attempt, 0)
    failed(attempt, 1, IN_ALL_REDUCE)
    failed(attempt, 2, IN_ALL_REDUCE)
    assert "rank 1 on n2 was still in all_reduce (early.py:5)" in sentence(attempt)


@pytest.mark.parametrize("other", ["killed", "told to stop", "an own error", "no record", "lost a peer too"])
def test_any_other_cause_comes_first(attempt: AttemptDirectory, other: str) -> None:
    failed(attempt, 0)
    if other == "an own error":
        failed(attempt, 1, "Traceback (most recent call last):\nValueError: mine", secondary=False)
    elif other == "killed":
        failed(attempt, 1, "killed", secondary=False)
    elif other == "lost a peer too":
        failed(attempt, 1)
    elif other == "told to stop":
        ended(attempt, 1, told=True)
    ended(attempt, 2, told=other in {"told to stop", "lost a peer too"})
    assert "different numbers of steps" not in sentence(attempt)


ABORTED = """terminate called without an active exception
Fatal Python error: Aborted

Thread 0x00007f7a6c1efb80 (most recent call first):
  <no Python frame>

Extension modules: numpy._core._multiarray_umath (total: 1)"""


def test_a_rank_that_aborts_when_python_has_ended_had_come_to_its_end(attempt: AttemptDirectory) -> None:
    failed(attempt, 0)
    failed(attempt, 1, ABORTED, secondary=False)
    ended(attempt, 2)
    said = sentence(attempt)
    assert said.startswith("ranks 1 on n2, 2 on n3 ended while rank 0 on n1 was still in backward")


@pytest.mark.parametrize("other", [LOST, ABORTED.replace("<no Python frame>", 'File "train.py", line 5 in step')])
def test_a_rank_with_a_cause_of_its_own_is_not_said_to_have_left_the_others_behind(
    attempt: AttemptDirectory, other: str
) -> None:
    failed(attempt, 0)
    failed(attempt, 1, ABORTED, secondary=False)
    failed(attempt, 2, other, secondary=False)
    assert "different numbers of steps" not in sentence(attempt)


TIMED_OUT = LOST.replace("Connection closed by peer [10.0.0.2]:14257", "Timed out waiting 40000ms for recv operation")


def test_a_rank_that_others_waited_for_until_their_timeout_is_named(
    attempt: AttemptDirectory, golden: GoldenMessages
) -> None:
    failed(attempt, 0, TIMED_OUT)
    failed(attempt, 2)
    ended(attempt, 1, code=-15, told=True)
    said = golden.message(sentence(attempt))
    assert said.startswith("rank 0 on n1 waited in backward (train.py:54) for rank 1 on n2")
    assert "a hang" in said


def test_a_timeout_of_all_ranks_names_none(attempt: AttemptDirectory) -> None:
    for rank in range(3):
        failed(attempt, rank, TIMED_OUT)
    assert "as all others did" in sentence(attempt)


def test_a_timeout_beside_a_failure_is_its_consequence(attempt: AttemptDirectory) -> None:
    failed(attempt, 0, TIMED_OUT)
    failed(attempt, 1, "ValueError: mine", secondary=False)
    assert sentence(attempt).startswith("rank 1 on n2 failed first")


@pytest.fixture
def two_hosts(tmp_path: Path) -> AttemptDirectory:
    """An attempt of torchrun on two hosts, in which a rank of the first task has lost one of the second."""
    attempt = RunDirectory(tmp_path / "two").attempt(0)
    attempt.path.mkdir(parents=True)
    write_ranks(attempt, [Rank(host=f"n{task + 1}", launcher="torchrun") for task in range(2)])
    failed(attempt, 0)
    attempt.rank_log(0).write_text(f"{LOST}\nChildFailedError:\n  <NO_OTHER_FAILURES>\n")
    attempt.rank_log(1).write_text("rank 1 is done early\n")
    return attempt


def test_a_launcher_that_only_waited_for_the_other_one_had_ranks_that_came_to_their_end(
    two_hosts: AttemptDirectory,
) -> None:
    ended(two_hosts, 1, code=1, told=True)
    said = sentence(two_hosts)
    assert said.startswith("another rank ended with exit code 0 while rank 0 on n1 was still in backward")


@pytest.mark.parametrize("order", ["after the other", "first"])
def test_a_launcher_that_srun_has_killed_after_another_one_had_waited(two_hosts: AttemptDirectory, order: str) -> None:
    lines = ["srun: error: n1: task 0: Exited with exit code 71\n", "srun: error: n2: task 1: Killed\n"]
    said = "".join(lines if order == "after the other" else reversed(lines))
    two_hosts.run.batch_log.write_text(beginning(two_hosts) + said)
    assert ("different numbers of steps" in sentence(two_hosts)) == (order == "after the other")


def test_a_launcher_that_names_a_rank_of_its_own_is_no_uneven_one(two_hosts: AttemptDirectory) -> None:
    ended(two_hosts, 1, code=1, told=True)
    two_hosts.rank_log(1).write_text("ChildFailedError:\n")
    assert "different numbers of steps" not in sentence(two_hosts)


def test_an_abort_of_a_thread_of_torch_in_a_step_is_no_end_of_its_rank(attempt: AttemptDirectory) -> None:
    """NCCL's watchdog aborts in a thread without a Python frame, while the main thread has some."""
    watchdog = (
        f'{ABORTED}\n\nThread 0x00007f01 (most recent call first):\n  File "/home/me/train.py", line 54 in step\n'
    )
    failed(attempt, 0)
    failed(attempt, 1, watchdog, secondary=False)
    ended(attempt, 2)
    assert "different numbers of steps" not in sentence(attempt)


def test_a_timeout_beside_a_rank_that_ended_without_a_record_leaves_the_story_to_srun(
    attempt: AttemptDirectory,
) -> None:
    failed(attempt, 0, TIMED_OUT)
    failed(attempt, 2)
    attempt.rank_log(1).touch()
    first, later = "srun: error: n2: task 1: Out Of Memory\n", "srun: error: n1: task 0: Exited with exit code 71\n"
    attempt.run.batch_log.write_text(beginning(attempt) + first + later)
    assert sentence(attempt).startswith("rank 1 on n2 ended without an error message")
