"""Start commands, daemons and the supervisor of a sandbox; find free addresses and ports."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from ipaddress import IPv4Network
from pathlib import Path

from hpcddp.errors import HpcddpError, UserError
from hpcddp.sandbox.instructions import Command, Daemon
from hpcddp.sandbox.network import UPLINK, parse_networks
from hpcddp.sandbox.processes import TOKEN_VARIABLE

# Daemons are in sbin, which an ordinary user's PATH lacks on Debian.
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_COMMAND_TIMEOUT_S = 30.0
_MUTEX_TIMEOUT_S = 120.0
_POLL_S = 0.05
# Below the ephemeral ports (32768-60999), so that a free one stays free.
_PORTS = range(10_000, 20_000)
# linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36


class ProcessError(HpcddpError):
    """A command or a daemon of the sandbox failed."""

    kind = "sandbox"


def daemon_environment(token: str) -> dict[str, str]:
    """Return a daemon's environment: nothing of the caller's, and the token of the sandbox."""
    return {"PATH": _PATH, "LANG": "C.UTF-8", TOKEN_VARIABLE: token}


def supervisor_environment(token: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the supervisor's environment: a daemon's environment, and the caller's ``PYTHONPATH``."""
    kept = {name: environment[name] for name in ("PYTHONPATH",) if name in environment}
    return {**daemon_environment(token), **kept}


def missing_programs(programs: Sequence[str]) -> list[str]:
    """Return those of ``programs`` that are not installed."""
    path = os.pathsep.join((os.environ.get("PATH", ""), _PATH))
    return [program for program in programs if shutil.which(program, path=path) is None]


def run(command: Command, environment: Mapping[str, str]) -> str:
    """Run a command to its end.

    Args:
        command: what to run.
        environment: its whole environment.

    Returns:
        What it printed.

    Raises:
        ProcessError: it failed, or did not end; the message quotes its output.
    """
    words = " ".join(command.argv)
    try:
        done = subprocess.run(
            command.argv,
            input=command.standard_input,
            env=dict(environment),
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_COMMAND_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ProcessError(f"`{words}` did not end within {_COMMAND_TIMEOUT_S:.0f} s") from None
    if done.returncode != 0:
        said = " ".join((done.stderr or done.stdout).split()) or "it said nothing"
        raise ProcessError(f"`{words}` failed with {done.returncode}: {said}", returncode=done.returncode)
    return done.stdout


def start_daemon(daemon: Daemon, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a daemon in its own session, without this process's file descriptors."""
    return _start(daemon.argv, daemon.output, environment)


def start_supervisor(directory: Path, *, isolated: bool, log: Path, environment: Mapping[str, str]) -> int:
    """Start the supervisor of a sandbox, detached from this process.

    Args:
        directory: the sandbox's directory.
        isolated: whether it gets its own namespaces (needs root). Then the kernel ends all processes of the sandbox
            and removes its network and mounts as soon as the supervisor ends for any reason.
        log: the file for its output.
        environment: its whole environment.

    Returns:
        The end of a pipe to write its instructions to. The sandbox ends when the pipe is closed before the supervisor
        was told to stay.
    """
    supervisor: tuple[str, ...] = (sys.executable, "-P", "-m", "hpcddp.sandbox.supervisor", str(directory))
    if isolated:
        # ip netns exec would hide /sys/fs/cgroup, without which slurmd does not start.
        own = ("--mount", "--uts", "--net", "--pid", "--fork", "--kill-child=SIGKILL")
        supervisor = ("unshare", *own, "--", *supervisor)
    read_end, write_end = os.pipe()
    try:
        # setsid exits at once; its child is adopted by the init process or a subreaper.
        detached = _start(("setsid", "--fork", *supervisor), log, environment, standard_input=read_end)
        detached.wait(_COMMAND_TIMEOUT_S)
    except BaseException:
        os.close(write_end)
        raise
    finally:
        os.close(read_end)
    return write_end


def _start(
    argv: Sequence[str], output: Path, environment: Mapping[str, str], *, standard_input: int = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    with output.open("ab") as stream:
        return subprocess.Popen(
            argv,
            stdin=standard_input,
            stdout=stream,
            stderr=stream,
            env=dict(environment),
            cwd="/",
            start_new_session=True,
        )


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent ends (prctl(2), PR_SET_CHILD_SUBREAPER)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def connect_machine(interface: str, address: str, *, supervisor: int, environment: Mapping[str, str]) -> None:
    """Create a veth pair between this machine and the sandbox; the kernel removes it with the sandbox's network.

    Args:
        interface: the name of this machine's end.
        address: this machine's address in the sandbox's network, with the prefix length.
        supervisor: the supervisor's process id.
        environment: the environment of the commands.
    """
    lines = (
        f"link add {interface} type veth peer name {UPLINK} netns {supervisor}\n"
        f"address add {address} dev {interface}\n"
        f"link set {interface} up\n"
    )
    run(Command(argv=("ip", "-batch", "-"), standard_input=lines), environment)


def networks_in_use(environment: Mapping[str, str]) -> list[IPv4Network]:
    """Return the IPv4 networks that this machine has a route to, in whatever routing table."""
    printed = run(Command(argv=("ip", "-json", "-4", "route", "show", "table", "all")), environment)
    return list(parse_networks(route.get("dst", "") for route in json.loads(printed)))


def host_address() -> str:
    """Return the address of this host's name, on which Slurm's processes listen unless they listen on all addresses.

    Raises:
        UserError: the name has none, or that of another host.
    """
    name = socket.gethostname()
    try:
        address = str(socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except socket.gaierror:
        raise _name_error(name, "has no IPv4 address") from None
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            raise _name_error(name, f"has the address {address}, which is not this host's") from None
    return address


def _name_error(name: str, what: str) -> UserError:
    return UserError(
        f"this host is called {name!r}, and that name {what}; Slurm's daemons listen there: "
        "put 127.0.0.1 and the name into /etc/hosts, or use --hosts namespaces as root"
    )


def is_source_address(address: str) -> bool:
    """Return whether what this host sends to one of its own addresses comes from the same address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Sends nothing, the kernel only chooses the source (udp(7)); any port does.
        probe.connect((address, 9))
        return bool(probe.getsockname()[0] == address)


def free_ports(count: int, *, start: int) -> list[int]:
    """Return ports on which no process listens, at any address of this host.

    Args:
        count: how many.
        start: where to begin the search, any number, so that sandboxes begin at different places.

    Raises:
        ProcessError: there are not that many.
    """
    found: list[int] = []
    for offset in range(len(_PORTS)):
        port = _PORTS[(start + offset) % len(_PORTS)]
        if _is_free(port):
            found.append(port)
        if len(found) == count:
            return found
    raise ProcessError(f"fewer than {count} ports from {_PORTS.start} to {_PORTS.stop - 1} are free on this machine")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Serialise the search for free ports, names and addresses between sandboxes that start at the same time.

    The lock is an abstract socket (unix(7)): it leaves no file, and the kernel releases it when its holder ends.

    Raises:
        ProcessError: it is still held after two minutes.
    """
    deadline = time.monotonic() + _MUTEX_TIMEOUT_S
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as lock:
        while True:
            try:
                lock.bind("\0hpcddp-sandbox-up")
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise ProcessError(
                        f"another `hpcddp sandbox up` has been starting for {_MUTEX_TIMEOUT_S:.0f} s; "
                        "end it and try again"
                    ) from None
                time.sleep(_POLL_S)
        yield
