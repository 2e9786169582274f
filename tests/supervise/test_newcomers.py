"""Processes in the places of ranks that have died, started by a program in place of srun."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from hpcddp.polling import wait_until
from hpcddp.run.directory import AttemptDirectory, RunDirectory
from hpcddp.run.failure import beginning
from hpcddp.supervise import serve_members
from hpcddp.supervise.members import NODE_LOST
from hpcddp.supervise.serve_members import Newcomers

TASK = {"SLURMD_NODENAME": "n2", "SLURM_PROCID": "3"}


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDirectory:
    attempt = RunDirectory(tmp_path / "run").attempt(0)
    attempt.path.mkdir(parents=True)
    return attempt


def environment(directory: Path, srun: str) -> Mapping[str, str]:
    """Return an environment whose srun is a script."""
    program = directory / "srun"
    program.write_text(f"#!/bin/sh\n{srun}\n")
    program.chmod(0o700)
    return {**os.environ, "PATH": f"{directory}:{os.environ['PATH']}", "RECORD": str(directory / "record")}


def newcomers(attempt: AttemptDirectory, variables: Mapping[str, str]) -> Newcomers:
    return Newcomers(attempt, ["python", "-m", "hpcddp.task"], 2, variables)


def test_a_new_process_is_started_on_the_node_of_the_dead_one_as_its_task(
    attempt: AttemptDirectory, tmp_path: Path
) -> None:
    new = newcomers(attempt, environment(tmp_path, 'printf "%s\\n" "$@" >"$RECORD"'))
    new.start(3, TASK)
    record = tmp_path / "record"
    assert wait_until(lambda: new.exit_of(3), timeout_s=30, poll_s=0.01) == "Exited with exit code 0"
    words = record.read_text().splitlines()
    assert {"--overlap", "--nodelist=n2", "--ntasks=1", "--cpus-per-task=2"} <= set(words)
    assert words[words.index("env") + 1 : words.index("sh")] == [
        "HPCDDP_NEWCOMER=yes",
        "SLURMD_NODENAME=n2",
        "SLURM_PROCID=3",
    ]
    assert words[-3:] == ["python", "-m", "hpcddp.task"]


@pytest.mark.parametrize(
    ("srun", "how"),
    [
        ("exit 137", "Killed"),
        ("exit 139", "Segmentation fault"),
        ("exit 1", "Exited with exit code 1"),
        ("kill -KILL $$", "Killed"),
    ],
)
def test_a_new_process_that_ends_before_it_joins_is_told_once(
    attempt: AttemptDirectory, tmp_path: Path, srun: str, how: str
) -> None:
    new = newcomers(attempt, environment(tmp_path, srun))
    new.start(3, TASK)
    assert wait_until(lambda: new.without_success({0, 1, 2}), timeout_s=30, poll_s=0.01) == {3: how}
    assert new.without_success({0, 1, 2}) == {}
    assert new.without_success({0, 1, 2, 3}) == {}


def test_a_process_for_which_slurm_has_no_step_is_started_again_and_told_once(
    attempt: AttemptDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = "srun: error: Unable to create step for job 7: Unable to contact slurm controller"
    # The controller is back when the file is there; then the process ends by itself.
    srun = f'echo start >>"$RECORD"; [ -e "$RECORD.back" ] && exit 3; echo "{refusal}" >&2; exit 1'
    new = newcomers(attempt, environment(tmp_path, srun))
    record = tmp_path / "record"

    def starts() -> int:
        return record.read_text().count("start")

    def has_ended() -> str | None:
        return new.exit_of(3)

    new.start(3, TASK)
    assert wait_until(lambda: new.without_success({0, 1, 2}), timeout_s=30, poll_s=0.01) == {
        3: "Exited with exit code 1"
    }
    new.start_again({0, 1, 2})
    assert starts() == 1
    monkeypatch.setattr(serve_members, "_START_AGAIN_AFTER_S", 0.0)
    new.start_again({0, 1, 2, 3})
    assert starts() == 1
    new.start_again({0, 1, 2})
    assert wait_until(has_ended, timeout_s=30, poll_s=0.01) == "Exited with exit code 1"
    assert (starts(), new.without_success({0, 1, 2})) == (2, {})
    record.with_name("record.back").touch()
    new.start_again({0, 1, 2})
    assert wait_until(has_ended, timeout_s=30, poll_s=0.01) == "Exited with exit code 3"
    # That end is the process's own.
    assert new.without_success({0, 1, 2}) == {3: "Exited with exit code 3"}
    new.start_again({0, 1, 2})
    assert starts() == 3


def lose_node(attempt: AttemptDirectory) -> None:
    attempt.run.batch_log.write_text(f"{beginning(attempt)}srun: error: Node failure on n2\n")


def test_a_process_that_has_ended_is_not_told_again_when_its_node_is_lost(
    attempt: AttemptDirectory, tmp_path: Path
) -> None:
    new = newcomers(attempt, environment(tmp_path, "exit 1"))
    new.start(3, TASK)
    assert wait_until(lambda: new.without_success({0, 1, 2}), timeout_s=30, poll_s=0.01) == {
        3: "Exited with exit code 1"
    }
    lose_node(attempt)
    assert new.exit_of(3) == NODE_LOST
    assert new.without_success({0, 1, 2}) == {}


def test_a_process_that_has_joined_is_not_one_without_success_when_its_node_is_lost(
    attempt: AttemptDirectory, tmp_path: Path
) -> None:
    new = newcomers(attempt, environment(tmp_path, "exit 1"))
    new.start(3, TASK)
    assert new.without_success({0, 1, 2, 3}) == {}
    assert wait_until(lambda: new.exit_of(3), timeout_s=30, poll_s=0.01)
    lose_node(attempt)
    assert new.exit_of(3) == NODE_LOST
    assert new.without_success({0, 1, 2}) == {}


def test_a_process_for_which_slurm_never_has_a_step_is_started_again_ten_times(
    attempt: AttemptDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_members, "_START_AGAIN_AFTER_S", 0.0)
    new = newcomers(attempt, environment(tmp_path, 'echo start >>"$RECORD"; echo "Unable to create step" >&2; exit 1'))
    new.start(3, TASK)
    for _ in range(20):
        assert wait_until(lambda: new.exit_of(3), timeout_s=30, poll_s=0.01)
        new.start_again({0, 1, 2})
    assert wait_until(lambda: new.exit_of(3), timeout_s=30, poll_s=0.01)
    assert (tmp_path / "record").read_text().count("start") == 11


def test_a_process_that_could_not_be_started_is_started_again(
    attempt: AttemptDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How the process before it has ended is not told again."""
    attempt.run.batch_log.write_text(f"{beginning(attempt)}srun: error: n2: task 3: Killed\n")
    away = attempt.path.with_name("away")
    new = newcomers(attempt, environment(tmp_path, "exit 0"))
    assert new.exit_of(3) == "Killed"
    attempt.path.rename(away)
    new.start(3, TASK)
    ((number, why),) = new.without_success({0, 1, 2}).items()
    assert number == 3
    assert why.startswith("it could not be started: [Errno 2] No such file or directory")
    assert new.exit_of(3) == why
    away.rename(attempt.path)
    monkeypatch.setattr(serve_members, "_START_AGAIN_AFTER_S", 0.0)
    new.start_again({0, 1, 2})
    assert wait_until(lambda: new.exit_of(3), timeout_s=30, poll_s=0.01) == "Exited with exit code 0"
