"""Which files of a project are code, and what is a change of them."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from hpcddp.run.code import changes_since
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
CODE = {"train.py", "src/model.py", "kernels/add.cu", "conf/train.yaml", "ds_config.json"}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return make_project(tmp_path / "project", FILES)


def code_in(directory: Path, *command: str) -> set[str]:
    return set(take_code(request_in(directory, "live", *command)).record.files)


def test_programs_and_tracked_configurations_are_code_and_data_is_not(project: Path) -> None:
    assert code_in(project) == CODE


def test_a_program_that_git_does_not_track_is_code_and_another_file_is_not(project: Path) -> None:
    write_files(project, {"new.py": "", "outputs/config.yaml": "lr: 1\n", "data/load.py": "", "run": "#!/bin/sh\n"})
    (project / "run").chmod(0o755)
    write_files(project, {"notes": "no program\n"})
    assert code_in(project) == {*CODE, "new.py", "run"}


def test_runs_and_virtual_environments_are_no_code(project: Path) -> None:
    write_files(
        project, {"runs/demo/r1/tool.py": "", ".venv/pyvenv.cfg": "", ".venv/lib/python3.11/site-packages/a.py": ""}
    )
    assert code_in(project) == CODE


def test_a_file_that_is_too_large_for_code_is_none(project: Path) -> None:
    (project / "table.py").write_text("x = 1\n" * 200_000)
    assert code_in(project) == CODE


def test_the_project_is_the_whole_repository_where_a_job_is_submitted_from_a_part_of_it(project: Path) -> None:
    (project / "experiments").mkdir()
    code = take_code(request_in(project / "experiments", "live", "python", "../train.py"))
    assert set(code.record.files) == CODE
    assert (code.record.root, code.record.directory) == (str(project), "experiments")


def test_submodules_and_repositories_in_it_are_parts_of_the_project(project: Path, tmp_path: Path) -> None:
    library = make_project(tmp_path / "library", {"lib.py": "", "weights.bin": ""})
    git(project, "submodule", "add", str(library), "third/library")
    make_project(project / "clone", {"clone.py": ""})
    assert code_in(project) == {*CODE, "third/library/lib.py", "clone/clone.py"}
    git(project, "submodule", "deinit", "-f", "third/library")
    assert code_in(project) == {*CODE, "clone/clone.py"}


def test_names_that_no_text_can_hold_and_files_that_cannot_be_read_are_left_out(project: Path) -> None:
    Path(os.fsdecode(os.fsencode(project) + b"/\xff.py")).write_text("")
    (project / "dangling.py").symlink_to("nowhere")
    (project / "endless.py").symlink_to("/dev/zero")
    git(project, "add", ".")
    (project / "train.py").unlink()
    os.mkfifo(project / "train.py")
    write_files(project, {"é\n.py": ""})
    # A pipe without a writer is empty, and is not waited for.
    assert code_in(project) == {*CODE, "é\n.py", "endless.py"}


def test_a_file_in_conflict_is_one_file(project: Path) -> None:
    git(project, "checkout", "-b", "other")
    write_files(project, {"train.py": "other\n"})
    git(project, "commit", "-am", "other")
    git(project, "checkout", "main")
    write_files(project, {"train.py": "mine\n"})
    git(project, "commit", "-am", "mine")
    with pytest.raises(Exception, match="merge"):
        git(project, "merge", "other")
    assert code_in(project) == CODE


def test_without_git_nothing_is_known_of_the_code(tmp_path: Path, golden: GoldenMessages) -> None:
    write_files(tmp_path, {"train.py": ""})
    code = take_code(request_in(tmp_path))
    assert not code.record.files
    assert code.write(RunDirectory(tmp_path)) == ()
    with pytest.raises(SubmissionError, match="in no git repository; run git init") as error:
        take_code(request_in(tmp_path, "frozen"))
    golden.message(error.value, {str(tmp_path): "/project"})


def test_a_git_that_does_not_answer_in_time_is_waited_for_no_longer(
    project: Path, tmp_path: Path, golden: GoldenMessages
) -> None:
    real = shutil.which("git")
    slow = tmp_path / "bin" / "git"
    slow.parent.mkdir()
    slow.write_text(f'#!/bin/sh\ncase "$*" in *ls-files*) sleep 60 ;; *) exec {real} "$@" ;; esac\n')
    slow.chmod(0o755)
    request = request_in(project, "frozen")
    request = replace(request, environment={**os.environ, "PATH": f"{slow.parent}:/usr/bin:/bin"})
    with pytest.raises(SubmissionError, match="in time") as error:
        take_code(request)
    golden.message(error.value)


def test_what_a_job_writes_is_no_change_and_an_edit_is_one(project: Path) -> None:
    write_files(project, {"untracked.py": "", "state.yaml": "epoch: 0\n", "metrics.json": "{}\n"})
    record = take_code(request_in(project)).record
    write_files(
        project,
        {
            "results.csv": "step,loss\n1,2\n", "metrics.json": '{"loss": 1}', "train.log": "line\n", "last.ckpt": "x",
            "state.yaml": "epoch: 1\n", "outputs/config.yaml": "lr: 1\n", "outputs/code/train.py": "copy\n",
            "checkpoints/step-1/model.pt": "x", "generated.py": "later\n", "job.yaml": "name: next\ntrain: {}\n",
        },
    )  # fmt: skip
    (project / "train.py").touch()
    assert not changes_since(record)
    write_files(project, {"train.py": "edited\n", "conf/train.yaml": "lr: 1\n", "ds_config.json": '{"a": 1}\n'})
    (project / "untracked.py").unlink()
    changes = changes_since(record)
    assert (changes.edited, changes.removed) == (
        ("conf/train.yaml", "ds_config.json", "train.py"),
        ("untracked.py",),
    )
    assert changes.sentence.startswith("conf/train.yaml, ds_config.json and train.py changed and untracked.py was ")


def test_a_project_that_is_away_is_no_change(project: Path) -> None:
    record = take_code(request_in(project)).record
    project.rename(project.with_name("elsewhere"))
    assert not changes_since(record)


def test_of_many_changes_the_first_are_named(project: Path) -> None:
    write_files(project, {f"m{number}.py": "" for number in range(5)})
    record = take_code(request_in(project)).record
    write_files(project, {f"m{number}.py": "x" for number in range(5)})
    assert changes_since(record).sentence == "m0.py, m1.py, m2.py and 2 more changed since the submission"
