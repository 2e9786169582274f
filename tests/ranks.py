"""Starts real ranks for a test: processes forked from one that has imported torch, the training and the commands."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


class ForkedProcess:
    """A process forked from one that has imported torch, with what its starter uses of ``subprocess.Popen``.

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
        self._process = FORKS.Process(
            target=_run_in_session, args=(main, arguments, output, dict(environment), directory)
        )
        self._process.start()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

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
    # The parent of all ranks was started long before: the environment and the directory are those of the test.
    os.environ.clear()
    os.environ.update(environment)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    code = main(*arguments, rank)
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of gloo may still run.
    os._exit(code)
