"""Cluster profiles: TOML files whose values a job file takes where it gives none, with what is known of the cluster."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path as FilePath

from hpcddp.spec.cluster import ClusterFacts, read_facts
from hpcddp.spec.names import nearest
from hpcddp.spec.problems import Problem
from hpcddp.spec.settings import Settings, SettingsError, read_settings

DEFAULT_PROFILE = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A profile.

    Args:
        name: its name.
        settings: what it holds.
        cluster: what it knows of its cluster, where it was written by ``hpcddp init``.
    """

    name: str
    settings: Settings
    cluster: ClusterFacts | None


def profile_file(name: str, profiles: FilePath) -> FilePath:
    """Return the file of a profile in a directory of profiles."""
    return profiles / f"{name}.toml"


def read_profile(name: str | None, profiles: FilePath | None) -> Profile | None:
    """Read a profile.

    Args:
        name: its name; None is ``default``, which need not exist.
        profiles: the directory of profiles; None where there is none.

    Returns:
        The profile, or None where the default one does not exist.

    Raises:
        SettingsError: it does not exist, is not TOML, or holds what no profile holds.
    """
    known = name or DEFAULT_PROFILE
    file = None if profiles is None else profile_file(known, profiles)
    if file is None or not _is_there(file):
        if name is None:
            return None
        raise SettingsError(_missing(name, profiles))
    settings = read_settings(file, origin=f"profile {known}", kind="a profile", more_keys=("cluster",))
    return Profile(name=known, settings=settings, cluster=read_facts(settings, name=known))


def _is_there(file: FilePath) -> bool:
    """Return whether there is such a file; one that cannot be seen is not there (`sudo -u`, a home of another's)."""
    try:
        return file.exists()
    except OSError:
        return False


def _missing(name: str, profiles: FilePath | None) -> Problem:
    there = sorted(file.stem for file in profiles.glob("*.toml")) if profiles is not None else []
    near = nearest(name, there)
    known = f"there are {', '.join(there)}" if there else "leave profile out"
    if profiles is not None and not there:
        known = f"make {profile_file(name, profiles)} with hpcddp init {name}, or leave profile out"
    instead = f"did you mean {near}?" if near else known
    return Problem(file="", key="profile", value=name, sentence=f"is {name!r}, and there is no such profile; {instead}")
