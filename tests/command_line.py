"""Calls ``hpcddp`` for a test in a process forked from one that has imported it: the imports take most of the time.

Where the start of the interpreter is the subject, a test starts ``python -m hpcddp`` itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from multiprocessing.connection import wait
from pathlib import Path

from tests.ranks import FORKS, take_environment

# Each start reads the exit codes of all processes that have ended, and an exit code can be read only once.
_LOCK = threading.Lock()


def hpcddp(
    directory: Path, *words: str | Path, environment: Mapping[str, str] | None = None, timeout_s: float = 240
) -> subprocess.CompletedProcess[str]:
    """Run ``hpcddp`` with these words, and return its exit code and what it printed.

    Args:
        directory: the working directory.
        words: the arguments.
        environment: the whole environment; the test's own if it is None.
        timeout_s: seconds after which the test fails.
    """
    arguments = [str(word) for word in words]
    variables = dict(os.environ if environment is None else environment)
    with tempfile.TemporaryDirectory() as folder:
        out, errors = Path(folder, "out"), Path(folder, "errors")
        with _LOCK:
            umask = os.umask(0o077)
            os.umask(umask)
            process = FORKS.Process(target=_run, args=(arguments, directory, variables, umask, out, errors))
            process.start()
        has_ended = wait([process.sentinel], timeout_s)
        with _LOCK:
            if not has_ended:
                process.kill()
            process.join()
        if not has_ended or process.exitcode is None:
            raise TimeoutError(f"not within {timeout_s} s: hpcddp {' '.join(arguments)}\n{errors.read_text()}")
        return subprocess.CompletedProcess(
            ["hpcddp", *arguments], process.exitcode, out.read_text("utf-8"), errors.read_text("utf-8")
        )


def _run(
    arguments: list[str], directory: Path, environment: dict[str, str], umask: int, out: Path, errors: Path
) -> None:
    from hpcddp.__main__ import main

    take_environment(environment)
    os.chdir(directory)
    os.umask(umask)
    for stream, file in ((1, out), (2, errors)):
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, stream)
        os.close(descriptor)
    sys.argv[:] = ["hpcddp", *arguments]
    main()
