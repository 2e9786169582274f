"""The checks of a job's command: its program, its launcher and its Python script."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from hpcddp.jobfile.cluster import Cluster
from hpcddp.jobfile.document import neighbour
from hpcddp.jobfile.job import JobSpec
from hpcddp.submit.checks.obstacle import Obstacle
from hpcddp.task.launchers import PYTHON, PYTHON_OPTIONS_WITH_VALUE, find_launcher

# python(1): with these options there is no script.
_NO_SCRIPT = ("-c", "-m")


def command_obstacles(spec: JobSpec, _: Cluster, environment: Mapping[str, str]) -> Iterator[Obstacle]:
    """Yield the obstacles to the job's command."""
    if spec.command is None:
        return
    yield from _program(spec, environment)
    yield from _launcher(spec, environment)
    yield from _script(spec)


def _program(spec: JobSpec, environment: Mapping[str, str]) -> Iterator[Obstacle]:
    """Yield a program that is not on this machine, where nothing in the job can provide it."""
    section = spec.environment
    prepared = section.modules or section.setup or section.container or section.conda
    if spec.command is None or prepared or "PATH" in section.env:
        return
    # An activated environment has its programs there, and the task looks there last.
    beside = Path(section.interpreter or sys.executable).parent
    name = spec.command[0]
    if shutil.which(name, path=f"{environment.get('PATH', os.defpath)}:{beside}") is None:
        where = "on PATH here" if "/" not in name else "here that can be run"
        yield Obstacle(
            sentence=f"command is {shlex.join(spec.command)}, and there is no program {name!r} {where}; correct its "
            "name, or write its path"
        )


def _launcher(spec: JobSpec, environment: Mapping[str, str]) -> Iterator[Obstacle]:
    """Yield torchrun or another launcher as the command of several tasks that would not form one world."""
    words = spec.command or ()
    launcher = find_launcher(words, {**environment, **spec.environment.env})
    if launcher is None or spec.world_size == 1:
        return
    why = launcher.obstacle(tasks=spec.world_size, nodes=spec.resources.nodes)
    if why is not None:
        line = f": -- {shlex.join(launcher.program)}" if launcher.program else ""
        yield Obstacle(sentence=f"command is {shlex.join(words)}, and {why}; {launcher.advice}{line}")


def _script(spec: JobSpec) -> Iterator[Obstacle]:
    """Yield a Python script that does not exist: usually a typing error, but another job may still write it."""
    script = _script_in(spec.command or ())
    if script is None or spec.environment.container or Path(script).is_file():
        return
    near = neighbour(Path(script))
    yield Obstacle(
        sentence=f"command is {shlex.join(spec.command or ())}, and there is no file {script!r} here yet; "
        + (f"did you mean {near}?" if near else "check its path, which is relative to the directory of submission"),
        certain=False,
    )


def _script_in(words: Sequence[str]) -> str | None:
    """Return the script that a Python command runs; None for ``-m``, ``-c`` or another program."""
    if not words or PYTHON.fullmatch(Path(words[0]).name) is None:
        return None
    for previous, word in pairwise(words):
        if word == "-" or word.startswith(_NO_SCRIPT):
            return None
        if not word.startswith("-") and previous not in PYTHON_OPTIONS_WITH_VALUE:
            return word
    return None
