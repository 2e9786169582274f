"""Slurm's commands, each with a timeout. No other module runs them."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpcddp.errors import HpcddpError

# A call waits 9 to 18 s for a controller that is away (measured); a busy one may take longer.
_TIMEOUT_S = 60.0

# What a command says when nobody answered it, or too late; a request that is answered too late may have been done.
_AWAY = (
    "Unable to contact",
    "timed out",
    "Connection refused",
    "Zero Bytes were transmitted",
    "Unexpected message received",
    "in standby mode",
)
_UNKNOWN_JOB = "Invalid job id specified"
_KEY = re.compile(r"(?:^|\s)([A-Z][A-Za-z/:]*)=")
# What a user writes freely stands last on its line, so it may hold anything but a line break.
_TO_THE_END_OF_THE_LINE = frozenset(
    {"JobName", "Comment", "AdminComment", "SystemComment", "Command", "WorkDir", "StdErr", "StdIn", "StdOut"}
)

DEFAULT_LARGEST_ARRAY = 1001
"""What ``MaxArraySize`` is where nobody has set it (slurm.conf(5))."""

_SLURMD_PORT = re.compile(r"^SlurmdPort\s*=\s*([0-9]+)", re.MULTILINE)

_DROPPED_PREFIXES = ("SBATCH_", "SLURM_", "SLURMD_", "SUBMITIT_", "TORCHELASTIC_", "HPCDDP_")
_KEPT = frozenset({"SLURM_CONF"})


class SlurmCommandError(HpcddpError):
    """One of Slurm's commands refused, and said why."""

    kind = "slurm"


class SlurmUnavailableError(SlurmCommandError):
    """A command of Slurm is not here, or its controller does not answer: asking again later may help."""

    kind = "slurm_unavailable"


class SlurmMissingError(SlurmUnavailableError):
    """A command of Slurm is not on this machine."""


def submission_environment(environment: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the environment that a new job may inherit.

    sbatch reads ``SBATCH_*`` and some ``SLURM_*`` variables as flags that win over the script's directives (sbatch(1),
    INPUT ENVIRONMENT VARIABLES). What an outer job's launcher said about its own ranks would mislead the new ones.

    Args:
        environment: the submitter's environment.

    Returns:
        The environment without them, but with ``SLURM_CONF``; and the names that were dropped, sorted.
    """
    dropped = tuple(sorted(name for name in environment if name.startswith(_DROPPED_PREFIXES) and name not in _KEPT))
    return {name: value for name, value in environment.items() if name not in dropped}, dropped


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
    done = _run(["sbatch", "--parsable", *words, *options, str(script)], environment)
    if done.returncode != 0:
        raise SlurmCommandError(f"sbatch refused the job: {_reason(done)}", returncode=done.returncode)
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
    # Submit times are compared, so they must not follow the user's taste (scontrol(1), SLURM_TIME_FORMAT).
    environment = {**(os.environ if environment is None else environment), "SLURM_TIME_FORMAT": "standard"}
    done = _run(["scontrol", "show", "job", job_id], environment)
    if done.returncode == 0:
        return parse_job(done.stdout)
    if _UNKNOWN_JOB in done.stderr:
        return None
    error = SlurmUnavailableError if _is_away(done) else SlurmCommandError
    raise error(f"scontrol show job {job_id} failed: {_reason(done)}", returncode=done.returncode)


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
    done = _run(["scontrol", "show", "job", job_id], os.environ if environment is None else environment)
    if done.returncode == 0:
        return [parse_job(record) for record in done.stdout.strip("\n").split("\n\n") if record.strip()]
    if _UNKNOWN_JOB in done.stderr:
        return []
    error = SlurmUnavailableError if _is_away(done) else SlurmCommandError
    raise error(f"scontrol show job {job_id} failed: {_reason(done)}", returncode=done.returncode)


def largest_array(environment: Mapping[str, str]) -> int:
    """Return how many elements a job array may have; 0 where the site allows no arrays.

    Args:
        environment: the command's environment; ``SLURM_CONF`` in it says which cluster.

    Raises:
        SlurmUnavailableError: there is no scontrol, or no answer.
        SlurmCommandError: the controller refused the question.
    """
    done = _run(["scontrol", "show", "config"], environment)
    if done.returncode != 0:
        error = SlurmUnavailableError if _is_away(done) else SlurmCommandError
        raise error(f"scontrol show config failed: {_reason(done)}", returncode=done.returncode)
    # slurm.conf(5): the largest index is one less, and the scheduler may have a limit of its own.
    limits = re.findall(r"^MaxArraySize\s*=\s*([0-9]+)|\bmax_array_tasks=([0-9]+)", done.stdout, re.MULTILINE)
    return min((int(size or tasks) for size, tasks in limits), default=DEFAULT_LARGEST_ARRAY)


def cancel(job_id: str, *, environment: Mapping[str, str]) -> None:
    """Cancel a job for good.

    Args:
        job_id: the job's id; the bare id of an array names all of it.
        environment: the command's environment.

    Raises:
        SlurmUnavailableError: there is no scancel, or no answer.
        SlurmCommandError: the controller refused.
    """
    done = _run(["scancel", job_id], environment)
    if done.returncode != 0:
        error = SlurmUnavailableError if _is_away(done) else SlurmCommandError
        raise error(f"scancel {job_id} failed: {_reason(done)}", returncode=done.returncode)


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
    done = _run(command, environment)
    if done.returncode == 0:
        return done.stdout
    error = SlurmUnavailableError if _is_away(done) else SlurmCommandError
    raise error(f"{' '.join(command)} failed: {_reason(done)}", returncode=done.returncode)


def _control(*words: str) -> str:
    """Run scontrol and return what it printed."""
    return ask("scontrol", *words, environment=os.environ)


def _is_away(done: subprocess.CompletedProcess[str]) -> bool:
    """Return whether a command failed only because no controller answered."""
    return any(words in done.stderr for words in _AWAY)


def parse_job(output: str) -> dict[str, str]:
    """Return the fields of the first record in what ``scontrol show job`` printed."""
    fields: dict[str, str] = {}
    record, _, _ = output.strip("\n").partition("\n\n")
    for line in record.splitlines():
        for key, value in _fields_of(line.strip()):
            fields.setdefault(key, value)
    return fields


def _fields_of(line: str) -> list[tuple[str, str]]:
    """Return the (key, value) pairs of one line."""
    found: list[tuple[str, str]] = []
    position = 0
    while match := _KEY.search(line, position):
        following = _KEY.search(line, match.end())
        whole = following is None or match[1] in _TO_THE_END_OF_THE_LINE
        position = len(line) if following is None or whole else following.start()
        found.append((match[1], line[match.end() : position]))
    return found


def controller_answers(environment: Mapping[str, str]) -> bool:
    """Return whether a controller of the configured cluster is up.

    Args:
        environment: the command's environment; ``SLURM_CONF`` in it says which cluster.
    """
    try:
        return _run(["scontrol", "ping"], environment).returncode == 0
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
    done = _run(["sinfo", "--noheader", "--Node", "--format=%N %T"], environment)
    if done.returncode != 0:
        error = SlurmUnavailableError if _is_away(done) else SlurmCommandError
        raise error(f"sinfo failed: {_reason(done)}", returncode=done.returncode)
    # A node has a line for each of its partitions.
    return dict(line.split(maxsplit=1) for line in done.stdout.splitlines())


def srun_knows(option: str, environment: Mapping[str, str]) -> bool:
    """Return whether srun has an option here: one of its own, or one that a plugin of the site adds.

    Args:
        option: the option, with its dashes.
        environment: the command's environment.
    """
    try:
        done = _run(["srun", "--help"], environment)
    except SlurmUnavailableError:
        return False
    return option in done.stdout


def _run(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and return what it printed."""
    try:
        # Names written by others need not be UTF-8; they must not stop us from reading the rest.
        return subprocess.run(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
            timeout=_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        raise SlurmMissingError(f"{command[0]} was not found; Slurm's commands must be on PATH here") from None
    except subprocess.TimeoutExpired:
        raise SlurmUnavailableError(f"{command[0]} did not answer within {_TIMEOUT_S:g} s; try again later") from None


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    """Return the command's own words, on one line."""
    lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    return "; ".join(lines) or f"it exited with {done.returncode} and said nothing"
