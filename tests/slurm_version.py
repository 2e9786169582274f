"""The version of the Slurm that the tests run on, and the mark of what fails on it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from functools import cache

import pytest

from hpcddp.sandbox import programs

Version = tuple[int, ...]


@cache
def slurm_version() -> str | None:
    """Return the version of this machine's Slurm, such as ``24.11.5``; None without one."""
    # Since 24.11 the client commands say it only where they find a configuration.
    program = shutil.which("slurmctld", path=programs.PATH)
    if program is None:
        return None
    # Debian's prints: slurm-wlm 24.11.5
    return subprocess.run((program, "-V"), capture_output=True, text=True, check=True).stdout.split()[-1]


def numbers(version: str) -> Version:
    """Return a version for comparison: ``24.11.5`` is (24, 11, 5)."""
    return tuple(int(part) for part in version.partition("-")[0].split("."))


def expected_failure(marks: Iterable[pytest.Mark], version: str) -> pytest.MarkDecorator | None:
    """Return the mark of a test that fails on a version of Slurm, or None.

    Args:
        marks: the test's marks ``fails_on_slurm(row, since, before)``: a row of docs/design/slurm-versions.md, the
            first version on which the test fails, and the first one on which it passes again, if there is one.
        version: the version of Slurm.
    """
    for mark in marks:
        row, since, before = _arguments(**mark.kwargs)
        if numbers(since) <= numbers(version) and (before is None or numbers(version) < numbers(before)):
            return pytest.mark.xfail(reason=f"row {row} of docs/design/slurm-versions.md", strict=True)
    return None


def _arguments(*, row: str, since: str, before: str | None = None) -> tuple[str, str, str | None]:
    return row, since, before
