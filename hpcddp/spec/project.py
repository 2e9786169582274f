"""``hpcddp.toml``: what all jobs of a project share, laid over the profile and under the job file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from hpcddp.spec.problems import Problem
from hpcddp.spec.settings import Settings, SettingsError, read_settings

PROJECT_FILE = "hpcddp.toml"
ORIGIN = f"project {PROJECT_FILE}"

_ROOT_MARK = ".git"


def find_project_file(directory: Path, *, home: Path | None) -> Path | None:
    """Return the project's file for jobs that are submitted from a directory.

    It lies in the directory, or in one above it, up to the root of the project, which is where ``.git`` is, or else up
    to the home directory. Outside of both nothing above the directory counts: it may be anybody's.

    Args:
        directory: the directory of submission; absolute.
        home: the user's home directory; None where it is not known.
    """
    return next((file for place in _places(directory, home) if os.path.isfile(file := place / PROJECT_FILE)), None)  # noqa: PTH113


def read_project(file: Path, *, directory: Path, user_id: int) -> Settings:
    """Read a project's file.

    Args:
        file: the file.
        directory: the directory of submission.
        user_id: whose job it is.

    Raises:
        SettingsError: it is not TOML, holds what does not belong there, or is a stranger's.
    """
    # It holds shell lines, and nobody named it: like git, take none from above that somebody else has put there.
    if file.parent != directory and file.stat().st_uid not in {0, user_id}:
        sentence = "belongs to another user and lies above this directory; copy it here, if you trust it, to use it"
        raise SettingsError(Problem(file=str(file), sentence=sentence))
    return read_settings(file, origin=ORIGIN, kind=PROJECT_FILE, more_keys=("profile",))


def _places(directory: Path, home: Path | None) -> Iterator[Path]:
    """Yield where the file may lie, the nearest first."""
    above = [directory, *directory.parents]
    # os.path answers no where Path would raise: in a directory that may not be looked into.
    root = next((place for place in above if place == home or os.path.lexists(place / _ROOT_MARK)), directory)
    yield from above[: above.index(root) + 1]
