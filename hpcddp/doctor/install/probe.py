"""What ``hpcddp doctor install --on-nodes`` runs on a node: ``python -P -m hpcddp.doctor.install.probe DIRECTORY``.

It communicates with the login node through srun's pipes, because the run root may not be shared. srun gives each line
of the login node to all tasks. There is one question, and an answer before and after it.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from hpcddp.doctor.install.machine import ask_torch
from hpcddp.packages import is_installed
from hpcddp.slurm.hostlist import expand
from hpcddp.slurm.rank_env import own_host, own_rank
from hpcddp.task.rendezvous import interface_of, reachable_addresses
from hpcddp.version import __version__

MARK: Final = "hpcddp-doctor: "
"""In front of each answer; sites print lines of their own."""
LOGIN_FILE: Final = "login"
_CONNECT_TIMEOUT_S: Final = 10.0


def node_file(task: int) -> str:
    """Return the name of the file that a node writes."""
    return f"node-{task}"


def main(directory: Path) -> int:
    """Answer the login node's question about this node.

    Args:
        directory: a directory in the run root, with a file of the login node.
    """
    task = own_rank(os.environ)
    host = own_host(os.environ)
    server = socket.create_server(("", 0), backlog=64)
    threading.Thread(target=_serve, args=(server, host), daemon=True).start()
    other_hosts = [name for name in expand(os.environ["SLURM_STEP_NODELIST"]) if name != host]
    _answer(
        task,
        host=host,
        python=platform.python_version(),
        hpcddp=__version__,
        addresses=reachable_addresses([host, socket.gethostname()], other_hosts, single_host=False),
        port=server.getsockname()[1],
        login_file=(directory / LOGIN_FILE).is_file(),
        refused=_write(directory / node_file(task)),
    )
    tasks = json.loads(sys.stdin.readline())
    clock = time.time()
    reached = _reach(tasks[(task + 1) % len(tasks)])
    torch = ask_torch(sys.executable) if is_installed("torch") else None
    _answer(task, clock=clock, torch=torch, **reached)
    # The other node may still connect.
    sys.stdin.readline()
    return 0


def _answer(task: int, **facts: object) -> None:
    sys.stdout.write(f"{MARK}{json.dumps({'task': task, **facts})}\n")
    sys.stdout.flush()


def _serve(server: socket.socket, host: str) -> None:
    """Send this node's name to each process that connects."""
    while True:
        connection, _ = server.accept()
        with connection:
            connection.sendall(host.encode())


def _write(file: Path) -> str | None:
    """Write a file; return why that is refused."""
    try:
        file.touch()
    except OSError as error:
        return error.strerror
    return None


def _reach(peer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the address by which this node reaches another one, and the interface that leads there."""
    for address in peer["addresses"]:
        try:
            with socket.create_connection((address, peer["port"]), timeout=_CONNECT_TIMEOUT_S) as connection:
                connection.settimeout(_CONNECT_TIMEOUT_S)
                if connection.recv(256).decode(errors="replace") == peer["host"]:
                    return {"reached": address, "interface": interface_of(connection.getsockname()[0])}
        except OSError:
            continue
    return {"reached": None, "interface": None}


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
