"""The nodes of a job: exclude those on which its run fails from the requeued job, and find those that were lost."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from hpcddp.errors import HpcddpError, write_message
from hpcddp.run.directory import AttemptDirectory
from hpcddp.run.events import append_event, read_events
from hpcddp.run.node_faults import FailingNode, excluded_nodes, failing_nodes
from hpcddp.slurm import commands
from hpcddp.slurm.hostlist import expand
from hpcddp.slurm.job import is_transient, moment_of

_MOST_NODES: Final = 8
# What Slurm shows for a field without a value.
_NO_VALUE: Final = "(null)"


def avoid_failing_nodes(attempt: AttemptDirectory, job_id: str, environment: Mapping[str, str]) -> None:
    """Exclude the nodes on which a run fails from its job, which has been requeued; no longer those of a day ago.

    Slurm changes the list of a pending job only, and keeps it over requeues. Nodes that the user or the site has
    excluded stay in it. Slurm takes any list, and a job that it could not start then waits for ever: so
    ``sbatch --test-only`` is asked first. Whatever Slurm refuses is a message and an event.

    Args:
        attempt: the attempt that ends; the requeue is in the event log.
        environment: the batch script's environment.

    Raises:
        OSError: the event cannot be written.
    """
    try:
        exclusion = _exclude_failing_nodes(attempt, job_id, environment)
    except HpcddpError as error:
        # The list that was set before still holds.
        exclusion = (f"the nodes on which the run fails are not excluded: {error.message}", None)
    if exclusion is None:
        return
    sentence, nodes = exclusion
    write_message(sentence)
    append_event(
        attempt.run.events,
        kind="exclusion",
        time=time.time(),
        attempt=attempt.number,
        reason=sentence,
        nodes=nodes,
    )


def _exclude_failing_nodes(
    attempt: AttemptDirectory, job_id: str, environment: Mapping[str, str]
) -> tuple[str, list[str] | None] | None:
    """Change the list of excluded nodes; return what was done, and which failing nodes are excluded now.

    None if the list stays as it is, and nothing kept a node out of it.
    """
    events = read_events(attempt.run.events)
    excluded_before = excluded_nodes(events)
    failing = failing_nodes(events, now=time.time())
    if not failing and not excluded_before:
        return None
    job = commands.show_job(job_id) or {}
    current_list = _nodes_in(job, "ExcNodeList")
    excluded_by_others = [node for node in current_list if node not in excluded_before]
    untouched = {*excluded_by_others, *required_nodes_of(job)}
    candidates = [node for node in failing if node.name not in untouched][:_MOST_NODES]
    chosen, why_not_all = _startable(candidates, excluded_by_others, job_id, environment)
    refused = candidates[len(chosen) :]
    chosen_names = [node.name for node in chosen]
    new_list = [*excluded_by_others, *chosen_names]
    is_changed = set(new_list) != set(current_list)
    if is_changed:
        commands.update_job(job_id, ExcNodeList=",".join(new_list))
    if not is_changed and not refused:
        return None
    sentences = []
    if chosen:
        sentences.append(f"job {job_id} is kept away from {_named(chosen)}")
    if refused:
        sentences.append(
            f"job {job_id} is not kept away from {_named(refused)}, because Slurm could not start it: {why_not_all}"
        )
    if not candidates:
        sentences.append(f"job {job_id} may run on {', '.join(excluded_before)} again")
    return "; ".join(sentences), chosen_names


def required_nodes_of(job: Mapping[str, str]) -> list[str]:
    """Return the nodes that a job must get (``resources.nodelist``), as its record in Slurm names them.

    Raises:
        HostListError: the record has another form.
    """
    return _nodes_in(job, "ReqNodeList")


def _nodes_in(job: Mapping[str, str], field: str) -> list[str]:
    text = job.get(field, _NO_VALUE)
    if text == _NO_VALUE:
        return []
    return expand(text)


def _startable(
    candidates: Sequence[FailingNode],
    excluded_by_others: Sequence[str],
    job_id: str,
    environment: Mapping[str, str],
) -> tuple[list[FailingNode], str]:
    """Return the first nodes without which Slurm could still start a job, and why not all; their faults are the newest.

    Raises:
        SlurmCommandError: Slurm cannot say it.
    """
    if not candidates:
        return [], ""
    script = commands.script_of_job(job_id, environment)
    chosen = list(candidates)
    why_not_all = ""
    while chosen:
        excluded = [*excluded_by_others, *(node.name for node in chosen)]
        try:
            commands.test_script(script, environment=environment, options=[f"--exclude={','.join(excluded)}"])
        except commands.SlurmCommandError as error:
            if is_transient(error):
                raise
            why_not_all = error.message
            chosen.pop()
        else:
            break
    return chosen, why_not_all


def _named(nodes: Sequence[FailingNode]) -> str:
    return ", ".join(f"{node.name} ({node.why})" for node in nodes)


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
