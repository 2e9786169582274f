"""Projects in real git repositories, from which tests submit."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from hpcddp.jobfile.job import JobSpec
from hpcddp.submission.request import SubmitRequest
from tests.submission.requests import request_of


def git(directory: Path, *words: str) -> str:
    """Run git in a directory, as a user who has a name, and return what it prints."""
    settings = (
        "user.name=a", "user.email=a@example.org", "init.defaultBranch=main", "protocol.file.allow=always"
    )  # fmt: skip
    options = [option for setting in settings for option in ("-c", setting)]
    done = subprocess.run(["git", *options, *words], cwd=directory, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def write_files(directory: Path, files: Mapping[str, str]) -> None:
    """Write files with their directories."""
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def make_project(directory: Path, files: Mapping[str, str]) -> Path:
    """Make a repository in which these files are committed."""
    directory.mkdir(parents=True)
    write_files(directory, files)
    git(directory, "init")
    git(directory, "add", ".")
    git(directory, "commit", "-m", "first")
    return directory


def request_in(directory: Path, code: str = "live", *command: str, **fields: object) -> SubmitRequest:
    """Return a request to submit a command from a directory."""
    job = {"name": "demo", "command": command or ("python", "train.py"), "environment": {"code": code}, **fields}
    spec = JobSpec.model_validate(job)
    return request_of(spec, directory=directory, environment=dict(os.environ))
