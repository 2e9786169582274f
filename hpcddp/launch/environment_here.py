"""Whether modules, conda, venv, uv or an interpreter are what a job needs, as far as this machine can know."""

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

import hpcddp
from hpcddp.launch.submission import Cluster
from hpcddp.launch.submittable import Obstacle
from hpcddp.spec.environment import Environment
from hpcddp.spec.job import JobSpec

# What Lmod and Environment Modules leave in the environment of a shell that has their module command.
_MODULE_MARKS: Final = ("MODULESHOME", "LMOD_CMD", "MODULES_CMD", "BASH_FUNC_module%%")
_MODULE_PROFILES: Final = ("/etc/profile.d/z00_lmod.sh", "/etc/profile.d/lmod.sh", "/etc/profile.d/modules.sh")
# What the batch script does first; it imports neither torch nor submitit.
_PROBE: Final = "import hpcddp.launch.attempt; print(hpcddp.__version__)"
_TIMEOUT_S: Final = 60.0


def environment_obstacles(spec: JobSpec, cluster: Cluster, environment: Mapping[str, str]) -> Iterator[Obstacle]:
    """Yield what the environment of the job lacks here.

    Args:
        spec: the job.
        cluster: where it goes.
        environment: the submitter's environment.
    """
    asked, here = spec.environment, cluster == "local"
    yield from _modules(asked, environment)
    if asked.conda is not None:
        yield from _conda(asked, asked.conda, environment, here=here)
    elif asked.venv is not None:
        way_out = f"make it (python -m venv {shlex.quote(asked.venv)}), or correct the path"
        yield from _virtual("venv", asked.venv, Path(asked.venv), asked, environment, way_out)
    elif asked.uv is not None:
        yield from _uv(asked, asked.uv, environment)
    elif asked.python is not None:
        yield from _python(asked, asked.python, environment, here=here)


def _modules(asked: Environment, environment: Mapping[str, str]) -> Iterator[Obstacle]:
    known = any(mark in environment for mark in _MODULE_MARKS) or any(Path(file).is_file() for file in _MODULE_PROFILES)
    if asked.modules and not known:
        yield Obstacle(
            sentence="environment.modules needs the module command, which this machine does not have; the job ends at "
            "its start unless its nodes have it",
            certain=False,
        )


def _python(asked: Environment, python: str, environment: Mapping[str, str], *, here: bool) -> Iterator[Obstacle]:
    if "/" not in python or Path(python) == Path(sys.executable):
        return
    if os.access(python, os.X_OK):
        yield from _without_hpcddp(f"environment.python is {python!r}, which", Path(python), asked, environment)
    elif here:
        yield Obstacle(
            sentence=f"environment.python is {python!r}, and this machine has no such program; "
            "correct it, or leave it out"
        )


def _virtual(
    field: str, value: str, venv: Path, asked: Environment, environment: Mapping[str, str], way_out: str
) -> Iterator[Obstacle]:
    python = venv / "bin" / "python"
    if not python.exists():
        what = f"there is no {python}" if venv.is_dir() else f"there is no directory {venv}"
        yield Obstacle(sentence=f"environment.{field} is {value!r}, and {what}; {way_out}")
        return
    add = f"uv add --project {shlex.quote(value)} hpcddp" if field == "uv" else None
    named = f"environment.{field} is {value!r}, whose python"
    yield from _without_hpcddp(named, python, asked, environment, add)


def _uv(asked: Environment, project: str, environment: Mapping[str, str]) -> Iterator[Obstacle]:
    if not (Path(project) / "pyproject.toml").is_file():
        yield Obstacle(
            sentence=f"environment.uv is {project!r}, and there is no {project}/pyproject.toml; "
            "give the directory of a uv project"
        )
        return
    uv, sync = shutil.which("uv", path=environment.get("PATH")), f"uv sync --project {shlex.quote(project)}"
    first = "" if uv else "install uv (python -m pip install uv), then "
    venv = Path(project) / environment.get("UV_PROJECT_ENVIRONMENT", ".venv")
    yield from _virtual("uv", project, venv, asked, environment, f"{first}run: {sync}")
    if uv and venv.is_dir():
        check = [uv, "sync", "--check", "--frozen", "--inexact", "--offline", "--project", project]
        if _run(check, environment).returncode != 0:
            yield Obstacle(
                sentence=f"environment.uv is {project!r}, whose environment is not what its lock file says; "
                f"run: {sync}",
                certain=False,
            )


def _conda(asked: Environment, name: str, environment: Mapping[str, str], *, here: bool) -> Iterator[Obstacle]:
    conda = shutil.which("conda", path=environment.get("PATH")) or environment.get("CONDA_EXE")
    if asked.modules:
        # A module may bring another conda, with other environments.
        return
    if conda is None:
        yield Obstacle(
            sentence="environment.conda needs conda, which is neither on PATH nor in CONDA_EXE here; submit from a "
            "shell in which conda works, or load its module in environment.modules",
            certain=here,
        )
        return
    prefix = Path(name) if "/" in name else _prefix_of(conda, name, environment)
    if prefix is None or not prefix.is_dir():
        flag = "--prefix" if "/" in name else "--name"
        yield Obstacle(
            sentence=f"environment.conda is {name!r}, and conda has no such environment here; correct it (conda env "
            f"list shows all), or make it: conda create {flag} {shlex.quote(name)} python"
        )
        return
    python = prefix / "bin" / "python"
    if not python.exists():
        yield Obstacle(
            sentence=f"environment.conda is {name!r}, and there is no {python}; install python and hpcddp in it"
        )
        return
    yield from _without_hpcddp(f"environment.conda is {name!r}, whose python", python, asked, environment)


def _prefix_of(conda: str, name: str, environment: Mapping[str, str]) -> Path | None:
    """Return the directory of a named environment."""
    listed = _run([conda, "env", "list", "--json"], environment)
    try:
        prefixes = [Path(prefix) for prefix in json.loads(listed.stdout)["envs"]]
    except (ValueError, KeyError, TypeError):
        return None
    # The base environment is the directory of conda itself.
    base = [prefix for prefix in prefixes if (prefix / "condabin").is_dir()] if name == "base" else []
    return next((prefix for prefix in (*base, *prefixes) if base or prefix.name == name), None)


def _without_hpcddp(
    named: str, python: Path, asked: Environment, environment: Mapping[str, str], add: str | None = None
) -> Iterator[Obstacle]:
    """Yield an interpreter that has no hpcddp, or another one than this."""
    # A path that is made absolute without following links: a link is what makes it a virtual environment's.
    done = _run([os.path.abspath(python), "-P", "-c", _PROBE], {**environment, **asked.env})  # noqa: PTH100
    if done.returncode != 0:
        add = add or f"{shlex.quote(str(python))} -m pip install hpcddp"
        reason = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "it said nothing").strip()
        yield Obstacle(
            sentence=f"{named} cannot run hpcddp ({reason}); run: {add}",
            # What modules and shell lines add, the node alone knows.
            certain=not (asked.modules or asked.setup),
        )
    elif (version := done.stdout.strip()) != hpcddp.__version__:
        yield Obstacle(
            sentence=f"{named} has hpcddp {version}, and the one that submits is {hpcddp.__version__}; "
            "install the same",
            certain=False,
        )


def _run(words: Sequence[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a program; one that cannot be run, or takes a minute, counts as one that failed."""
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
