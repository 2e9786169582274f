"""Resolve a job file, its default settings and the command line into one job, and record the origin of each value.

Paths are expanded here: ``$NAME``, ``${NAME}`` and a leading ``~``. What only a node can expand is left to it:
``environment.stage.target``, and ``train.data_dir`` below it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path as FilePath
from pathlib import PurePath
from typing import Any, Final

from hpcddp.jobfile.cluster import ClusterFacts
from hpcddp.jobfile.document import MOST_VALUES, Document, Path, Source, dotted, path_of, read_document, read_text
from hpcddp.jobfile.field_facts import facts_of
from hpcddp.jobfile.fields import INTERACTIVE_JOB_NAMES, PROFILE_PATTERN, UNNAMED_JOB
from hpcddp.jobfile.job import JobSpec, field_paths, leaf_paths
from hpcddp.jobfile.merge import COMMAND_LINE, JOB_FILE, MergedValues
from hpcddp.jobfile.overrides import Override, read_override
from hpcddp.jobfile.placeholders import SHELLS, shell_script, shell_text_indices
from hpcddp.jobfile.problems import JobFileError, Problem
from hpcddp.jobfile.profiles import Profile, read_profile, read_project
from hpcddp.jobfile.validation import check_values


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedJob:
    """A job with all its values, and the origin of each.

    Args:
        origins: where each field came from, by key path: "job file", "--set", an option's name, "command line",
            "project hpcddp.yaml", "profile NAME" or "default".
        profile: the name of the profile that it uses; None where there is none.
        cluster: the facts about the cluster in that profile.
        named: the key paths that the command line sets, each as it is written there.
    """

    spec: JobSpec
    origins: Mapping[str, str]
    profile: str | None = None
    cluster: ClusterFacts | None = None
    named: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultSettings:
    """Locations of the files with default settings for jobs.

    Args:
        profiles: the directory of cluster profiles; None where there is none.
        project: the project's ``hpcddp.yaml``; None where there is none.
        directory: the directory of submission.
        user_id: the user who submits.
        environment: the variables that paths may hold.
    """

    profiles: FilePath | None = None
    project: FilePath | None = None
    directory: FilePath = FilePath()
    user_id: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)


NO_DEFAULTS = DefaultSettings()


def load_job(
    path: FilePath | Mapping[str, Any] | None,
    *,
    overrides: Sequence[str] = (),
    options: Sequence[Override | Problem] = (),
    defaults: DefaultSettings = NO_DEFAULTS,
) -> ResolvedJob:
    """Read a job file, or build a job from the command line alone.

    Args:
        path: the YAML file, or its content; None for a job without one.
        overrides: ``key.path=value`` each; the last of two for one key counts.
        options: values of other command-line options; ``overrides`` have precedence over them.
        defaults: the files with default settings.

    Returns:
        The job. Precedence, highest first: overrides, options, job file, ``hpcddp.yaml``, profile, field defaults.

    Raises:
        JobFileError: with every problem of the files and the overrides.
    """
    if path is None:
        document = Document(value={}, source=Source(origin=JOB_FILE, file=f"the {COMMAND_LINE}"))
    elif isinstance(path, FilePath):
        document = _read_file(path)
    else:
        document = Document(value=dict(path), source=Source(origin=JOB_FILE, file="the job"))

    sets, problems = _read_command_line(overrides, options)
    problems += document.problems
    merged = MergedValues()
    profile: Profile | None = None
    try:
        profile = _merge_defaults(merged, document, sets, defaults)
    except JobFileError as error:
        problems += error.problems
    merged.merge(document.value, document.source)
    if path is None:
        _name_after_command(merged, sets)
    wrong = [fault.path for fault in document.faults]
    wrong += [tuple(problem.key.split(".")) for problem in problems if problem.key]
    return _resolve(merged, document.source, sets, problems, wrong, profile, environment=defaults.environment)


_OPTIMIZER: Final = ("train", "optimizer", "name")


def change_job(
    spec: JobSpec,
    *,
    file: str,
    overrides: Sequence[str] = (),
    options: Sequence[Override | Problem] = (),
    profiles: FilePath | None = None,
    environment: Mapping[str, str],
) -> ResolvedJob:
    """Return a resolved job with the changes of the command line; default settings are not merged into it again.

    Args:
        file: the name of the resolved job in errors.
        overrides: ``key.path=value`` each; the last of two for one key counts.
        options: values of other command-line options; ``overrides`` have precedence over them.
        profiles: the directory of cluster profiles, for the facts about the cluster; None where there is none.
        environment: the variables that paths in the changes may hold.

    Raises:
        JobFileError: with every problem of the changes.
    """
    sets, problems = _read_command_line(overrides, options)
    source = Source(origin=JOB_FILE, file=file)
    merged = MergedValues()
    merged.merge(spec.values(), source)
    optimizer = None if spec.train is None else spec.train.optimizer.name
    if optimizer and any(override.path == _OPTIMIZER and override.value != optimizer for override in sets):
        # The constants of one optimizer are no fields of another.
        merged.assign(_OPTIMIZER[:-1], {}, source)
    wrong = [tuple(problem.key.split(".")) for problem in problems if problem.key]
    profile: Profile | None = None
    # The job has all its values: without the profile only the checks against the cluster's facts are left out.
    with suppress(JobFileError):
        profile = read_profile(spec.profile, profiles)
    return _resolve(merged, source, sets, problems, wrong, profile, environment=environment)


def _read_command_line(
    overrides: Sequence[str], options: Sequence[Override | Problem]
) -> tuple[list[Override], list[Problem]]:
    results = [*options, *(read_override(text) for text in overrides)]
    sets = [result for result in results if isinstance(result, Override)]
    return sets, [result for result in results if isinstance(result, Problem)]


def _resolve(
    merged: MergedValues,
    source: Source,
    sets: Sequence[Override],
    problems: Sequence[Problem],
    wrong: Sequence[Path],
    profile: Profile | None,
    *,
    environment: Mapping[str, str],
) -> ResolvedJob:
    """Assign the values of the command line, and check the job.

    Args:
        wrong: the key paths whose values have problems already.

    Raises:
        JobFileError: with ``problems`` and every problem of the values.
    """
    for override in sets:
        merged.assign(override.path, override.value, override.source)
        wrong = [wrong_path for wrong_path in wrong if wrong_path[: len(override.path)] != override.path]
    problems_of_paths = list(expand_paths(merged, environment, source))
    wrong = [*wrong, *(path_of(problem.key) for problem in problems_of_paths)]
    spec, problems_of_values = check_values(merged, source, wrong)
    all_problems = [*problems, *problems_of_paths, *problems_of_values]
    if all_problems or spec is None:
        raise JobFileError.of(all_problems)
    return ResolvedJob(
        spec=spec,
        origins=dict(_origins(spec, merged)),
        profile=None if profile is None else profile.name,
        cluster=None if profile is None else profile.cluster,
        named=frozenset(dotted(override.path) for override in sets),
    )


def _read_file(path: FilePath) -> Document:
    text = read_text(path)
    if isinstance(text, Problem):
        raise JobFileError.of([text])
    if text.startswith("#!"):
        raise JobFileError.of([Problem(file=str(path), line=1, sentence=_script_sentence(path, text))])
    try:
        return read_document(text, origin=JOB_FILE, file=str(path), most_values=MOST_VALUES)
    except JobFileError:
        if _DIRECTIVE.search(text):
            raise JobFileError.of([Problem(file=str(path), sentence=_script_sentence(path, text))]) from None
        raise


_DIRECTIVE: Final = re.compile("^#SBATCH", re.MULTILINE)


def is_sbatch_script(path: FilePath) -> bool:
    """Return whether a file is a script with ``#SBATCH`` lines."""
    text = read_text(path)
    return isinstance(text, str) and text.startswith("#!") and _DIRECTIVE.search(text) is not None


def _script_sentence(path: FilePath, text: str) -> str:
    if _DIRECTIVE.search(text):
        command = shlex.join(["hpcddp", "init", "--from", str(path)])
        return f"is a script for sbatch, not a job file; make a job file from it: {command}"
    return f"is a script, not a job file; to run it in a job, write its interpreter before it, as in: -- bash {path}"


def _merge_defaults(
    merged: MergedValues, job_file: Document, sets: Sequence[Override], defaults: DefaultSettings
) -> Profile | None:
    """Merge the profile, then the project's file, and return the profile."""
    project = Document(value={}, source=job_file.source)
    if defaults.project is not None:
        project = read_project(defaults.project, directory=defaults.directory, user_id=defaults.user_id)
    files = (project, job_file)
    naming = [(file.value["profile"], file.source) for file in files if "profile" in file.value]
    naming += [(override.value, override.source) for override in sets if override.path == ("profile",)]
    name, source = naming[-1] if naming else (None, job_file.source)
    profile: Profile | None = None
    # An invalid name is reported with the other problems of the fields.
    if name is None or (isinstance(name, str) and re.fullmatch(PROFILE_PATTERN, name, re.ASCII)):
        profile = read_profile(name, defaults.profiles, source)
    if profile is not None:
        merged.merge(profile.settings.value, profile.settings.source)
    merged.merge(project.value, project.source)
    return profile


def _name_after_command(merged: MergedValues, sets: Sequence[Override]) -> None:
    command = next((override.value for override in sets if override.path == ("command",)), None)
    # Anything else is refused as a command.
    is_words = isinstance(command, list) and all(isinstance(word, str) for word in command)
    if command and is_words:
        merged.assign(("name",), name_of_command(command), Source(origin=COMMAND_LINE, file=f"the {COMMAND_LINE}"))


_SCRIPT = re.compile(r".+\.(?:py|sh|bash|pl|R|jl)", re.ASCII)
_FOREIGN = re.compile(r"[^A-Za-z0-9._-]+", re.ASCII)
_LONGEST = 64


def name_of_command(command: Sequence[str]) -> str:
    """Return a name for a job: that of its script, of its module after ``-m``, or else of its program.

    It is never that of a shell, nor one of ``INTERACTIVE_JOB_NAMES``.
    """
    words = [word for given in _with_shell_text(command) for word in given]
    module = next((word for flag, word in pairwise(words) if flag == "-m"), None)
    script = next((PurePath(word).stem for word in words if _SCRIPT.fullmatch(word)), None)
    name = _FOREIGN.sub("-", script or module or _program_name(command)).lstrip("._-")[:_LONGEST]
    return UNNAMED_JOB if not name or name in INTERACTIVE_JOB_NAMES else name


def _program_name(command: Sequence[str]) -> str:
    """Return the name of a program; of a shell, that of its script, if it is given one."""
    program = PurePath(command[0]).name
    if program not in SHELLS:
        return program
    return PurePath(shell_script(command) or "").stem


def _with_shell_text(command: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield the words of a command; of the text after ``bash -c``, the words in it."""
    text_indices = shell_text_indices(command)
    for index, word in enumerate(command):
        yield word.split() if index in text_indices else [word]


def _origins(spec: JobSpec, merged: MergedValues) -> Iterator[tuple[str, str]]:
    for path, value in leaf_paths(spec):
        yield dotted(path), merged.origin(path)
        for key in value if isinstance(value, Mapping) else ():
            yield dotted((*path, key)), merged.origin((*path, key))


def shared_run_root(defaults: DefaultSettings) -> str | None:
    """Return ``run_root`` of jobs that do not give it, or None where no default setting gives it.

    Raises:
        JobFileError: a file with default settings cannot be used.
    """
    merged = MergedValues()
    no_job_file = Document(value={}, source=Source(origin=JOB_FILE, file=""))
    _merge_defaults(merged, no_job_file, (), defaults)
    if problems := list(expand_paths(merged, defaults.environment, no_job_file.source)):
        raise JobFileError.of(problems)
    return _text(merged, ("run_root",)) or None


_STAGE_TARGET: Final[Path] = ("environment", "stage", "target")
_VARIABLE: Final = re.compile(r"\$(?:\{([A-Za-z_][A-Za-z0-9_]*)\}|([A-Za-z_][A-Za-z0-9_]*))", re.ASCII)
_HOME: Final = re.compile("~(?=/|$)")


def expand_paths(merged: MergedValues, environment: Mapping[str, str], fallback: Source) -> Iterator[Problem]:
    """Expand the paths in place, and yield a problem for each variable that is not set, and what only a shell expands.

    Args:
        merged: the values of the job.
        environment: the variables of the shell that submits the job.
        fallback: the source of values that have none.
    """
    target = _text(merged, _STAGE_TARGET)
    for path, field_info in field_paths():
        text = _text(merged, path) if facts_of(field_info).is_expanded else None
        if text is None or (path == ("train", "data_dir") and target is not None and text.startswith(target)):
            continue
        meant = _HOME.sub("$HOME", text, count=1) if text.startswith("~") else text
        sentence = _why_unusable(text, meant, environment)
        if sentence is not None:
            source = merged.owner(path) or fallback
            yield Problem(file=source.file, line=source.line_of(path), key=dotted(path), sentence=sentence)
        elif meant != text or "$" in text:
            expanded = _VARIABLE.sub(lambda found: environment[found[1] or found[2]], meant)
            merged.leaves[path] = (expanded, merged.leaves[path][1])


def _why_unusable(text: str, meant: str, environment: Mapping[str, str]) -> str | None:
    unset = [name for name in _names(meant) if not environment.get(name)]
    if unset:
        return f"is {text!r}, and {unset[0]} is not set here; export it, or write the whole path"
    if "$" in _VARIABLE.sub("", meant) or meant.startswith("~"):
        return f"is {text!r}, and hpcddp expands only $NAME, ${{NAME}} and ~/ in it; write the whole path"
    return None


def _text(merged: MergedValues, path: Path) -> str | None:
    value = merged.leaves[path][0] if path in merged.leaves else None
    return value if isinstance(value, str) else None


def _names(text: str) -> list[str]:
    return [braced or plain for braced, plain in _VARIABLE.findall(text)]
