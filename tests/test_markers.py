"""Markers and durations of the tests themselves: what runs a second time, what is skipped, and how both are counted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.depends_on(
    "scripts/slow-tests", "pyproject.toml", "tests/conftest.py", "tests/test_markers.py"
)

ROOT = Path(__file__).parents[1]
PROBE = """\
import pathlib
import pytest

def fails_once(name):
    path = pathlib.Path(name)
    has_run = path.exists()
    path.touch()
    assert has_run

@pytest.mark.depends_on_speed("a deadline of 1 s")
def test_marked():
    fails_once("marked")

def test_not_marked():
    fails_once("not-marked")

@pytest.mark.depends_on("no/such/page.md")
def test_of_a_page():
    pass
"""


def run_probe(directory: Path, *options: str) -> str:
    """Run the probe with the tests' conftest.py, and return what pytest prints."""
    (directory / "test_probe.py").write_text(PROBE)
    command = [
        sys.executable, "-m", "pytest", "-q", "-raR", "-p", "no:cacheprovider", "-p", "tests.conftest",
        f"--rootdir={directory}", "-c", os.devnull, "--import-mode=importlib", *options, "test_probe.py",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    return done.stdout


def test_only_a_marked_test_runs_a_second_time_and_the_last_lines_count_it(tmp_path: Path) -> None:
    printed = run_probe(tmp_path, f"--junitxml={tmp_path}/results/probe.xml")
    assert "RERUN test_probe.py::test_marked" in printed
    assert "FAILED test_probe.py::test_not_marked" in printed
    summary = subprocess.run(
        [sys.executable, ROOT / "scripts" / "slow-tests", tmp_path / "results"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert summary.stdout.endswith(
        "ran a second time: test_probe.py::test_marked (a deadline of 1 s)\n"
        "1 tests ran a second time\n"
        "2 passed, 1 failed, 0 skipped\n"
    )


def test_what_did_not_change_is_skipped_where_that_is_asked_for(tmp_path: Path) -> None:
    printed = run_probe(tmp_path, "--skip-unchanged", "-k", "page")
    assert "no/such/page.md did not change since the parent commit; scripts/test --long runs it" in printed
    assert "1 skipped" in printed
    assert "1 passed" in run_probe(tmp_path, "-k", "page")
