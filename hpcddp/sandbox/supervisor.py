"""Supervisor process of a sandbox: starts the daemons, adopts their orphans, and ends last.

``hpcddp sandbox up`` runs it as ``python -m hpcddp.sandbox.supervisor DIRECTORY``. It reads the instructions from
standard input, one line, and then the word to stay. Without that word it ends the sandbox, for example when ``up`` is
killed half way.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path

from hpcddp.errors import HpcddpError
from hpcddp.sandbox import processes, start, state
from hpcddp.sandbox.instructions import Command, Daemon, Instructions
from hpcddp.sandbox.state import Sandbox

STAY = "stay"
_READY_TIMEOUT_S = 20.0
_POLL_S = 0.01
_CHECK_EVERY_S = 0.1

Running = dict[str, subprocess.Popen[bytes]]


class _AbandonedError(HpcddpError):
    """``up`` has ended before the sandbox was up."""


def main(directory: Path) -> None:
    """Run the sandbox in ``directory``; does not return while the sandbox is up."""
    sandbox = state.read(directory)
    if sandbox is None:
        return
    _register(sandbox)
    try:
        running = _bring_up(sandbox)
        _wait_until_told_to_stay(running)
    except HpcddpError as error:
        sys.stderr.write(f"{error.message}\n")
        sys.stderr.flush()
        processes.end_all(sandbox.token, sandbox.slurm_conf, supervisor=None)
        if isinstance(error, _AbandonedError):
            _unmount(sandbox)
            state.remove_files(sandbox)
        sys.exit(1)
    _reap_forever()


def _register(sandbox: Sandbox) -> None:
    """Record this process as the supervisor, and set up its namespaces or adopt orphans."""
    # /proc is still the one of the machine: it has this process under its id there.
    own = processes.find(int(Path("/proc/self").readlink().name))
    if own is None:
        raise start.ProcessError("the supervisor does not find itself in /proc")
    state.write_supervisor(sandbox, own)
    if not sandbox.isolated:
        start.adopt_orphans()
        return
    environment = start.daemon_environment(sandbox.token)
    start.run(Command(argv=("mount", "-t", "proc", "proc", "/proc")), environment)
    socket.sethostname(sandbox.controller_host)


def _bring_up(sandbox: Sandbox) -> Running:
    line = sys.stdin.readline()
    if not line.endswith("\n"):
        raise _AbandonedError("up has ended before it gave instructions")
    instructions = Instructions.from_line(line)
    environment = start.daemon_environment(sandbox.token)
    for command in instructions.commands:
        start.run(command, environment)
    running: Running = {}
    for daemon in instructions.daemons:
        running[daemon.name] = start.start_daemon(daemon, environment)
        _wait_until_ready(daemon, running)
    state.write_daemons(sandbox, {name: process.pid for name, process in running.items()})
    return running


def _wait_until_ready(daemon: Daemon, running: Running) -> None:
    deadline = time.monotonic() + _READY_TIMEOUT_S
    while not _is_ready(daemon):
        _check(running)
        if time.monotonic() > deadline:
            raise start.ProcessError(f"{daemon.name} does not serve after {_READY_TIMEOUT_S:.0f} s")
        time.sleep(_POLL_S)


def _is_ready(daemon: Daemon) -> bool:
    if daemon.ready_socket is not None and not daemon.ready_socket.is_socket():
        return False
    if daemon.ready_address is None:
        return True
    with socket.socket() as probe:
        return probe.connect_ex(daemon.ready_address) == 0


def _wait_until_told_to_stay(running: Running) -> None:
    """Return when told to stay.

    Raises:
        _AbandonedError: the other end was closed without it.
        ProcessError: a daemon ended meanwhile.
    """
    while not select.select([sys.stdin], [], [], _CHECK_EVERY_S)[0]:
        _check(running)
    if sys.stdin.readline().strip() != STAY:
        raise _AbandonedError("up has ended before every node was up")


def _check(running: Running) -> None:
    for name, process in running.items():
        if process.poll() is not None:
            raise start.ProcessError(f"{name} ended with {process.returncode} as soon as it was started")


def _unmount(sandbox: Sandbox) -> None:
    """Unmount everything in the sandbox's directory, so that its files can be removed."""
    environment = start.daemon_environment(sandbox.token)
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        # The fifth field is the mount point (proc_pid_mountinfo(5)).
        place = Path(line.split()[4])
        if place.is_relative_to(sandbox.directory):
            start.run(Command(argv=("umount", "--lazy", str(place))), environment)


def _reap_forever() -> None:
    """Reap the daemons and their orphans."""
    while True:
        try:
            os.wait()
        except ChildProcessError:
            # Every daemon has ended; a user may start one again in these namespaces.
            time.sleep(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
