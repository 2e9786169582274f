"""A real Slurm on this one machine: start it, end it, ask about it."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcddp.errors import HpcddpError, UserError
from hpcddp.rehearse import cgroups, daemons, ending, network, planning, processes, state
from hpcddp.rehearse import request as requests
from hpcddp.rehearse.configuration import Cluster
from hpcddp.rehearse.keeper import STAY
from hpcddp.rehearse.orders import Orders
from hpcddp.rehearse.request import Request
from hpcddp.rehearse.state import Sandbox
from hpcddp.slurm.commands import SlurmCommandError, node_states

_KEEPER_TIMEOUT_S = 20.0
_DAEMONS_TIMEOUT_S = 60.0
_NODES_TIMEOUT_S = 60.0
_INTERFACE_TIMEOUT_S = 20.0
_POLL_S = 0.05
# slurmctld has refused what the node said about itself (sinfo(1), INVALID_REG); that does not pass.
_HOPELESS = "inval"
_TAIL_LINES = 6


class SandboxError(HpcddpError):
    """The sandbox did not come up, or does not go."""

    kind = "sandbox"


def up(request: Request, *, environment: Mapping[str, str]) -> Sandbox:
    """Start a sandbox and wait until every node is idle.

    Args:
        request: what the user wants.
        environment: the caller's environment.

    Returns:
        The sandbox, which goes on when this process has ended.

    Raises:
        UserError: it cannot be had like this.
        SandboxError: a daemon failed or a node did not come up; nothing is left behind.
    """
    requests.check(request, missing_programs=processes.missing_programs)
    with processes.one_at_a_time():
        _make_room(request.directory)
        sandbox, cluster = planning.plan(request, secrets.token_hex(16))
        request.directory.mkdir(parents=True, exist_ok=True)
        state.write(sandbox)
        try:
            _start(sandbox, cluster, environment)
        except BaseException:
            _end(sandbox)
            raise
    return sandbox


def down(directory: Path) -> Sandbox | None:
    """End the sandbox in ``directory`` and take everything of it away.

    Args:
        directory: the sandbox's directory; a sandbox that was never up, or was cut short, is no error.

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
    if state.find_keeper(sandbox) is None:
        return {"state": "stopped", **sandbox.as_json()}
    try:
        nodes = node_states(slurm_environment(sandbox, environment))
    except SlurmCommandError:
        return {"state": "degraded", **sandbox.as_json(), "node_states": None}
    lost = [name for name, word in nodes.items() if word.endswith("*") or word.startswith("down")]
    return {"state": "degraded" if lost else "up", **sandbox.as_json(), "node_states": nodes}


def _make_room(directory: Path) -> None:
    """Take away what an earlier sandbox left in ``directory``."""
    _check_owner(directory)
    sandbox = state.read(directory)
    if sandbox is not None and state.find_keeper(sandbox) is not None:
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


def _check_owner(directory: Path) -> None:
    if not directory.exists():
        return
    if not directory.is_dir():
        raise UserError(f"the sandbox's directory {directory} is a file; give a directory with --dir")
    if directory.stat().st_uid != os.geteuid():
        raise UserError(
            f"the sandbox in {directory} is user {directory.stat().st_uid}'s; let that user run the command, "
            "or give another directory with --dir"
        )


def _start(sandbox: Sandbox, cluster: Cluster, environment: Mapping[str, str]) -> None:
    planning.write_files(sandbox, cluster)
    pipe = processes.start_keeper(
        sandbox.directory,
        isolated=sandbox.isolated,
        log=sandbox.directory / "log" / "keeper.log",
        environment=processes.keeper_environment(sandbox.token, environment),
    )
    with os.fdopen(pipe, "w", encoding="utf-8") as orders:
        keeper = _wait_for_keeper(sandbox)
        if sandbox.interface is not None:
            processes.connect_machine(
                sandbox.interface,
                network.machine_address(cluster.controller_address),
                keeper=keeper,
                environment=processes.daemon_environment(sandbox.token),
            )
        commands = network.build_commands(cluster) if sandbox.isolated else ()
        groups = cgroups.make(sandbox.directory, sandbox.token) if sandbox.uses_cgroups else ()
        orders.write(Orders(commands=commands + groups, daemons=daemons.daemons_of(cluster)).as_line() + "\n")
        orders.flush()
        _wait_for_daemons(sandbox)
        _wait_for_nodes(sandbox, environment)
        orders.write(f"{STAY}\n")


def _wait_for_keeper(sandbox: Sandbox) -> int:
    deadline = time.monotonic() + _KEEPER_TIMEOUT_S
    while (keeper := state.find_keeper(sandbox)) is None:
        if time.monotonic() > deadline or not ending.members(sandbox.token, sandbox.slurm_conf):
            raise _keeper_error(sandbox)
        time.sleep(_POLL_S)
    return keeper.pid


def _wait_for_daemons(sandbox: Sandbox) -> None:
    deadline = time.monotonic() + _DAEMONS_TIMEOUT_S
    while state.read_daemons(sandbox) is None:
        if time.monotonic() > deadline or state.find_keeper(sandbox) is None:
            raise _keeper_error(sandbox)
        time.sleep(_POLL_S)


def _wait_for_nodes(sandbox: Sandbox, environment: Mapping[str, str]) -> None:
    deadline = time.monotonic() + _NODES_TIMEOUT_S
    states: Mapping[str, str] = {}
    while any(states.get(node) != "idle" for node in sandbox.nodes):
        if state.find_keeper(sandbox) is None:
            raise _keeper_error(sandbox)
        if time.monotonic() > deadline or _HOPELESS in states.values():
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
    keeper = state.find_keeper(sandbox)
    ending.end_all(sandbox.token, sandbox.slurm_conf, keeper=None if keeper is None else keeper.pid)
    _wait_for_interface(sandbox)
    state.remove_files(sandbox)


def _wait_for_interface(sandbox: Sandbox) -> None:
    """Wait until this machine's end of the cable is gone: the kernel removes a network a while after its last user."""
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


def _keeper_error(sandbox: Sandbox) -> SandboxError:
    """Return the keeper's complaint, with the end of the log of the daemon that it names first."""
    said = _tail(sandbox.directory / "log" / "keeper.log")[-1:] or ["its keeper said nothing"]
    return SandboxError(f"the sandbox did not come up: {said[0]}", hint=_tails(sandbox, said[0].partition(" ")[0]))


def _tails(sandbox: Sandbox, daemon: str) -> str | None:
    """Return the ends of the logs that tell why ``daemon`` is not as it should be."""
    logs = sandbox.directory / "log"
    # What was wrong before a log could be opened was printed only.
    lines = _tail(logs / f"{daemon}.log") or _tail(logs / f"{daemon}.out")
    if daemon in sandbox.nodes:
        lines += _tail(logs / "slurmctld.log")
    return "\n  ".join(lines) or None


def _tail(log: Path) -> list[str]:
    """Return the last lines of a log, without a file none."""
    if not log.is_file():
        return []
    return log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
