"""Jobs whose environments are looked at before they are submitted, and what is said about them."""

from __future__ import annotations

import sys
import venv
from pathlib import Path
from typing import Any

import pytest

from hpcddp.jobfile.cluster import Cluster
from hpcddp.jobfile.job import JobSpec
from hpcddp.submission import checks as job_checks
from hpcddp.submission.checks import check_submittable
from hpcddp.submission.request import SubmissionError
from tests.submission.requests import request_of


def program(here: Path, name: str, text: str = "#!/bin/sh\n") -> None:
    path = here / "bin" / name
    path.write_text(text)
    path.chmod(0o700)


def virtual(directory: Path, *, with_hpcddp: bool = True) -> Path:
    """Make a real virtual environment; with hpcddp it sees the packages of this interpreter."""
    venv.create(directory, symlinks=True, with_pip=False)
    (packages,) = directory.glob("lib/python*/site-packages")
    root = Path(job_checks.__file__).parents[2]
    seen = [root, *(path for path in sys.path if path.endswith("site-packages"))]
    if with_hpcddp:
        (packages / "seen.pth").write_text("\n".join(map(str, seen)))
    return directory


def spec_of(environment: dict[str, Any], **fields: Any) -> JobSpec:
    train = {"model": "resnet18", "dataset": "digits"}
    job = {"name": "a", "batch": {"global_batch_size": 8}, "train": train, "environment": environment, **fields}
    return JobSpec.model_validate(job)


def warnings_of(
    here: Path, environment: dict[str, Any], cluster: Cluster = "slurm", more: dict[str, str] | None = None, **job: Any
) -> list[str]:
    variables = {"PATH": f"{here / 'bin'}:/usr/bin:/bin", **(more or {})}
    return list(check_submittable(request_of(spec_of(environment, **job), cluster=cluster, environment=variables)))


def errors_of(
    here: Path, environment: dict[str, Any], cluster: Cluster = "slurm", more: dict[str, str] | None = None, **job: Any
) -> list[str]:
    with pytest.raises(SubmissionError) as caught:
        warnings_of(here, environment, cluster, more, **job)
    return caught.value.message.splitlines()
