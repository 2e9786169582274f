"""The user's own code creates files with the submitter's umask; the run directory stays private."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcddp.run.directory import RunDirectory
from tests.submission.local_commands import ended, program, result, submit

WRITES = """
import os
from pathlib import Path

def write(name):
    Path(name).write_text("")
    Path(f"{name}-directory").mkdir()
"""
ENTRYPOINT = f"""{WRITES}
import torch
from torch import nn

def main(context):
    write(f"own-{{context.rank}}")
    checkpointer = context.checkpointer({{"model": nn.Linear(1, 1)}})
    checkpointer.restore()
    context.log(1, loss=1.0)
    checkpointer.save(1)
    checkpointer.wait()
"""


@pytest.fixture(autouse=True)
def _umask_of_a_group() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def open_to_others(run: RunDirectory) -> list[Path]:
    """Return the files of a run whose modes allow access to users other than its owner."""
    assert mode(run.path) == 0o700
    return [path for path in run.path.rglob("*") if mode(path) & 0o077]


def test_a_command_writes_with_the_umask_of_its_submitter(tmp_path: Path) -> None:
    words = program(tmp_path, f"{WRITES}\nwrite('own')\n(Path(os.environ['HPCDDP_PROGRESS_FILE'])).touch(mode=0o600)")
    run = ended(submit(tmp_path, *words))
    assert result(run)["status"] == "finished"
    assert (mode(tmp_path / "own"), mode(tmp_path / "own-directory")) == (0o640, 0o750)
    assert open_to_others(run) == []


def test_a_command_writes_with_the_umask_of_environment_setup(tmp_path: Path) -> None:
    words = program(tmp_path, f"{WRITES}\nwrite('own')")
    run = ended(submit(tmp_path, "--set", "environment.setup=['umask 007']", *words))
    assert mode(tmp_path / "own") == 0o660
    assert open_to_others(run) == []


@pytest.mark.long("a command of the same task")
def test_an_entrypoint_writes_with_the_umask_of_its_submitter(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(ENTRYPOINT)
    (tmp_path / "job.yaml").write_text(
        "{name: mine, resources: {tasks_per_node: 2}, entrypoint: 'mine:main', trackers: {use: [tensorboard]}, "
        f"environment: {{python: {sys.executable}}}}}"
    )
    run = ended(submit(tmp_path, "job.yaml"))
    assert result(run)["status"] == "finished"
    assert [mode(tmp_path / f"own-{rank}") for rank in range(2)] == [0o640, 0o640]
    assert list(run.tensorboard.iterdir())
    assert list(run.checkpoints.glob("*/*"))
    assert open_to_others(run) == []
