"""Checkpoints written beside the training: whole or not there, whatever happens to the process or the disk."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest

from hpcddp.run.checkpoints import Manifest, left_by, list_checkpoints, newest_valid, step_of
from hpcddp.run.directory import RunDirectory
from hpcddp.run.events import read_events
from hpcddp.run.ownership import FencedError
from hpcddp.run.publish import remove_unfinished
from hpcddp.stop import faults
from hpcddp.stop.faults import InjectedError
from hpcddp.train.checkpoint.writer import CheckpointWriter
from hpcddp.train.errors import SaveError
from tests.messages import GoldenMessages
from tests.ranks import ForkedProcess
from tests.train import checkpoint_process
from tests.train.checkpoint_process import content, output_of
from tests.waiting import wait_until


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    faults.arm(None, rank=0, attempt=0)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "run")
    run.attempt(0).path.mkdir(parents=True)
    return run


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def writer(run: RunDirectory, said: list[str]) -> CheckpointWriter:
    return CheckpointWriter(run, attempt=0, keep=2, now=lambda: 1.5, monotonic=time.monotonic, print_line=said.append)


def write(stream: IO[bytes]) -> None:
    stream.write(b"state")


def start(writer: CheckpointWriter, step: int, write: Callable[[IO[bytes]], None] = write) -> None:
    manifest = Manifest(step=step, attempt=0, time=1.5, contract={}, progress={}, information={}, files={})
    writer.start(manifest, {"a.bin": write}, reason="test", began=time.monotonic())


def steps_of(run: RunDirectory) -> list[int | None]:
    return [step_of(path) for path in list_checkpoints(run.checkpoints)]


def ended(process: ForkedProcess, run: RunDirectory, attempt: int) -> tuple[int | None, str]:
    return process.wait(), output_of(run, attempt).read_text()


def no_warning(text: str) -> None:
    raise AssertionError(text)


# The save of step 10 is the first, that of 20 has one before it, that of 40 also removes one.
@pytest.mark.parametrize(
    "step",
    [20, *(pytest.param(step, marks=pytest.mark.long("the saves before it are alike")) for step in (10, 40))],
)
@pytest.mark.parametrize("point", faults.SAVE_POINTS)
def test_process_killed_at_any_point_of_a_save_leaves_a_valid_newest_checkpoint(
    run: RunDirectory, point: str, step: int
) -> None:
    killed = checkpoint_process.start(run, 0, 10, 20, 30, 40, fault=f"kill@{point}:{step}")
    assert ended(killed, run, 0) == (-signal.SIGKILL, "")
    saved = step if point in ("save.latest", "save.prune") else step - 10
    newest = newest_valid(run.checkpoints, expected=saved > 0, warn=no_warning)
    if newest is None:
        assert saved == 0
    else:
        assert newest.manifest.step == saved
        assert (newest.path / "optimizer.pt").read_bytes() == content(saved)
    # The next attempt goes on, and what was left half written is gone in the end.
    assert ended(checkpoint_process.start(run, 1, 40, 50), run, 1) == (0, "")
    assert steps_of(run) == [50, 40]
    assert (run.checkpoints / "latest").read_text() == "step-000050\n"
    assert [path for path in run.checkpoints.iterdir() if left_by(path) == 0] == []


def stopped_at(run: RunDirectory, point: str, *steps: int) -> ForkedProcess:
    """Return a process of the first attempt that stands still at a point of its last save."""
    old = checkpoint_process.start(run, 0, *steps, fault=f"stop@{point}:{steps[-1]}")
    status = Path(f"/proc/{old.pid}/status")
    wait_until(lambda: "State:\tT" in status.read_text(), "the stop")
    return old


def go_on(process: ForkedProcess) -> None:
    assert process.pid is not None
    os.kill(process.pid, signal.SIGCONT)


@pytest.mark.parametrize("point", ["save.begin", "save.file", "save.manifest", "save.rename"])
def test_attempt_that_is_overtaken_in_the_middle_of_a_save_publishes_nothing(
    golden: GoldenMessages, run: RunDirectory, point: str
) -> None:
    old = stopped_at(run, point, 10, 20)
    run.attempt(1).path.mkdir()
    remove_unfinished(run.checkpoints, attempt=1)
    go_on(old)
    code, message = ended(old, run, 0)
    assert code == 76
    golden.message(message)
    assert "attempt 1 owns the run run" in message
    assert "attempt 0 ends here and writes nothing" in message
    assert steps_of(run) == [10]
    assert [event.step for event in read_events(run.events)] == [10]
    assert (run.checkpoints / "latest").read_text() == "step-000010\n"


def test_latest_never_goes_back_when_an_overtaken_attempt_wakes_up(run: RunDirectory) -> None:
    old = stopped_at(run, "save.latest", 10, 20)
    assert ended(checkpoint_process.start(run, 1, 30, 40), run, 1) == (0, "")
    go_on(old)
    assert ended(old, run, 0)[0] == 76
    assert (run.checkpoints / "latest").read_text() == "step-000040\n"
    assert steps_of(run) == [40, 30]


def test_overtaken_attempt_that_wakes_up_while_it_removes_old_ones_leaves_the_newest(run: RunDirectory) -> None:
    old = stopped_at(run, "save.prune", 10, 20, 30)
    run.attempt(1).path.mkdir()
    go_on(old)
    assert ended(old, run, 0) == (0, "")
    # It had checked the ownership just before.
    assert 30 in steps_of(run)
    assert 20 in steps_of(run)


def test_caller_goes_on_while_a_checkpoint_is_written(run: RunDirectory, writer: CheckpointWriter) -> None:
    gate = threading.Event()

    def slow(stream: IO[bytes]) -> None:
        gate.wait()
        stream.write(b"state")

    start(writer, 10, slow)
    assert writer.busy
    assert not writer.join(0.01)
    writer.settle()
    assert steps_of(run) == []
    gate.set()
    outcome = writer.wait()
    assert outcome is not None
    assert (outcome.step, outcome.error, writer.seconds) == (10, None, [outcome.seconds])
    assert steps_of(run) == [10]
    assert writer.wait() is None


def test_next_save_waits_for_the_one_before_it(run: RunDirectory, writer: CheckpointWriter) -> None:
    faults.arm("sleep=0.2@save.rename:10", rank=0, attempt=0)
    start(writer, 10)
    start(writer, 20)
    writer.wait()
    assert steps_of(run) == [20, 10]
    assert [event.step for event in read_events(run.events)] == [10, 20]


def test_event_says_how_long_a_save_took(run: RunDirectory, writer: CheckpointWriter) -> None:
    start(writer, 10)
    writer.wait()
    (event,) = read_events(run.events)
    assert (event.kind, event.step, event.reason) == ("save", 10, "test")
    assert event.facts["seconds"] == round(writer.seconds[0], 3)


def test_failed_save_is_told_when_the_caller_settles_and_keeps_what_was_there(
    golden: GoldenMessages, run: RunDirectory, writer: CheckpointWriter, said: list[str]
) -> None:
    start(writer, 10)
    writer.wait()
    faults.arm("oserror=ENOSPC@save.file", rank=0, attempt=0)
    start(writer, 20)
    assert writer.join(60)
    assert said == []
    writer.settle()
    (warning,) = said
    golden.message(warning)
    assert "saving after step 20 failed ([Errno 28]" in warning
    assert "checkpoints before it are kept" in warning
    assert steps_of(run) == [10]
    assert len(read_events(run.events)) == 1


@pytest.mark.parametrize(("seconds", "saves"), [(10, 31), (400, 3)])
def test_failures_end_the_training_after_three_of_them_and_five_minutes(
    golden: GoldenMessages, run: RunDirectory, said: list[str], seconds: float, saves: int
) -> None:
    clock = [0.0]
    writer = CheckpointWriter(run, attempt=0, keep=2, now=time.time, monotonic=lambda: clock[0], print_line=said.append)
    faults.arm("oserror=EROFS@save.manifest", rank=0, attempt=0)
    for number in range(1, saves + 1):
        start(writer, number * 10)
        assert writer.join(60)
        if number < saves:
            writer.settle()
            clock[0] += seconds
    with pytest.raises(SaveError) as caught:
        writer.settle()
    message = golden.message(caught.value)
    assert f"saving after step {saves * 10} failed ([Errno 30]" in message
    assert f"all {saves} saves of the last {clock[0]:.0f} s" in message
    assert f"make {run.checkpoints} writable" in message
    assert caught.value.exit_code == 71
    assert len(said) == saves - 1


def test_save_that_works_forgives_those_before_it(writer: CheckpointWriter) -> None:
    for step in (10, 20, 30, 40, 50):
        faults.arm(None if step == 30 else "oserror=EIO@save.begin", rank=0, attempt=0)
        start(writer, step)
        writer.wait()
    writer.raise_if_failing()


def test_what_else_breaks_a_write_is_raised_in_the_thread_that_trains(
    run: RunDirectory, writer: CheckpointWriter
) -> None:
    faults.arm("exception@save.file", rank=0, attempt=0)
    start(writer, 10)
    assert writer.join(60)
    with pytest.raises(InjectedError, match=r"at save\.file"):
        writer.settle()
    assert steps_of(run) == []
    assert list(run.checkpoints.iterdir()) == []


def test_fenced_attempt_is_told_so_in_the_thread_that_trains(run: RunDirectory, writer: CheckpointWriter) -> None:
    run.attempt(1).path.mkdir()
    start(writer, 10)
    with pytest.raises(FencedError):
        writer.wait()
    assert steps_of(run) == []


@pytest.mark.parametrize(
    ("point", "failure"),
    [("save.latest", "{}/latest cannot be written"), ("save.prune", "old checkpoints in {} cannot be removed")],
    ids=["latest", "prune"],
)
def test_checkpoint_counts_even_if_what_comes_after_it_fails(
    golden: GoldenMessages, run: RunDirectory, writer: CheckpointWriter, said: list[str], point: str, failure: str
) -> None:
    faults.arm(f"oserror=EIO@{point}", rank=0, attempt=0)
    start(writer, 10)
    outcome = writer.wait()
    assert outcome is not None
    assert outcome.error is None
    (warning,) = said
    golden.message(warning)
    assert f"warning: {failure.format(run.checkpoints)} ([Errno 5]" in warning
    assert "the checkpoint is whole" in warning


def test_event_log_that_cannot_be_written_is_a_warning(
    golden: GoldenMessages, run: RunDirectory, writer: CheckpointWriter, said: list[str]
) -> None:
    run.events.mkdir()
    start(writer, 10)
    writer.wait()
    (warning,) = said
    golden.message(warning)
    assert f"warning: {run.events} cannot be written ([Errno 21]" in warning
    assert "the checkpoint is whole" in warning


def test_run_that_is_gone_is_not_made_again_in_its_place(run: RunDirectory, writer: CheckpointWriter) -> None:
    run.path.rename(run.path.with_name("elsewhere"))
    start(writer, 10)
    outcome = writer.wait()
    assert outcome is not None
    assert isinstance(outcome.error, FileNotFoundError)
    assert not run.path.exists()
