"""The size of the package: its budget, and what scripts/size counts."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]
CODE = '''\
"""A module."""

# why
def name(word: str) -> str:
    """Return a name."""
    return f"{word} of {len(word)}"
'''
# def name ( word : str ) -> str :   return and the f-string
TOKENS = 10 + 2


def run_size(project: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command: list[str | Path] = [sys.executable, project / "scripts" / "size", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a small project with 12 tokens of code and 3 words of text."""
    for folder in ("scripts", "hpcddp/train", "templates"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(PROJECT / "scripts" / "size", tmp_path / "scripts")
    (tmp_path / "hpcddp" / "train" / "module.py").write_text(CODE)
    (tmp_path / "templates" / "script.j2").write_text("#!/bin/bash\nexit 0\n")
    write_budget(tmp_path, 15)
    return tmp_path


def write_budget(project: Path, tokens: int) -> None:
    (project / "pyproject.toml").write_text(f"[tool.hpcddp.budget]\ntokens = {tokens}\n")


def rows(output: str) -> dict[str, list[str]]:
    return {line.split()[0]: line.split()[1:] for line in output.splitlines()}


def commit(project: Path) -> None:
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "all"]):
        subprocess.run(["git", "-C", project, *words], check=True, timeout=60)


@pytest.mark.depends_on("hpcddp", "templates", "scripts/size", "pyproject.toml", "tests/test_size.py")
def test_the_package_keeps_its_budget() -> None:
    done = run_size(PROJECT, "--check")
    assert done.returncode == 0, done.stdout + done.stderr


def test_neither_comments_nor_docstrings_nor_layout_count_and_an_f_string_is_one_token(project: Path) -> None:
    table = rows(run_size(project).stdout)
    assert table["train"][3] == str(TOKENS)
    assert table["(text)"][3] == "3"
    assert table["total"][3] == str(TOKENS + 3)


@pytest.mark.parametrize(("excess", "returncode"), [(250, 0), (251, 1)])
def test_a_package_that_is_more_than_250_tokens_above_its_budget_is_told_what_to_do(
    project: Path, excess: int, returncode: int
) -> None:
    (project / "hpcddp" / "train" / "more.py").write_text("x\n" * (250 + 3))
    write_budget(project, TOKENS + 3 + 250 + 3 - excess)
    done = run_size(project, "--check")
    assert done.returncode == returncode
    assert ("remove something, or raise the number there and say in the commit" in done.stderr) == bool(returncode)


def test_the_difference_is_to_the_parent_commit_and_unknown_without_git(project: Path) -> None:
    assert rows(run_size(project).stdout)["train"][4] == "unknown"
    commit(project)
    (project / "hpcddp" / "train" / "module.py").unlink()
    (project / "hpcddp" / "other").mkdir()
    (project / "hpcddp" / "other" / "module.py").write_text("x\n")
    table = rows(run_size(project).stdout)
    assert (table["train"][4], table["other"][4], table["total"][4]) == (f"-{TOKENS}", "+1", f"-{TOKENS - 1}")


def test_a_commit_that_git_does_not_know_is_refused(project: Path) -> None:
    done = run_size(project, "--against", "no-such-commit")
    assert done.returncode == 2
    assert "no-such-commit" in done.stderr
