"""Default settings from TOML files: cluster profiles and the project's ``hpcddp.toml``."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpcddp.jobfile.cluster import ClusterFacts, read_facts
from hpcddp.jobfile.names import nearest
from hpcddp.jobfile.problems import Problem
from hpcddp.jobfile.settings import Settings, SettingsError, read_settings

DEFAULT_PROFILE = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A cluster profile.

    Args:
        name: its name.
        settings: its content.
        cluster: the facts about its cluster, if ``hpcddp init`` wrote it.
    """

    name: str
    settings: Settings
    cluster: ClusterFacts | None


def profile_file(name: str, profiles: Path) -> Path:
    """Return the file of a profile in a directory of profiles."""
    return profiles / f"{name}.toml"


def read_profile(name: str | None, profiles: Path | None) -> Profile | None:
    """Read a profile.

    Args:
        name: its name; None is ``default``, which need not exist.
        profiles: the directory of profiles; None where there is none.

    Returns:
        The profile, or None where the default one does not exist.

    Raises:
        SettingsError: it does not exist, is not TOML, or has keys that no profile has.
    """
    known = name or DEFAULT_PROFILE
    file = None if profiles is None else profile_file(known, profiles)
    if file is None or not _is_there(file):
        if name is None:
            return None
        raise SettingsError(_missing(name, profiles))
    settings = read_settings(file, origin=f"profile {known}", kind="a profile", more_keys=("cluster",))
    return Profile(name=known, settings=settings, cluster=read_facts(settings, name=known))


def _is_there(file: Path) -> bool:
    """Return whether a file exists; False where the directory cannot be searched (`sudo -u`, another user's home)."""
    try:
        return file.exists()
    except OSError:
        return False


def _missing(name: str, profiles: Path | None) -> Problem:
    there = sorted(file.stem for file in profiles.glob("*.toml")) if profiles is not None else []
    near = nearest(name, there)
    known = f"there are {', '.join(there)}" if there else "leave profile out"
    if profiles is not None and not there:
        known = f"make {profile_file(name, profiles)} with hpcddp init {name}, or leave profile out"
    instead = f"did you mean {near}?" if near else known
    return Problem(file="", key="profile", value=name, sentence=f"is {name!r}, and there is no such profile; {instead}")


PROJECT_FILE = "hpcddp.toml"
ORIGIN = f"project {PROJECT_FILE}"
_ROOT_MARK = ".git"


def find_project_file(directory: Path, *, home: Path | None) -> Path | None:
    """Return the project's file for jobs that are submitted from a directory.

    The file is in the directory or in one above it, up to the root of the project (where ``.git`` is) or up to the home
    directory. Outside of both only the directory itself counts, because others may write to the directories above.

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
        user_id: the user who submits.

    Raises:
        SettingsError: it is not TOML, has unknown keys, or other users own it or may write to it.
    """
    # It contains shell lines and is found without being named: like git, reject one that another user controls.
    status = file.stat()
    if status.st_uid not in {0, user_id}:
        where = "is here" if file.parent == directory else "lies above this directory"
        way_out = "make it your own" if file.parent == directory else "copy it here"
        sentence = f"belongs to another user and {where}; {way_out}, if you trust it, to use it"
        raise SettingsError(Problem(file=str(file), sentence=sentence))
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        sentence = f"can be written by others; look at what it holds, and run: chmod go-w {shlex.quote(str(file))}"
        raise SettingsError(Problem(file=str(file), sentence=sentence))
    return read_settings(file, origin=ORIGIN, kind=PROJECT_FILE, more_keys=("profile",))


def _places(directory: Path, home: Path | None) -> Iterator[Path]:
    """Yield the directories that may contain the file, the nearest first."""
    above = [directory, *directory.parents]
    # os.path returns False where Path raises: in a directory that cannot be searched.
    root = next((place for place in above if place == home or os.path.lexists(place / _ROOT_MARK)), directory)
    yield from above[: above.index(root) + 1]
