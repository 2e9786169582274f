"""From a job file, a profile and overrides to one job, with where each of its values came from."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import Any

from hpcddp.spec.cluster import ClusterFacts
from hpcddp.spec.command_name import name_of_command
from hpcddp.spec.document import Document, DocumentError, Path, dotted, read_document
from hpcddp.spec.fields import PROFILE_PATTERN
from hpcddp.spec.fieldtree import leaf_paths
from hpcddp.spec.job import JobSpec
from hpcddp.spec.layers import COMMAND_LINE, DEFAULT, JOB_FILE, Layers, Source
from hpcddp.spec.overrides import Override, read_override
from hpcddp.spec.problems import JobFileError, Problem
from hpcddp.spec.profiles import Profile, read_profile
from hpcddp.spec.project import read_project
from hpcddp.spec.settings import Settings, SettingsError
from hpcddp.spec.textfile import read_text
from hpcddp.spec.validation import check_values


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedJob:
    """A job with everything filled in.

    Args:
        spec: the job.
        origins: where each field came from, by key path: "job file", "--set", an option's name, "command line",
            "project hpcddp.toml", "profile NAME" or "default".
        profile: the name of the profile under it; None where there is none.
        cluster: what that profile knows of its cluster.
    """

    spec: JobSpec
    origins: Mapping[str, str]
    profile: str | None = None
    cluster: ClusterFacts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Underlay:
    """Where the values lie that a job takes where it gives none.

    Args:
        profiles: the directory of cluster profiles; None where there is none.
        project: the project's ``hpcddp.toml``; None where there is none.
        directory: the directory of submission.
        user_id: whose job it is.
    """

    profiles: FilePath | None = None
    project: FilePath | None = None
    directory: FilePath = FilePath()
    user_id: int = 0


NOTHING = Underlay()


def load_job(
    path: FilePath | None,
    *,
    overrides: Sequence[str] = (),
    options: Sequence[Override | Problem] = (),
    underlay: Underlay = NOTHING,
) -> ResolvedJob:
    """Read a job file, or make a job of what the command line says.

    Args:
        path: the YAML file; None where the job has none.
        overrides: ``key.path=value`` each, the last of two for one key counts.
        options: what options of their own say; ``overrides`` come after them.
        underlay: what lies under it.

    Returns:
        The job: options and overrides over the job file over ``hpcddp.toml`` over the profile over the defaults.

    Raises:
        JobFileError: with every problem of the files and the overrides.
    """
    file = Document(value={}, lines={}, written={}, faults=()) if path is None else _read_file(path)
    source = Source(
        origin=JOB_FILE,
        file=f"the {COMMAND_LINE}" if path is None else str(path),
        lines=file.lines,
        written=file.written,
    )
    results = [*options, *(read_override(text) for text in overrides)]
    sets = [result for result in results if isinstance(result, Override)]
    problems = [result for result in results if isinstance(result, Problem)]
    problems += [_of_fault(fault, source) for fault in file.faults]
    layers = Layers()
    profile: Profile | None = None
    try:
        profile = _lay_under(layers, file.value, source, sets, underlay)
    except SettingsError as error:
        problems += error.problems
    layers.lay(file.value, source)
    if path is None:
        _name_after_command(layers, sets)
    wrong = [fault.path for fault in file.faults]
    wrong += [tuple(problem.key.split(".")) for problem in problems if problem.key]
    for override in sets:
        layers.assign(override.path, override.value, override.source)
        wrong = [fault for fault in wrong if fault[: len(override.path)] != override.path]
    spec, found = check_values(layers, source, wrong)
    if problems or found or spec is None:
        raise JobFileError.of([*problems, *found])
    return ResolvedJob(
        spec=spec,
        origins=dict(_origins(spec, layers)),
        profile=None if profile is None else profile.name,
        cluster=None if profile is None else profile.cluster,
    )


def shared_run_root(underlay: Underlay) -> str | None:
    """Return where jobs keep their runs that do not say it themselves, or None where nothing under them says it either.

    Raises:
        JobFileError: a file under them cannot be used.
    """
    layers, nothing = Layers(), Source(origin=JOB_FILE, file="")
    try:
        _lay_under(layers, {}, nothing, (), underlay)
    except SettingsError as error:
        raise JobFileError.of(error.problems) from None
    found = layers.value.get("run_root")
    return found if isinstance(found, str) and found else None


def _name_after_command(layers: Layers, sets: Sequence[Override]) -> None:
    command = next((override.value for override in sets if override.path == ("command",)), None)
    if command:
        layers.assign(("name",), name_of_command(command), Source(origin=COMMAND_LINE, file=f"the {COMMAND_LINE}"))


def _read_file(path: FilePath) -> Document:
    text = read_text(path)
    if isinstance(text, Problem):
        raise JobFileError.of([text])
    try:
        return read_document(text)
    except DocumentError as error:
        raise JobFileError.of(
            [Problem(file=str(path), line=error.line, key=dotted(error.path), sentence=error.sentence)]
        ) from None


def _of_fault(fault: DocumentError, source: Source) -> Problem:
    return Problem(file=source.file, line=fault.line, key=dotted(fault.path), sentence=fault.sentence)


def _lay_under(
    layers: Layers, values: Mapping[str, Any], source: Source, sets: Sequence[Override], underlay: Underlay
) -> Profile | None:
    """Lay the profile, and over it the project's file, and return the profile."""
    project: Settings | None = None
    if underlay.project is not None:
        project = read_project(underlay.project, directory=underlay.directory, user_id=underlay.user_id)
    named = [(project.values.get("profile"), project.source)] if project is not None else []
    named += [(values["profile"], source)] if "profile" in values else []
    named += [(override.value, override.source) for override in sets if override.path == ("profile",)]
    name, place = named[-1] if named else (None, source)
    profile: Profile | None = None
    # Another kind of name is a problem of the field, found with the others.
    if name is None or (isinstance(name, str) and re.fullmatch(PROFILE_PATTERN, name, re.ASCII)):
        profile = _read_profile(name, place, underlay)
    for settings in (profile.settings if profile is not None else None, project):
        if settings is not None:
            layers.lay(settings.job, settings.source)
    return profile


def _read_profile(name: str | None, place: Source, underlay: Underlay) -> Profile | None:
    """Read a profile; a name that is wrong is a problem where it stands."""
    try:
        return read_profile(name, underlay.profiles)
    except SettingsError as error:
        line = place.line_of(("profile",))
        problems = (one if one.file else replace(one, file=place.file, line=line) for one in error.problems)
        raise SettingsError(*problems) from None


def _origins(spec: JobSpec, layers: Layers) -> Iterator[tuple[str, str]]:
    for path, value in leaf_paths(spec):
        yield dotted(path), _origin(path, layers)
        for key in value if isinstance(value, Mapping) else ():
            yield dotted((*path, key)), _origin((*path, key), layers)


def _origin(path: Path, layers: Layers) -> str:
    owner = layers.owners.get(path)
    return owner.origin if owner is not None else DEFAULT
