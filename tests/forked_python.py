"""Runs Python programs for a test in processes forked from one that has imported torch and hpcddp.

Where the start of the interpreter, or what it imports, is the subject, a test starts ``sys.executable`` itself.
"""

from __future__ import annotations

import atexit
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

from tests.ranks import FORKS, Forked, leave, take_environment


class ForkedPython(Forked):
    """``python -c TEXT WORDS...`` or ``python FILE WORDS...``.

    Args:
        program: the text, or the path of the file.
        words: the arguments.
        env: the whole environment; None = the test's own.
        cwd: the working directory; None = the test's own.
    """

    def __init__(
        self, program: str | Path, *words: str, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> None:
        read_end, write_end = os.pipe()
        self.stdout: IO[str] = os.fdopen(read_end, encoding="utf-8")
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115  communicate closes it
        streams = [Connection(number, readable=False) for number in (write_end, os.dup(self._errors.fileno()))]
        variables = dict(os.environ if env is None else env)
        super().__init__(FORKS.Process(target=_run, args=(program, words, variables, cwd or Path.cwd(), streams)))
        for stream in streams:
            stream.close()

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired("a forked program", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.pid is not None and self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def communicate(self, timeout: float = 120) -> tuple[str, str]:
        """Return the output and the errors; a program that still runs after so many seconds is killed."""
        timer = threading.Timer(timeout, self.kill)
        timer.start()
        try:
            output = self.stdout.read()
            self.wait()
        finally:
            timer.cancel()
        self.stdout.close()
        with self._errors:
            self._errors.seek(0)
            return output, self._errors.read()


def run_python(
    program: str | Path, *words: str, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; the arguments are those of ``ForkedPython``."""
    process = ForkedPython(program, *words, env=env, cwd=cwd)
    output, errors = process.communicate()
    return subprocess.CompletedProcess(["python", *words], process.wait(), output, errors)


def _run(
    program: str | Path, words: Sequence[str], environment: dict[str, str], cwd: Path, streams: Sequence[Connection]
) -> None:
    take_environment(environment)
    os.chdir(cwd)
    for number, stream in enumerate(streams, start=1):
        os.dup2(stream.fileno(), number)
        stream.close()
    _set_threads(environment.get("OMP_NUM_THREADS"))
    sys.argv[:] = [str(program) if isinstance(program, Path) else "-c", *words]
    atexit._clear()
    code = 0
    try:
        if isinstance(program, Path):
            runpy.run_path(str(program), run_name="__main__")
        else:
            exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  as the interpreter does
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    leave(code)


def _set_threads(number: str | None) -> None:
    import torch

    # torch read the variable when it was imported.
    if number is not None:
        torch.set_num_threads(int(number))
