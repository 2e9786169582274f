"""The copy of the project: what is copied, what is a link, and what is refused."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from hpcddp.run.code import read_copy
from hpcddp.run.directory import RunDirectory
from hpcddp.submission.code import take_code
from hpcddp.submission.request import SubmissionError, SubmitRequest
from tests.facts import assert_facts
from tests.messages import GoldenMessages
from tests.submission.git_projects import git, make_project, request_in, write_files

FILES = {
    ".gitignore": "data/\noutputs/\n*.so\n*.pt\n_version.py\n__pycache__/\n.venv/\n",
    "train.py": "train\n",
    "src/pkg/__init__.py": "pkg\n",
    "tool": "#!/bin/sh\n",
    "table.csv": "a,b\n",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    project = make_project(tmp_path / "project", FILES)
    (project / "tool").chmod(0o755)
    write_files(
        project,
        {
            "data/x": "x", "outputs/a": "a", "weights.pt": "w", "new.py": "new\n", "notes.txt": "n",
            "src/pkg/_C.cpython-311.so": "so", "src/pkg/_version.py": "1\n", "src/pkg/__pycache__/a.pyc": "c",
            ".venv/pyvenv.cfg": "", ".venv/bin/python": "", "untracked_venv/pyvenv.cfg": "", "untracked_venv/a.py": "",
        },
    )  # fmt: skip
    (project / "empty").mkdir()
    return project


def copied(request: SubmitRequest, run: RunDirectory) -> Path:
    run.path.mkdir(exist_ok=True)
    take_code(request).write(run)
    return read_copy(run)[1]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "r1")


def test_code_is_copied_and_what_git_ignores_is_a_link(project: Path, run: RunDirectory) -> None:
    copy = copied(request_in(project, "snapshot"), run)
    for name in (*FILES, "new.py", "notes.txt"):
        assert not (copy / name).is_symlink()
        assert (copy / name).read_bytes() == (project / name).read_bytes()
    originals = ("data", "outputs", "weights.pt", "src/pkg/_C.cpython-311.so", "src/pkg/_version.py", "empty")
    for name in (*originals, ".venv", "untracked_venv"):
        assert (copy / name).readlink() == project / name
    assert os.access(copy / "tool", os.X_OK)
    assert not os.access(copy / "train.py", os.X_OK)
    for name in (".git", "src/pkg/__pycache__"):
        assert not os.path.lexists(copy / name)


def test_only_its_owner_sees_the_copy(project: Path, run: RunDirectory) -> None:
    copy = copied(request_in(project, "snapshot"), run)
    assert copy.parent.stat().st_mode & 0o077 == 0


def test_large_data_that_git_does_not_track_is_a_link(
    project: Path, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcddp.submission.code.LARGEST_COPY", 10)
    write_files(project, {"big.bin": "x" * 11, "small.bin": "x" * 9, "train.py": "x" * 99})
    copy = copied(request_in(project, "snapshot"), run)
    assert [(copy / name).is_symlink() for name in ("big.bin", "small.bin", "train.py")] == [True, False, False]


def test_links_lead_to_the_copy_or_out_of_the_project(project: Path, run: RunDirectory, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (project / "src" / "relative").symlink_to("../train.py")
    (project / "absolute.py").symlink_to(project / "train.py")
    (project / "out").symlink_to("../scratch")
    (project / "dangling").symlink_to("nowhere")
    git(project, "add", "src/relative", "absolute.py", "out", "dangling")
    copy = copied(request_in(project, "snapshot"), run)
    assert (copy / "src" / "relative").resolve() == copy / "train.py"
    assert (copy / "absolute.py").resolve() == copy / "train.py"
    assert (copy / "out").resolve() == tmp_path / "scratch"
    assert (copy / "dangling").readlink() == Path("nowhere")


def test_submodules_are_copied_and_their_repositories_are_not(project: Path, run: RunDirectory, tmp_path: Path) -> None:
    library = make_project(tmp_path / "library", {"lib.py": "lib\n"})
    git(project, "submodule", "add", str(library), "third")
    copy = copied(request_in(project, "snapshot"), run)
    assert (copy / "third" / "lib.py").read_text() == "lib\n"
    assert not (copy / "third" / ".git").exists()


def test_a_file_that_git_tracks_in_a_directory_that_it_ignores_is_copied(project: Path, run: RunDirectory) -> None:
    git(project, "add", "--force", "data/x")
    copy = copied(request_in(project / "data", "snapshot", "python", "../train.py"), run)
    assert not (copy / "data" / "x").is_symlink()


@pytest.mark.parametrize("name", ["empty", "data", "data/deeper", "src"])
def test_the_directory_of_submission_is_a_directory_of_the_copy(project: Path, run: RunDirectory, name: str) -> None:
    write_files(project, {"data/deeper/y": "y", "data/empty/.keep": ""})
    copy = copied(request_in(project / name, "snapshot", "python", "../train.py"), run)
    assert (copy / name).resolve() == copy / name
    for path in (project / name).iterdir():
        if path.name != "__pycache__":
            assert (copy / name / path.name).exists()
    assert (copy / "data" / "x").read_text() == "x"


def test_the_directory_of_runs_is_a_link(project: Path) -> None:
    run = RunDirectory(project / "runs" / "demo" / "r1")
    run.path.mkdir(parents=True)
    write_files(project, {"runs/demo/old/checkpoint": "old"})
    copy = copied(request_in(project, "snapshot"), run)
    assert (copy / "runs").readlink() == project / "runs"
    assert (copy / "runs" / "demo" / "old" / "checkpoint").read_text() == "old"


def test_a_file_that_was_removed_is_not_in_the_copy(project: Path, run: RunDirectory) -> None:
    (project / "table.csv").unlink()
    copy = copied(request_in(project, "snapshot"), run)
    assert not os.path.lexists(copy / "table.csv")


def test_code_that_is_edited_or_removed_while_it_is_copied_is_refused(
    project: Path, run: RunDirectory, golden: GoldenMessages
) -> None:
    run.path.mkdir()
    code = take_code(request_in(project, "snapshot"))
    (project / "train.py").write_text("half of an edi")
    with pytest.raises(SubmissionError, match=r"train\.py changed while") as error:
        code.write(run)
    golden.message(error.value)
    (project / "train.py").unlink()
    with pytest.raises(SubmissionError, match=r"train\.py changed while"):
        code.write(run)
    assert list(run.code_copies.iterdir()) == []
    # Data that a program writes meanwhile is copied as it is.
    write_files(project, {"train.py": FILES["train.py"], "table.csv": "a,b\n1,2\n"})
    code.write(run)
    assert (read_copy(run)[1] / "table.csv").read_text() == "a,b\n1,2\n"


def test_a_copy_that_the_disk_does_not_take_leaves_nothing(
    project: Path, run: RunDirectory, golden: GoldenMessages
) -> None:
    run.path.mkdir()
    write_files(project, {"notes.txt": "x" * 5000})
    code = take_code(request_in(project, "snapshot"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(SubmissionError, match="cannot be copied to") as error:
            code.write(run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_facts(
        golden.message(error.value, {str(project): "/project", str(run.path): "/runs/r1"}), f"{project}/notes.txt"
    )
    assert list(run.code_copies.iterdir()) == []
    assert not run.code.exists()


REFUSED = {
    "an absolute path": ("python", "PROJECT/train.py"),
    "a directory of the project": ("python", "train.py", "--root=PROJECT"),
    "a path in a text": ("bash", "-c", "cd PROJECT && python train.py"),
    "a new path": ("python", "train.py", "--out", "PROJECT/new/a.pt"),
    "a program outside": ("python", "../other.py"),
}


@pytest.mark.parametrize("words", REFUSED.values(), ids=REFUSED)
def test_a_command_that_would_run_other_code_is_refused(
    words: tuple[str, ...], project: Path, golden: GoldenMessages
) -> None:
    command = [word.replace("PROJECT", str(project)) for word in words]
    with pytest.raises(SubmissionError, match="command holds") as error:
        take_code(request_in(project, "snapshot", *command))
    golden.message(error.value, {str(project): "/project"})


def test_the_project_by_another_name_is_refused_too(project: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(project)
    for name in (tmp_path / "link", project):
        with pytest.raises(SubmissionError, match="absolute path into the project"):
            take_code(request_in(tmp_path / "link" / "src", "snapshot", "python", f"{name}/train.py"))


@pytest.mark.parametrize(
    "word", ["PROJECT/data/x", "--out=PROJECT/outputs/a", ".venv/bin/python", "PROJECT/.venv/bin/python", "PROJECT2/a"]
)
def test_an_absolute_path_to_what_is_a_link_in_the_copy_is_not_refused(word: str, project: Path) -> None:
    take_code(request_in(project, "snapshot", "python", "train.py", word.replace("PROJECT", str(project))))


def test_a_value_of_a_sweep_is_no_absolute_path_into_the_project(project: Path) -> None:
    values = {"script": [str(project / "train.py")]}
    with pytest.raises(SubmissionError, match="absolute path into the project"):
        take_code(request_in(project, "snapshot", "python", "{script}", sweep=values))


def test_without_git_there_is_no_copy(tmp_path: Path, golden: GoldenMessages) -> None:
    with pytest.raises(SubmissionError, match="not in a git repository") as error:
        take_code(request_in(tmp_path, "snapshot"))
    golden.message(error.value, {str(tmp_path): "/project"})
