"""The one module that starts daemons and makes network namespaces."""

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

from hpcddp.errors import HpcddpError
from hpcddp.rehearse.ending import TOKEN_VARIABLE
from hpcddp.rehearse.network import UPLINK, parse_networks
from hpcddp.rehearse.orders import Command, Daemon

# Daemons are in sbin, which an ordinary user's PATH lacks on Debian.
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_COMMAND_TIMEOUT_S = 30.0
_MUTEX_TIMEOUT_S = 120.0
_POLL_S = 0.05
# Below the ports that the kernel hands out by itself (32768-60999), so that a free one stays free.
_PORTS = range(10_000, 20_000)
# linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36


class ProcessError(HpcddpError):
    """A command or a daemon of the sandbox failed."""

    kind = "sandbox"


def daemon_environment(token: str) -> dict[str, str]:
    """Return what a daemon sees: nothing of the caller's environment, but the token that tells whose it is."""
    return {"PATH": _PATH, "LANG": "C.UTF-8", TOKEN_VARIABLE: token}


def keeper_environment(token: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return what the keeper sees: a daemon's environment, and where the caller's Python looks for modules."""
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
        ProcessError: it failed, or did not end; the message holds its own words.
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
    """Start a daemon in a session of its own, with none of this process's descriptors."""
    return _start(daemon.argv, daemon.output, environment)


def start_keeper(directory: Path, *, isolated: bool, log: Path, environment: Mapping[str, str]) -> int:
    """Start the process that keeps a sandbox; it is nobody's child.

    Args:
        directory: the sandbox's directory.
        isolated: whether it gets namespaces of its own (needs root). Then the kernel ends everything in the sandbox,
            and takes its network and mounts away, as soon as the keeper ends, however it ends.
        log: what it prints goes here.
        environment: its whole environment.

    Returns:
        The end of a pipe to write its orders to. The sandbox ends when the pipe is closed before the keeper was told to
        stay.
    """
    keeper: tuple[str, ...] = (sys.executable, "-P", "-m", "hpcddp.rehearse.keeper", str(directory))
    if isolated:
        # ip netns exec would hide /sys/fs/cgroup, without which slurmd does not start.
        own = ("--mount", "--uts", "--net", "--pid", "--fork", "--kill-child=SIGKILL")
        keeper = ("unshare", *own, "--", *keeper)
    read_end, write_end = os.pipe()
    try:
        # setsid leaves at once; its child is adopted by whoever adopts orphans here.
        detached = _start(("setsid", "--fork", *keeper), log, environment, standard_input=read_end)
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


def connect_machine(interface: str, address: str, *, keeper: int, environment: Mapping[str, str]) -> None:
    """Lay a cable from this machine into the sandbox; it goes when the sandbox's network goes.

    Args:
        interface: the name of this machine's end.
        address: this machine's address in the sandbox's network, with the prefix length.
        keeper: the keeper's process id.
        environment: the environment of the commands.
    """
    lines = (
        f"link add {interface} type veth peer name {UPLINK} netns {keeper}\n"
        f"address add {address} dev {interface}\n"
        f"link set {interface} up\n"
    )
    run(Command(argv=("ip", "-batch", "-"), standard_input=lines), environment)


def networks_in_use(environment: Mapping[str, str]) -> list[IPv4Network]:
    """Return the IPv4 networks that this machine has a route to, in whatever routing table."""
    printed = run(Command(argv=("ip", "-json", "-4", "route", "show", "table", "all")), environment)
    return list(parse_networks(route.get("dst", "") for route in json.loads(printed)))


def free_ports(count: int, *, start: int) -> list[int]:
    """Return ports of 127.0.0.1 that nobody listens on.

    Args:
        count: how many.
        start: where to begin the search, any number; so that sandboxes begin at different places.

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
            # slurmctld may listen on all addresses.
            probe.bind(("", port))
        except OSError:
            return False
    return True


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Let one sandbox after the other look for free ports, names and addresses on this machine and take them.

    The lock is a name in the kernel (unix(7), abstract sockets): it leaves no file and goes with its holder.

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
