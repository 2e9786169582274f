"""Requests to submit the jobs of tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.read import ResolvedJob
from hpcddp.submission.request import SubmitRequest


def request_of(job: ResolvedJob | JobSpec, **fields: Any) -> SubmitRequest:
    """Return a request to submit a job to Slurm from the working directory, changed by ``fields``."""
    resolved = job if isinstance(job, ResolvedJob) else ResolvedJob(spec=job, origins={})
    defaults: dict[str, Any] = {
        "run_id": "r1",
        "cluster": "slurm",
        "python": "python3",
        "template": None,
        "directory": Path.cwd(),
        "environment": {},
    }
    return SubmitRequest(job=resolved, **(defaults | fields))
