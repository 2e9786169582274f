"""The checks of a job's environment: modules, conda, venv, uv, the interpreter and the container."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from hpcddp.jobfile.cluster import Cluster
from hpcddp.jobfile.datasets import DATASETS
from hpcddp.jobfile.environment import Container, Environment, unmountable
from hpcddp.jobfile.fields import is_reference
from hpcddp.jobfile.job import JobSpec
from hpcddp.packages import is_installed, missing_packages, pip_requirement
from hpcddp.script.syntax import script_error
from hpcddp.slurm import commands
from hpcddp.submission.request import Obstacle
from hpcddp.version import __version__

# Variables that Lmod and Environment Modules set in a shell that has their module command.
_MODULE_MARKS: Final = ("MODULESHOME", "LMOD_CMD", "MODULES_CMD", "BASH_FUNC_module%%")
_MODULE_PROFILES: Final = ("/etc/profile.d/z00_lmod.sh", "/etc/profile.d/lmod.sh", "/etc/profile.d/modules.sh")
# The import that the batch script does first; it loads neither torch nor submitit. Then the packages that are missing.
_PROBE: Final = (
    "import sys, hpcddp.supervise.begin; from importlib.util import find_spec; "
    "print(hpcddp.__version__, *(name for name in sys.argv[1:] if find_spec(name) is None))"
)
_TIMEOUT_S: Final = 60.0


def runs_in_this_python(section: Environment) -> bool:
    """Return whether a job's ranks run in the interpreter of this process."""
    others = (section.conda, section.venv, section.uv, section.container)
    return section.python in {None, sys.executable} and not any(others)


def environment_obstacles(spec: JobSpec, cluster: Cluster, environment: Mapping[str, str]) -> Iterator[Obstacle]:
    """Yield the obstacles in the job's ``environment`` section."""
    section = spec.environment
    is_local = cluster == "local"
    yield from _modules(section, environment)
    if section.stage is not None and not Path(section.stage.source).exists():
        yield Obstacle(
            sentence=f"environment.stage.source is {section.stage.source!r}, which is not here; correct it, unless the "
            "nodes have it",
            certain=is_local,
        )
    if section.conda is not None:
        yield from _conda(spec, section.conda, environment, is_local=is_local)
    elif section.venv is not None:
        instead = f"make it (python -m venv {shlex.quote(section.venv)}), or correct the path"
        yield from _virtual("venv", section.venv, Path(section.venv), spec, environment, instead)
    elif section.uv is not None:
        yield from _uv(spec, section.uv, environment)
    elif section.python is not None and Path(section.python) != Path(sys.executable):
        yield from _python(spec, section.python, environment)
    elif section.container is None:
        missing = [name for name in _packages(spec) if not is_installed(name)]
        if missing:
            yield _without_packages(spec, missing, sys.executable)


def setup_obstacles(spec: JobSpec, _: Cluster, __: Mapping[str, str]) -> Iterator[Obstacle]:
    """Yield the syntax error in ``environment.setup``, or its here-document that never ends: no task would start."""
    setup = spec.environment.setup
    error = script_error("\n".join((*setup, ""))) if setup else None
    if error is not None:
        yield Obstacle(sentence=f"environment.setup is not valid bash ({error}); correct it", can_force=False)


def _packages(spec: JobSpec) -> tuple[str, ...]:
    """Return the packages that the ranks of a job import, as they are imported; a command needs none."""
    if spec.command is not None:
        return ()
    names = ["torch", "numpy"]
    if spec.train is not None:
        dataset = DATASETS.get(spec.train.dataset)
        names += () if dataset is None else dataset.packages
        names += [] if is_reference(spec.train.model) else ["torchvision"]
    return tuple(dict.fromkeys(names))


def _without_packages(spec: JobSpec, missing: Sequence[str], python: str) -> Obstacle:
    what = "this training" if spec.entrypoint is None else "an entrypoint"
    section = spec.environment
    return Obstacle(
        sentence=missing_packages(what, missing, python),
        # Modules, shell lines and variables may add them on the node.
        certain=not (section.modules or section.setup or "PYTHONPATH" in section.env),
    )


def _modules(section: Environment, environment: Mapping[str, str]) -> Iterator[Obstacle]:
    has_modules = any(mark in environment for mark in _MODULE_MARKS) or any(
        Path(file).is_file() for file in _MODULE_PROFILES
    )
    if section.modules and not has_modules:
        yield Obstacle(
            sentence="environment.modules needs the module command, which this machine does not have; the job ends at "
            "its start unless its nodes have it",
            certain=False,
        )


def _python(spec: JobSpec, python: str, environment: Mapping[str, str]) -> Iterator[Obstacle]:
    section = spec.environment
    prepared = section.modules or section.setup or "PATH" in section.env
    if shutil.which(python, path=environment.get("PATH", os.defpath)) is None:
        yield Obstacle(
            sentence=f"environment.python is {python!r}, but this machine has no program of that name; "
            "correct it, or leave it out",
            certain=not prepared,
        )
    elif "/" in python:
        yield from _without_hpcddp(f"environment.python is {python!r}, which", Path(python), spec, environment)


def _virtual(
    field: str, value: str, venv: Path, spec: JobSpec, environment: Mapping[str, str], instead: str
) -> Iterator[Obstacle]:
    python = venv / "bin" / "python"
    if not python.exists():
        what = f"{python} does not exist" if venv.is_dir() else f"the directory {venv} does not exist"
        yield Obstacle(sentence=f"environment.{field} is {value!r}, but {what}; {instead}")
        return
    add = ["uv", "add", "--project", value] if field == "uv" else []
    named = f"environment.{field} is {value!r}, whose python"
    yield from _without_hpcddp(named, python, spec, environment, add)


def _uv(spec: JobSpec, project: str, environment: Mapping[str, str]) -> Iterator[Obstacle]:
    if not (Path(project) / "pyproject.toml").is_file():
        yield Obstacle(
            sentence=f"environment.uv is {project!r}, but {project}/pyproject.toml does not exist; "
            "give the directory of a uv project"
        )
        return
    uv = shutil.which("uv", path=environment.get("PATH"))
    sync = f"uv sync --project {shlex.quote(project)}"
    first = "" if uv else "install uv (python -m pip install uv), then "
    venv = Path(project) / environment.get("UV_PROJECT_ENVIRONMENT", ".venv")
    yield from _virtual("uv", project, venv, spec, environment, f"{first}run: {sync}")
    if uv and venv.is_dir():
        check = [uv, "sync", "--check", "--frozen", "--inexact", "--offline", "--project", project]
        if _run(check, environment).returncode != 0:
            yield Obstacle(
                sentence=f"environment.uv is {project!r}, whose environment is not what its lock file says; "
                f"run: {sync}",
                certain=False,
            )


def _conda(spec: JobSpec, name: str, environment: Mapping[str, str], *, is_local: bool) -> Iterator[Obstacle]:
    if spec.environment.modules:
        # A module may bring another conda, with other environments.
        return
    conda = shutil.which("conda", path=environment.get("PATH")) or environment.get("CONDA_EXE")
    if conda is None:
        yield Obstacle(
            sentence="environment.conda needs conda, which is neither on PATH nor in CONDA_EXE here; submit from a "
            "shell in which conda works, or load its module in environment.modules",
            certain=is_local,
        )
        return
    flag = "--name"
    if "/" in name:
        flag = "--prefix"
        prefix: Path | None = Path(name)
    else:
        prefix = _prefix_of(conda, name, environment)
    if prefix is None or not prefix.is_dir():
        yield Obstacle(
            sentence=f"environment.conda is {name!r}, but conda does not have that environment here; correct it (conda "
            f"env list shows all), or make it: conda create {flag} {shlex.quote(name)} python"
        )
        return
    python = prefix / "bin" / "python"
    if not python.exists():
        yield Obstacle(
            sentence=f"environment.conda is {name!r}, but {python} does not exist; install python and hpcddp in it"
        )
        return
    yield from _without_hpcddp(f"environment.conda is {name!r}, whose python", python, spec, environment)


def _prefix_of(conda: str, name: str, environment: Mapping[str, str]) -> Path | None:
    """Return the directory of a named environment."""
    listed = _run([conda, "env", "list", "--json"], environment)
    try:
        prefixes = [Path(prefix) for prefix in json.loads(listed.stdout)["envs"]]
    except (ValueError, KeyError, TypeError):
        return None
    if name == "base":
        for prefix in prefixes:
            # The base environment is the directory of conda itself.
            if (prefix / "condabin").is_dir():
                return prefix
    for prefix in prefixes:
        if prefix.name == name:
            return prefix
    return None


def _without_hpcddp(
    named: str, python: Path, spec: JobSpec, environment: Mapping[str, str], add: Sequence[str] = ()
) -> Iterator[Obstacle]:
    """Yield an interpreter that has no hpcddp, another version of it, or not the packages that the job needs."""
    section = spec.environment
    # ``absolute`` does not follow links: the link in a virtual environment is what selects its packages.
    probe = [str(python.absolute()), "-P", "-c", _PROBE, *_packages(spec)]
    completed = _run(probe, {**environment, **section.env})
    if completed.returncode != 0:
        installer = add or [str(python), "-m", "pip", "install"]
        install = shlex.join([*installer, pip_requirement()])
        lines = [line.strip() for line in completed.stderr.splitlines() if line.strip()]
        reason = lines[-1] if lines else "it said nothing"
        yield Obstacle(
            sentence=f"{named} cannot run hpcddp ({reason}); run: {install}",
            # Modules and shell lines may add it on the node.
            certain=not (section.modules or section.setup),
        )
        return
    version, *missing = completed.stdout.split() or [""]
    if missing and section.container is None:
        yield _without_packages(spec, missing, str(python))
    if version != __version__:
        yield Obstacle(
            sentence=f"{named} has hpcddp {version}, and the one that submits is {__version__}; install the same",
            certain=False,
        )


def _run(words: Sequence[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a program; one that cannot start, or takes more than a minute, has failed."""
    try:
        return subprocess.run(
            words,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(words, 1, stdout="", stderr=str(error))


_PYXIS_OPTION = "--container-image"


def container_obstacles(spec: JobSpec, cluster: Cluster, environment: Mapping[str, str]) -> Iterator[Obstacle]:
    """Yield the obstacles to the job's container."""
    container = spec.environment.container
    if container is None:
        return
    if container.runtime == "pyxis":
        yield from _pyxis(cluster, environment)
    elif not (spec.environment.modules or spec.environment.setup):
        yield from _program(container.runtime, cluster, environment)
    yield from _files(container, cluster)


def _pyxis(cluster: Cluster, environment: Mapping[str, str]) -> Iterator[Obstacle]:
    if cluster == "local":
        yield Obstacle(
            sentence="environment.container.runtime is pyxis, which is a part of srun, but a run on this "
            "machine does not use srun; write runtime: apptainer, or submit to Slurm"
        )
    elif not commands.srun_knows(_PYXIS_OPTION, environment):
        yield Obstacle(
            sentence="environment.container.runtime is pyxis, and srun has no --container-image here; the job ends at "
            "its start unless its nodes have pyxis (runtime: apptainer is the other choice)",
            certain=False,
        )


def _program(runtime: str, cluster: Cluster, environment: Mapping[str, str]) -> Iterator[Obstacle]:
    if shutil.which(runtime, path=environment.get("PATH")) is not None:
        return
    is_local = cluster == "local"
    yield Obstacle(
        sentence=f"environment.container.runtime is {runtime}, which was not found here; "
        + ("install it, " if is_local else "the job ends at its start unless its nodes have it; ")
        + "load its module in environment.modules, or write the name of the program there (apptainer, singularity)",
        certain=is_local,
    )


def _files(container: Container, cluster: Cluster) -> Iterator[Obstacle]:
    directory = Path.cwd()
    if (held := unmountable(str(directory), container.runtime)) is not None:
        yield Obstacle(
            sentence=f"the directory of submission is {str(directory)!r}, which holds {held}, and {container.runtime} "
            "cannot mount such a path; submit from another directory"
        )
    if container.image_file is not None and not Path(container.image_file).exists():
        yield Obstacle(
            sentence=f"environment.container.image is {container.image!r}, but that file does not exist; correct it, "
            "or name an image in a registry (docker://...)"
        )
    for mount in container.mounted:
        if not Path(mount.source).exists():
            yield Obstacle(
                sentence=f"environment.container.mounts names {mount.source!r}, which is not here; correct it, unless "
                "the nodes have it",
                certain=cluster == "local",
            )
