"""Daemon manager of a sandbox: a process that starts the daemons, adopts their orphans, and ends last.

``hpcddp sandbox up`` starts it as ``python -m hpcddp.sandbox.daemon_manager DIRECTORY``. It reads two lines from
standard input: the instructions, and ``stay`` when every node is up. If its input ends before ``stay``, for example
because ``up`` was killed, it ends the sandbox.
"""

from __future__ import annotations

import ctypes
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from hpcddp.errors import HpcddpError
from hpcddp.processes import find, wait_until
from hpcddp.sandbox import cleanup, programs, root, state
from hpcddp.sandbox.programs import Command, Daemon, Instructions
from hpcddp.sandbox.state import Sandbox

STAY = "stay"
_READY_TIMEOUT_S = 20.0
_POLL_S = 0.01
_CHECK_EVERY_S = 0.1
# linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36

Running = dict[str, subprocess.Popen[bytes]]


class _AbandonedError(HpcddpError):
    """``up`` has ended before the sandbox was up."""


def manager_environment(token: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the daemon manager's environment: a daemon's environment, and the caller's ``PYTHONPATH``."""
    kept = {name: environment[name] for name in ("PYTHONPATH",) if name in environment}
    return {**programs.daemon_environment(token), **kept}


def start(sandbox: Sandbox, *, log: Path, environment: Mapping[str, str]) -> int:
    """Start the daemon manager of a sandbox, detached from this process.

    Args:
        sandbox: if its nodes are hosts of their own, the daemon manager gets its own namespaces (needs root). Then the
            kernel ends all processes of the sandbox and removes its network and mounts as soon as the daemon manager
            ends for any reason.
        log: the file for its output.

    Returns:
        The end of a pipe to write its instructions to. The sandbox ends when the pipe is closed before ``stay`` was
        written.
    """
    manager: tuple[str, ...] = (sys.executable, "-P", "-m", "hpcddp.sandbox.daemon_manager", str(sandbox.directory))
    if sandbox.slurm_root is not None:
        manager = root.command_in(sandbox.slurm_root, manager)
    if sandbox.isolated:
        # ip netns exec would hide /sys/fs/cgroup, without which slurmd does not start.
        namespaces = ("--mount", "--uts", "--net", "--pid", "--fork", "--kill-child=SIGKILL")
        manager = ("unshare", *namespaces, "--", *manager)
    read_end, write_end = os.pipe()
    try:
        # setsid exits at once; its child is adopted by the init process or a subreaper.
        detached = programs.start_detached(("setsid", "--fork", *manager), log, environment, standard_input=read_end)
        detached.wait(programs.COMMAND_TIMEOUT_S)
    except BaseException:
        os.close(write_end)
        raise
    finally:
        os.close(read_end)
    return write_end


def main(directory: Path) -> None:
    """Run the sandbox in ``directory``; does not return while the sandbox is up."""
    sandbox = state.read(directory)
    if sandbox is None:
        return
    _register(sandbox)
    try:
        running = _bring_up(sandbox)
        _wait_for_stay_command(running)
    except HpcddpError as error:
        sys.stderr.write(f"{error.message}\n")
        sys.stderr.flush()
        cleanup.end_all(sandbox.token, sandbox.slurm_conf, manager=None)
        if isinstance(error, _AbandonedError):
            _unmount(sandbox)
            state.remove_files(sandbox)
        sys.exit(1)
    _reap_forever()


def _register(sandbox: Sandbox) -> None:
    """Record this process as the daemon manager, and set up its namespaces or adopt orphans."""
    # /proc is still the one of the machine: it has this process under its id there.
    manager = find(int(Path("/proc/self").readlink().name))
    if manager is None:
        raise programs.ProcessError("the daemon manager does not find itself in /proc")
    state.write_manager(sandbox, manager)
    if not sandbox.isolated:
        _adopt_orphans()
        return
    environment = programs.daemon_environment(sandbox.token)
    programs.run(Command(argv=("mount", "-t", "proc", "proc", "/proc")), environment)
    socket.sethostname(sandbox.controller_host)


def _adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent ends (prctl(2), PR_SET_CHILD_SUBREAPER)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def _bring_up(sandbox: Sandbox) -> Running:
    line = sys.stdin.readline()
    if not line.endswith("\n"):
        raise _AbandonedError("up has ended before it gave instructions")
    instructions = Instructions.from_line(line)
    environment = programs.daemon_environment(sandbox.token)
    for command in instructions.commands:
        programs.run(command, environment)
    running: Running = {}
    for daemon in instructions.daemons:
        running[daemon.name] = programs.start_detached(daemon.argv, daemon.output, environment)
        _wait_until_ready(daemon, running)
    state.write_daemons(sandbox, {name: process.pid for name, process in running.items()})
    return running


def _wait_until_ready(daemon: Daemon, running: Running) -> None:
    def is_ready() -> bool:
        _check(running)
        if daemon.ready_socket is not None and not daemon.ready_socket.is_socket():
            return False
        if daemon.ready_address is None:
            return True
        with socket.socket() as probe:
            return probe.connect_ex(daemon.ready_address) == 0

    if not wait_until(is_ready, timeout_s=_READY_TIMEOUT_S, poll_s=_POLL_S):
        raise programs.ProcessError(f"{daemon.name} is not ready after {_READY_TIMEOUT_S:.0f} s")


def _wait_for_stay_command(running: Running) -> None:
    """Wait for the line ``stay``.

    Raises:
        _AbandonedError: the pipe was closed without it.
        ProcessError: a daemon ended meanwhile.
    """
    while not select.select([sys.stdin], [], [], _CHECK_EVERY_S)[0]:
        _check(running)
    if sys.stdin.readline().strip() != STAY:
        raise _AbandonedError("up has ended before every node was up")


def _check(running: Running) -> None:
    for name, process in running.items():
        if process.poll() is not None:
            raise programs.ProcessError(f"{name} exited with code {process.returncode} right after its start")


def _unmount(sandbox: Sandbox) -> None:
    """Unmount everything in the sandbox's directory, so that its files can be removed."""
    environment = programs.daemon_environment(sandbox.token)
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        # The fifth field is the mount point (proc_pid_mountinfo(5)).
        mount_point = Path(line.split()[4])
        if mount_point.is_relative_to(sandbox.directory):
            programs.run(Command(argv=("umount", "--lazy", str(mount_point))), environment)


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
