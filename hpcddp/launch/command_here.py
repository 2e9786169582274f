"""Whether a command can run as the tasks of a job, as far as this machine can know."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from hpcddp.launch.submission import Cluster
from hpcddp.launch.submittable import Obstacle
from hpcddp.spec.job import JobSpec
from hpcddp.spec.textfile import neighbour

_LAUNCHERS = frozenset({"torchrun", "torch.distributed.run", "torch.distributed.launch"})
_TELLS_OF_OTHERS = ("--nnodes", "--rdzv-endpoint", "--rdzv-conf")
_PYTHON = re.compile(r"python[0-9.]*", re.ASCII)
# python(1): those that take a word of their own, and those behind which there is no script.
_WITH_A_WORD = ("-W", "-X")
_NO_SCRIPT = ("-c", "-m")


def command_obstacles(spec: JobSpec, _: Cluster, environment: Mapping[str, str]) -> Iterator[Obstacle]:
    """Yield what is in the way of the job's command.

    Args:
        spec: the job.
        environment: the submitter's environment.
    """
    if spec.command is None:
        return
    yield from _program(spec, environment)
    yield from _launcher(spec)
    yield from _script(spec)


def _program(spec: JobSpec, environment: Mapping[str, str]) -> Iterator[Obstacle]:
    """Yield a command whose program is not here, where nothing in the job could bring it."""
    asked = spec.environment
    prepared = asked.modules or asked.setup or asked.container or asked.conda
    if spec.command is None or prepared or "PATH" in asked.env:
        return
    # Where an activation puts it, or where the task looks last.
    beside = Path(asked.interpreter or sys.executable).parent
    name = spec.command[0]
    if shutil.which(name, path=f"{environment.get('PATH', os.defpath)}:{beside}") is None:
        where = "on PATH here" if "/" not in name else "here that can be run"
        yield Obstacle(
            sentence=f"command is {shlex.join(spec.command)}, and there is no program {name!r} {where}; correct its "
            "name, or write its path"
        )


def _launcher(spec: JobSpec) -> Iterator[Obstacle]:
    """Yield torchrun as the program of several tasks: unless it is told of the others, each is a world of its own."""
    words = spec.command or ()
    module = next((word for before, word in pairwise(words) if before == "-m"), "")
    launcher = next((name for name in (Path(words[0]).name if words else "", module) if name in _LAUNCHERS), None)
    told = any(word.replace("_", "-").startswith(_TELLS_OF_OTHERS) for word in words)
    if launcher is None or told or spec.world_size == 1 or "PET_NNODES" in spec.environment.env:
        return
    yield Obstacle(
        sentence=f"command is {shlex.join(words)}, and each of the {spec.world_size} tasks would start a training of "
        f"its own; leave {launcher} and its options out, every task is a rank already (resources.tasks_per_node of "
        "them on a node)"
    )


def _script(spec: JobSpec) -> Iterator[Obstacle]:
    """Yield a script of Python's that is not here: another job may still write it, but most often it is a slip."""
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
    """Return the script that a call of Python runs; None for a module, a program text, or another program."""
    if not words or _PYTHON.fullmatch(Path(words[0]).name) is None:
        return None
    for before, word in pairwise(words):
        if word == "-" or word.startswith(_NO_SCRIPT):
            return None
        if not word.startswith("-") and before not in _WITH_A_WORD:
            return word
    return None
