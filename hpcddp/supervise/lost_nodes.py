"""Find the nodes of a job that were lost while it ran."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping
from typing import Final

from hpcddp.slurm import commands
from hpcddp.slurm.hostlist import expand
from hpcddp.slurm.job import moment_of

_CONNECT_TIMEOUT_S: Final = 3.0


def lost_nodes(
    environment: Mapping[str, str], *, tasks_per_node: int, recorded: Iterable[int], started_at: float | None
) -> list[str]:
    """Return the nodes without records whose slurmd does not answer either, or which were started anew meanwhile.

    Args:
        environment: the batch script's environment, which names the job's nodes.
        tasks_per_node: ranks on each of them.
        recorded: the ranks that left a record of why they ended.
        started_at: when the attempt began, in seconds since the epoch; None if that is not known.
    """
    nodes = expand(environment.get("SLURM_JOB_NODELIST", ""))
    silent_nodes = nodes_without_records(nodes, tasks_per_node=tasks_per_node, recorded=recorded)
    restarted_nodes = _nodes_restarted_since(started_at, silent_nodes, environment)
    return [node for node in silent_nodes if node in restarted_nodes or not _slurmd_answers(node)]


def nodes_without_records(nodes: list[str], *, tasks_per_node: int, recorded: Iterable[int]) -> list[str]:
    """Return the nodes without a record of any rank; ranks are laid out in blocks.

    Args:
        nodes: the job's nodes in their order.
        tasks_per_node: ranks on each of them.
        recorded: the ranks that left a record of why they ended.
    """
    recorded_nodes = {rank // tasks_per_node for rank in recorded}
    return [node for index, node in enumerate(nodes) if index not in recorded_nodes]


def _nodes_restarted_since(started_at: float | None, nodes: list[str], environment: Mapping[str, str]) -> set[str]:
    """Return the nodes that were started after a moment; none where that is not known."""
    if not nodes or started_at is None:
        return set()
    try:
        boot_times = commands.boot_times(nodes, environment)
    except commands.SlurmCommandError:
        return set()
    restarted_nodes = set()
    for node, boot_time in boot_times.items():
        booted_at = moment_of(boot_time)
        if booted_at is not None and booted_at > started_at:
            restarted_nodes.add(node)
    return restarted_nodes


def _slurmd_answers(node: str) -> bool:
    """Return whether a connection to the node's slurmd opens; a node with an unknown address counts as answering."""
    try:
        address = commands.slurmd_address(node)
    except commands.SlurmCommandError:
        return True
    try:
        socket.create_connection(address, timeout=_CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True
