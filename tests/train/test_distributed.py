"""The trace of the newest collectives, and the end of a process group."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hpcddp.run.collectives import read_collectives, write_trace
from hpcddp.run.directory import RunDirectory
from hpcddp.train.distributed import collective_trace
from tests.forked_python import run_python


@pytest.mark.usefixtures("group")
def test_the_recorder_of_gloo_is_read(tmp_path: Path) -> None:
    dist.all_reduce(torch.ones(3))
    trace = collective_trace()
    assert trace is not None
    attempt = RunDirectory(tmp_path).attempt(0)
    attempt.path.mkdir(parents=True)
    write_trace(attempt, 0, trace)
    last = read_collectives(attempt)[0][-1]
    assert (last.group, last.call) == ("0 (default_pg)", "all_reduce Float[3]")


def test_without_a_group_there_is_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    assert collective_trace() is None


def test_a_process_group_that_cannot_be_closed_ends_the_process_with_all_of_its_output() -> None:
    code = (
        "import time\n"
        "from datetime import timedelta\n"
        "from hpcddp.train.distributed import _exit_after\n"
        "print('the last line')\n"
        "with _exit_after(timedelta(seconds=0.1)):\n"
        "    time.sleep(600)\n"
    )
    done = run_python(code)
    assert (done.returncode, done.stdout) == (0, "the last line\n")
