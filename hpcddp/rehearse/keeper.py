"""The process that keeps a sandbox: it starts the daemons, adopts what they leave behind, and goes last.

Run by ``hpcddp sandbox up`` as ``python -m hpcddp.rehearse.keeper DIRECTORY``. Standard input brings the orders in one
line and then the word to stay. Without that word the sandbox ends: so it does when ``up`` is killed half way.
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
from hpcddp.rehearse import ending, processes, state
from hpcddp.rehearse.orders import Command, Daemon, Orders
from hpcddp.rehearse.state import Sandbox

STAY = "stay"
_READY_TIMEOUT_S = 20.0
_POLL_S = 0.01
_CHECK_EVERY_S = 0.1

Running = dict[str, subprocess.Popen[bytes]]


class _NotWantedError(HpcddpError):
    """``up`` has ended before the sandbox was up."""


def main(directory: Path) -> None:
    """Keep the sandbox in ``directory`` until it is ended; never returns while it is wanted."""
    sandbox = state.read(directory)
    if sandbox is None:
        return
    _settle(sandbox)
    try:
        running = _bring_up(sandbox)
        _wait_for_the_word(running)
    except HpcddpError as error:
        sys.stderr.write(f"{error.message}\n")
        sys.stderr.flush()
        ending.end_all(sandbox.token, sandbox.slurm_conf, keeper=None)
        if isinstance(error, _NotWantedError):
            _unmount(sandbox)
            state.remove_files(sandbox)
        sys.exit(1)
    _reap_forever()


def _settle(sandbox: Sandbox) -> None:
    """Say who keeps the sandbox, as this machine sees it, and take the keeper's place."""
    # The mounted /proc is still the machine's: it knows this process by its id there.
    own = ending.find(int(Path("/proc/self").readlink().name))
    if own is None:
        raise processes.ProcessError("the keeper does not find itself in /proc")
    state.write_keeper(sandbox, own)
    if not sandbox.isolated:
        processes.adopt_orphans()
        return
    environment = processes.daemon_environment(sandbox.token)
    processes.run(Command(argv=("mount", "-t", "proc", "proc", "/proc")), environment)
    socket.sethostname(sandbox.controller_host)


def _bring_up(sandbox: Sandbox) -> Running:
    line = sys.stdin.readline()
    if not line.endswith("\n"):
        raise _NotWantedError("up has ended before it gave orders")
    orders = Orders.from_line(line)
    environment = processes.daemon_environment(sandbox.token)
    for command in orders.commands:
        processes.run(command, environment)
    running: Running = {}
    for daemon in orders.daemons:
        running[daemon.name] = processes.start_daemon(daemon, environment)
        _wait_until_ready(daemon, running)
    state.write_daemons(sandbox, {name: process.pid for name, process in running.items()})
    return running


def _wait_until_ready(daemon: Daemon, running: Running) -> None:
    deadline = time.monotonic() + _READY_TIMEOUT_S
    while not _is_ready(daemon):
        _check(running)
        if time.monotonic() > deadline:
            raise processes.ProcessError(f"{daemon.name} does not serve after {_READY_TIMEOUT_S:.0f} s")
        time.sleep(_POLL_S)


def _is_ready(daemon: Daemon) -> bool:
    if daemon.ready_socket is not None and not daemon.ready_socket.is_socket():
        return False
    if daemon.ready_address is None:
        return True
    with socket.socket() as probe:
        return probe.connect_ex(daemon.ready_address) == 0


def _wait_for_the_word(running: Running) -> None:
    """Return when told to stay.

    Raises:
        _NotWantedError: the other end was closed without it.
        ProcessError: a daemon ended meanwhile.
    """
    while not select.select([sys.stdin], [], [], _CHECK_EVERY_S)[0]:
        _check(running)
    if sys.stdin.readline().strip() != STAY:
        raise _NotWantedError("up has ended before every node was up")


def _check(running: Running) -> None:
    for name, process in running.items():
        if process.poll() is not None:
            raise processes.ProcessError(f"{name} ended with {process.returncode} as soon as it was started")


def _unmount(sandbox: Sandbox) -> None:
    """Take away the mounts in the sandbox's directory, which its files could not be removed under."""
    environment = processes.daemon_environment(sandbox.token)
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        # The fifth field is where it is mounted (proc_pid_mountinfo(5)).
        place = Path(line.split()[4])
        if place.is_relative_to(sandbox.directory):
            processes.run(Command(argv=("umount", "--lazy", str(place))), environment)


def _reap_forever() -> None:
    """Take the exit codes of the daemons and of everything they leave behind."""
    while True:
        try:
            os.wait()
        except ChildProcessError:
            # Every daemon has ended; somebody may start one again in these namespaces.
            time.sleep(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
