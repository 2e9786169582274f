"""Starts real ranks for a test: processes forked from one that has imported torch, the training and the commands."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NoReturn

_TIMEOUT_S = 300
FORKS = multiprocessing.get_context("forkserver")
# A rank of its own interpreter spends five seconds of CPU on these, and a command half a second.
FORKS.set_forkserver_preload(["torch", "hpcddp.train.loop.job", "tests.preloaded_commands"])


@dataclass(frozen=True)
class Ended:
    """Exit codes and outputs of the ranks, by rank."""

    codes: list[int]
    outputs: list[str]


def run_forked(main: Callable[..., int], arguments: Sequence[Any], *, world_size: int, logs: Path) -> Ended:
    """Run ``main(*arguments, rank)`` in ``world_size`` processes at once, and wait for their ends.

    Args:
        main: a function of a module; what it returns is the exit code.
        arguments: what every rank gets before its number.
        world_size: how many ranks.
        logs: an existing directory for the ranks' outputs.
    """
    files = [logs / f"output-{rank}" for rank in range(world_size)]
    processes = [
        FORKS.Process(target=_run, args=(main, arguments, rank, file, dict(os.environ)))
        for rank, file in enumerate(files)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(_TIMEOUT_S)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return Ended([process.exitcode or 0 for process in processes], [file.read_text() for file in files])


class Forked:
    """A process forked from one that has imported torch, with what its starter uses of ``subprocess.Popen``."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process
        self._process.start()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode


class ForkedProcess(Forked):
    """A function in a session of its own.

    Args:
        main: a function of a module; what it returns is the exit code.
        arguments: its arguments.
        environment: the whole environment.
        directory: the working directory.
        output: the file for its output and errors.
    """

    def __init__(
        self,
        main: Callable[..., int],
        arguments: Sequence[Any],
        *,
        environment: Mapping[str, str],
        directory: Path,
        output: Path,
    ) -> None:
        job = (main, arguments, output, dict(environment), directory)
        super().__init__(FORKS.Process(target=_run_in_session, args=job))

    def wait(self) -> int | None:
        self._process.join()
        return self._process.exitcode


def _run_in_session(
    main: Callable[..., int], arguments: Sequence[Any], output: Path, environment: dict[str, str], directory: Path
) -> None:
    os.setsid()
    os.chdir(directory)
    _run(main, arguments[:-1], arguments[-1], output, environment)


def _run(
    main: Callable[..., int], arguments: Sequence[Any], rank: int, output: Path, environment: dict[str, str]
) -> None:
    take_environment(environment)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    leave(main(*arguments, rank))


def take_environment(environment: Mapping[str, str]) -> None:
    """Take the environment of a test; the parent of all forked processes was started long before."""
    os.environ.clear()
    os.environ.update(environment)


def leave(code: int) -> NoReturn:
    """End a forked process, of which threads of gloo may still run."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
