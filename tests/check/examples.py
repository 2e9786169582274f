"""Checks an example of a rule as a user's file in a directory of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from hpcddp.check.check import Report, check_file
from hpcddp.check.finding import Example


def report_of(
    example: Example, directory: Path, monkeypatch: pytest.MonkeyPatch, environment: Mapping[str, str]
) -> Report:
    """Return what a check of an example finds.

    Args:
        example: the example.
        directory: an empty directory, which becomes the working directory.
        monkeypatch: that of the test.
        environment: the submitter's environment; the example's own variables are added.
    """
    for name, text in example.files.items():
        file = directory / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    is_script = "#!" in example.text or "#SBATCH" in example.text
    file = directory / ("job.sh" if is_script else "job.yaml")
    file.write_text(example.text)
    monkeypatch.chdir(directory)
    return check_file(Path(file.name), None, {**environment, **example.environment})
