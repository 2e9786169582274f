"""Which files of a project are code, and what is a change of them."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from hpcddp.run.code import CodeRecord, changes_sentence, changes_since
from hpcddp.run.directory import RunDirectory
from hpcddp.submission.code import take_code
from hpcddp.submission.request import SubmissionError
from tests.messages import GoldenMessages
from tests.submission.git_projects import git, make_project, request_in, write_files

FILES = {
    ".gitignore": "data/\n*.ckpt\n__pycache__/\n",
    "train.py": "import model\n",
    "src/model.py": "width = 1\n",
    "kernels/add.cu": "add\n",
    "conf/train.yaml": "lr: 0.1\n",
    "job.yaml": "name: demo\ncommand: [python, train.py]\n",
    "hpcddp.yaml": "",
    ".github/workflows/ci.yml": "on: push\n",
    "results.csv": "step,loss\n",
    "ds_config.json": "{}\n",
    ".vscode/settings.json": "{}\n",
    "train.log": "",
    "README.md": "read\n",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return make_project(tmp_path / "project", FILES)


def record_of(directory: Path) -> CodeRecord:
    return take_code(request_in(directory)).record


def test_programs_and_configurations_that_git_tracks_are_code_and_data_is_not(project: Path) -> None:
    record = record_of(project)
    write_files(project, {name: f"{text}edited\n" for name, text in FILES.items()})
    assert changes_since(record) == ["conf/train.yaml", "ds_config.json", "kernels/add.cu", "src/model.py", "train.py"]


def test_what_a_job_writes_is_no_change_and_an_edit_is_one(project: Path) -> None:
    write_files(project, {"untracked.py": "", "state.yaml": "epoch: 0\n"})
    record = record_of(project)
    write_files(
        project,
        {
            "results.csv": "step,loss\n1,2\n", "metrics.json": '{"loss": 1}', "train.log": "line\n", "last.ckpt": "x",
            "state.yaml": "epoch: 1\n", "outputs/config.yaml": "lr: 1\n", "outputs/code/train.py": "copy\n",
            "checkpoints/step-1/model.pt": "x", "generated.py": "later\n", "job.yaml": "name: next\ntrain: {}\n",
            "untracked.py": "edited\n",
        },
    )  # fmt: skip
    (project / "train.py").touch()
    assert not changes_since(record)
    write_files(project, {"train.py": "edited\n"})
    (project / "src" / "model.py").unlink()
    changes = changes_since(record)
    assert changes == ["src/model.py", "train.py"]
    assert changes_sentence(changes) == "src/model.py and train.py changed since the submission"


def test_what_was_changed_before_is_compared_too_and_a_commit_of_it_is_no_change(project: Path) -> None:
    write_files(project, {"train.py": "before\n", "new file.py": "é\n"})
    git(project, "add", "new file.py")
    record = record_of(project)
    assert set(record.changes) == {"train.py", "new file.py"}
    git(project, "commit", "-am", "second")
    assert not changes_since(record)
    write_files(project, {"train.py": "after\n"})
    assert changes_since(record) == ["train.py"]
    git(project, "checkout", "HEAD~1", ".")
    assert changes_since(record) == ["train.py"]


def test_a_configuration_of_git_changes_nothing(project: Path) -> None:
    write_files(project, {"train.py": "before\n"})
    record = record_of(project)
    for key, value in {"diff.noprefix": "true", "diff.renames": "copies", "core.quotePath": "true"}.items():
        git(project, "config", key, value)
    assert not changes_since(record)


def test_the_project_is_the_whole_repository_where_a_job_is_submitted_from_a_part_of_it(project: Path) -> None:
    (project / "experiments").mkdir()
    record = record_of(project / "experiments")
    assert (record.root, record.directory) == (str(project), "experiments")
    write_files(project, {"train.py": "edited\n"})
    assert changes_since(record) == ["train.py"]


def test_the_files_of_a_submodule_are_code(project: Path, tmp_path: Path) -> None:
    library = make_project(tmp_path / "library", {"lib.py": "", "weights.bin": ""})
    git(project, "submodule", "add", str(library), "third/library")
    git(project, "commit", "-m", "library")
    write_files(project, {"third/library/lib.py": "before\n"})
    record = record_of(project)
    write_files(project, {"third/library/weights.bin": "x", "third/library/new.py": ""})
    assert not changes_since(record)
    write_files(project, {"third/library/lib.py": "after\n"})
    assert changes_since(record) == ["third/library/lib.py"]


def test_without_git_nothing_is_known_of_the_code(tmp_path: Path, golden: GoldenMessages) -> None:
    write_files(tmp_path, {"train.py": ""})
    code = take_code(request_in(tmp_path))
    write_files(tmp_path, {"train.py": "edited\n"})
    assert not changes_since(code.record)
    assert code.write(RunDirectory(tmp_path)) == ()
    with pytest.raises(SubmissionError, match="not in a git repository; commit it to a git") as error:
        take_code(request_in(tmp_path, "frozen"))
    golden.message(error.value, {str(tmp_path): "/project"})


def test_frozen_code_is_refused_where_git_does_not_answer_in_time(
    project: Path, tmp_path: Path, golden: GoldenMessages
) -> None:
    real = shutil.which("git")
    slow = tmp_path / "bin" / "git"
    slow.parent.mkdir()
    slow.write_text(f'#!/bin/sh\ncase "$*" in *diff*) sleep 60 ;; *) exec {real} "$@" ;; esac\n')
    slow.chmod(0o755)
    request = request_in(project, "frozen")
    request = replace(request, environment={**os.environ, "PATH": f"{slow.parent}:/usr/bin:/bin"})
    with pytest.raises(SubmissionError, match="did not end within 2 s") as error:
        take_code(request)
    golden.message(error.value)


def test_a_project_that_is_away_is_no_change(project: Path) -> None:
    record = record_of(project)
    project.rename(project.with_name("elsewhere"))
    assert not changes_since(record)


def test_of_many_changes_the_first_are_named() -> None:
    names = [f"m{number}.py" for number in range(5)]
    assert changes_sentence(names) == "m0.py, m1.py, m2.py and 2 more changed since the submission"
