"""A run directory belongs to one job at a time, and to its owner alone."""

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcddp.run.job_records import Start
from hpcddp.run.ownership import (
    RunDirectoryError,
    conflict,
    group_writable_warnings,
    is_alive,
    make_private_directory,
)
from tests.messages import GoldenMessages
from tests.submission.local_run import script_process

PAGE = Path(__file__).parents[2] / "docs" / "batch.md"


def start(job_id: str | None = "7", restart_count: int = 0, submit_time: str | None = "2026-01-01T10:00:00") -> Start:
    return Start(
        job_id=job_id, restart_count=restart_count, submit_time=submit_time, host="n1", time=0.0, is_local=False
    )


def test_a_new_directory_is_free() -> None:
    assert conflict(None, start(), previous_alive=False) is None


def test_a_requeue_goes_on_although_slurm_renews_the_submit_time() -> None:
    requeued = start(restart_count=1, submit_time="2026-01-01T11:00:00")
    assert conflict(start(), requeued, previous_alive=False) is None


def test_the_same_job_id_with_another_submit_time_is_another_job(golden: GoldenMessages) -> None:
    sentence = conflict(start(), start(submit_time="2026-02-02T10:00:00"), previous_alive=False)
    assert sentence is not None
    message = golden.message(sentence)
    assert "submitted at 2026-01-01T10:00:00;" in message
    assert "this one was submitted at 2026-02-02T10:00:00" in message


def test_a_second_job_is_refused_while_the_first_lives_and_names_it() -> None:
    assert conflict(start("7"), start("8"), previous_alive=True) == "job 7 is still using it"
    assert conflict(start("7"), start("8"), previous_alive=False) is None


@pytest.fixture
def script() -> Iterator[subprocess.Popen[bytes]]:
    """Start a process with the command line of a batch script."""
    with script_process() as process:
        yield process


def local_start(pid: int, *, is_local: bool = True) -> Start:
    return Start(job_id=str(pid), host=socket.gethostname(), time=0.0, is_local=is_local)


@pytest.mark.parametrize(("is_local", "alive"), [(False, False), (True, True)])
def test_the_id_of_a_slurm_job_is_never_taken_for_that_of_a_process(
    script: subprocess.Popen[bytes], *, is_local: bool, alive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    assert is_alive(local_start(script.pid, is_local=is_local)) is alive


def test_another_process_with_the_id_of_a_local_run_is_not_the_run(script: subprocess.Popen[bytes]) -> None:
    assert is_alive(local_start(script.pid))
    assert not is_alive(local_start(os.getpid()))
    script.kill()
    script.wait()
    assert not is_alive(local_start(script.pid))


def test_directories_are_made_private(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "name" / "id"
    make_private_directory(path)
    assert path.stat().st_mode & 0o777 == 0o700
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_directory_that_others_can_write_to_is_refused(tmp_path: Path, golden: GoldenMessages) -> None:
    path = tmp_path / "run"
    path.mkdir()
    path.chmod(0o770)
    with pytest.raises(RunDirectoryError, match="can be written by others") as caught:
        make_private_directory(path)
    assert f"run: chmod go-w {path}" in golden.message(caught.value)


def test_a_parent_that_everyone_can_write_to_is_refused_unless_it_is_sticky(tmp_path: Path) -> None:
    parent = tmp_path / "open"
    parent.mkdir()
    parent.chmod(0o777)
    with pytest.raises(RunDirectoryError, match="can be written by everyone"):
        make_private_directory(parent / "run")
    parent.chmod(0o1777)
    make_private_directory(parent / "run")


def test_a_file_in_the_way_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(RunDirectoryError, match=r"cannot be created: .*; choose another run_root"):
        make_private_directory(tmp_path / "runs" / "name")


@pytest.mark.skipif(os.getuid() != 0, reason="giving a directory away needs root")
def test_a_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir(mode=0o700)
    os.chown(path, 65534, 65534)
    with pytest.raises(RunDirectoryError, match="belongs to user 65534, not to you"):
        make_private_directory(path)


def test_a_parent_that_its_group_can_write_to_is_worth_a_warning_unless_it_is_sticky(tmp_path: Path) -> None:
    parent = tmp_path / "shared"
    (parent / "runs" / "x").mkdir(parents=True)
    parent.chmod(0o770)
    assert [str(parent) in warning for warning in group_writable_warnings(parent / "runs" / "x")] == [True]
    parent.chmod(0o1770)
    assert group_writable_warnings(parent / "runs" / "x") == []


def test_several_such_parents_are_one_warning(tmp_path: Path, golden: GoldenMessages) -> None:
    inner = tmp_path / "a b" / "runs"
    inner.mkdir(parents=True)
    inner.chmod(0o775)
    inner.parent.chmod(0o775)
    (warning,) = group_writable_warnings(inner / "x")
    assert golden.message(warning).startswith(f"{inner}, {inner.parent}, ")
    assert "written by their groups" in warning
    assert f"run: chmod g-w '{inner}' '{inner.parent}'" in warning
