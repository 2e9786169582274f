from __future__ import annotations

import os
import signal
import subprocess
import sys

from hpcddp.processes import (
    all_processes,
    children_of,
    command_line,
    environment_of,
    find,
    handled_signals,
    own_processes,
    program_of,
)


def test_a_process_that_has_ended_shows_nothing() -> None:
    with subprocess.Popen("true") as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert find(process.pid) is None
    pid = process.pid
    assert find(pid) is None
    assert (command_line(pid), environment_of(pid), children_of(pid)) == ([], {}, [])
    assert (program_of(pid), handled_signals(pid)) == ("", frozenset())


def test_a_running_process_is_shown_as_it_was_started() -> None:
    handle = "import signal, sys; signal.signal(signal.SIGUSR1, print); print('up', flush=True); sys.stdin.read()"
    words = [sys.executable, "-c", handle, "", "a b"]
    variables = {**os.environ, "WITH_EQUALS": "a=b", "EMPTY": "", "NOT_UTF8": os.fsdecode(b"\xff")}
    with subprocess.Popen(words, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        found = find(process.pid)
        assert found is not None
        assert (found.pid, found.parent) == (process.pid, os.getpid())
        assert command_line(process.pid) == command_line(str(process.pid)) == words
        assert environment_of(process.pid) == variables
        assert program_of(process.pid).startswith("python")
        assert signal.SIGUSR1 in handled_signals(process.pid)
        assert signal.SIGUSR2 not in handled_signals(process.pid)
        assert process.pid in children_of(os.getpid())
        assert found in {*own_processes()} <= {*all_processes()}
        process.communicate()
