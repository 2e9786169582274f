"""What a run has saved: the files that hold tensors, and the values that differ."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hpcddp.rehearse.compare import SavedFile, compare_saved, newest_to_damage, saved_files
from hpcddp.rehearse.faults import cut_in_half
from hpcddp.run.directory import RunDirectory

STATE: dict[str, Any] = {"model": {"weight": torch.arange(4.0)}, "step": 3, "rng_state": torch.zeros(9)}


def save(directory: Path, name: str = "last.pt", **changed: Any) -> list[SavedFile]:
    directory.mkdir(exist_ok=True)
    torch.save({**STATE, **changed}, directory / name)
    return saved_files(RunDirectory(directory), directory / "copy", since=0)


def test_equal_files_are_compared_without_a_difference(tmp_path: Path) -> None:
    compared = compare_saved(save(tmp_path / "a"), save(tmp_path / "b"))
    assert (compared.files, compared.differences, compared.unreadable) == (1, (), ())


def test_the_largest_difference_of_a_tensor_is_computed_in_float64(tmp_path: Path) -> None:
    weight = torch.arange(4.0)
    weight[2] += 0.5
    compared = compare_saved(save(tmp_path / "a"), save(tmp_path / "b", model={"weight": weight}))
    (difference,) = compared.differences
    value = difference.value
    assert (value.name, value.largest, value.relative) == ("model.weight", 0.5, 0.5 / 3)


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({"step": 4}, ["step"]),
        ({"model": {"weight": torch.arange(5.0)}}, ["model.weight"]),
        ({"model": {}}, ["model.weight"]),
        ({"model": {"weight": torch.tensor([0.0, 1.0, float("nan"), 3.0])}}, ["model.weight"]),
        ({"rng_state": torch.ones(9)}, []),
        ({"elapsed_s": 7.0}, []),
    ],
)
def test_what_counts_as_a_difference(tmp_path: Path, changed: dict[str, Any], names: list[str]) -> None:
    compared = compare_saved(save(tmp_path / "a"), save(tmp_path / "b", **changed))
    assert [difference.value.name for difference in compared.differences] == names


@pytest.mark.parametrize("name", ["queue", "queue.safetensors"])
def test_a_named_pipe_of_the_program_is_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    assert [file.name for file in save(tmp_path)] == ["last.pt"]


def test_what_cannot_be_loaded_is_named_and_runs_no_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "ran"),)

    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.pkl").write_bytes(pickle.dumps(Evil()))
    files = [saved_files(RunDirectory(tmp_path / name), tmp_path / "none", since=0) for name in ("a", "b")]
    compared = compare_saved(*files)
    assert (compared.files, compared.unreadable) == (0, ("state.pkl",))
    assert not (tmp_path / "ran").exists()


def test_a_file_that_is_cut_in_half_is_not_loaded(tmp_path: Path) -> None:
    whole, half = save(tmp_path / "a"), save(tmp_path / "b")
    cut_in_half(half[0].path)
    assert compare_saved(whole, half).unreadable == ("last.pt",)


def test_files_of_safetensors_are_compared(tmp_path: Path) -> None:
    files = []
    for name, value in (("a", 1.0), ("b", 2.0)):
        (tmp_path / name).mkdir()
        save_file({"weight": torch.full((2,), value)}, tmp_path / name / "model.safetensors")
        files.append(saved_files(RunDirectory(tmp_path / name), tmp_path / "none", since=0))
    assert compare_saved(*files).differences[0].value.largest == 1.0


def test_only_files_of_the_program_count_and_the_newest_with_more_than_generators_is_damaged(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    for folder in (run.attempts, run.submitit, tmp_path / ".hidden"):
        folder.mkdir()
        torch.save(STATE, folder / "state.pt")
    torch.save(STATE, tmp_path / ".writing.pt")
    (tmp_path / "notes.txt").write_text("PK is no archive")
    names = ("step-1.pt", "step-2.pt", "random_states_0.pkl")
    for number, name in enumerate(names):
        torch.save(STATE, tmp_path / name)
        os.utime(tmp_path / name, ns=(number, number))
    files = saved_files(run, tmp_path / "none", since=0)
    assert [file.name for file in files] == list(names)
    newest = newest_to_damage(files)
    assert newest is not None
    assert newest.name == "step-2.pt"
    assert newest_to_damage([]) is None
