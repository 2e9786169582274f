"""Start and end a real Slurm on this machine, and report its state."""

from __future__ import annotations

import os
import secrets
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcddp.errors import HpcddpError, UserError
from hpcddp.sandbox import cgroups, daemons, layout, network, processes, start, state
from hpcddp.sandbox import request as requests
from hpcddp.sandbox.configuration import Cluster
from hpcddp.sandbox.instructions import Instructions
from hpcddp.sandbox.request import Request
from hpcddp.sandbox.state import Sandbox
from hpcddp.sandbox.supervisor import STAY
from hpcddp.slurm.commands import SlurmCommandError, node_states

_SUPERVISOR_TIMEOUT_S = 20.0
# While a process is in execve(2), /proc shows it without the environment that marks it as the sandbox's.
_UNSEEN_S = 1.0
_DAEMONS_TIMEOUT_S = 60.0
_NODES_TIMEOUT_S = 60.0
_INTERFACE_TIMEOUT_S = 20.0
_POLL_S = 0.05
# slurmctld rejected the registration of the node (sinfo(1), INVALID_REG); waiting does not help.
_INVALID_NODE = "inval"
_TAIL_LINES = 6


class SandboxError(HpcddpError):
    """The sandbox did not start, or does not end."""

    kind = "sandbox"


def up(request: Request, *, environment: Mapping[str, str]) -> Sandbox:
    """Start a sandbox and wait until every node is idle.

    Args:
        request: what the user wants.
        environment: the caller's environment.

    Returns:
        The sandbox, which continues after this process ends.

    Raises:
        UserError: the request is invalid.
        SandboxError: a daemon failed or a node did not come up; nothing is left behind.
    """
    requests.check(request, missing_programs=start.missing_programs)
    with start.one_at_a_time():
        _make_room(request.directory)
        sandbox, cluster = layout.plan(request, secrets.token_hex(16))
        _make_private(request.directory)
        state.write(sandbox)
        try:
            _start(sandbox, cluster, environment)
        except BaseException:
            _end(sandbox)
            raise
    return sandbox


def down(directory: Path) -> Sandbox | None:
    """End the sandbox in ``directory`` and remove everything of it.

    Args:
        directory: the sandbox's directory; a sandbox that never started, or only in part, is no error.

    Returns:
        The sandbox that was there, or None.

    Raises:
        UserError: it is another user's.
        StillRunningError: a process does not end.
    """
    _check_owner(directory)
    sandbox = state.read(directory)
    if sandbox is not None:
        _end(sandbox)
    return sandbox


def status(directory: Path, *, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return what is known about the sandbox in ``directory``.

    Args:
        directory: the sandbox's directory.
        environment: the caller's environment.

    Returns:
        ``state``: ``none``, ``stopped`` (it left files behind), ``up`` or ``degraded`` (up, but something is not as it
        should be); with a sandbox also the fields that ``up`` prints; with a running one ``node_states``, Slurm's word
        for each node, null if slurmctld does not answer.
    """
    _check_owner(directory)
    sandbox = state.read(directory)
    if sandbox is None:
        return {"state": "none", "directory": str(directory)}
    if state.find_supervisor(sandbox) is None:
        return {"state": "stopped", **sandbox.as_json()}
    try:
        nodes = node_states(slurm_environment(sandbox, environment))
    except SlurmCommandError:
        return {"state": "degraded", **sandbox.as_json(), "node_states": None}
    lost = [name for name, word in nodes.items() if word.endswith("*") or word.startswith("down")]
    return {"state": "degraded" if lost else "up", **sandbox.as_json(), "node_states": nodes}


def _make_room(directory: Path) -> None:
    """Remove what an earlier sandbox left in ``directory``."""
    _check_owner(directory)
    _check_parents(directory)
    sandbox = state.read(directory)
    if sandbox is not None and state.find_supervisor(sandbox) is not None:
        raise UserError(
            f"a sandbox is up already in {directory}; end it with hpcddp sandbox down, "
            "or start a second one with --dir DIRECTORY"
        )
    if sandbox is not None:
        _end(sandbox)
    elif directory.exists() and any(directory.iterdir()):
        raise UserError(
            f"the sandbox's directory {directory} holds files that are not a sandbox's; give an empty one with --dir"
        )


def _make_private(directory: Path) -> None:
    """Make ``directory`` with mode 0700: whoever reaches the socket of munged runs jobs as the sandbox's owner."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Another user may have created it in the meantime.
    _check_owner(directory)
    directory.chmod(0o700)


def _check_owner(directory: Path) -> None:
    if not os.path.lexists(directory):
        return
    # A symbolic link has its own owner, who can change its target.
    owners = [directory.lstat().st_uid, *([directory.stat().st_uid] if directory.exists() else [])]
    if others := [owner for owner in owners if owner != os.geteuid()]:
        raise UserError(
            f"the sandbox in {directory} is user {others[0]}'s; let that user run the command, "
            "or give another directory with --dir"
        )
    if not directory.is_dir():
        raise UserError(f"the sandbox's directory {directory} is a file; give a directory with --dir")


def _check_parents(directory: Path) -> None:
    for parent in directory.resolve().parents:
        mode = parent.stat().st_mode if parent.exists() else 0
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise UserError(
                f"{parent}, above the sandbox's directory, can be written by everyone, who could put another directory "
                "in its place; give another one with --dir"
            )


def _start(sandbox: Sandbox, cluster: Cluster, environment: Mapping[str, str]) -> None:
    layout.write_files(sandbox, cluster)
    descriptor = start.start_supervisor(
        sandbox.directory,
        isolated=sandbox.isolated,
        log=sandbox.directory / "log" / "supervisor.log",
        environment=start.supervisor_environment(sandbox.token, environment),
    )
    with os.fdopen(descriptor, "w", encoding="utf-8") as pipe:
        supervisor = _wait_for_supervisor(sandbox)
        if sandbox.interface is not None:
            start.connect_machine(
                sandbox.interface,
                network.machine_address(cluster.controller_address),
                supervisor=supervisor,
                environment=start.daemon_environment(sandbox.token),
            )
        commands = network.build_commands(cluster) if sandbox.isolated else ()
        groups = cgroups.make(sandbox.directory, sandbox.token) if sandbox.uses_cgroups else ()
        instructions = Instructions(commands=commands + groups, daemons=daemons.daemons_of(cluster))
        pipe.write(f"{instructions.as_line()}\n")
        pipe.flush()
        _wait_for_daemons(sandbox)
        _wait_for_nodes(sandbox, environment)
        layout.write_srun_configuration(cluster)
        pipe.write(f"{STAY}\n")


def _wait_for_supervisor(sandbox: Sandbox) -> int:
    last_seen = time.monotonic()
    deadline = last_seen + _SUPERVISOR_TIMEOUT_S
    while (supervisor := state.find_supervisor(sandbox)) is None:
        now = time.monotonic()
        if processes.members(sandbox.token, sandbox.slurm_conf):
            last_seen = now
        if now > deadline or now - last_seen > _UNSEEN_S:
            raise _supervisor_error(sandbox)
        time.sleep(_POLL_S)
    return supervisor.pid


def _wait_for_daemons(sandbox: Sandbox) -> None:
    deadline = time.monotonic() + _DAEMONS_TIMEOUT_S
    while state.read_daemons(sandbox) is None:
        if time.monotonic() > deadline or state.find_supervisor(sandbox) is None:
            raise _supervisor_error(sandbox)
        time.sleep(_POLL_S)


def _wait_for_nodes(sandbox: Sandbox, environment: Mapping[str, str]) -> None:
    deadline = time.monotonic() + _NODES_TIMEOUT_S
    states: Mapping[str, str] = {}
    while any(states.get(node) != "idle" for node in sandbox.nodes):
        if state.find_supervisor(sandbox) is None:
            raise _supervisor_error(sandbox)
        if time.monotonic() > deadline or _INVALID_NODE in states.values():
            late = [node for node in sandbox.nodes if states.get(node) != "idle"]
            words = ", ".join(f"{node} is {states.get(node, 'unknown')}" for node in late)
            raise SandboxError(f"not every node of the sandbox came up: {words}", hint=_tails(sandbox, late[0]))
        time.sleep(_POLL_S)
        states = node_states(slurm_environment(sandbox, environment))


def slurm_environment(sandbox: Sandbox, environment: Mapping[str, str]) -> dict[str, str]:
    """Return ``environment`` changed so that Slurm's commands speak to the sandbox."""
    return {**environment, "SLURM_CONF": str(sandbox.slurm_conf)}


def _end(sandbox: Sandbox) -> None:
    """End every process, wait for the kernel to take the network away, remove the files."""
    supervisor = state.find_supervisor(sandbox)
    processes.end_all(sandbox.token, sandbox.slurm_conf, supervisor=None if supervisor is None else supervisor.pid)
    _wait_for_interface(sandbox)
    state.remove_files(sandbox)


def _wait_for_interface(sandbox: Sandbox) -> None:
    """Wait until this machine's end of the veth pair is gone: the kernel removes it a while after the last process."""
    if sandbox.interface is None:
        return
    deadline = time.monotonic() + _INTERFACE_TIMEOUT_S
    while (Path("/sys/class/net") / sandbox.interface).exists():
        if time.monotonic() > deadline:
            raise SandboxError(
                f"the network interface {sandbox.interface} of the sandbox is still there after "
                f"{_INTERFACE_TIMEOUT_S:.0f} s; run hpcddp sandbox down again"
            )
        time.sleep(_POLL_S)


def _supervisor_error(sandbox: Sandbox) -> SandboxError:
    """Return the supervisor's error message, with the end of the log of the daemon that it names first."""
    said = _tail(sandbox.directory / "log" / "supervisor.log")[-1:] or ["its supervisor said nothing"]
    return SandboxError(f"the sandbox did not come up: {said[0]}", hint=_tails(sandbox, said[0].partition(" ")[0]))


def _tails(sandbox: Sandbox, daemon: str) -> str | None:
    """Return the last lines of the logs that explain why ``daemon`` failed."""
    logs = sandbox.directory / "log"
    # Errors before the log was opened are only in the output file.
    lines = _tail(logs / f"{daemon}.log") or _tail(logs / f"{daemon}.out")
    if daemon in sandbox.nodes:
        lines += _tail(logs / "slurmctld.log")
    return "\n  ".join(lines) or None


def _tail(log: Path) -> list[str]:
    """Return the last lines of a log; none if the file does not exist."""
    if not log.is_file():
        return []
    return log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
