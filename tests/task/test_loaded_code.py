"""What a process has loaded from the project, and what has changed in it since then."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hpcddp.run.directory import AttemptDirectory, RunDirectory
from hpcddp.submission.code import take_code
from hpcddp.task.code import why_code_differs
from tests.submission.git_projects import make_project, request_in

FILES = {
    ".gitignore": "runs/\n.venv/\n",
    "train.py": "import parts.layers\n",
    "parts/__init__.py": "",
    "parts/layers.py": "SIZE = 1\n",
    "another.py": "LOADED = False\n",
    ".venv/lib/python3.11/site-packages/package_of_the_project.py": "",
}
# As rank 0 of a training does, in a process of its own: what is loaded belongs to the whole process.
RECORD = """
import sys
sys.path[:0] = sys.argv[2:]
import train, package_of_the_project
from hpcddp.run.directory import AttemptDirectory
from hpcddp.task.code import record_loaded_code
record_loaded_code(AttemptDirectory.from_text(sys.argv[1]))
"""


class Submitted:
    """A run of a project, and its first attempt."""

    def __init__(self, directory: Path, code: str) -> None:
        self.project = make_project(directory / "project", FILES)
        run = RunDirectory(self.project / "runs" / "demo" / "r1")
        run.path.mkdir(parents=True, mode=0o700)
        take_code(request_in(self.project, code)).write(run)
        self.attempt: AttemptDirectory = run.attempt(0)
        self.attempt.path.mkdir(parents=True)
        self.root = run.code_copies / "0" if code == "snapshot" else self.project

    def record(self) -> dict[str, str]:
        """Record what a process has loaded, and return it."""
        packages = self.project / ".venv/lib/python3.11/site-packages"
        words = [sys.executable, "-P", "-c", RECORD, str(self.attempt.path), str(self.root), str(packages)]
        subprocess.run(words, check=True)
        files: dict[str, str] = json.loads(self.attempt.loaded_code.read_text())["files"]
        return files


@pytest.fixture(params=["live", "snapshot"])
def submitted(tmp_path: Path, request: pytest.FixtureRequest) -> Submitted:
    return Submitted(tmp_path, request.param)


def test_only_the_loaded_files_of_the_project_are_recorded(submitted: Submitted) -> None:
    files = submitted.record()
    assert sorted(files) == ["parts/__init__.py", "parts/layers.py", "train.py"]
    assert why_code_differs(submitted.attempt) is None


def test_an_edit_of_a_loaded_file_is_named(submitted: Submitted) -> None:
    submitted.record()
    (submitted.root / "parts" / "layers.py").write_text("SIZE = 2\n")
    assert why_code_differs(submitted.attempt) == "parts/layers.py changed since the ranks began"
    (submitted.root / "train.py").unlink()
    why = why_code_differs(submitted.attempt)
    assert why == "parts/layers.py changed and train.py was removed since the ranks began"


def test_an_edit_of_another_file_is_no_difference(submitted: Submitted) -> None:
    submitted.record()
    (submitted.root / "another.py").write_text("LOADED = 'no'\n")
    (submitted.root / "new.py").write_text("")
    assert why_code_differs(submitted.attempt) is None


def test_an_edit_of_the_project_is_no_difference_where_its_copy_runs(tmp_path: Path) -> None:
    submitted = Submitted(tmp_path, "snapshot")
    submitted.record()
    (submitted.project / "train.py").write_text("import no_such_module\n")
    assert why_code_differs(submitted.attempt) is None


def test_the_first_record_of_an_attempt_stays(submitted: Submitted) -> None:
    submitted.record()
    (submitted.root / "train.py").write_text("import parts\n")
    submitted.record()
    assert why_code_differs(submitted.attempt) == "train.py changed since the ranks began"


@pytest.mark.parametrize("content", ["", "{", '{"files": 1}'])
def test_a_damaged_record_is_a_difference(submitted: Submitted, content: str) -> None:
    submitted.record()
    submitted.attempt.loaded_code.write_text(content)
    assert "is damaged" in (why_code_differs(submitted.attempt) or "")


def test_nothing_is_known_without_a_record(submitted: Submitted) -> None:
    assert why_code_differs(submitted.attempt) is None
