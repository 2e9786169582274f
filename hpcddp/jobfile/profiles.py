"""Default settings from TOML files: cluster profiles and the project's ``hpcddp.toml``."""

from __future__ import annotations

import os
import re
import shlex
import stat
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time
from pathlib import Path as FilePath
from typing import Any

from pydantic import ValidationError

from hpcddp.errors import did_you_mean
from hpcddp.jobfile.cluster import FACTS, ClusterFacts
from hpcddp.jobfile.document import Path, dotted, read_text
from hpcddp.jobfile.merge import Source
from hpcddp.jobfile.problems import Problem, shown

JOB_KEYS = ("run_root", "resources", "environment", "checkpoint", "requeue", "launch")
"""The fields of a job file that may have default settings."""

_KEY = re.compile(r"""\s*["']?([A-Za-z0-9_.-]+)["']?\s*=""")
_AT_LINE = re.compile(r" \(at line ([0-9]+), column [0-9]+\)")


class SettingsError(ValueError):
    """A file with default settings cannot be used.

    Args:
        problems: why, each with its place.
    """

    def __init__(self, *problems: Problem) -> None:
        super().__init__("; ".join(problem.sentence for problem in problems))
        self.problems = problems


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The content of a file with default settings.

    Args:
        values: the whole file.
        source: its name in errors and origins.
    """

    values: Mapping[str, Any]
    source: Source

    @property
    def job(self) -> Mapping[str, Any]:
        """The values that are defaults of a job."""
        return {key: value for key, value in self.values.items() if key in (*JOB_KEYS, "profile")}


def read_settings(file: FilePath, *, origin: str, kind: str, more_keys: Sequence[str] = ()) -> Settings:
    """Read a file with default settings.

    Args:
        origin: the origin of its values in ``render --json``.
        kind: what the file is called in errors: "a profile".
        more_keys: the keys that it may hold besides those of a job.

    Raises:
        SettingsError: it is not TOML, or holds what does not belong there.
    """
    text = read_text(file)
    if isinstance(text, Problem):
        raise SettingsError(text)
    values = _parse(text, file)
    source = Source(origin=origin, file=str(file), lines=dict(_find_lines(text)))
    keys = (*JOB_KEYS, *more_keys)
    problems = [_foreign_key(key, source, kind, keys) for key in values if key not in keys]
    problems += [_clock_value(path, source) for path, value in _leaves(values) if isinstance(value, date | time)]
    if problems:
        raise SettingsError(*problems)
    return Settings(values=values, source=source)


def _parse(text: str, file: FilePath) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        match = _AT_LINE.search(str(error))
        sentence = f"is not valid TOML ({_AT_LINE.sub('', str(error))}); check quotes, brackets and equals signs"
        raise SettingsError(Problem(file=str(file), line=int(match[1]) if match else None, sentence=sentence)) from None


def _foreign_key(key: str, source: Source, kind: str, keys: Sequence[str]) -> Problem:
    instead = did_you_mean(key, keys, "write it in the job file")
    sentence = f"is not a key of {kind}, which has {', '.join(keys)}; {instead}"
    return Problem(file=source.file, line=source.line_of((key,)), key=key, sentence=sentence)


def _clock_value(path: Path, source: Source) -> Problem:
    sentence = "is a date or time of TOML, expected a string; put double quotes around it"
    return Problem(file=source.file, line=source.line_of(path), key=dotted(path), sentence=sentence)


def _leaves(values: Mapping[str, Any], above: Path = ()) -> Iterator[tuple[Path, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*above, key))
        else:
            yield (*above, key), value


def _find_lines(text: str) -> Iterator[tuple[Path, int]]:
    """Yield the line of each key, found by its form: tomllib does not report lines, and errors need them."""
    table: Path = ()
    for number, line in enumerate(text.splitlines(), start=1):
        key = _KEY.match(line)
        if line.lstrip().startswith("["):
            table = _header(line) or table
            yield table, number
        elif key is not None:
            yield (*table, *key[1].split(".")), number


def _header(line: str) -> Path | None:
    """Return the key path of a table's header, parsed as a TOML document of one line."""
    try:
        below: Any = tomllib.loads(line)
    except tomllib.TOMLDecodeError:
        return None
    path: list[str] = []
    while isinstance(below, dict) and below:
        ((key, below),) = below.items()
        path.append(key)
    return tuple(path)


DEFAULT_PROFILE = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A cluster profile.

    Args:
        cluster: the facts about its cluster, if ``hpcddp init`` wrote it.
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
        SettingsError: it does not exist, is not TOML, or has keys that no profile has.
    """
    profile_name = name or DEFAULT_PROFILE
    file = None if profiles is None else profile_file(profile_name, profiles)
    if file is None or not _is_there(file):
        if name is None:
            return None
        raise SettingsError(_missing(name, profiles))
    settings = read_settings(file, origin=f"profile {profile_name}", kind="a profile", more_keys=("cluster",))
    return Profile(name=profile_name, settings=settings, cluster=_read_facts(settings, name=profile_name))


def _is_there(file: FilePath) -> bool:
    """Return whether a file exists; False where the directory cannot be searched (`sudo -u`, another user's home)."""
    try:
        return file.exists()
    except OSError:
        return False


def _missing(name: str, profiles: FilePath | None) -> Problem:
    there = sorted(file.stem for file in profiles.glob("*.toml")) if profiles is not None else []
    known = f"the profiles are {', '.join(there)}" if there else "leave profile out"
    if profiles is not None and not there:
        known = f"make {profile_file(name, profiles)} with hpcddp init {name}, or leave profile out"
    instead = did_you_mean(name, there, known)
    return Problem(file="", key="profile", value=name, sentence=f"is {name!r}, but no profile has that name; {instead}")


PROJECT_FILE = "hpcddp.toml"
ORIGIN = f"project {PROJECT_FILE}"
_ROOT_MARK = ".git"


def find_project_file(directory: FilePath, *, home: FilePath | None) -> FilePath | None:
    """Return the project's file for jobs that are submitted from a directory.

    The file is in the directory or in one above it, up to the root of the project (where ``.git`` is) or up to the home
    directory. Outside of both only the directory itself counts, because others may write to the directories above.

    Args:
        directory: the directory of submission; absolute.
        home: the user's home directory; None where it is not known.
    """
    # Path.is_file raises where the user may not look into a directory; os.path.isfile does not.
    return next((file for place in _places(directory, home) if os.path.isfile(file := place / PROJECT_FILE)), None)  # noqa: PTH113


def read_project(file: FilePath, *, directory: FilePath, user_id: int) -> Settings:
    """Read a project's file.

    Args:
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


def _places(directory: FilePath, home: FilePath | None) -> Iterator[FilePath]:
    """Yield the directories that may contain the file, the nearest first."""
    above = [directory, *directory.parents]
    # os.path returns False where FilePath raises: in a directory that cannot be searched.
    root = next((folder for folder in above if folder == home or os.path.lexists(folder / _ROOT_MARK)), directory)
    yield from above[: above.index(root) + 1]


def _read_facts(settings: Settings, *, name: str) -> ClusterFacts | None:
    """Return the facts in a profile, or None if it has none.

    Args:
        settings: the content of the profile.

    Raises:
        SettingsError: facts are missing or invalid; lists all of them.
    """
    facts = settings.values.get(FACTS)
    if facts is None:
        return None
    try:
        return ClusterFacts.model_validate(facts)
    except ValidationError as error:
        raise SettingsError(*(_no_fact(details, settings, name) for details in error.errors())) from None


def _no_fact(details: Mapping[str, object], settings: Settings, name: str) -> Problem:
    location = details["loc"]
    path = (FACTS, *(str(part) for part in location)) if isinstance(location, tuple) else (FACTS,)
    missing = details["type"] == "missing"
    what = "is missing" if missing else f"is {shown(details['input'])}, which hpcddp init would not have written"
    return Problem(
        file=settings.source.file,
        line=settings.source.line_of(path),
        key=dotted(path),
        sentence=f"{what}; write the file anew with hpcddp init {name} --force, or remove the table [{FACTS}]",
    )
