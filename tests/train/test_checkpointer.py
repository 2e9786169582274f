"""``hpcddp.Checkpointer`` in a process without a group."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim

import hpcddp
from hpcddp.run.checkpoints import NoCheckpointError, list_checkpoints
from hpcddp.run.directory import RunDirectory
from hpcddp.run.events import read_events
from hpcddp.run.ownership import FencedError
from hpcddp.stop import faults
from hpcddp.train.checkpoint import writer
from hpcddp.train.checkpoint.checkpointer import Checkpointer, CheckpointerError, SaveSettings, Stateful
from hpcddp.train.distributed import NoGroupError
from hpcddp.train.errors import ResumeError, SaveError
from tests.messages import GoldenMessages
from tests.run.checkpoints import flip


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take away what other tests and launchers leave: a process group, their variables, faults."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    for name in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    yield
    faults.arm(None, rank=0, attempt=0)


class Loop:
    """A model that is trained a little at each step."""

    def __init__(self, directory: Path, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 2)
        self.optimizer = optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = optim.lr_scheduler.StepLR(self.optimizer, 2)
        objects: dict[str, Stateful] = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        self.checkpointer = Checkpointer(directory, objects, **options)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(3, 4)).square().sum().backward()
        self.optimizer.step()
        self.scheduler.step()

    @property
    def state(self) -> str:
        return str([self.model.state_dict(), self.optimizer.state_dict(), self.scheduler.state_dict()])


def test_it_is_public() -> None:
    assert hpcddp.Checkpointer is Checkpointer


def test_loop_goes_on_where_it_was(tmp_path: Path) -> None:
    first = Loop(tmp_path / "run")
    assert first.checkpointer.restore().step == 0
    for step in range(5):
        first.step()
        if step == 2:
            first.checkpointer.save(3, {"epoch": 1, "names": ("a", "b")})
    assert first.checkpointer.wait()
    second = Loop(tmp_path / "run")
    restored = second.checkpointer.restore()
    assert (restored.step, restored.facts) == (3, {"epoch": 1, "names": ["a", "b"]})
    for _ in range(2):
        second.step()
    assert second.state == first.state


def test_newest_ones_are_kept_and_written_down(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "run", keep=2)
    loop.checkpointer.restore()
    for step in (1, 2, 3):
        loop.checkpointer.save(step)
    loop.checkpointer.wait()
    run = RunDirectory(tmp_path / "run")
    assert [path.name for path in list_checkpoints(run.checkpoints)] == ["step-000003", "step-000002"]
    assert [(event.kind, event.step) for event in read_events(run.events)] == [
        ("start", None),
        ("save", 1),
        ("save", 2),
        ("save", 3),
    ]


def test_damaged_newest_is_passed_over_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop = Loop(tmp_path / "run")
    loop.checkpointer.restore()
    for step in (1, 2):
        loop.step()
        loop.checkpointer.save(step)
    loop.checkpointer.wait()
    model = tmp_path / "run" / "checkpoints" / "step-000002" / "model.pt"
    model.write_bytes(model.read_bytes()[:-1])
    assert Loop(tmp_path / "run").checkpointer.restore().step == 1
    assert "hpcddp: checkpoint step-000002 is skipped: " in capsys.readouterr().err


def test_flipped_bit_in_the_newest_manifest_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop = Loop(tmp_path / "run")
    loop.checkpointer.restore()
    for step in (1, 2):
        loop.checkpointer.save(step, {"seen": 188})
    loop.checkpointer.wait()
    flip(tmp_path / "run" / "checkpoints" / "step-000002" / "manifest.json", b": 188", 3 * 8 + 3)
    assert Loop(tmp_path / "run").checkpointer.restore().facts == {"seen": 188}
    assert "its content does not have its checksum" in capsys.readouterr().err


def test_file_that_the_manifest_does_not_name_is_not_loaded(golden: GoldenMessages, tmp_path: Path) -> None:
    loop = Loop(tmp_path / "run")
    loop.checkpointer.restore()
    loop.checkpointer.save(1)
    loop.checkpointer.wait()
    path = tmp_path / "run" / "checkpoints" / "step-000001"
    shutil.copy(path / "model.pt", path / "network.pt")
    with pytest.raises(ResumeError) as caught:
        Checkpointer(tmp_path / "run", {"network": loop.model}).restore()
    message = golden.message(caught.value)
    assert "step-000001 is of another model" in message
    assert "has no network.pt" in message


def test_all_damaged_is_an_error_and_no_fresh_start(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "run")
    loop.checkpointer.restore()
    loop.checkpointer.save(1)
    loop.checkpointer.wait()
    (tmp_path / "run" / "checkpoints" / "step-000001" / "manifest.json").unlink()
    with pytest.raises(NoCheckpointError):
        Loop(tmp_path / "run").checkpointer.restore()


@pytest.mark.parametrize("path", ["run", "link", "other/../run"])
def test_the_jobs_own_run_directory_is_not_claimed_again_by_another_spelling_of_its_path(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(tmp_path / "run")
    run.attempt(0).path.mkdir(parents=True)
    (tmp_path / "link").symlink_to(run.path)
    (tmp_path / "other").mkdir()
    monkeypatch.setenv("HPCDDP_ATTEMPT_DIR", str(run.attempt(0).path))
    Loop(tmp_path / path).checkpointer.restore()
    assert run.newest_attempt() == 0
    Loop(tmp_path / "mine").checkpointer.restore()
    assert RunDirectory(tmp_path / "mine").newest_attempt() == 0


def test_whoever_restores_last_owns_the_directory(golden: GoldenMessages, tmp_path: Path) -> None:
    old = Loop(tmp_path / "run")
    old.checkpointer.restore()
    Loop(tmp_path / "run").checkpointer.restore()
    old.checkpointer.save(1)
    with pytest.raises(FencedError) as caught:
        old.checkpointer.wait()
    message = golden.message(caught.value)
    assert "attempt 1 owns the run run" in message
    assert "attempt 0 ends here and writes nothing" in message
    assert list_checkpoints(tmp_path / "run" / "checkpoints") == []


def test_save_does_not_wait_for_the_disk_and_wait_does(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "run")
    loop.checkpointer.restore()
    faults.arm("sleep=0.5@save.begin", rank=0, attempt=0)
    loop.checkpointer.save(1)
    before = loop.state
    loop.step()
    assert list_checkpoints(tmp_path / "run" / "checkpoints") == []
    assert loop.checkpointer.wait()
    again = Loop(tmp_path / "run")
    again.checkpointer.restore()
    assert again.state == before


def test_failed_save_is_a_warning_until_the_third_after_five_minutes(
    golden: GoldenMessages, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_OUTAGE_ALLOWED_S", 0.0)
    loop = Loop(tmp_path / "run")
    loop.checkpointer.restore()
    faults.arm("oserror=ENOSPC@save.file", rank=0, attempt=0)
    for step in (1, 2, 3):
        loop.checkpointer.save(step)
        assert not loop.checkpointer.wait()
    assert capsys.readouterr().err.count("hpcddp: warning: saving after step ") == 2
    with pytest.raises(SaveError) as caught:
        loop.checkpointer.save(4)
    message = golden.message(re.sub(r"last \d+ s", "last N s", str(caught.value)))
    assert "saving after step 3 failed" in message
    assert "all 3 saves of the last" in message
    assert f"make {tmp_path}/run/checkpoints writable" in message


def test_other_contract_is_refused(golden: GoldenMessages, tmp_path: Path) -> None:
    loop = Loop(tmp_path / "run", contract={"seed": 1, "shape": (2, 3)})
    loop.checkpointer.restore()
    loop.checkpointer.save(1)
    loop.checkpointer.wait()
    Loop(tmp_path / "run", contract={"seed": 1, "shape": (2, 3)}).checkpointer.restore()
    with pytest.raises(ResumeError) as caught:
        Loop(tmp_path / "run", contract={"seed": 2}).checkpointer.restore()
    message = golden.message(caught.value)
    assert "step-000001 was saved with seed 1" in message
    assert "now it is 2" in message


def test_other_objects_are_refused(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "run")
    loop.checkpointer.restore()
    loop.checkpointer.save(1)
    loop.checkpointer.wait()
    for objects in ({"model": nn.Linear(3, 2)}, {"network": loop.model}):
        with pytest.raises(ResumeError, match="step-000001 is of another model or optimizer"):
            Checkpointer(tmp_path / "run", objects).restore()


class Seen:
    """An object whose state may be empty."""

    def __init__(self, **state: int) -> None:
        self.state = state

    def state_dict(self) -> dict[str, int]:
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = state


def test_optional_object_has_a_file_only_while_it_has_a_state(tmp_path: Path) -> None:
    model, seen, settings = nn.Linear(1, 1), Seen(), SaveSettings(optional=("seen",))
    first = Checkpointer(tmp_path / "run", {"model": model, "seen": seen}, settings=settings)
    first.restore()
    first.save(1)
    first.wait()
    assert not (tmp_path / "run" / "checkpoints" / "step-000001" / "seen.pt").exists()
    again = Seen(samples=7)
    second = Checkpointer(tmp_path / "run", {"model": model, "seen": again}, settings=settings)
    assert second.restore().step == 1
    assert again.state == {"samples": 7}
    second.save(2)
    second.wait()
    third = Checkpointer(tmp_path / "run", {"model": model, "seen": seen}, settings=settings)
    assert third.restore().step == 2
    assert seen.state == {"samples": 7}


def test_save_before_restore_is_refused(golden: GoldenMessages, tmp_path: Path) -> None:
    loop = Loop(tmp_path / "run")
    for use in (lambda: loop.checkpointer.save(1), loop.checkpointer.wait):
        with pytest.raises(CheckpointerError) as caught:
            use()
        message = golden.message(caught.value)
        assert f"{tmp_path}/run is used before restore()" in message
        assert "call restore() first" in message


def test_facts_that_are_no_json_are_refused_at_once(golden: GoldenMessages, tmp_path: Path) -> None:
    loop = Loop(tmp_path / "run")
    loop.checkpointer.restore()
    with pytest.raises(CheckpointerError) as caught:
        loop.checkpointer.save(1, {"tensor": torch.ones(1)})
    message = golden.message(caught.value)
    assert "type Tensor is not JSON serializable" in message
    assert "give numbers, texts and containers" in message


@pytest.mark.parametrize(
    ("objects", "keep", "facts"),
    [
        ({}, 3, ("objects is empty", "give the model and the optimizer")),
        ({"a/b": nn.Linear(1, 1)}, 3, ("'a/b'", "write letters, digits and underscores")),
        ({"m": 3}, 3, ("m is a int", "no state_dict", "to save() as facts")),
        (nn.Linear(1, 1), 3, ("objects is a Linear", '{"model": model, "optimizer": optimizer}')),
        ({"a": nn.Linear(1, 1)}, 1, ("keep is 1", "write 2 or more")),
    ],
)
def test_what_cannot_work_is_refused(
    golden: GoldenMessages, tmp_path: Path, objects: Any, keep: int, facts: tuple[str, ...]
) -> None:
    with pytest.raises(CheckpointerError) as caught:
        Checkpointer(tmp_path / "run", objects, keep=keep)
    message = golden.message(caught.value)
    for fact in facts:
        assert fact in message


@pytest.mark.parametrize("name", ["WORLD_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_several_processes_without_a_group_are_refused(
    golden: GoldenMessages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "4")
    with pytest.raises(NoGroupError) as caught:
        Loop(tmp_path / "run")
    message = golden.message(caught.value)
    assert f"{name} is 4" in message
    assert "no process group is open" in message
    assert "call torch.distributed.init_process_group first" in message


def test_directory_belongs_to_its_owner_alone(tmp_path: Path) -> None:
    Loop(tmp_path / "run").checkpointer.restore()
    assert (tmp_path / "run").stat().st_mode & 0o077 == 0
    assert (tmp_path / "run" / "attempts" / "0" / "start.json").exists()


@pytest.mark.parametrize("step", [3.0, "3", None, -1])
def test_a_step_that_is_no_number_of_steps_is_refused(golden: GoldenMessages, tmp_path: Path, step: Any) -> None:
    checkpointer = Checkpointer(tmp_path / "run", {"model": nn.Linear(2, 2)})
    checkpointer.restore()
    with pytest.raises(CheckpointerError) as caught:
        checkpointer.save(step)
    message = golden.message(caught.value)
    assert f"the step is {step!r}" in message
    assert "an integer of 0 or more" in message


def test_an_integer_of_a_library_is_a_step(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "run", {"model": nn.Linear(2, 2)})
    checkpointer.restore()
    steps: list[Any] = [np.int64(1), torch.tensor(2)]
    for step in steps:
        checkpointer.save(step)
        assert checkpointer.wait()
    names = [path.name for path in list_checkpoints(RunDirectory(tmp_path / "run").checkpoints)]
    assert sorted(names) == ["step-000001", "step-000002"]


def test_a_path_that_is_not_unicode_is_no_fact(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "run", {"model": nn.Linear(2, 2)})
    checkpointer.restore()
    with pytest.raises(CheckpointerError, match="the facts cannot be saved"):
        checkpointer.save(1, {"path": os.fsdecode(b"/x/\xff")})


class Hooked(nn.Linear):
    """A module whose state cannot be written."""

    def get_extra_state(self) -> Any:
        return {"hook": lambda: None}

    def set_extra_state(self, state: Any) -> None:
        pass


def test_a_write_that_raised_has_saved_nothing(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "run", {"model": Hooked(2, 2)})
    checkpointer.restore()
    checkpointer.save(1)
    with pytest.raises(Exception, match="pickle"):
        checkpointer.wait()
    assert not checkpointer.wait()


def test_an_error_without_a_text_is_a_resume_error(tmp_path: Path) -> None:
    class Odd(nn.Linear):
        def load_state_dict(self, *_: Any, **__: Any) -> Any:
            raise TypeError

    first = Checkpointer(tmp_path / "run", {"model": nn.Linear(2, 2)})
    first.restore()
    first.save(1)
    first.wait()
    with pytest.raises(ResumeError, match="TypeError"):
        Checkpointer(tmp_path / "run", {"model": Odd(2, 2)}).restore()


class Numbers:
    """An object with a state of its own."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state


def test_numbers_of_numpy_are_saved_as_numbers(tmp_path: Path) -> None:
    rate = np.logspace(-3, -1, 3)[1]
    for restoring in (False, True):
        model = nn.Linear(2, 2)
        optimizer, numbers = optim.SGD(model.parameters(), lr=rate), Numbers(best=np.float32(0.5), steps=np.int64(3))
        checkpointer = Checkpointer(tmp_path / "run", {"optimizer": optimizer, "numbers": numbers})
        checkpointer.restore()
        if not restoring:
            checkpointer.save(1)
            assert checkpointer.wait()
    assert numbers.values == {"best": 0.5, "steps": 3}
    assert optimizer.param_groups[0]["lr"] == rate


class Arrays:
    """An object whose state is no tensor."""

    def state_dict(self) -> dict[str, Any]:
        return {"scores": np.arange(3)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError(f"such a state is never loaded: {state}")


def test_a_state_that_no_restore_loads_is_a_warning_of_the_first_save(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpointer = Checkpointer(tmp_path, {"arrays": Arrays(), "model": nn.Linear(2, 2)})
    checkpointer.restore()
    for step in (1, 2):
        checkpointer.save(step)
        assert checkpointer.wait()
    said = capsys.readouterr()
    assert (said.out + said.err).count("no restore will load") == 1
    assert "arrays.pt: it holds numpy" in said.out + said.err
    with pytest.raises(ResumeError, match="holds objects that could run code"):
        Checkpointer(tmp_path, {"arrays": Arrays(), "model": nn.Linear(2, 2)}).restore()


def test_a_state_of_tensors_makes_no_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop = Loop(tmp_path)
    loop.checkpointer.restore()
    loop.step()
    loop.checkpointer.save(1)
    assert loop.checkpointer.wait()
    said = capsys.readouterr()
    assert "warning" not in said.out + said.err
