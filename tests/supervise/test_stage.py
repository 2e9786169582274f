"""Data that a node copies to a disk of its own: once, whole, and never into what somebody else has made."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from hpcddp.jobfile.environment import Stage
from hpcddp.run.directory import AttemptDirectory
from hpcddp.run.failure import failure_sentence, read_failures
from hpcddp.run.job_records import FailureRecord
from hpcddp.supervise.stage import MARK
from tests.facts import assert_facts
from tests.messages import GoldenMessages
from tests.small_disk import small_disk
from tests.waiting import wait_until


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDirectory:
    path = tmp_path / "run" / "attempts" / "0"
    path.mkdir(parents=True)
    return AttemptDirectory.from_text(str(path))


def command(source: Path, target: str) -> list[str]:
    return [sys.executable, "-P", "-m", "hpcddp.supervise", "stage", f"--source={source}", f"--target={target}"]


def run(attempt: AttemptDirectory, source: Path, target: Path | str, **variables: str) -> tuple[int, str]:
    """Stage, and return the exit code and what was said, without the host."""
    done = subprocess.run(
        command(source, str(target)),
        env={**os.environ, "HPCDDP_ATTEMPT_DIR": str(attempt.path), "HPCDDP_UMASK": "0022", **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr.partition(": ")[2].partition(": ")[2].strip()


def failed(attempt: AttemptDirectory) -> FailureRecord:
    (record,) = read_failures(attempt)
    attempt.rank_error(record.rank).unlink()
    return record


def archive(path: Path, members: dict[str, str], mode: Any = "w:gz") -> Path:
    with tarfile.open(path, mode) as file:
        top = tarfile.TarInfo(".")
        top.type, top.mode = tarfile.DIRTYPE, 0o777
        file.addfile(top)
        for name, text in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            file.addfile(info, io.BytesIO(text.encode()))
    return path


@pytest.mark.parametrize("name", ["images.tar", "images.tar.gz", "images.tgz", "images.tar.xz"])
def test_an_archive_is_unpacked_once(
    name: str, attempt: AttemptDirectory, tmp_path: Path, golden: GoldenMessages
) -> None:
    kind = {"gz": "w:gz", "tgz": "w:gz", "xz": "w:xz"}.get(name.rpartition(".")[2], "w")
    source = archive(tmp_path / name, {"train/cat/1.jpg": "a cat", "val/dog/2.jpg": "a dog"}, kind)
    target = tmp_path / "node" / "images"
    code, said = run(attempt, source, target)
    assert (code, said.startswith(f"{target} has the data after ")) == (0, True)
    assert (target / "train" / "cat" / "1.jpg").read_text() == "a cat"
    # An archive may say that all users may write.
    assert target.stat().st_mode & 0o777 == 0o700
    kept = (target / "val" / "dog" / "2.jpg").stat().st_mtime_ns
    code, said = run(attempt, source, target)
    assert code == 0
    assert_facts(golden.message(said), f"{target} has the data", "an earlier attempt")
    assert (target / "val" / "dog" / "2.jpg").stat().st_mtime_ns == kept
    assert [path.name for path in target.parent.iterdir()] == ["images"]


def test_a_directory_and_a_file_are_copied(attempt: AttemptDirectory, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "a").write_text("a")
    assert run(attempt, source, tmp_path / "one")[0] == 0
    assert (tmp_path / "one" / "sub" / "a").read_text() == "a"
    assert run(attempt, source / "sub" / "a", tmp_path / "two")[0] == 0
    assert (tmp_path / "two" / "a").read_text() == "a"
    assert run(attempt, source / "sub" / "a", "${SCRATCH}/three", SCRATCH=str(tmp_path / "disk"))[0] == 0
    assert (tmp_path / "disk" / "three" / "a").read_text() == "a"


def test_what_another_attempt_has_left_half_done_is_removed(attempt: AttemptDirectory, tmp_path: Path) -> None:
    source = archive(tmp_path / "a.tar", {"f": "whole"}, "w")
    target = tmp_path / "node" / "images"
    left = target.with_name(f".images.7-n4-{os.geteuid()}")
    left.mkdir(parents=True)
    (left / "f").write_text("half")
    assert run(attempt, source, target, SLURM_JOB_ID="7", SLURMD_NODENAME="n4")[0] == 0
    assert [path.name for path in target.parent.iterdir()] == ["images"]
    assert (target / "f").read_text() == "whole"


def test_what_cannot_be_used_is_a_failure_record_and_one_sentence(
    attempt: AttemptDirectory, tmp_path: Path, golden: GoldenMessages
) -> None:
    source = archive(tmp_path / "a.tar", {"f": "text"}, "w")
    mine = tmp_path / "mine"
    mine.mkdir(mode=0o700)
    assert run(attempt, source, mine, SLURM_PROCID="3", SLURMD_NODENAME="n4")[0] == 70
    message = golden.message(failure_sentence(attempt, read_failures(attempt)))
    assert_facts(message, "environment.stage on n4", f"{mine} exists already")
    assert_facts(message, "remove it on that node", "another environment.stage.target")
    assert failed(attempt).rank == 3
    assert list(mine.iterdir()) == []

    target = tmp_path / "staged"
    assert run(attempt, source, target)[0] == 0
    os.utime(source, ns=(0, 0))
    assert run(attempt, source, target)[0] == 70
    assert_facts(
        golden.message(failed(attempt).message), f"{target} holds a copy of {source}", "has changed since", "remove it"
    )
    (target / MARK).write_text("{")
    assert run(attempt, source, target)[0] == 70
    assert_facts(golden.message(failed(attempt).message), str(target), "remove the directory on that node")
    target.chmod(0o777)
    assert run(attempt, source, target)[0] == 70
    assert_facts(golden.message(failed(attempt).message), f"{target} exists already", "only you can change")

    assert run(attempt, source, "$NOT_SET_HERE/a") == (70, failed(attempt).message)
    # Another node may see the file.
    assert run(attempt, tmp_path / "none.tar", tmp_path / "b")[0] == 71
    assert failed(attempt).message.startswith(f"{tmp_path / 'none.tar'}: ")
    torn = tmp_path / "torn.tar"
    torn.write_bytes(archive(tmp_path / "long.tar", {"f": "text" * 9999}, "w").read_bytes()[:5000])
    assert run(attempt, torn, tmp_path / "b")[0] == 70
    message = golden.message(failed(attempt).message)
    assert_facts(message, f"environment.stage.source is {str(torn)!r}", "cannot be unpacked", "correct it")
    assert not (tmp_path / "b").exists()


def test_no_path_of_an_archive_leads_out_of_the_target(attempt: AttemptDirectory, tmp_path: Path) -> None:
    source = archive(tmp_path / "a.tar", {"../outside": "text"}, "w")
    assert run(attempt, source, tmp_path / "node" / "images")[0] == 70
    assert list((tmp_path / "node").iterdir()) == []


def test_term_ends_a_copy_and_leaves_nothing_while_usr2_does_not(attempt: AttemptDirectory, tmp_path: Path) -> None:
    source = tmp_path / "pipe.tar"
    os.mkfifo(source)
    target = tmp_path / "node" / "images"
    environment = {**os.environ, "HPCDDP_ATTEMPT_DIR": str(attempt.path)}
    with subprocess.Popen(command(source, str(target)), env=environment, stderr=subprocess.PIPE) as process:
        writer = os.open(source, os.O_WRONLY)
        wait_until(lambda: target.parent.exists() and list(target.parent.iterdir()), "the copy")
        process.send_signal(signal.SIGUSR2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 143
        os.close(writer)
    assert list(target.parent.iterdir()) == []
    assert read_failures(attempt) == []


@pytest.mark.parametrize(
    ("target", "variables", "place"),
    [
        ("/tmp/a b", {}, "/tmp/a b"),
        ("$D/a", {"D": "/x/"}, "/x/a"),
        ("${D}/a/b", {"D": "/x"}, "/x/a/b"),
        ("$D", {"D": "/x"}, "/x"),
        ("$D/a", {}, None),
        ("$D/a", {"D": "relative"}, None),
    ],
)
def test_a_target_begins_with_a_variable_of_the_node(target: str, variables: dict[str, str], place: str | None) -> None:
    assert Stage(source="/s", target=target).directory(variables) == place


def test_the_mark_says_what_is_there(attempt: AttemptDirectory, tmp_path: Path) -> None:
    source = archive(tmp_path / "a.tar", {"f": "text"}, "w")
    run(attempt, source, tmp_path / "t")
    mark = json.loads((tmp_path / "t" / MARK).read_text())
    found = source.stat()
    assert (mark["source"], mark["size"], mark["modified_ns"]) == (str(source), found.st_size, found.st_mtime_ns)


def test_a_full_disk_is_a_failure_that_another_node_may_not_have(attempt: AttemptDirectory, tmp_path: Path) -> None:
    source = archive(tmp_path / "a.tar", {"f": "x" * 400_000}, "w")
    with small_disk(tmp_path / "disk", size="200k") as disk:
        assert run(attempt, source, disk / "images")[0] == 71
        assert list(disk.iterdir()) == []
    assert "No space left on device" in failed(attempt).message
