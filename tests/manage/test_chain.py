"""A run whose jobs are a chain: which of them it has come to, and its end."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from hpcddp.manage.control import RequeueError, cancel, cancel_sweep, requeue
from hpcddp.manage.history import history_of
from hpcddp.manage.overview import SweepStatus, overview
from hpcddp.manage.run_files import read_run_files
from hpcddp.manage.status import RunStatus, statuses
from hpcddp.manage.why import explain
from hpcddp.run.directory import RunDirectory
from hpcddp.run.find import NoRunError, add_to_index, find_run
from hpcddp.run.sweep import Chunk, Sweep, write_sweep
from hpcddp.slurm.commands import QueuedJob
from hpcddp.slurm.job import State
from tests.manage.runs import NOON, FakeRun, make, queued
from tests.manage.test_cancel_and_requeue import ONLY_TIME, TRAINING, Slurm, running
from tests.messages import GoldenMessages

BEHIND = queued("9", "PENDING", reason="Dependency", dependency="singleton(unfulfilled)")


@pytest.fixture
def made(tmp_path: Path) -> FakeRun:
    return make(tmp_path).submitted("7", chain=("7", "8", "9"))


def look(made: FakeRun, *jobs: QueuedJob) -> RunStatus:
    return statuses([read_run_files(made.run)], ask=lambda: jobs, now=NOON + 100).runs[0]


def seen(made: FakeRun, *jobs: QueuedJob) -> tuple[State, str | None]:
    status = look(made, *jobs)
    return status.state, None if status.files.job is None else status.files.job.job_id


def test_a_chain_is_the_job_that_runs_or_waits_first(made: FakeRun) -> None:
    waiting = queued("8", "PENDING", reason="Priority")
    assert seen(made, queued("7", "PENDING"), waiting, BEHIND) == (State.PENDING, "7")
    made.started("7", submit_time="2026-11-21T12:00:00").event("train")
    assert seen(made, queued("7"), waiting, BEHIND) == (State.RUNNING, "7")
    made.event("requeue", cause="time_limit", by="chain", job_id="8")
    assert seen(made, queued("7", "COMPLETING"), waiting, BEHIND) == (State.REQUEUED, "7")
    assert seen(made, queued("7", "FAILED"), waiting, BEHIND) == (State.REQUEUED, "8")
    # Slurm has forgotten the first one.
    assert seen(made, queued("8"), BEHIND) == (State.STARTING, "8")
    made.started("8", at=60, attempt=1, restart_count=0).event("train", attempt=1)
    assert seen(made, queued("8"), BEHIND) == (State.RUNNING, "8")
    # It was killed before it could record its end.
    assert seen(made, queued("8", "NODE_FAIL"), BEHIND) == (State.REQUEUED, "9")
    assert seen(made, queued("8", "NODE_FAIL")) == (State.FAILED, "8")
    # Somebody has cancelled the last one with scancel.
    made.event("requeue", attempt=1, cause="time_limit", by="chain", job_id="9")
    status = look(made, queued("8", "FAILED"))
    assert status.state is State.FAILED
    assert explain(status).why == "Slurm says that job 8 is FAILED, and no job of its chain is left to go on"
    assert seen(made) == (State.LOST, "8")


def test_status_and_why_say_which_job_of_the_chain_it_is(made: FakeRun, golden: GoldenMessages) -> None:
    made.started("7").event("requeue", step=20, cause="time_limit", by="chain", job_id="8")
    status = look(made, queued("7", "FAILED"), queued("8", "PENDING", reason="Priority"), BEHIND)
    (remark,) = status.remarks
    assert "job 8 is number 2 of the 3 of its chain" in remark
    golden.message("\n".join(explain(status).lines()))
    made.started("8", at=60, attempt=1, restart_count=0)
    made.event("requeue", at=90, attempt=1, cause="requeued", by="chain", job_id="9", found_at_start=True)
    golden.message(history_of(made.run)[-1])


def test_a_chain_without_its_own_first_job_is_answered(tmp_path: Path) -> None:
    made = make(tmp_path).submitted("7", chain=("8", "9"))
    assert look(made, queued("7", "PENDING", reason="Priority")).remarks == ()


def test_a_cancel_ends_what_is_left_of_a_chain(tmp_path: Path, golden: GoldenMessages) -> None:
    made, slurm = running(tmp_path).submitted("7", chain=("7", "8")), Slurm()
    every_job = "end ['--name=digits-run-1']"
    said = golden.message(cancel(look(made, queued("7"), queued("8", "PENDING")), end=slurm.end))
    assert said.endswith(f"hpcddp submit --resume {made.run.path} --chain 2")
    made.event("requeue", cause="time_limit", by="chain", job_id="8")
    golden.message(cancel(look(made, queued("8", "PENDING")), end=slurm.end))
    assert json.loads(made.run.result.read_text())["status"] == "cancelled"
    # The others would wait for nodes, and end at once.
    golden.message(cancel(look(made), end=slurm.end))
    assert slurm.calls == [every_job] * 3


def test_a_chain_is_cancelled_by_the_name_that_it_was_submitted_with(made: FakeRun, tmp_path: Path) -> None:
    slurm = Slurm()
    moved = FakeRun(RunDirectory(made.run.path.rename(tmp_path / "moved")))
    cancel(look(moved, queued("7", "PENDING")), end=slurm.end)
    assert slurm.calls == ["end ['--name=digits-run-1']"]


def test_an_element_of_a_sweep_that_is_cancelled_is_cancelled_with_its_chain(tmp_path: Path) -> None:
    sweep_run, slurm = make(tmp_path, "sweep").submitted("50"), Slurm()
    chunks = (Chunk(job_id="50", first=0, count=2),)
    write_sweep(Sweep(sweep_id="sweep", path=sweep_run.run.path, elements=({}, {}), chunks=chunks))
    make(tmp_path, "sweep_0").submitted("60", chain=("60", "61")).started("60").event("train")
    jobs = [queued("60"), queued("61", "PENDING"), queued("50_1", "PENDING")]
    (status,) = overview(tmp_path, ask=lambda: jobs, now=NOON, everything=True).lines
    assert isinstance(status, SweepStatus)
    cancel_sweep(status, end=slurm.end, now=NOON)
    assert slurm.calls == ["end ['--name=digits-sweep_0']", "end ['50_[1]']"]


@pytest.mark.parametrize("more", ["", ONLY_TIME], ids=["left to Slurm", "not left to Slurm"])
def test_a_job_of_a_chain_is_not_requeued(tmp_path: Path, golden: GoldenMessages, more: str) -> None:
    made, slurm = running(tmp_path, TRAINING + more).submitted("7", chain=("7", "8")), Slurm(allowed=False)
    with pytest.raises(RequeueError) as caught:
        requeue(look(made, queued("7"), queued("8", "PENDING")), slurm.commands)
    golden.message(caught.value)
    assert slurm.calls == []


def test_the_jobs_of_a_chain_without_a_directory_are_found_by_their_name(
    made: FakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    add_to_index(made.run)
    made.run.path.rename(tmp_path / "elsewhere")
    names = shlex.quote("--name=digits,digits-run-1")
    with pytest.raises(NoRunError, match=f"squeue --me {names}"):
        find_run(str(made.run.path), tmp_path / "none")
