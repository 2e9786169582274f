"""A real Slurm on this one machine: start it, end it, ask about it."""

from __future__ import annotations

import os
import pwd
import secrets
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcddp.errors import HpcddpError, UserError
from hpcddp.rehearse import cgroups, configuration, daemons, ending, network, processes, state
from hpcddp.rehearse import request as requests
from hpcddp.rehearse.configuration import PARTITIONS, Cluster, Node
from hpcddp.rehearse.keeper import STAY
from hpcddp.rehearse.orders import Orders
from hpcddp.rehearse.request import Request
from hpcddp.rehearse.state import Sandbox
from hpcddp.run.files import write_text
from hpcddp.slurm.commands import SlurmCommandError, node_states

_KEEPER_TIMEOUT_S = 20.0
_DAEMONS_TIMEOUT_S = 60.0
_NODES_TIMEOUT_S = 60.0
_INTERFACE_TIMEOUT_S = 20.0
_POLL_S = 0.05
_TAIL_LINES = 12
_MUNGE_KEY_BYTES = 128


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
        sandbox, cluster = _plan(request, secrets.token_hex(16))
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
    elif directory.is_dir() and any(directory.iterdir()):
        raise UserError(
            f"the sandbox's directory {directory} holds files that are not a sandbox's; give an empty one with --dir"
        )
    elif directory.exists() and not directory.is_dir():
        raise UserError(f"the sandbox's directory {directory} is a file; give a directory with --dir")


def _check_owner(directory: Path) -> None:
    if directory.exists() and directory.stat().st_uid != os.geteuid():
        raise UserError(
            f"the sandbox in {directory} is user {directory.stat().st_uid}'s; let that user run the command, "
            "or give another directory with --dir"
        )


def _plan(request: Request, token: str) -> tuple[Sandbox, Cluster]:
    """Decide every name, address and port."""
    names = tuple(f"n{number}" for number in range(1, request.nodes + 1))
    # Sandboxes look for what is free from different places on.
    start = int(token, 16)
    if request.isolated:
        subnet = network.free_subnet(processes.networks_in_use(processes.daemon_environment(token)), start)
        host, address, port = network.CONTROLLER_HOST, network.controller_address(subnet), network.CONTROLLER_PORT
        places = [(one, network.NODE_PORT) for one in network.node_addresses(subnet, len(names))]
    else:
        host, address = socket.gethostname().partition(".")[0], "127.0.0.1"
        port, *ports = processes.free_ports(1 + len(names), start=start)
        places = [(address, one) for one in ports]
    nodes = tuple(Node(name=name, address=at, port=on) for name, (at, on) in zip(names, places, strict=True))
    cluster = Cluster(
        directory=request.directory,
        user=_user_name(),
        controller_host=host,
        controller_address=address,
        controller_port=port,
        node_host=None if request.isolated else host,
        nodes=nodes,
        cpus_per_node=request.cpus_per_node,
        gpus_per_node=request.gpus_per_node,
        overrides=request.overrides,
    )
    sandbox = Sandbox(
        directory=request.directory,
        token=token,
        isolated=request.isolated,
        interface=network.interface_name(token) if request.isolated else None,
        controller_host=host,
        nodes=names,
        partitions=PARTITIONS,
        uses_cgroups=request.uses_cgroups,
    )
    return sandbox, cluster


def _user_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def _start(sandbox: Sandbox, cluster: Cluster, environment: Mapping[str, str]) -> None:
    _write_files(cluster)
    if sandbox.uses_cgroups:
        write_text(sandbox.directory / "cgroup.conf", cgroups.configuration(sandbox.directory))
    pipe = processes.start_keeper(
        sandbox.directory,
        isolated=sandbox.isolated,
        log=sandbox.keeper_log,
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
        _wait_for_nodes(sandbox, cluster, environment)
        orders.write(f"{STAY}\n")


def _write_files(cluster: Cluster) -> None:
    for directory in daemons.directories_of(cluster):
        directory.mkdir(parents=True)
    key = daemons.key_of(cluster)
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(_MUNGE_KEY_BYTES))
    for node in cluster.nodes:
        for index in range(cluster.gpus_per_node):
            # Slurm wants a character device; nobody opens it.
            cluster.device_of(node.name, index).symlink_to("/dev/null")
    for path in network.namespace_files(cluster) if cluster.node_host is None else ():
        path.parent.mkdir(exist_ok=True)
        path.touch()
    write_text(cluster.directory / "hosts", configuration.hosts_file(cluster))
    write_text(cluster.directory / "gres.conf", configuration.gres_conf(cluster))
    write_text(cluster.slurm_conf, configuration.slurm_conf(cluster))


def _wait_for_keeper(sandbox: Sandbox) -> int:
    deadline = time.monotonic() + _KEEPER_TIMEOUT_S
    while (keeper := state.find_keeper(sandbox)) is None:
        if time.monotonic() > deadline or not ending.members(sandbox.token, sandbox.slurm_conf):
            raise SandboxError(_keeper_sentence(sandbox))
        time.sleep(_POLL_S)
    return keeper.pid


def _wait_for_daemons(sandbox: Sandbox) -> None:
    deadline = time.monotonic() + _DAEMONS_TIMEOUT_S
    while state.read_daemons(sandbox) is None:
        if time.monotonic() > deadline or state.find_keeper(sandbox) is None:
            raise SandboxError(_keeper_sentence(sandbox), hint=_tails(sandbox))
        time.sleep(_POLL_S)


def _wait_for_nodes(sandbox: Sandbox, cluster: Cluster, environment: Mapping[str, str]) -> None:
    deadline = time.monotonic() + _NODES_TIMEOUT_S
    states: Mapping[str, str] = {}
    while any(states.get(node) != "idle" for node in sandbox.nodes):
        if state.find_keeper(sandbox) is None:
            raise SandboxError(_keeper_sentence(sandbox), hint=_tails(sandbox))
        if time.monotonic() > deadline:
            late = [node for node in sandbox.nodes if states.get(node) != "idle"]
            words = ", ".join(f"{node} is {states.get(node, 'unknown')}" for node in late)
            raise SandboxError(
                f"not every node of the sandbox came up within {_NODES_TIMEOUT_S:.0f} s: {words}",
                hint=_tail(cluster.log_of(late[0])),
            )
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


def _keeper_sentence(sandbox: Sandbox) -> str:
    said = _tail(sandbox.keeper_log, lines=1) or "its keeper said nothing"
    return f"the sandbox did not come up: {said}"


def _tails(sandbox: Sandbox) -> str | None:
    """Return the end of the log of the daemon that the keeper complained about."""
    name = (_tail(sandbox.keeper_log, lines=1) or "").partition(" ")[0]
    return _tail(sandbox.directory / "log" / f"{name}.log")


def _tail(log: Path, *, lines: int = _TAIL_LINES) -> str | None:
    if not log.is_file():
        return None
    return "\n  ".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]) or None
