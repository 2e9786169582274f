"""Which rank failed first."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcddp.manage.first_error import failed_attempt, first_error, shortened
from hpcddp.manage.logs import sources
from hpcddp.run.directory import RunDirectory
from hpcddp.run.failure import beginning
from hpcddp.run.job_records import Rank, write_ranks
from tests.manage.runs import FakeRun, make
from tests.messages import GoldenMessages

CLOSED = "[gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:16816. GLHF!"
TOLD = "rank 3 on n1 failed, and this rank was told to end: ValueError: no"
TRACEBACK = """\
Traceback (most recent call last):
  File "/venv/lib/hpcddp/task/__main__.py", line 63, in main
    _work(env, attempt, environment)
  File "/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1787, in _wrapped_call_impl
    return self._call_impl(*args, **kwargs)
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/home/me/model.py", line 54, in forward
    return self.layer(x)
  File "/venv/lib/python3.11/site-packages/torch/nn/functional.py", line 9, in linear
    raise ValueError("no")
ValueError: no
"""


@pytest.fixture
def made(tmp_path: Path) -> FakeRun:
    """Eight ranks on two hosts."""
    made = make(tmp_path).submitted().started()
    for rank in range(8):
        made.log(rank, f"the log of rank {rank}\nits last line\n")
    write_ranks(made.attempt(), [Rank(host=f"n{rank // 4 + 1}") for rank in range(8)])
    return made


def follow(made: FakeRun, *ranks: int, message: str = CLOSED, kind: str = "RuntimeError", at: float = 29) -> None:
    """Ranks fail because another one has; their clocks may be behind."""
    for rank in ranks:
        made.failed(rank, secondary=True, message=message, kind=kind, exit_code=71, at=at, step=20)


def test_the_first_rank_is_named_with_its_traceback_and_the_followers_in_one_line(
    made: FakeRun, golden: GoldenMessages
) -> None:
    follow(made, 0, 1, 2, 4, 6, 7)
    follow(made, 5, message=TOLD, kind="peer_failed")
    made.failed(3, at=30, traceback=TRACEBACK, step=20)
    lines = list(first_error(made.attempt()).lines())
    assert golden.message(lines[0]).startswith("attempt 0: rank 3 on n1")
    assert lines[0].endswith("failed first after step 20: ValueError: no")
    assert lines[1:-1] == [
        "  Traceback (most recent call last):",
        "    ... 2 frames of libraries",
        '    File "/home/me/model.py", line 54, in forward',
        "      return self.layer(x)",
        '    File "/venv/lib/python3.11/site-packages/torch/nn/functional.py", line 9, in linear',
        '      raise ValueError("no")',
        "  ValueError: no",
    ]
    assert golden.message(lines[-1]).startswith("ranks 0-2, 4-7 failed as a consequence")
    assert lines[-1].endswith(": connection closed by peer")


@pytest.mark.parametrize(
    ("kind", "short"),
    [("peer_failed", "the failure of another rank"), ("RuntimeError", TOLD)],
    ids=["peer_failed", "RuntimeError"],
)
def test_the_kind_of_a_record_shows_that_a_rank_ended_after_another_one(
    made: FakeRun, kind: str, short: str, golden: GoldenMessages
) -> None:
    follow(made, *(rank for rank in range(8) if rank != 3), message=TOLD, kind=kind)
    made.failed(3, at=30)
    followers = golden.message(first_error(made.attempt()).secondary)
    assert followers.startswith("ranks 0-2, 4-7 failed as a consequence")
    assert followers.endswith(short)


def test_the_document_holds_the_whole_traceback(made: FakeRun) -> None:
    follow(made, 0)
    made.failed(3, traceback=TRACEBACK, step=20)
    document = first_error(made.attempt()).as_json()
    assert (document["ranks"], document["host"], document["step"]) == ([3], "n1", 20)
    assert document["traceback"] == TRACEBACK.splitlines()
    assert document["secondary"].startswith("ranks 0-2, 4-7 failed as a consequence: ")


def test_a_rank_that_went_without_a_word_is_named_with_the_end_of_its_log(
    made: FakeRun, golden: GoldenMessages
) -> None:
    follow(made, 0, 1, 2, 3, 4, 6, 7)
    lines = list(first_error(made.attempt()).lines())
    assert golden.message(lines[0]).startswith("attempt 0: rank 5 on n2")
    assert "without an error message after step 20" in lines[0]
    assert lines[1:-1] == ["the last lines of rank 5:", "  the log of rank 5", "  its last line"]
    assert golden.message(lines[-1]).startswith("ranks 0-4, 6-7 failed as a consequence")


def test_torchs_warning_about_a_host_without_a_name_is_no_error(made: FakeRun) -> None:
    nameless = "[W1127 18:38:04.1 socket.cpp:207] [c10d] The hostname of the client socket cannot be retrieved. err=-3"
    follow(made, 0, 1, 2, 3, 5, 6, 7)
    made.log(4, f"{nameless}\nthe last word\n{nameless}\n")
    assert first_error(made.attempt()).text == ("the last word",)


def test_of_several_silent_ranks_the_one_that_srun_saw_first_is_named(made: FakeRun, golden: GoldenMessages) -> None:
    follow(made, 0, 1, 2, 3)
    srun = "srun: error: n2: task 6: Killed\nsrun: error: n2: tasks 4-5,7: Killed\n"
    made.run.batch_log.write_text(f"{beginning(made.attempt())}{srun}")
    found = first_error(made.attempt())
    assert found.ranks == (6,)
    assert golden.message(found.sentence).startswith("rank 6 on n2 ended without")
    assert "step 20: Killed (by SIGKILL" in found.sentence
    assert golden.message(found.secondary).startswith("ranks 0-5, 7 failed as a consequence")


def test_a_rank_that_could_not_open_its_log_is_first_and_has_no_last_lines(tmp_path: Path) -> None:
    attempt = RunDirectory(tmp_path / "run").attempt(0)
    attempt.path.mkdir(parents=True)
    attempt.rank_log(0).write_text("waits for rank 1\n")
    refused = "sh: 3: cannot create /shared/rank-1.log: Directory nonexistent\n"
    srun = "srun: error: n2: task 1: Exited with exit code 2\nsrun: error: n1: task 0: Killed\n"
    attempt.run.batch_log.write_text(f"{refused}{srun}")
    error = first_error(attempt)
    assert error.ranks == (1,)
    assert error.text == ()
    assert error.secondary == "rank 0 failed as a consequence: ended without an error message"


def test_what_srun_says_of_another_attempt_does_not_count(made: FakeRun) -> None:
    follow(made, *range(6))
    later = f"{beginning(made.attempt(1))}srun: error: n2: task 7: Killed\n"
    made.run.batch_log.write_text(f"{beginning(made.attempt())}srun: error: n2: task 6: Killed\n{later}")
    assert first_error(made.attempt()).ranks == (6,)


def test_other_errors_of_their_own_are_told_too(made: FakeRun, golden: GoldenMessages) -> None:
    follow(made, *range(6))
    made.failed(6, at=30).failed(7, at=31, message="another bug")
    another, followers = list(first_error(made.attempt()).lines())[-2:]
    assert another == "also rank 7 on n2: ValueError: another bug"
    assert golden.message(followers).startswith("ranks 0-5 failed as a consequence")


def test_tasks_that_start_a_launcher_are_not_called_ranks(made: FakeRun) -> None:
    write_ranks(made.attempt(), [Rank(host=f"n{task}", launcher="torchrun") for task in range(8)])
    made.failed(1, who="rank 5")
    follow(made, 0, 2)
    found = first_error(made.attempt())
    assert found.sentence.startswith("rank 5 on n1 failed first")
    assert found.secondary.startswith("tasks 0, 2-7 failed as a consequence")
    assert [source.label for source in sources(made.attempt(), ranks=[2])] == ["task 2 n2"]


def test_the_newest_attempt_in_which_something_failed_is_looked_at(made: FakeRun) -> None:
    assert failed_attempt(made.run) is None
    made.failed(3)
    made.started(attempt=1, at=100).log(0, "fine", attempt=1)
    found = failed_attempt(made.run)
    assert found is not None
    assert found.number == 0
    made.event("requeue", attempt=1, cause="crash")
    found = failed_attempt(made.run)
    assert found is not None
    assert found.number == 1


def test_a_traceback_of_libraries_alone_stays_whole() -> None:
    lines = [line for line in TRACEBACK.splitlines() if "model.py" not in line and "self.layer" not in line]
    assert shortened(lines) == lines


def test_ranks_that_failed_alike_share_a_line(made: FakeRun) -> None:
    missing = "No module named 'nothing'"
    for rank in range(7):
        made.failed(rank, kind="ModuleNotFoundError", message=missing, at=30 + rank)
    made.failed(7, kind="ValueError", message="another bug", at=40)
    assert list(first_error(made.attempt()).lines())[-2:] == [
        "also ranks 1-6: ModuleNotFoundError: No module named 'nothing'",
        "also rank 7 on n2: ValueError: another bug",
    ]


def test_the_end_of_a_killed_programs_log_is_called_that(made: FakeRun) -> None:
    made.submitted().failed(1, kind="killed", message="it was killed by SIGKILL", traceback="UserWarning: x")
    error = first_error(made.attempt())
    assert not error.is_traceback
    assert "the last lines of rank 1:" in list(error.lines())
    assert "last_lines" in error.as_json()
