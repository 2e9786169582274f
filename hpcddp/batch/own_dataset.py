"""The size of a dataset, or of its groups, by the user's code: in a child process, so that no torch is loaded here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcddp.errors import UserError

# The user's code may print what it likes: its standard output becomes standard error, and the answer has a pipe alone.
_BEGIN = """
import importlib, json, os, sys
directory, module, function, arguments = sys.argv[1:]
answer = os.dup(1)
os.dup2(2, 1)
sys.path.insert(0, directory)
function = getattr(importlib.import_module(module), function)
arguments = json.loads(arguments)
"""
_SAMPLES = """
os.write(answer, str(len(function(split="train", **arguments))).encode())
"""
_GROUPS = """
from collections import Counter
from numbers import Integral
def name(index):
    group = function(index)
    if isinstance(group, bool) or not isinstance(group, (Integral, str)):
        raise TypeError(f"it returned a {type(group).__name__} for sample {index}; return an int or a str")
    return group
sizes = Counter(map(name, range(arguments["samples"])))
os.write(answer, f"{len(sizes)} {min(sizes.values())}".encode())
"""


_VERBS = {"train.dataset": ("make", "made"), "batch.group": ("call", "called")}


class OwnDatasetError(UserError):
    """The dataset could not be made or has no length."""

    kind = "dataset"


def count_own_samples(
    target: str, arguments: Mapping[str, Any], *, directory: Path, python: str, timeout_s: float
) -> int:
    """Return ``len(function(split="train", **arguments))``.

    Args:
        target: ``pkg.module:function``.
        arguments: ``train.dataset_args``.
        directory: what the module is imported from first, and the child's working directory.
        python: the interpreter.
        timeout_s: how long the child may take, in seconds; then it is ended with all that it started.

    Raises:
        OwnDatasetError: it failed, took too long or has no length.
    """
    (samples,) = _measure(_SAMPLES, "train.dataset", target, arguments, directory, python, timeout_s)
    return samples


def count_own_groups(target: str, samples: int, *, directory: Path, python: str, timeout_s: float) -> tuple[int, int]:
    """Return how many groups ``function(index)`` makes of ``samples`` samples, and how many the smallest one has.

    Args:
        target: ``pkg.module:function``, from ``batch.group``.
        samples: samples of the training data, >= 1.
        directory: what the module is imported from first, and the child's working directory.
        python: the interpreter.
        timeout_s: how long the child may take, in seconds.

    Raises:
        OwnDatasetError: it failed or took too long.
    """
    groups, smallest = _measure(_GROUPS, "batch.group", target, {"samples": samples}, directory, python, timeout_s)
    return groups, smallest


def _measure(
    program: str,
    key: str,
    target: str,
    arguments: Mapping[str, Any],
    directory: Path,
    python: str,
    timeout_s: float,
) -> list[int]:
    module, _, function = target.partition(":")
    command = [python, "-c", _BEGIN + program, str(directory), module, function, json.dumps(dict(arguments))]
    make, made = _VERBS[key]
    try:
        output, errors, code = _run(command, directory, timeout_s)
    except OSError as error:
        raise OwnDatasetError(f"{key} {target} could not be {made} ({error})") from error
    if code is None:
        raise OwnDatasetError(f"{key} {target} took longer than {timeout_s:g} s to {make}")
    numbers = output.split()
    if code != 0 or not numbers or not all(number.isdecimal() for number in numbers):
        reason = errors.strip().rpartition("\n")[2] or f"exit code {code}"
        raise OwnDatasetError(f"{key} {target} could not be {made} ({reason})")
    return [int(number) for number in numbers]


def _run(command: list[str], directory: Path, timeout_s: float) -> tuple[str, str, int | None]:
    """Return standard output, standard error and the exit code; None for one that had to be killed."""
    # A session of its own, so that loader workers and other children of the user's code end with it.
    with subprocess.Popen(
        command,
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as child:
        try:
            output, errors = child.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            return "", "", None
        except BaseException:
            os.killpg(child.pid, signal.SIGKILL)
            raise
        return output, errors, child.returncode
