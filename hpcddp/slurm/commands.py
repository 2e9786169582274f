"""Slurm's commands, each with a timeout; no other module runs them.

The file has five parts: the output of squeue, the errors, running a command, parsing, and one function for each
command.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from hpcddp.errors import HpcddpError, UserError, did_you_mean
from hpcddp.processes import signal_name

# Only fields that Slurm writes itself, none that users write. Without a width, squeue cuts values after 20 characters.
_FIELDS: Final = (
    ("JobArrayID", 40), ("State", 24), ("RestartCnt", 8), ("SubmitTime", 24), ("StartTime", 24), ("TimeUsed", 24),
    ("TimeLimit", 24), ("NumNodes", 8), ("NodeList", 300), ("Dependency", 300), ("exit_code", 12), ("Reason", 300),
)  # fmt: skip
FORMAT: Final = ",".join(f"{name}:{width}|" for name, width in _FIELDS)
"""The value of ``--Format``; every field ends with a bar (squeue(1), 22.05)."""

_TIME = re.compile(r"(?:(?:(?P<days>\d+)-)?(?P<hours>\d+):)?(?P<minutes>\d+):(?P<seconds>\d+)", re.ASCII)
_SIGNAL_BITS: Final = 0x7F
_NO_VALUES: Final = frozenset({"N/A", "NONE", "Unknown", "(null)", ""})


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedJob:
    """A job that the controller knows; it purges the records of ended jobs after a while (slurm.conf(5), MinJobAge).

    Args:
        job_id: its id, ``123`` or ``123_4``.
        state: its state, such as ``RUNNING``.
        restarts: how often it was requeued.
        submit_time: when it was submitted or last requeued, as Slurm writes it.
        start_time: its start or its expected start; None if Slurm does not know.
        used_s: seconds that it has run; None before its start.
        limit_s: its time limit in seconds; None without one.
        nodes: how many nodes it has or requests.
        node_list: their names as Slurm writes them; empty before its start.
        dependency: the jobs that it waits for, such as ``afterok:12(unfulfilled),afterany:14_*(unfulfilled)``; empty
            where there are none.
        exit_signal: the signal by which its script ended, as Slurm counts it; None if no signal ended it. 53 means that
            slurmstepd could not open the job's output file, and has started no script.
        reason: why it is pending, or why it ended.
    """

    job_id: str
    state: str
    restarts: int = 0
    submit_time: str = ""
    start_time: str | None = None
    used_s: int | None = None
    limit_s: int | None = None
    nodes: int = 0
    node_list: str = ""
    dependency: str = ""
    exit_signal: int | None = None
    reason: str = "None"


def parse_queue(answer: str) -> list[QueuedJob]:
    """Return the jobs in the output of ``squeue --noheader --Format``; other lines are skipped."""
    # The reason is a text of Slurm's plugins that may contain a bar, so it is the last field.
    rows = (line.split("|", len(_FIELDS) - 1) for line in answer.splitlines())
    return [_job([field.strip(" |") for field in row]) for row in rows if len(row) == len(_FIELDS)]


def _job(row: list[str]) -> QueuedJob:
    job_id, state, restarts, submitted, start, used, limit, nodes, node_list, dependency, exit_code, reason = row
    return QueuedJob(
        job_id=job_id,
        state=state,
        restarts=_number_or_0(restarts),
        submit_time=submitted,
        start_time=None if start in _NO_VALUES else start,
        used_s=seconds_in(used),
        limit_s=seconds_in(limit),
        nodes=_number_or_0(nodes),
        node_list=_text_or_empty(node_list),
        dependency=_text_or_empty(dependency),
        exit_signal=_signal_of_exit(exit_code),
        reason=reason,
    )


def _signal_of_exit(exit_code: str) -> int | None:
    """Return the signal in the exit code of a job; None if no signal ended it, or the code is not known."""
    # 0:53 in newer versions; in 22.05 the wait status, 4021 (wait(2)).
    if exit_code.isdecimal():
        return int(exit_code) & _SIGNAL_BITS or None
    return _number_or_0(exit_code.rpartition(":")[2]) or None


def _number_or_0(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def _text_or_empty(text: str) -> str:
    return "" if text in _NO_VALUES else text


def seconds_in(text: str) -> int | None:
    """Return the seconds of a time such as ``2-03:04:05``; None for texts such as ``UNLIMITED``."""
    match = _TIME.fullmatch(text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


DEFAULT_LARGEST_ARRAY: Final = 1001
"""The default of ``MaxArraySize`` (slurm.conf(5))."""

# A call waits 9 to 18 s for a controller that is away (measured); a busy one may take longer.
TIMEOUT_S: Final = 60.0
# How often a question is asked whose command a signal ends.
_MAX_TRIES: Final = 5
# A query that only shows states is not worth a longer wait than that.
_QUERY_TIMEOUT_S: Final = 20.0
_COMPLETION_TIMEOUT_S: Final = 2.0
# What a command prints when no controller answered, or too late; a request that is answered late may have been done.
_AWAY: Final = (
    "Unable to contact",
    "timed out",
    "Connection refused",
    "Zero Bytes were transmitted",
    "Unexpected message received",
    "in standby mode",
)
# sbatch's own sentence about a partition, and the controller's about any value (slurm_errno.c).
_UNKNOWN_PARTITION: Final = re.compile(r"invalid partition specified: (?P<names>[^;\s]+)")
# A user id or a credential is no value of the job: the cluster does not know the user, or its keys or clocks differ.
_INVALID: Final = re.compile(r"\binvalid\b(?! (?:user id|authentication credential|job credential))", re.IGNORECASE)
# Of an sbatch that has ended before it printed a job id: the controller may have the job.
_MAYBE_QUEUED: Final = "if squeue --me shows the job all the same, end it with scancel"
_PARSABLE_JOB_ID: Final = re.compile(r"^[ \t]*([0-9]+)(?:;\S+)?[ \t]*$", re.MULTILINE)
_UNKNOWN_JOB: Final = "Invalid job id specified"
# For an array element that has ended, while the controller still knows other elements of its array.
_UNKNOWN_ELEMENT: Final = "Job {job_id} not found"
_KEY: Final = re.compile(r"(?:^|\s)([A-Z][A-Za-z/:]*)=")
# Values that users write freely are the last on their line, so they may contain anything but a line break.
_TO_THE_END_OF_THE_LINE: Final = frozenset(
    {"JobName", "Comment", "AdminComment", "SystemComment", "Command", "WorkDir", "StdErr", "StdIn", "StdOut"}
)
_SUBMIT_LINE: Final = re.compile(r"\n +SubmitLine=.*?(?=\n +WorkDir=)", re.DOTALL)
NO_CONFIGURATION: Final = "configuration source"
"""Part of the message of a command that is installed and finds no slurm.conf."""
_SLURMD_PORT: Final = re.compile(r"^SlurmdPort\s*=\s*([0-9]+)", re.MULTILINE)


class SlurmCommandError(HpcddpError):
    """A command of Slurm refused a request; the message has its reason."""

    kind = "slurm"
    advice = "The reason is Slurm's own; change the request, or ask the cluster's administrators."


class SlurmRequestError(SlurmCommandError):
    """sbatch refused a value of the job, such as the name of a partition, which the user can correct."""

    exit_code = 2


class SlurmUnavailableError(SlurmCommandError):
    """A command of Slurm is not installed here, or its controller does not answer; a later call may succeed."""

    kind = "slurm_unavailable"
    advice = "Try again later; scontrol ping tells whether the controller answers."


class SlurmMissingError(SlurmUnavailableError):
    """A command of Slurm is not installed on this machine."""


def _run(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    timeout_s: float | None = None,
    text: str = "",
    own_session: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and return what it printed.

    Args:
        text: what it reads.
        own_session: whether the signals of the terminal, such as that of Ctrl-C, do not reach it.
    """
    timeout_s = TIMEOUT_S if timeout_s is None else timeout_s
    try:
        # Names that other users wrote need not be UTF-8; the rest must still be readable.
        return subprocess.run(
            command,
            env=dict(environment),
            input=text,
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
            timeout=timeout_s,
            check=False,
            start_new_session=own_session,
        )
    except FileNotFoundError:
        raise SlurmMissingError(f"{command[0]} was not found; Slurm's commands must be on PATH here") from None
    except subprocess.TimeoutExpired:
        raise SlurmUnavailableError(f"{command[0]} did not answer within {timeout_s:g} s; try again later") from None


def _query(
    command: Sequence[str], environment: Mapping[str, str], *, timeout_s: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command that changes nothing; one that a signal ended is run again.

    With proctrack/linuxproc Slurm signals every process of a task, twice within milliseconds at a preemption: a command
    that a task runs after the first signal is ended by the second one.
    """
    completed = _run(command, environment, timeout_s=timeout_s)
    for _ in range(_MAX_TRIES - 1):
        if completed.returncode >= 0:
            break
        completed = _run(command, environment, timeout_s=timeout_s)
    return completed


def _is_away(completed: subprocess.CompletedProcess[str]) -> bool:
    """Return whether a command failed because no controller answered."""
    return any(message in completed.stderr for message in _AWAY)


def _reason(completed: subprocess.CompletedProcess[str]) -> str:
    """Return what the command printed about its failure, on one line."""
    lines = [line.strip() for line in (completed.stderr or completed.stdout).splitlines() if line.strip()]
    return "; ".join(lines) or f"it exited with {completed.returncode} and said nothing"


def _failure(name: str, completed: subprocess.CompletedProcess[str]) -> SlurmCommandError:
    """Return the error for a command that failed; ``name`` is what the error calls it."""
    error = SlurmUnavailableError if _is_away(completed) else SlurmCommandError
    return error(f"{name} failed: {_reason(completed)}", returncode=completed.returncode)


def _output(completed: subprocess.CompletedProcess[str], *, name: str) -> str:
    """Return what a command printed; ``name`` is what an error calls it."""
    if completed.returncode == 0:
        return completed.stdout
    raise _failure(name, completed)


def ask(*command: str, environment: Mapping[str, str]) -> str:
    """Run a command that changes nothing, and return what it printed.

    Args:
        command: its name and arguments, such as ``"scontrol", "show", "config"``.
        environment: its environment; ``SLURM_CONF`` selects the cluster.

    Raises:
        SlurmUnavailableError: the command is not installed, or the controller does not answer.
        SlurmCommandError: the command failed; the message has its reason.
    """
    return _output(_query(command, environment), name=" ".join(command))


def _change(*command: str) -> None:
    """Run a command that changes something, once, in this process's own environment."""
    _output(_run(command, os.environ), name=" ".join(command))


def parse_job_id(output: str) -> str:
    """Return the job id in the output of ``sbatch --parsable``: ``123``, or ``123;cluster`` in a federation.

    Plugins of a site may print lines before it, and a wrapper of sbatch lines after it.

    Raises:
        SlurmCommandError: not exactly one line is a job id.
    """
    job_ids: list[str] = _PARSABLE_JOB_ID.findall(output)
    if len(job_ids) != 1:
        printed = "; ".join(line.strip() for line in output.splitlines() if line.strip())
        raise SlurmCommandError(f"sbatch --parsable printed {printed!r}, which is not one job id; {_MAYBE_QUEUED}")
    return job_ids[0]


def parse_job(output: str) -> dict[str, str]:
    """Return the fields of the first record in the output of ``scontrol show job``."""
    fields: dict[str, str] = {}
    for line in _records_of(output)[0].splitlines():
        for key, value in _fields_of(line.strip()):
            fields.setdefault(key, value)
    return fields


def _records_of(output: str) -> list[str]:
    """Return the records in the output of ``scontrol show job``, without the command line of the submission.

    Slurm shows that since 25.11 (scontrol/info_job.c), and it may contain lines that look like fields, and blank ones.
    """
    return _SUBMIT_LINE.sub("", output.strip("\n")).split("\n\n")


def _fields_of(line: str) -> list[tuple[str, str]]:
    """Return the (key, value) pairs of one line."""
    fields: list[tuple[str, str]] = []
    position = 0
    while match := _KEY.search(line, position):
        following = _KEY.search(line, match.end())
        whole = following is None or match[1] in _TO_THE_END_OF_THE_LINE
        position = len(line) if following is None or whole else following.start()
        fields.append((match[1], line[match.end() : position]))
    return fields


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
        dependency: the value of ``--dependency``, such as ``afterany:12``; None waits for nothing.
        options: more options of sbatch; they take precedence over the script's directives.

    Returns:
        The job id.

    Raises:
        SlurmUnavailableError: sbatch is not installed, or the controller does not answer.
        SlurmRequestError: Slurm refused a value of the job; the message has its reason.
        SlurmCommandError: Slurm refused the job for another reason.
    """
    words = [f"--chdir={directory}"] if directory else []
    words += [f"--dependency={dependency}"] if dependency else []
    try:
        # A signal could end it when the controller has the job and no job id is printed yet.
        completed = _run(["sbatch", "--parsable", *words, *options, str(script)], environment, own_session=True)
    except SlurmMissingError:
        raise
    except SlurmUnavailableError as error:
        raise SlurmUnavailableError(f"{error.message}; {_MAYBE_QUEUED}") from error
    if completed.returncode < 0:
        raise SlurmCommandError(
            f"{signal_name(-completed.returncode)} ended sbatch before it printed a job id; {_MAYBE_QUEUED}",
            returncode=completed.returncode,
        )
    if completed.returncode != 0:
        raise _refusal(completed, environment)
    return parse_job_id(completed.stdout)


def _refusal(completed: subprocess.CompletedProcess[str], environment: Mapping[str, str]) -> SlurmCommandError:
    """Return the error of an sbatch that failed; for an unknown partition with the one that was meant."""
    reason = _reason(completed)
    if _is_away(completed):
        return SlurmUnavailableError(f"sbatch failed: {reason}; {_MAYBE_QUEUED}", returncode=completed.returncode)
    requested = _UNKNOWN_PARTITION.search(reason)
    if requested is not None:
        reason = _unknown_partition(requested["names"], environment)
        return SlurmRequestError(f"sbatch refused the job: {reason}", returncode=completed.returncode)
    message = f"sbatch refused the job: {reason}"
    if _INVALID.search(reason):
        return SlurmRequestError(message, returncode=completed.returncode)
    return SlurmCommandError(message, returncode=completed.returncode)


def _unknown_partition(names: str, environment: Mapping[str, str]) -> str:
    """Return which of these partitions, with commas between them, the cluster does not have, and which was meant."""
    known: list[str] = []
    with suppress(SlurmCommandError):
        known = partitions(environment)
    unknown = names
    # Without an answer each of the names may be the wrong one.
    if known:
        unknown = next((name for name in names.split(",") if name not in known), names)
    way_out = did_you_mean(unknown, known, "sinfo --summarize lists them")
    return f"the cluster has no partition {unknown!r}; {way_out}"


def script_of_job(job_id: str, environment: Mapping[str, str]) -> str:
    """Return the script of a job, as Slurm has kept it.

    Args:
        job_id: the job, one of this user.

    Raises:
        SlurmUnavailableError: scontrol is not installed, or the controller does not answer.
        SlurmCommandError: the controller refused the request.
    """
    return ask("scontrol", "write", "batch_script", job_id, "-", environment=environment)


def test_script(script: str, *, environment: Mapping[str, str], options: Sequence[str]) -> str:
    """Ask Slurm whether it would take a script, and when it would start it; nothing is submitted.

    Args:
        script: its text.
        environment: the environment of sbatch.
        options: more options of sbatch; they take precedence over the script's directives.

    Returns:
        When, where and on how many processors the job would start, in Slurm's words.

    Raises:
        SlurmUnavailableError: sbatch is not installed, or the controller does not answer.
        SlurmCommandError: Slurm would refuse the job; the message has its reason.
    """
    completed = _run(["sbatch", "--test-only", *options], environment, text=script)
    if completed.returncode != 0:
        raise _failure("sbatch --test-only", completed)
    return _reason(completed).removeprefix("sbatch: ")


def start_srun(words: Sequence[str], *, environment: Mapping[str, str], errors: IO[str]) -> subprocess.Popen[str]:
    """Start srun outside of a job, with pipes for its input and output; the caller ends it.

    Args:
        words: its options, then the program and its arguments.
        environment: its environment; ``SLURM_CONF`` selects the cluster.
        errors: the file that gets its errors.

    Raises:
        SlurmMissingError: srun is not installed here.
    """
    command = ["srun", *words]
    try:
        return subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            encoding="utf-8",
            errors="replace",
        )
    except FileNotFoundError:
        raise SlurmMissingError("srun was not found; Slurm's commands must be on PATH here") from None


def srun_knows(option: str, environment: Mapping[str, str]) -> bool:
    """Return whether srun has an option, such as ``--container-image``; plugins of a site add options."""
    try:
        completed = _query(["srun", "--help"], environment)
    except SlurmUnavailableError:
        return False
    return option in completed.stdout


def queue(environment: Mapping[str, str]) -> list[QueuedJob]:
    """Return the user's jobs that the controller knows, each element of an array as a job.

    Args:
        environment: the command's environment. ``SQUEUE_*`` in it could select other jobs, so it is removed.

    Raises:
        SlurmUnavailableError: squeue is not installed, or the controller does not answer.
        SlurmCommandError: the controller refused the request.
    """
    if (named := environment.get("SLURM_CONF")) and not Path(named).exists():
        # squeue would wait a minute for it.
        raise SlurmUnavailableError(f"SLURM_CONF is {named!r}, but that file does not exist; correct or unset it")
    plain = _without_squeue_options(environment)
    words = ["squeue", "--me", "--array", "--states=all", "--noheader", f"--Format={FORMAT}"]
    plain["SLURM_TIME_FORMAT"] = "standard"
    return parse_queue(_output(_query(words, plain, timeout_s=_QUERY_TIMEOUT_S), name="squeue"))


def step_exists(step_id: str, environment: Mapping[str, str]) -> bool:
    """Return whether a step has not ended on all of its nodes yet.

    Args:
        step_id: its id, such as ``123.0``; its job is one that the controller knows.

    Raises:
        SlurmUnavailableError: squeue is not installed, or the controller does not answer.
        SlurmCommandError: the controller refused the request.
    """
    plain = _without_squeue_options(environment)
    return bool(ask("squeue", f"--steps={step_id}", "--noheader", "--format=%i", environment=plain).strip())


def _without_squeue_options(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(("SQUEUE_", "SLURM_CLUSTERS"))}


def priority(job_id: str, environment: Mapping[str, str]) -> str | None:
    """Return the parts of a pending job's priority as ``sprio`` prints them; None if it prints none."""
    try:
        table = _output(_query(["sprio", "--long", "--jobs", job_id], environment), name="sprio")
    except SlurmCommandError:
        return None
    return table if len(table.splitlines()) > 1 else None


def cancel(job_ids: Sequence[str], environment: Mapping[str, str], *, signal: str | None = None) -> None:
    """Cancel jobs, or send a signal to their tasks but not to their batch scripts.

    Args:
        job_ids: the jobs, or the option that selects them; an array's id means all of its elements.
        signal: the signal's name; None cancels the jobs.

    Raises:
        SlurmUnavailableError: scancel is not installed, or the controller does not answer.
        SlurmCommandError: the controller refused the request.
    """
    words = ["scancel", *([] if signal is None else [f"--signal={signal}"]), *job_ids]
    _output(_run(words, environment), name="scancel")


def show_job(job_id: str, *, environment: Mapping[str, str] | None = None) -> dict[str, str] | None:
    """Return the record of a job.

    Args:
        job_id: the job's id; ``123_4`` names an array element.
        environment: the command's environment; None is this process's own.

    Returns:
        The fields of ``scontrol show job`` by their names there, or None if the controller does not know the job.

    Raises:
        SlurmUnavailableError: scontrol is not installed, or the controller does not answer.
        SlurmCommandError: the controller refused the request.
    """
    records = show_array(job_id, environment=environment)
    return records[0] if records else None


def show_array(job_id: str, *, environment: Mapping[str, str] | None = None) -> list[dict[str, str]]:
    """Return the records of a job: one, or for an array one for each element that the controller has split off.

    Args:
        job_id: the job's id; the array's id names all of its elements.
        environment: the command's environment; None is this process's own.

    Returns:
        The fields of each record of ``scontrol show job``; none if the controller does not know the job.

    Raises:
        SlurmUnavailableError: scontrol is not installed, or the controller does not answer.
        SlurmCommandError: the controller refused the request.
    """
    # Submit times are compared, so the user's format must not apply (scontrol(1), SLURM_TIME_FORMAT).
    environment = {**(os.environ if environment is None else environment), "SLURM_TIME_FORMAT": "standard"}
    completed = _query(["scontrol", "show", "job", job_id], environment)
    if completed.returncode == 0:
        return [parse_job(record) for record in _records_of(completed.stdout) if record.strip()]
    is_unknown_element = _UNKNOWN_ELEMENT.format(job_id=job_id) in completed.stdout + completed.stderr
    if is_unknown_element or _UNKNOWN_JOB in completed.stderr:
        return []
    raise _failure(f"scontrol show job {job_id}", completed)


def requeue(job_id: str) -> None:
    """Requeue a job if it still runs.

    Without ``Incomplete`` the command would also requeue a job that its user has cancelled (measured). Slurm answers
    the same whether it requeues the job or not, so look at ``Restarts`` afterwards.

    Args:
        job_id: the job's id; ``123_4`` names an array element, the array's id all of its elements.

    Raises:
        SlurmUnavailableError: scontrol is not installed, or the controller does not answer.
        SlurmCommandError: the controller refused the request.
    """
    _change("scontrol", "requeue", "Incomplete", job_id)


def update_job(job_id: str, **fields: str) -> None:
    """Change fields of a job.

    Args:
        fields: the new values by their names in ``scontrol show job``, such as ``StartTime="now+2seconds"``.

    Raises:
        SlurmUnavailableError: scontrol is not installed, or the controller does not answer.
        SlurmCommandError: the controller refused the request.
    """
    _change("scontrol", "update", f"JobId={job_id}", *(f"{name}={value}" for name, value in fields.items()))


def update_node(node: str, **fields: str) -> None:
    """Change fields of a node, as an administrator.

    Args:
        fields: the new values by their names in ``scontrol update``, such as ``State="RESUME"``.

    Raises:
        SlurmUnavailableError: scontrol is not installed, or the controller does not answer.
        SlurmCommandError: the controller refused the request.
    """
    _change("scontrol", "update", f"NodeName={node}", *(f"{name}={value}" for name, value in fields.items()))


def largest_array(environment: Mapping[str, str]) -> int:
    """Return how many elements a job array may have; 0 if the site allows no arrays.

    Args:
        environment: the command's environment; ``SLURM_CONF`` selects the cluster.

    Raises:
        SlurmUnavailableError: scontrol is not installed, or the controller does not answer.
        SlurmCommandError: the controller refused the request.
    """
    config = ask("scontrol", "show", "config", environment=environment)
    # slurm.conf(5): the largest index is one less, and the scheduler can have a limit of its own.
    limits = re.findall(r"^MaxArraySize\s*=\s*([0-9]+)|\bmax_array_tasks=([0-9]+)", config, re.MULTILINE)
    return min((int(size or tasks) for size, tasks in limits), default=DEFAULT_LARGEST_ARRAY)


def slurmd_address(node: str) -> tuple[str, int]:
    """Return the host and the port on which a node's slurmd listens.

    Args:
        node: the node's name in Slurm.

    Raises:
        SlurmUnavailableError: scontrol is not installed, or the controller does not answer.
        SlurmCommandError: the controller does not know the node.
    """
    fields = parse_job(ask("scontrol", "show", "node", node, environment=os.environ))
    host = fields.get("NodeAddr")
    port = fields.get("Port")
    if port is None:
        # A node shows its port only if it differs from that of the cluster.
        port_of_cluster = _SLURMD_PORT.search(ask("scontrol", "show", "config", environment=os.environ))
        port = None if port_of_cluster is None else port_of_cluster[1]
    if host is None or port is None or not port.isdecimal():
        raise SlurmCommandError(f"scontrol show node {node} does not say where its slurmd listens")
    return host, int(port)


def boot_times(nodes: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return when each node was started last, as Slurm writes it; ``None`` of a node that has never answered.

    The controller reckons these times by its own clock, each time a slurmd registers.

    Args:
        nodes: the names of the nodes.
        environment: the command's environment; ``SLURM_CONF`` selects the cluster.

    Raises:
        SlurmUnavailableError: scontrol is not installed, or the controller does not answer.
        SlurmCommandError: the controller refused the request.
    """
    plain = {**environment, "SLURM_TIME_FORMAT": "standard"}
    printed = ask("scontrol", "show", "node", ",".join(nodes), environment=plain)
    records = [parse_job(record) for record in printed.split("\n\n") if record.strip()]
    return {record["NodeName"]: record.get("BootTime", "None") for record in records if "NodeName" in record}


def controller_answers(environment: Mapping[str, str]) -> bool:
    """Return whether a controller of the configured cluster is up.

    Args:
        environment: the command's environment; ``SLURM_CONF`` selects the cluster.
    """
    try:
        return _query(["scontrol", "ping"], environment).returncode == 0
    except SlurmUnavailableError:
        return False


def overlapping_step(
    job_id: str, command: Sequence[str], *, nodes: Sequence[str] | int, directory: Path, terminal: bool = False
) -> list[str]:
    """Return the srun command that runs a command inside a running job, beside its tasks, once on each node.

    Args:
        nodes: the nodes by name, or how many of the job's.
        terminal: whether it gets a pseudo-terminal.
    """
    count = nodes if isinstance(nodes, int) else len(nodes)
    words = ["srun", f"--jobid={job_id}", "--overlap", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1"]
    if not isinstance(nodes, int):
        words.append(f"--nodelist={','.join(nodes)}")
    # Without --mem=0 Slurm waits for the memory that the tasks hold (srun(1)).
    words += ["--mem=0", "--mpi=none", f"--chdir={directory}"]
    if terminal:
        words.append("--pty")
    return [*words, *command]


def run_attached(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a command with this process's input and output to its end, which may be a person's; return its exit code.

    Raises:
        UserError: there is no such program.
    """
    try:
        return subprocess.run(command, env=dict(environment), check=False).returncode
    except FileNotFoundError:
        raise UserError(f"{command[0]} was not found; write a program that is on PATH here") from None
    except OSError as error:
        raise UserError(f"{command[0]} cannot be started: {error.strerror}; correct it") from None


def step_output(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return what a command of ``overlapping_step`` printed.

    Raises:
        SlurmUnavailableError: srun is not installed, or does not come back in time.
        SlurmCommandError: it failed; the message has its reason.
    """
    return _output(_run(command, environment), name="srun")


def partitions(environment: Mapping[str, str]) -> list[str]:
    """Return the names of the partitions; asked by a shell that completes a word, so it waits two seconds at most.

    Args:
        environment: the command's environment; ``SLURM_CONF`` selects the cluster.

    Raises:
        SlurmUnavailableError: sinfo is not installed, or the controller does not answer in time.
        SlurmCommandError: the controller refused the request.
    """
    completed = _run(["sinfo", "--noheader", "--format=%R"], environment, timeout_s=_COMPLETION_TIMEOUT_S)
    return sorted(set(_output(completed, name="sinfo").split()))


def node_states(environment: Mapping[str, str]) -> dict[str, str]:
    """Return each node's state, such as ``idle``; a ``*`` at its end means that the node does not respond.

    Args:
        environment: the command's environment; ``SLURM_CONF`` selects the cluster.

    Raises:
        SlurmUnavailableError: sinfo is not installed, or the controller does not answer.
        SlurmCommandError: the controller refused the request.
    """
    printed = _output(_query(["sinfo", "--noheader", "--Node", "--format=%N %T"], environment), name="sinfo")
    # A node has a line for each of its partitions.
    return dict(line.split(maxsplit=1) for line in printed.splitlines())
