"""Rules between the fields of ``environment``, and what a container needs of the rest of the job."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from hpcddp.spec.environment import ACTIVATED, Container, unmountable
from hpcddp.spec.job import JobSpec

# Names that bash keeps read-only or changes itself (man bash, Shell Variables).
SHELL_VARIABLES = frozenset(
    {
        "_", "BASHOPTS", "BASHPID", "BASH_ALIASES", "BASH_ARGC", "BASH_ARGV", "BASH_CMDS", "BASH_COMMAND",
        "BASH_LINENO", "BASH_SOURCE", "BASH_SUBSHELL", "BASH_VERSINFO", "DIRSTACK", "EPOCHREALTIME",
        "EPOCHSECONDS", "EUID", "FUNCNAME", "GROUPS", "HISTCMD", "LINENO", "OPTIND", "PPID", "RANDOM",
        "SECONDS", "SHELLOPTS", "SHLVL", "SRANDOM", "UID",
    }
)  # fmt: skip
OWN_PREFIX = "HPCDDP_"
# The one of our own variables that a job file sets: faults on purpose, for tests of a job.
FAULTS_VARIABLE = "HPCDDP_FAULTS"

IMAGE_SUFFIXES: Final = (".sif", ".sqsh", ".squashfs", ".simg", ".img")


def one_environment(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Yield which of conda, venv, uv, an interpreter and a container exclude each other."""
    environment = spec.environment
    given = [name for name in ACTIVATED if getattr(environment, name) is not None]
    if not given:
        return
    first = given[0]
    for extra in given[1:]:
        yield f"environment.{extra}", f"is given, and environment.{first} is given too; keep one of them"
    if environment.container is not None:
        sentence = (
            "is given, and the tasks run in environment.container, which has an interpreter of its own; remove it, or "
            "write environment.container.python for an interpreter in the container"
        )
        yield f"environment.{first}", sentence
    elif environment.python is not None:
        sentence = (
            f"is given, and environment.{first} has an interpreter of its own; keep one of them (null takes a "
            "profile's value away)"
        )
        yield "environment.python", sentence


def paths_are_usable(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Yield paths that only a shell would understand, and those that PATH cannot carry."""
    environment, container = spec.environment, spec.environment.container
    paths = {f"environment.{name}": getattr(environment, name) for name in ACTIVATED}
    if container is not None:
        paths["environment.container.image"] = container.image_file
    for key, path in paths.items():
        if path is not None and (path.startswith("~") or "$" in path):
            yield key, f"is {path!r}, and nothing is expanded in it; write the whole path"
        elif path is not None and ":" in path and key != "environment.container.image":
            yield key, f"is {path!r}, and PATH cannot carry a colon; choose a directory without"


def container_shows_the_run(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Yield the paths that the container's runtime cannot mount."""
    container = spec.environment.container
    if container is None:
        return
    places = [("run_root", spec.run_root)]
    places += [("environment.container.mounts", f"{mount.source}{mount.target}") for mount in container.mounted]
    if (data := data_mount_of(spec, container)) is not None:
        places.append(("train.data_dir", data))
    for key, path in places:
        if (held := unmountable(path, container.runtime)) is not None:
            yield key, f"holds {held}, and {container.runtime} cannot mount such a path; choose one without"


def data_mount_of(spec: JobSpec, container: Container) -> str | None:
    """Return the data directory that has to be mounted as it is, None where there is none."""
    data_dir = spec.train.data_dir if spec.train is not None else None
    if data_dir is None or not data_dir.startswith("/"):
        return None
    shown = any(mount.host_path(data_dir) is not None for mount in container.mounted)
    return None if shown else data_dir


def image_is_found(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Yield an image that pyxis would look for in a registry although it is a file."""
    container = spec.environment.container
    if container is None or container.image_file is not None:
        return
    if Path(container.image).suffix in IMAGE_SUFFIXES:
        sentence = (
            f"is {container.image!r}, and pyxis takes a name without a slash in front for one in a registry; write "
            f"./{container.image}"
        )
        yield "environment.container.image", sentence


def variable_names(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Yield the names of variables that a script cannot set."""
    environment = spec.environment
    named = [(f"environment.env.{name}", name) for name in environment.env]
    named += [("environment.pass_env", name) for name in environment.pass_env]
    for key, name in named:
        if name in SHELL_VARIABLES:
            yield key, f"names {name}, which bash keeps for itself; remove it"
        elif name.startswith(OWN_PREFIX) and name != FAULTS_VARIABLE:
            yield key, f"names {name}, and hpcddp keeps {OWN_PREFIX}* for itself; rename it"
    for name in environment.pass_env:
        if name in environment.env:
            yield "environment.pass_env", f"names {name}, which environment.env sets too; keep one of the two"
