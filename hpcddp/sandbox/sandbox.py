"""Start and end a real Slurm on this machine, and report its state."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import socket
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcddp.errors import HpcddpError, UserError
from hpcddp.run.files import user_name, write_text
from hpcddp.sandbox import (
    cgroups,
    cleanup,
    configuration,
    daemon_manager,
    network,
    programs,
    state,
)
from hpcddp.sandbox import root as roots
from hpcddp.sandbox.configuration import PARTITIONS, Cluster, Node
from hpcddp.sandbox.network import MOST_NODES
from hpcddp.sandbox.programs import Command, Daemon, Instructions
from hpcddp.sandbox.request import Request
from hpcddp.sandbox.state import Sandbox
from hpcddp.slurm.commands import SlurmCommandError, node_states

_MANAGER_TIMEOUT_S = 20.0
# While a process is in execve(2), /proc shows it without the environment that marks it as the sandbox's.
_UNSEEN_S = 1.0
_DAEMONS_TIMEOUT_S = 60.0
_NODES_TIMEOUT_S = 60.0
_INTERFACE_TIMEOUT_S = 20.0
_POLL_S = 0.05
# slurmctld rejected the registration of the node (sinfo(1), INVALID_REG); waiting does not help.
_INVALID_NODE = "inval"
_TAIL_LINES = 6
_MUNGE_KEY_BYTES = 128
_MUTEX_TIMEOUT_S = 120.0


class SandboxError(HpcddpError):
    """The sandbox did not start, or does not end."""

    kind = "sandbox"


def up(request: Request, *, environment: Mapping[str, str]) -> Sandbox:
    """Start a sandbox and wait until every node is idle.

    Returns:
        The sandbox, which continues after this process ends.

    Raises:
        UserError: the request is invalid.
        SandboxError: a daemon failed or a node did not come up; nothing is left behind.
    """
    check_request(request, missing_programs=programs.missing_programs)
    with _one_at_a_time():
        _make_room(request.directory)
        sandbox, cluster = _plan(request, secrets.token_hex(16))
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

    Returns:
        ``state``: ``none``, ``stopped`` (it left files behind), ``up`` or ``degraded`` (up, but something is not as it
        should be); with a sandbox also the fields that ``up`` prints; with a running one ``node_states``, Slurm's word
        for each node, null if slurmctld does not answer.
    """
    _check_owner(directory)
    sandbox = state.read(directory)
    if sandbox is None:
        return {"state": "none", "directory": str(directory)}
    if state.find_manager(sandbox) is None:
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
    if sandbox is not None and state.find_manager(sandbox) is not None:
        raise UserError(
            f"a sandbox is up already in {directory}; hpcddp sandbox status shows it, hpcddp sandbox down ends it, "
            "and --dir DIRECTORY starts a second one"
        )
    if sandbox is not None:
        _end(sandbox)
    elif directory.exists() and any(directory.iterdir()):
        raise UserError(
            f"the sandbox's directory {directory} holds files that are not a sandbox's; give an empty one with --dir"
        )


def _make_private(directory: Path) -> None:
    """Make ``directory`` with mode 0700: who reaches the socket of munged can run jobs as the sandbox's owner."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Another user may have created it in the meantime.
    _check_owner(directory)
    directory.chmod(0o700)


def _check_owner(directory: Path) -> None:
    if not os.path.lexists(directory):
        return
    # A symbolic link has its own owner, who can change its target.
    owners = [directory.lstat().st_uid]
    if directory.exists():
        owners.append(directory.stat().st_uid)
    others = [owner for owner in owners if owner != os.geteuid()]
    if others:
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


def _plan(request: Request, token: str) -> tuple[Sandbox, Cluster]:
    """Choose every name, address and port."""
    names = tuple(f"n{number}" for number in range(1, request.nodes + 1))
    # Each sandbox starts its search at a different place.
    search_start = int(token, 16)
    if request.isolated:
        subnet = network.free_subnet(network.networks_in_use(programs.daemon_environment(token)), search_start)
        controller_host = network.CONTROLLER_HOST
        controller_address = network.controller_address(subnet)
        controller_port = network.CONTROLLER_PORT
        node_host: str | None = None
        node_addresses = network.node_addresses(subnet, len(names))
        node_ports = [network.NODE_PORT] * len(names)
        machine: tuple[str, str] | None = (network.machine_address(controller_address), socket.gethostname())
        interface: str | None = network.interface_name(token)
    else:
        controller_host = socket.gethostname().partition(".")[0]
        controller_address = network.host_address()
        controller_port, *node_ports = network.free_ports(1 + len(names), start=search_start)
        node_host = controller_host
        node_addresses = [controller_address] * len(names)
        machine = None
        interface = None
    nodes = tuple(
        Node(name=name, address=address, port=port)
        for name, address, port in zip(names, node_addresses, node_ports, strict=True)
    )
    cluster = Cluster(
        directory=request.directory,
        user=user_name(),
        controller_host=controller_host,
        controller_address=controller_address,
        controller_port=controller_port,
        node_host=node_host,
        nodes=nodes,
        cpus_per_node=request.cpus_per_node,
        gpus_per_node=request.gpus_per_node,
        overrides=request.overrides,
        machine=machine,
    )
    sandbox = Sandbox(
        directory=request.directory,
        token=token,
        isolated=request.isolated,
        interface=interface,
        controller_host=controller_host,
        nodes=names,
        partitions=PARTITIONS,
        uses_cgroups=request.uses_cgroups,
        slurm_root=request.slurm_root,
    )
    return sandbox, cluster


def _write_files(sandbox: Sandbox, cluster: Cluster) -> None:
    """Write the files that the daemons read, and make the directories that they write to."""
    for name in ("log", "run", "state", "dev", "munge", *(f"spool/{node.name}" for node in cluster.nodes)):
        (cluster.directory / name).mkdir(parents=True)
    key = _key_of(cluster)
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(_MUNGE_KEY_BYTES))
    for node in cluster.nodes:
        for index in range(cluster.gpus_per_node):
            # Slurm requires a character device; no process opens it.
            cluster.device_of(node.name, index).symlink_to("/dev/null")
    for path in network.namespace_files(cluster) if cluster.node_host is None else ():
        path.parent.mkdir(exist_ok=True)
        path.touch()
    write_text(cluster.directory / "hosts", configuration.hosts_file(cluster))
    write_text(cluster.directory / "gres.conf", configuration.gres_conf(cluster))
    write_text(cluster.slurm_conf, configuration.slurm_conf(cluster))
    if sandbox.uses_cgroups:
        write_text(cluster.directory / "cgroup.conf", cgroups.configuration(cluster.directory))


def _write_srun_configuration(cluster: Cluster) -> None:
    """Let srun listen on all addresses where the tasks cannot reach it at the daemons' address.

    Tasks connect to the source address of srun's own connection: for a connection to 127.0.1.1 that is 127.0.0.1.

    Args:
        cluster: a running one; its daemons have read slurm.conf and do not read it again.
    """
    if cluster.node_host is not None and not network.is_source_address(cluster.controller_address):
        write_text(cluster.slurm_conf, configuration.slurm_conf(cluster, binds_srun=False))


def daemons_of(cluster: Cluster) -> tuple[Daemon, ...]:
    """Return the daemons in the order in which they are started, each in the foreground."""
    munge = cluster.directory / "munge"
    munged = Daemon(
        name="munged",
        argv=(
            "munged",
            "--foreground",
            # The log's directory may be under one that a group can write to, such as a temporary one.
            "--force",
            f"--key-file={_key_of(cluster)}",
            f"--socket={cluster.munge_socket}",
            f"--pid-file={munge}/pid",
            f"--log-file={cluster.log_of('munged')}",
            f"--seed-file={munge}/seed",
        ),
        output=cluster.output_of("munged"),
        ready_socket=cluster.munge_socket,
    )
    slurmctld = Daemon(
        name="slurmctld",
        argv=("slurmctld", "-D", "-f", str(cluster.slurm_conf)),
        output=cluster.output_of("slurmctld"),
        ready_address=(cluster.controller_address, cluster.controller_port),
    )
    return (munged, slurmctld, *(_slurmd(cluster, node) for node in cluster.nodes))


def _key_of(cluster: Cluster) -> Path:
    """Return the file of the sandbox's own key, which only its owner may read (munged(8))."""
    return cluster.directory / "munge" / "key"


def _slurmd(cluster: Cluster, node: Node) -> Daemon:
    enter = network.on_node(cluster.directory, node.name) if cluster.node_host is None else ()
    return Daemon(
        name=node.name,
        argv=(*enter, "slurmd", "-D", "-f", str(cluster.slurm_conf), "-N", node.name),
        output=cluster.output_of(node.name),
    )


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Serialise the search for free ports, names and addresses between sandboxes that start at the same time.

    The lock is an abstract socket (unix(7)): it leaves no file, and the kernel releases it when its holder ends.

    Raises:
        programs.ProcessError: it is still held after two minutes.
    """
    deadline = time.monotonic() + _MUTEX_TIMEOUT_S
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as lock:
        while True:
            try:
                lock.bind("\0hpcddp-sandbox-up")
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise programs.ProcessError(
                        f"another `hpcddp sandbox up` has been starting for {_MUTEX_TIMEOUT_S:.0f} s; "
                        "end it and try again"
                    ) from None
                time.sleep(_POLL_S)
        yield


def _start(sandbox: Sandbox, cluster: Cluster, environment: Mapping[str, str]) -> None:
    _write_files(sandbox, cluster)
    descriptor = daemon_manager.start(
        sandbox,
        log=sandbox.directory / "log" / "daemon-manager.log",
        environment=daemon_manager.manager_environment(sandbox.token, environment),
    )
    with os.fdopen(descriptor, "w", encoding="utf-8") as pipe:
        manager = _wait_for_manager(sandbox)
        if sandbox.interface is not None:
            network.connect_machine(
                sandbox.interface,
                network.machine_address(cluster.controller_address),
                manager=manager,
                environment=programs.daemon_environment(sandbox.token),
            )
        instructions = Instructions(
            commands=_commands_before_daemons(sandbox, cluster, manager), daemons=daemons_of(cluster)
        )
        pipe.write(f"{instructions.as_line()}\n")
        pipe.flush()
        _wait_for_daemons(sandbox)
        _wait_for_nodes(sandbox, environment)
        _write_srun_configuration(cluster)
        pipe.write(f"{daemon_manager.STAY}\n")


def _commands_before_daemons(sandbox: Sandbox, cluster: Cluster, manager: int) -> tuple[Command, ...]:
    """Make the control groups and Slurm's client commands, and return what the daemon manager runs first, in order.

    Args:
        manager: the daemon manager's process id.
    """
    commands: list[Command] = []
    if sandbox.isolated:
        commands += network.build_commands(cluster)
    if sandbox.uses_cgroups:
        commands += cgroups.make(sandbox.directory, sandbox.token)
    if sandbox.slurm_root is not None:
        commands.append(_write_client_commands(sandbox, sandbox.slurm_root, manager=manager))
    return tuple(commands)


def _wait_for_manager(sandbox: Sandbox) -> int:
    last_seen = time.monotonic()
    deadline = last_seen + _MANAGER_TIMEOUT_S
    while (manager := state.find_manager(sandbox)) is None:
        now = time.monotonic()
        if cleanup.members(sandbox.token, sandbox.slurm_conf):
            last_seen = now
        if now > deadline or now - last_seen > _UNSEEN_S:
            raise _manager_error(sandbox)
        time.sleep(_POLL_S)
    return manager.pid


def _wait_for_daemons(sandbox: Sandbox) -> None:
    deadline = time.monotonic() + _DAEMONS_TIMEOUT_S
    while state.read_daemons(sandbox) is None:
        if time.monotonic() > deadline or state.find_manager(sandbox) is None:
            raise _manager_error(sandbox)
        time.sleep(_POLL_S)


def _wait_for_nodes(sandbox: Sandbox, environment: Mapping[str, str]) -> None:
    deadline = time.monotonic() + _NODES_TIMEOUT_S
    states: Mapping[str, str] = {}
    while any(states.get(node) != "idle" for node in sandbox.nodes):
        if state.find_manager(sandbox) is None:
            raise _manager_error(sandbox)
        if time.monotonic() > deadline or _INVALID_NODE in states.values():
            late = [node for node in sandbox.nodes if states.get(node) != "idle"]
            words = ", ".join(f"{node} is {states.get(node, 'unknown')}" for node in late)
            raise SandboxError(f"not every node of the sandbox came up: {words}", hint=_tails(sandbox, late[0]))
        time.sleep(_POLL_S)
        states = node_states(slurm_environment(sandbox, environment))


def slurm_environment(sandbox: Sandbox, environment: Mapping[str, str]) -> dict[str, str]:
    """Return ``environment`` changed so that Slurm's commands use the sandbox."""
    changed = {**environment, "SLURM_CONF": str(sandbox.slurm_conf)}
    if sandbox.slurm_root is not None:
        changed["PATH"] = os.pathsep.join((str(sandbox.client_commands), environment.get("PATH", programs.PATH)))
    return changed


def _end(sandbox: Sandbox) -> None:
    """End every process, wait for the kernel to take the network away, remove the files."""
    manager = state.find_manager(sandbox)
    cleanup.end_all(sandbox.token, sandbox.slurm_conf, manager=None if manager is None else manager.pid)
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


def _manager_error(sandbox: Sandbox) -> SandboxError:
    """Return the daemon manager's error message, with the end of the log of the daemon that it names first."""
    said = _tail(sandbox.directory / "log" / "daemon-manager.log")[-1:] or ["its daemon manager wrote nothing"]
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


_CLIENT_COMMANDS = (
    "sacct", "sacctmgr", "salloc", "sattach", "sbatch", "sbcast", "scancel", "scontrol", "scrontab", "sdiag", "sinfo",
    "sprio", "squeue", "sreport", "srun", "sshare", "sstat", "strigger",
)  # fmt: skip
# nsenter's own option for the working directory takes one that is outside of the namespace, before version 2.38.
_CLIENT_SCRIPT = """\
#!/bin/sh
# Runs {name} of the sandbox in {directory}.
if [ "$(readlink /proc/{manager}/ns/mnt)" != '{namespace}' ]; then
    echo "{name}: the sandbox in {directory} has stopped; hpcddp sandbox down removes what it left" >&2
    exit 1
fi
exec nsenter --target={manager} --mount -- env --chdir="$PWD" {program} "$@"
"""


def _write_client_commands(sandbox: Sandbox, slurm_root: Path, *, manager: int) -> Command:
    """Write Slurm's client commands of a sandbox whose Slurm is in another root directory.

    A directory, which its user puts first in ``PATH``, holds them: on this machine as scripts that enter the sandbox's
    mount namespace, in the sandbox, whose jobs inherit ``PATH``, as links to the commands themselves.

    Returns:
        The command with which the daemon manager shows them to the sandbox.
    """
    links = sandbox.directory / "links"
    links.mkdir()
    sandbox.client_commands.mkdir()
    namespace = str(Path(f"/proc/{manager}/ns/mnt").readlink())
    for name in _CLIENT_COMMANDS:
        program = roots.find_program(slurm_root, name)
        if program is None:
            continue
        (links / name).symlink_to(program)
        script = sandbox.client_commands / name
        text = _CLIENT_SCRIPT.format(
            name=name,
            directory=sandbox.directory,
            manager=manager,
            namespace=namespace,
            program=shlex.quote(str(program)),
        )
        write_text(script, text)
        script.chmod(0o755)
    return Command(argv=("mount", "--bind", str(links), str(sandbox.client_commands)))


_PACKAGES: Mapping[str, str] = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sinfo": "slurm-client",
    "munged": "munge",
    "ip": "iproute2",
}
_ISOLATION_ONLY = frozenset({"ip"})

# The longest path in the directory is a step's socket, spool/n123/n123_4294967295.4294967294, and a socket's path
# has at most 107 bytes (unix(7)).
_LONGEST_DIRECTORY = 70
# Characters that neither slurm.conf nor a node's name pattern gives a meaning to.
_PLAIN_PATH = re.compile(r"/[A-Za-z0-9/._+-]*")
_MOST_PER_NODE = 1024


def check_request(request: Request, *, missing_programs: Callable[[Sequence[str]], list[str]]) -> None:
    """Reject a request that cannot be carried out.

    Raises:
        UserError: for the first error; says what to do instead.
    """
    if request.isolated and os.geteuid() != 0:
        raise UserError("--hosts is namespaces, and only root can make networks; use --hosts shared")
    _check_numbers(request)
    _check_directory(request.directory)
    if request.uses_cgroups and not request.isolated:
        raise UserError(
            "--hosts is shared, and nodes on one host would share their control groups; "
            "leave the cgroup plugins out, or use --hosts namespaces as root"
        )
    if request.uses_cgroups and not cgroups.is_version_1():
        raise UserError(
            "--conf names a cgroup plugin, and this machine has control groups of version 2, for which the sandbox "
            "cannot make room; leave the cgroup plugins out"
        )
    if user_name() == str(os.geteuid()):
        raise UserError(
            f"user id {os.geteuid()} has no name on this machine, and Slurm's daemons need one; add it to /etc/passwd"
        )
    if request.slurm_root is not None:
        _check_slurm_root(request, request.slurm_root)
    programs = _needed_programs(request)
    missing = missing_programs(programs)
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        pronoun = "it" if len(missing) == 1 else "them"
        raise UserError(
            f"{' and '.join(missing)} {verb} not installed, and a sandbox needs {pronoun}; run as root: "
            f"apt-get install --no-install-recommends {' '.join(_PACKAGES[name] for name in _PACKAGES)}"
        )


def _needed_programs(request: Request) -> list[str]:
    """Return the programs of this machine that the sandbox needs."""
    if request.slurm_root is not None:
        return list(_ISOLATION_ONLY)
    return [name for name in _PACKAGES if request.isolated or name not in _ISOLATION_ONLY]


def _check_slurm_root(request: Request, slurm_root: Path) -> None:
    if not request.isolated:
        raise UserError(
            "--slurm is given and --hosts is shared, and only nodes with hosts of their own can have another root "
            "directory; use --hosts namespaces as root, or leave --slurm out"
        )
    roots.check(slurm_root)
    if not roots.is_shared(request.directory):
        raise UserError(
            f"--slurm is given, and the sandbox's directory {request.directory} is in a system directory, which is "
            "another one in that root; give another one with --dir"
        )


def _check_numbers(request: Request) -> None:
    limits = {
        "--nodes": (request.nodes, 1, MOST_NODES),
        "--cpus-per-node": (request.cpus_per_node, 1, _MOST_PER_NODE),
        "--gpus-per-node": (request.gpus_per_node, 0, _MOST_PER_NODE),
    }
    for option, (value, least, most) in limits.items():
        if not least <= value <= most:
            raise UserError(f"{option} is {value}, and it must be from {least} to {most}; write for example {option} 4")


def _check_directory(directory: Path) -> None:
    if not _PLAIN_PATH.fullmatch(str(directory)):
        raise UserError(
            f"the sandbox's directory is {str(directory)!r}, and slurm.conf takes only letters, digits and ._+-/; "
            "give another one with --dir"
        )
    if len(str(directory)) > _LONGEST_DIRECTORY:
        raise UserError(
            f"the sandbox's directory {directory} has {len(str(directory))} characters, and with more than "
            f"{_LONGEST_DIRECTORY} the paths of its sockets get too long; give a shorter one with --dir"
        )
