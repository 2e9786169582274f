"""A command's job: its file, what lies under it, and ``--set`` over it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpcddp.cli.options import profiles_directory

if TYPE_CHECKING:
    from hpcddp.spec.overrides import Override
    from hpcddp.spec.problems import Problem
    from hpcddp.spec.read import ResolvedJob, Underlay


def read_job(
    job_file: Path | None, overrides: Sequence[str] | None, *, options: Sequence[Override | Problem] = ()
) -> ResolvedJob:
    """Return the job of a file, over this directory's ``hpcddp.toml`` and the user's profiles.

    Args:
        job_file: the job file; None where the options say all of the job.
        overrides: ``--set`` as it was given.
        options: what options of their own say.

    Raises:
        JobFileError: with every problem of them.
    """
    from hpcddp.spec.read import load_job

    return load_job(job_file, overrides=overrides or (), options=options, underlay=underlay_here())


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
