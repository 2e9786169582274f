"""Whether a node has gone, as far as another node can tell."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping

from hpcddp.slurm import commands
from hpcddp.slurm.hostlist import expand

_CONNECT_TIMEOUT_S = 3.0


def silent_nodes(nodes: list[str], *, tasks_per_node: int, heard: Iterable[int]) -> list[str]:
    """Return the nodes of which no rank has left a word; ranks are laid out in blocks.

    Args:
        nodes: the job's nodes in their order.
        tasks_per_node: ranks on each of them.
        heard: the ranks that left a record of why they ended.
    """
    speaking = {rank // tasks_per_node for rank in heard}
    return [node for index, node in enumerate(nodes) if index not in speaking]


def lost_nodes(environment: Mapping[str, str], *, tasks_per_node: int, heard: Iterable[int]) -> list[str]:
    """Return the silent nodes whose slurmd does not answer either.

    Args:
        environment: the batch script's environment, which names the job's nodes.
        tasks_per_node: ranks on each of them.
        heard: the ranks that left a record of why they ended.
    """
    nodes = expand(environment.get("SLURM_JOB_NODELIST", ""))
    return [
        node for node in silent_nodes(nodes, tasks_per_node=tasks_per_node, heard=heard) if not _slurmd_answers(node)
    ]


def _slurmd_answers(node: str) -> bool:
    """Return whether a connection to the node's slurmd opens; a node that cannot be asked about counts as well."""
    try:
        address = commands.slurmd_address(node)
    except commands.SlurmCommandError:
        return True
    try:
        socket.create_connection(address, timeout=_CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True
