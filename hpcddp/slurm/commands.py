"""Slurm's commands, each with a timeout. No other module runs them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpcddp.slurm.calling import (
    SlurmCommandError,
    SlurmMissingError,
    SlurmUnavailableError,
    answer,
    failure,
    reason,
    run,
)
from hpcddp.slurm.job_fields import parse_job
from hpcddp.slurm.queue import FORMAT, QueuedJob, parse_queue

# Whoever calls these commands catches their errors here.
__all__ = ["SlurmCommandError", "SlurmMissingError", "SlurmUnavailableError"]

_UNKNOWN_JOB = "Invalid job id specified"
# Of an element that has ended, while others of its array are still there.
_UNKNOWN_ELEMENT = "Job {job_id} not found"
DEFAULT_LARGEST_ARRAY = 1001
"""What ``MaxArraySize`` is where nobody has set it (slurm.conf(5))."""

_SLURMD_PORT = re.compile(r"^SlurmdPort\s*=\s*([0-9]+)", re.MULTILINE)


def sbatch(
    script: Path,
    *,
    environment: Mapping[str, str],
    directory: Path | None = None,
    dependency: str | None = None,
    options: Sequence[str] = (),
) -> str:
    """Submit a script.

    Args:
        script: the file; Slurm copies it.
        environment: what sbatch sees and, by default, what the job inherits.
        directory: where the job runs; None is this process's own directory.
        dependency: what it waits for, in sbatch's words such as ``afterany:12``; None waits for nothing.
        options: further words for sbatch, which win over the script's directives.

    Returns:
        The job id.

    Raises:
        SlurmUnavailableError: there is no sbatch, or no answer.
        SlurmCommandError: Slurm refused the job; the message holds its reason.
    """
    words = [f"--chdir={directory}"] if directory else []
    words += [f"--dependency={dependency}"] if dependency else []
    done = run(["sbatch", "--parsable", *words, *options, str(script)], environment)
    if done.returncode != 0:
        raise SlurmCommandError(f"sbatch refused the job: {reason(done)}", returncode=done.returncode)
    return parse_job_id(done.stdout)


def parse_job_id(output: str) -> str:
    """Return the job id in what ``sbatch --parsable`` printed: ``123``, or ``123;cluster`` in a federation.

    Raises:
        SlurmCommandError: there is none.
    """
    # A site's plugins may print lines of their own before it.
    last = output.strip().rpartition("\n")[2]
    job_id = last.partition(";")[0]
    if not (job_id.isascii() and job_id.isdecimal()):
        raise SlurmCommandError(f"sbatch --parsable printed {last!r}, which holds no job id")
    return job_id


def show_job(job_id: str, *, environment: Mapping[str, str] | None = None) -> dict[str, str] | None:
    """Return what the controller knows about a job.

    Args:
        job_id: the job's id; ``123_4`` names an array element.
        environment: the command's environment; None is this process's own.

    Returns:
        The fields of ``scontrol show job`` by their names there, or None if the controller does not know the job.

    Raises:
        SlurmUnavailableError: there is no scontrol, or no answer.
        SlurmCommandError: the controller refused the question.
    """
    records = show_array(job_id, environment=environment)
    return records[0] if records else None


def requeue(job_id: str) -> None:
    """Ask Slurm to run a job again if it still runs.

    Never without ``Incomplete``: that would bring a job back to life that its user has cancelled (measured). Slurm
    answers the same whether it requeues the job or not, so look at ``Restarts`` afterwards.

    Args:
        job_id: the job's id; ``123_4`` names an array element, the bare id of an array all of them.

    Raises:
        SlurmUnavailableError: there is no scontrol, or no answer.
        SlurmCommandError: the controller refused.
    """
    _control("requeue", "Incomplete", job_id)


def update_job(job_id: str, **fields: str) -> None:
    """Change fields of a job.

    Args:
        job_id: the job's id.
        fields: the new values by their names in ``scontrol show job``, such as ``StartTime="now+2seconds"``.

    Raises:
        SlurmUnavailableError: there is no scontrol, or no answer.
        SlurmCommandError: the controller refused.
    """
    _control("update", f"JobId={job_id}", *(f"{name}={value}" for name, value in fields.items()))


def show_array(job_id: str, *, environment: Mapping[str, str] | None = None) -> list[dict[str, str]]:
    """Return what the controller knows about a job, a record for each element that it has split off an array.

    Args:
        job_id: the job's id; the bare id of an array names all of it.
        environment: the command's environment; None is this process's own.

    Returns:
        The fields of each record of ``scontrol show job``; none if the controller does not know the job.

    Raises:
        SlurmUnavailableError: there is no scontrol, or no answer.
        SlurmCommandError: the controller refused the question.
    """
    # Submit times are compared, so they must not follow the user's taste (scontrol(1), SLURM_TIME_FORMAT).
    environment = {**(os.environ if environment is None else environment), "SLURM_TIME_FORMAT": "standard"}
    done = run(["scontrol", "show", "job", job_id], environment)
    if done.returncode == 0:
        return [parse_job(record) for record in done.stdout.strip("\n").split("\n\n") if record.strip()]
    if _UNKNOWN_JOB in done.stderr or _UNKNOWN_ELEMENT.format(job_id=job_id) in done.stdout + done.stderr:
        return []
    raise failure(["scontrol", "show", "job", job_id], done)


def largest_array(environment: Mapping[str, str]) -> int:
    """Return how many elements a job array may have; 0 where the site allows no arrays.

    Args:
        environment: the command's environment; ``SLURM_CONF`` in it says which cluster.

    Raises:
        SlurmUnavailableError: there is no scontrol, or no answer.
        SlurmCommandError: the controller refused the question.
    """
    config = ask("scontrol", "show", "config", environment=environment)
    # slurm.conf(5): the largest index is one less, and the scheduler may have a limit of its own.
    limits = re.findall(r"^MaxArraySize\s*=\s*([0-9]+)|\bmax_array_tasks=([0-9]+)", config, re.MULTILINE)
    return min((int(size or tasks) for size, tasks in limits), default=DEFAULT_LARGEST_ARRAY)


def slurmd_address(node: str) -> tuple[str, int]:
    """Return the host and the port at which a node's slurmd listens.

    Args:
        node: the node's name in Slurm.

    Raises:
        SlurmUnavailableError: there is no scontrol, or no answer.
        SlurmCommandError: the controller does not know the node.
    """
    fields = parse_job(_control("show", "node", node))
    # A port is shown only where it is not everybody's.
    port = fields.get("Port") or _SLURMD_PORT.findall(_control("show", "config"))[0]
    return fields["NodeAddr"], int(port)


def ask(*command: str, environment: Mapping[str, str]) -> str:
    """Run one of Slurm's commands that only tells, and return what it printed.

    Args:
        command: its name and its words, such as ``"scontrol", "show", "config"``.
        environment: its environment; ``SLURM_CONF`` in it says which cluster.

    Raises:
        SlurmUnavailableError: there is no such command, or no answer.
        SlurmCommandError: it failed; the message holds its reason.
    """
    done = run(command, environment)
    if done.returncode == 0:
        return done.stdout
    raise failure(command, done)


def _control(*words: str) -> str:
    """Run scontrol and return what it printed."""
    return ask("scontrol", *words, environment=os.environ)


def controller_answers(environment: Mapping[str, str]) -> bool:
    """Return whether a controller of the configured cluster is up.

    Args:
        environment: the command's environment; ``SLURM_CONF`` in it says which cluster.
    """
    try:
        return run(["scontrol", "ping"], environment).returncode == 0
    except SlurmUnavailableError:
        return False


def node_states(environment: Mapping[str, str]) -> dict[str, str]:
    """Return each node's state in Slurm's words, such as ``idle``; ``*`` behind it means that the node does not answer.

    Args:
        environment: the command's environment; ``SLURM_CONF`` in it says which cluster.

    Raises:
        SlurmUnavailableError: there is no sinfo, or no answer.
        SlurmCommandError: the controller refused the question.
    """
    printed = answer(["sinfo", "--noheader", "--Node", "--format=%N %T"], environment)
    # A node has a line for each of its partitions.
    return dict(line.split(maxsplit=1) for line in printed.splitlines())


def queue(environment: Mapping[str, str]) -> list[QueuedJob]:
    """Return the user's jobs that the controller knows, each element of an array by itself, in one question.

    Args:
        environment: the command's environment. ``SQUEUE_*`` in it would choose other jobs, and is left out.

    Raises:
        SlurmUnavailableError: there is no squeue, or no answer.
        SlurmCommandError: the controller refused the question.
    """
    plain = {name: value for name, value in environment.items() if not name.startswith(("SQUEUE_", "SLURM_CLUSTERS"))}
    words = ["squeue", "--me", "--array", "--states=all", "--noheader", f"--Format={FORMAT}"]
    return parse_queue(answer(words, {**plain, "SLURM_TIME_FORMAT": "standard"}))


def priority(job_id: str, environment: Mapping[str, str]) -> str | None:
    """Return what a waiting job's priority is made of, as ``sprio`` prints it; None where it does not.

    Args:
        job_id: the job's id.
        environment: the command's environment.
    """
    try:
        table = answer(["sprio", "--long", "--jobs", job_id], environment)
    except SlurmCommandError:
        return None
    return table if len(table.splitlines()) > 1 else None


def cancel(job_ids: Sequence[str], environment: Mapping[str, str], *, signal: str | None = None) -> None:
    """End jobs, or send a signal to their tasks but not to their batch scripts.

    Args:
        job_ids: the jobs; a bare array id means all of its elements.
        environment: the command's environment.
        signal: the signal's name; None ends the jobs.

    Raises:
        SlurmUnavailableError: there is no scancel, or no answer.
        SlurmCommandError: the controller refused.
    """
    answer(["scancel", *([] if signal is None else [f"--signal={signal}"]), *job_ids], environment)


def srun_knows(option: str, environment: Mapping[str, str]) -> bool:
    """Return whether srun has an option here: one of its own, or one that a plugin of the site adds.

    Args:
        option: the option, with its dashes.
        environment: the command's environment.
    """
    try:
        done = run(["srun", "--help"], environment)
    except SlurmUnavailableError:
        return False
    return option in done.stdout
