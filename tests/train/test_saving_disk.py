"""A disk that is full, read-only or gone: the training goes on, and what was saved stays."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from hpcddp.run.checkpoints import newest_valid
from hpcddp.run.events import read_events
from hpcddp.train.checkpoint import writer
from hpcddp.train.errors import SaveError
from hpcddp.train.loop import loop
from tests.distributed.training import result
from tests.messages import GoldenMessages
from tests.small_disk import FILLS, fill_blocks, make_room, small_disk
from tests.train.conftest import Training
from tests.waiting import join_threads

# 12 steps, a save after each second one; the loop asks once before each step.
SAVES: dict[str, Any] = {"checkpoint": {"every": {"steps": 2}}, "train__epochs": 3}


@pytest.fixture
def disk(training: Training) -> Iterator[Path]:
    """Let the checkpoints lie on a file system of their own, with room for a few of them."""
    with small_disk(training.run.checkpoints, size="256k") as folder:
        yield folder


def remount(disk: Path, option: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{option}", str(disk)], check=True)


def at_steps(actions: Mapping[int, Callable[[], object]]) -> Callable[[], int]:
    """Return a ``should_stop`` that does something before some steps, when no save is under way."""
    asked = iter(range(1000))

    def act() -> int:
        step = next(asked)
        if step in actions:
            join_threads("hpcddp-checkpoint")
            actions[step]()
        return 0

    return act


def saves(training: Training) -> list[int | None]:
    return [event.step for event in read_events(training.run.events) if event.kind == "save"]


def warnings(training: Training) -> list[str]:
    return [line for line in training.said if line.startswith("warning: ")]


def newest_step(training: Training) -> int:
    newest = newest_valid(training.run.checkpoints, expected=True, warn=training.said.append)
    assert newest is not None
    return newest.manifest.step


@pytest.mark.parametrize(
    ("break_it", "mend_it", "words"),
    [
        (FILLS["bytes"], make_room, "[Errno 28] No space left on device"),
        (FILLS["inodes"], make_room, "[Errno 28] No space left on device"),
        (lambda disk: remount(disk, "ro"), lambda disk: remount(disk, "rw"), "[Errno 30] Read-only file system"),
    ],
    ids=["bytes", "inodes", "read-only"],
)
def test_training_goes_on_and_saves_again_when_it_can(
    golden: GoldenMessages,
    new_training: Callable[[str], Training],
    training: Training,
    disk: Path,
    break_it: Callable[[Path], None],
    mend_it: Callable[[Path], None],
    words: str,
) -> None:
    whole = new_training("whole")
    whole.train(**SAVES)
    # Broken while the saves after steps 6 and 8 are made.
    actions = {5: lambda: break_it(disk), 9: lambda: mend_it(disk)}
    training.train(stop_reason=at_steps(actions), **SAVES)
    assert saves(training) == [2, 4, 10, 12]
    first, second = warnings(training)
    # Without the path of the unfinished checkpoint, which is a random one.
    golden.message(re.sub(r": '.*'\)", ")", first))
    assert f"saving after step 6 failed ({words}" in first
    assert "checkpoints before it are kept" in first
    assert "saving after step 8 failed (" in second
    assert result(training.run.path)["parameters_sha256"] == result(whole.run.path)["parameters_sha256"]


def test_failures_for_a_long_time_end_the_training_and_the_old_checkpoint_is_whole(
    golden: GoldenMessages, training: Training, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_OUTAGE_ALLOWED_S", 0.0)
    with pytest.raises(SaveError) as caught:
        training.train(stop_reason=at_steps({5: lambda: fill_blocks(disk)}), **SAVES)
    message = golden.message(re.sub(r"last \d+ s", "last N s", str(caught.value)))
    assert "saving after step 10 failed" in message
    assert "No space left" in message
    assert "all 3 saves of the last" in message
    assert newest_step(training) == 4
    make_room(disk)
    training.train(attempt=1, **SAVES)
    assert any("going on after step 4" in line for line in training.said)


def test_many_failures_in_a_short_time_do_not_end_the_training(training: Training, disk: Path) -> None:
    training.train(stop_reason=at_steps({3: lambda: fill_blocks(disk), 11: lambda: make_room(disk)}), **SAVES)
    assert saves(training) == [2, 12]
    assert len(warnings(training)) == 4


def test_the_last_step_is_saved_again_until_the_disk_takes_it(
    training: Training, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "_SAVE_AGAIN_S", 0.0)
    # The ranks are asked before each of 12 steps, and before each further try.
    training.train(stop_reason=at_steps({11: lambda: fill_blocks(disk), 14: lambda: make_room(disk)}), **SAVES)
    assert saves(training) == [2, 4, 6, 8, 10, 12]
    assert newest_step(training) == 12
    assert len(warnings(training)) == 3
    assert result(training.run.path)["status"] == "finished"


def test_a_run_whose_last_step_cannot_be_saved_has_not_finished(
    training: Training, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "_SAVE_AGAIN_S", 0.0)
    monkeypatch.setattr(writer, "_OUTAGE_ALLOWED_S", 0.0)
    with pytest.raises(SaveError, match="saving after step 12 failed"):
        training.train(stop_reason=at_steps({11: lambda: fill_blocks(disk)}), **SAVES)
    assert not training.run.result.exists()
    make_room(disk)
    training.train(attempt=1, **SAVES)
    assert newest_step(training) == 12
    assert result(training.run.path)["status"] == "finished"


def test_folder_of_checkpoints_that_is_gone_is_made_again(training: Training) -> None:
    folder = training.run.checkpoints
    actions = {5: lambda: folder.rename(training.run.path / "elsewhere")}
    training.train(stop_reason=at_steps(actions), **SAVES)
    assert saves(training) == [2, 4, 6, 8, 10, 12]
    assert newest_step(training) == 12
    assert warnings(training) == []


def test_something_else_in_the_place_of_the_folder_costs_a_warning_each(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_OUTAGE_ALLOWED_S", 0.0)
    folder = training.run.checkpoints

    def replace() -> None:
        folder.rename(training.run.path / "elsewhere")
        folder.write_text("")

    with pytest.raises(SaveError, match="File exists"):
        training.train(stop_reason=at_steps({5: replace}), **SAVES)
    assert len(warnings(training)) == 2
    assert (training.run.path / "elsewhere" / "step-000004" / "manifest.json").exists()
