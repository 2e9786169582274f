"""Default settings from YAML files: cluster profiles and the project's ``hpcddp.yaml``."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Final

from pydantic import ValidationError

from hpcddp.errors import did_you_mean
from hpcddp.jobfile.cluster import FACTS, ClusterFacts
from hpcddp.jobfile.document import Document, Source, dotted, read_document, read_text
from hpcddp.jobfile.messages import error_path
from hpcddp.jobfile.problems import JobFileError, Problem, shown

JOB_KEYS = ("run_root", "resources", "environment", "checkpoint", "requeue", "launch")
"""The fields of a job file that may have default settings."""


def _read_settings(file: FilePath, *, origin: str, kind: str, another_key: str, anew: str) -> Document:
    """Read a file with default settings.

    Args:
        origin: the origin of its values in ``render --json``.
        kind: what the file is called in errors: "a profile".
        another_key: the key that it may hold besides those of a job.
        anew: what to do with a file in TOML.

    Raises:
        JobFileError: it is not YAML, or holds what does not belong there.
    """
    if file.suffix == ".toml":
        raise JobFileError.of([Problem(file=str(file), sentence=f"is TOML, and hpcddp reads YAML; {anew}")])
    text = read_text(file)
    if isinstance(text, Problem):
        raise JobFileError.of([text])
    document = read_document(text, origin=origin, file=str(file), may_be_empty=True)
    keys = (*JOB_KEYS, another_key)
    foreign_keys = [_foreign_key(key, document.source, kind, keys) for key in document.value if key not in keys]
    if document.faults or foreign_keys:
        raise JobFileError.of([*document.problems, *foreign_keys])
    return document


def _foreign_key(key: str, source: Source, kind: str, keys: Sequence[str]) -> Problem:
    instead = did_you_mean(key, keys, "write it in the job file")
    sentence = f"is not a key of {kind}, which has {', '.join(keys)}; {instead}"
    return Problem(file=source.file, line=source.line_of((key,)), key=key, sentence=sentence)


def _first_that_exists(files: Iterable[FilePath]) -> FilePath | None:
    """Return the first file that exists; one in a directory that the user may not search counts as missing."""
    # Path.exists raises there (`sudo -u`, another user's home); os.path.exists does not.
    return next((file for file in files if os.path.exists(file)), None)  # noqa: PTH110


DEFAULT_PROFILE = "default"
_NOWHERE: Final = Source()


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A cluster profile.

    Args:
        settings: its values for jobs.
        cluster: the facts about its cluster, if ``hpcddp init`` wrote it.
    """

    name: str
    settings: Document
    cluster: ClusterFacts | None


def profile_file(name: str, profiles: FilePath) -> FilePath:
    """Return the file of a profile in a directory of profiles."""
    return profiles / f"{name}.yaml"


def read_profile(name: str | None, profiles: FilePath | None, named_in: Source = _NOWHERE) -> Profile | None:
    """Read a profile.

    Args:
        name: its name; None is ``default``, which need not exist.
        profiles: the directory of profiles; None where there is none.
        named_in: the source that names it.

    Returns:
        The profile, or None where the default one does not exist.

    Raises:
        JobFileError: it does not exist, is not YAML, or has keys that no profile has.
    """
    profile_name = name or DEFAULT_PROFILE
    file = None
    if profiles is not None:
        file = _first_that_exists((profile_file(profile_name, profiles), profiles / f"{profile_name}.toml"))
    if file is None:
        if name is None:
            return None
        raise JobFileError.of([_missing(name, profiles, named_in)])
    anew = f"write it anew with hpcddp init {profile_name}"
    settings = _read_settings(file, origin=f"profile {profile_name}", kind="a profile", another_key=FACTS, anew=anew)
    facts = settings.value.pop(FACTS, None)
    try:
        cluster = None if facts is None else ClusterFacts.model_validate(facts)
    except ValidationError as error:
        problems = []
        for details in error.errors():
            what = "is missing" if details["type"] == "missing" else f"is {shown(details['input'])}"
            path = (FACTS, *error_path(details))
            sentence = f"{what}; {anew} --force, or remove the section {FACTS}"
            line = settings.source.line_of(path)
            problems.append(Problem(file=str(file), line=line, key=dotted(path), sentence=sentence))
        raise JobFileError.of(problems) from None
    return Profile(name=profile_name, settings=settings, cluster=cluster)


def _missing(name: str, profiles: FilePath | None, named_in: Source) -> Problem:
    there = sorted(file.stem for file in profiles.glob("*.yaml")) if profiles is not None else []
    known = f"the profiles are {', '.join(there)}" if there else "leave profile out"
    if profiles is not None and not there:
        known = f"make {profile_file(name, profiles)} with hpcddp init {name}, or leave profile out"
    sentence = f"is {name!r}, but no profile has that name; {did_you_mean(name, there, known)}"
    return Problem(file=named_in.file, line=named_in.line_of(("profile",)), key="profile", sentence=sentence)


PROJECT_FILE = "hpcddp.yaml"
_ROOT_MARK = ".git"


def find_project_file(directory: FilePath, *, home: FilePath | None) -> FilePath | None:
    """Return the project's file for jobs that are submitted from a directory.

    The file is in the directory or in one above it, up to the root of the project (where ``.git`` is) or up to the home
    directory. Outside of both only the directory itself counts, because others may write to the directories above.

    Args:
        directory: the directory of submission; absolute.
        home: the user's home directory; None where it is not known.
    """
    return _first_that_exists(_places(directory, home))


def read_project(file: FilePath, *, directory: FilePath, user_id: int) -> Document:
    """Read a project's file.

    Args:
        directory: the directory of submission.
        user_id: the user who submits.

    Raises:
        JobFileError: it is not YAML, has unknown keys, or other users own it or may write to it.
    """
    # It contains shell lines and is found without being named: like git, reject one that another user controls.
    status = file.stat()
    if status.st_uid not in {0, user_id}:
        where = "is here" if file.parent == directory else "lies above this directory"
        way_out = "make it your own" if file.parent == directory else "copy it here"
        sentence = f"belongs to another user and {where}; {way_out}, if you trust it, to use it"
        raise JobFileError.of([Problem(file=str(file), sentence=sentence)])
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        sentence = f"can be written by others; look at what it holds, and run: chmod go-w {shlex.quote(str(file))}"
        raise JobFileError.of([Problem(file=str(file), sentence=sentence)])
    return _read_settings(
        file,
        origin=f"project {PROJECT_FILE}",
        kind=PROJECT_FILE,
        another_key="profile",
        anew=f"write its settings into {PROJECT_FILE}, and remove this file",
    )


def _places(directory: FilePath, home: FilePath | None) -> Iterator[FilePath]:
    """Yield the files that may be the project's, the nearest first."""
    above = [directory, *directory.parents]
    # os.path returns False where FilePath raises: in a directory that cannot be searched.
    root = next((folder for folder in above if folder == home or os.path.lexists(folder / _ROOT_MARK)), directory)
    for folder in above[: above.index(root) + 1]:
        yield folder / PROJECT_FILE
        yield folder / "hpcddp.toml"
