"""Job files for the tests of spec."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcddp.jobfile.problems import JobFileError
from hpcddp.jobfile.read import DefaultSettings, ResolvedJob, load_job
from tests.messages import GoldenMessages

GOOD = """\
name: a-job
batch: {global_batch_size: 8}
train: {model: resnet18, dataset: digits}
"""

Load = Callable[..., ResolvedJob]
Refuse = Callable[..., list[str]]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Load a good job file with more lines below it."""

    def run(
        more: str = "",
        *,
        sets: tuple[str, ...] = (),
        profiles: Path | None = None,
        project: Path | None = None,
        good: str = GOOD,
    ) -> ResolvedJob:
        file = tmp_path / "job.yaml"
        file.write_text(good + more, encoding="utf-8")
        defaults = DefaultSettings(profiles=profiles, project=project, directory=tmp_path, user_id=os.geteuid())
        return load_job(file, overrides=sets, defaults=defaults)

    return run


@pytest.fixture
def refuse(load: Load, tmp_path: Path, golden: GoldenMessages) -> Refuse:
    """Compare the error that a job file gives with the golden one, and return its lines without the directory."""

    def run(*arguments: Any, **options: Any) -> list[str]:
        with pytest.raises(JobFileError) as caught:
            load(*arguments, **options)
        return golden.message(str(caught.value).replace(f"{tmp_path}/", "")).splitlines()

    return run
