"""The copies of a project: what they hold, and that nothing in them leads to a file that a program writes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hpcddp.errors import UserError
from hpcddp.rehearse.project import read_project
from tests.messages import GoldenMessages


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    project = tmp_path / "project"
    for name in ("train.py", "src/part.py", "data/images.bin", "checkpoint.pt", ".venv/pyvenv.cfg", ".venv/lib.py"):
        file = project / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
    return project


def in_git(directory: Path) -> Path:
    (directory / ".gitignore").write_text("data/\n*.pt\n.venv/\n")
    for words in (["init", "--quiet"], ["add", "train.py", ".gitignore"]):
        subprocess.run(["git", *words], cwd=directory, check=True, timeout=30)
    return directory


def copied(directory: Path, target: Path, *linked: str) -> list[str]:
    read_project(directory, linked=[Path(name) for name in linked]).copy_to(target)
    return sorted(str(path.relative_to(target)) for path in target.rglob("*") if not path.is_dir())


def test_a_copy_holds_what_git_tracks_or_does_not_ignore(directory: Path, tmp_path: Path) -> None:
    assert copied(in_git(directory), tmp_path / "copy") == [".gitignore", "src/part.py", "train.py"]
    assert read_project(directory, linked=[]).left_out == (".venv", "checkpoint.pt", "data")


def test_without_git_a_copy_holds_what_looks_like_code(directory: Path, tmp_path: Path) -> None:
    assert copied(directory, tmp_path / "copy") == ["src/part.py", "train.py"]


def test_what_a_program_writes_into_a_copy_is_not_in_the_project(directory: Path, tmp_path: Path) -> None:
    copied(in_git(directory), tmp_path / "copy")
    (tmp_path / "copy" / "train.py").write_text("changed")
    (tmp_path / "copy" / "checkpoint.pt").write_text("new")
    assert (directory / "train.py").read_text() == "train.py"
    assert (directory / "checkpoint.pt").read_text() == "checkpoint.pt"


def test_data_is_linked_on_request(directory: Path, tmp_path: Path) -> None:
    copied(in_git(directory), tmp_path / "copy", "data")
    assert (tmp_path / "copy" / "data").readlink() == directory / "data"
    assert (tmp_path / "copy" / "data" / "images.bin").read_text() == "data/images.bin"


def test_a_deleted_file_that_git_tracks_is_left_out(directory: Path, tmp_path: Path) -> None:
    in_git(directory)
    (directory / "train.py").unlink()
    assert copied(directory, tmp_path / "copy") == [".gitignore", "src/part.py"]


@pytest.mark.parametrize("name", ["missing", "..", "."])
def test_a_link_that_makes_no_sense_is_refused(directory: Path, name: str, golden: GoldenMessages) -> None:
    with pytest.raises(UserError, match="--link is") as caught:
        read_project(directory, linked=[Path(name)])
    golden.message(caught.value)
