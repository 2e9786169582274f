"""Calls of git that end in time, prompt for nothing, and start no program that a configuration names."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

TIMEOUT_S: Final = 2.0
"""The longest that the calls for one purpose may take together, in seconds."""
# No prompt, no lock, no fetch of what a partial clone lacks; messages in English.
_ENVIRONMENT: Final = {
    "LC_ALL": "C",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_NO_LAZY_FETCH": "1",
}


def find_git(directory: Path, environment: Mapping[str, str], *, timeout_s: float = TIMEOUT_S) -> Git | None:
    """Return git for calls in a directory, which have some seconds in all; None if it is not on the PATH."""
    program = shutil.which("git", path=environment.get("PATH"))
    if program is None:
        return None
    return Git(program=program, directory=directory, environment=environment, deadline=time.monotonic() + timeout_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Git:
    """Calls of git that end in time.

    Args:
        program: the path of git.
        deadline: when the last one must have ended, on the monotonic clock.
    """

    program: str
    directory: Path
    environment: Mapping[str, str]
    deadline: float

    def run(self, *words: str, limit: int, errors: int = subprocess.DEVNULL) -> tuple[int | None, bytes]:
        """Return the exit code of a command, None if it had to be ended, and the beginning of what it printed.

        Args:
            limit: bytes of its output that are read at most.
            errors: where its standard error goes.
        """
        try:
            process = subprocess.Popen(
                [self.program, "--no-pager", "-c", "core.fsmonitor=false", *words],
                cwd=self.directory,
                env={**self.environment, **_ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                # Its filters may have processes of their own, which would keep the pipe open.
                start_new_session=True,
            )
        except OSError as error:
            return 1, str(error.strerror).encode()
        timer = threading.Timer(max(0.0, self.deadline - time.monotonic()), _end, [process])
        timer.start()
        try:
            output = b"" if process.stdout is None else process.stdout.read(limit)
            if len(output) == limit:
                _end(process)
            code = process.wait()
        finally:
            timer.cancel()
            _end(process)
            if process.stdout is not None:
                process.stdout.close()
        if code == -signal.SIGKILL:
            return None, output
        return code, output


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
