"""A command's job: its file, what lies under it, and ``--set`` over it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpcddp.spec.read import ResolvedJob, Underlay


def read_job(job_file: Path, overrides: Sequence[str] | None) -> ResolvedJob:
    """Return the job of a file, over this directory's ``hpcddp.toml`` and the user's profiles.

    Args:
        job_file: the job file.
        overrides: ``--set`` as it was given.

    Raises:
        JobFileError: with every problem of them.
    """
    from hpcddp.spec.read import load_job

    return load_job(job_file, overrides=overrides or (), underlay=underlay_here())


def underlay_here() -> Underlay:
    """Return what lies under a job that this process's user submits from this directory."""
    from hpcddp.spec.project import find_project_file
    from hpcddp.spec.read import Underlay

    directory, home = Path.cwd(), os.environ.get("HOME")
    return Underlay(
        profiles=profiles_directory(os.environ),
        project=find_project_file(directory, home=Path(home) if home else None),
        directory=directory,
        user_id=os.geteuid(),
    )


def profiles_directory(environment: Mapping[str, str]) -> Path:
    """Return where the user's cluster profiles are (XDG Base Directory Specification)."""
    configuration = environment.get("XDG_CONFIG_HOME") or Path(environment.get("HOME") or "~").expanduser() / ".config"
    return Path(configuration) / "hpcddp" / "profiles"
