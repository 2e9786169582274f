"""What the batch script runs before and after the tasks: ``begin`` claims the run, ``end`` says what became of it."""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpcddp.errors import HpcddpError, UserError
from hpcddp.launch.claim import RunDirectoryError, Start, conflict, make_private_directory
from hpcddp.run.directory import AttemptDirectory, RunDirectory
from hpcddp.run.events import append_event
from hpcddp.run.failure import describe_failure, failure_sentence, read_failures
from hpcddp.run.files import read_json, write_json, write_text
from hpcddp.slurm import commands
from hpcddp.stop.exit_codes import ExitCode

# Slurm kept a job id in these states, or is about to run it again.
_ENDED_STATES = frozenset(
    {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT"}
)

# How often Slurm is asked whether a grace time is over; it looks itself every 30 s.
_ASK_EVERY_S = 2.0


def begin(*, run_root: str, name: str, run_id: str | None, job_text: str, environment: Mapping[str, str]) -> str:
    """Claim the run directory for one more attempt.

    Args:
        run_root: where runs live; relative to the working directory.
        name: the job's name.
        run_id: the run's id; None derives ``<cluster name>-<job id>``.
        job_text: the resolved job file.
        environment: the batch script's environment.

    Returns:
        The attempt's directory, or an empty text if the run has finished already and nothing is left to do.

    Raises:
        RunDirectoryError: the directory belongs to another job, or is not safe.
    """
    start = _observe(environment)
    run = RunDirectory(Path(run_root).absolute() / name / (run_id or _derived_run_id(environment)))
    make_private_directory(run.path)
    previous = _newest_start(run)
    alive = previous is not None and previous.job_id != start.job_id and _is_alive(previous)
    refused = run.path / f"refused-{start.job_id}.json"
    # A job that was refused once stays refused: after a requeue it would look like a requeue of the run's own job.
    if (why := read_json(refused) or conflict(previous, start, previous_alive=alive)) is not None:
        if previous is not None and previous.job_id == start.job_id:
            write_json(refused, why)
        raise RunDirectoryError(f"the run directory {run.path} is taken: {why}; use another run id or run_root")
    if _has_finished(run):
        return ""
    _keep_job_file(run, job_text)
    # A result is written when a run has ended for good; this one is being continued.
    run.result.unlink(missing_ok=True)
    attempt = _create_attempt(run)
    write_json(attempt.start, start.as_json())
    append_event(
        run.events, kind="start", time=start.time, attempt=attempt.number, job_id=start.job_id, host=start.host
    )
    return str(attempt.path)


def end(
    attempt: AttemptDirectory, *, code: int, environment: Mapping[str, str], cancelled: bool = False
) -> tuple[int, str]:
    """Decide what the batch script exits with, and say why.

    Args:
        attempt: the attempt that has ended.
        code: what srun (or the local controller) exited with; it hides the cause.
        cancelled: whether the user ended the job on this machine.
        environment: the batch script's environment.

    Returns:
        The exit code of the job and the paragraph for its log.
    """
    run = attempt.run
    if _has_finished(run):
        return ExitCode.FINISHED, f"run {run.run_id} has finished; its result is {run.result}"
    failures = read_failures(attempt)
    primary = failures[0] if failures and not failures[0].secondary else None
    if cancelled and primary is None:
        return _cancel(run, attempt)
    taken = None if primary else _taken_away(environment)
    if taken is not None:
        append_event(run.events, kind="stop", time=time.time(), attempt=attempt.number, reason=taken)
        _outlast_grace(environment)
        return int(ExitCode.INFRASTRUCTURE), f"{taken}; if the run starts again it goes on from its newest checkpoint"
    exit_code = primary.exit_code if primary else int(ExitCode.INFRASTRUCTURE)
    reason = failure_sentence(attempt, failures)
    write_json(
        run.result, {"status": "failed", "reason": reason, "exit_code": exit_code, "attempts": attempt.number + 1}
    )
    append_event(
        run.events,
        kind="failure",
        time=time.time(),
        attempt=attempt.number,
        reason=reason,
        exit_code=exit_code,
        srun=code,
    )
    return exit_code, describe_failure(attempt, failures)


def _cancel(run: RunDirectory, attempt: AttemptDirectory) -> tuple[int, str]:
    reason = "cancelled by a signal to the job"
    document = {"status": "cancelled", "reason": reason, "exit_code": int(ExitCode.INTERRUPTED)}
    write_json(run.result, {**document, "attempts": attempt.number + 1})
    append_event(run.events, kind="stop", time=time.time(), attempt=attempt.number, reason=reason)
    return int(ExitCode.INTERRUPTED), f"run {run.run_id} was {reason}"


def _observe(environment: Mapping[str, str]) -> Start:
    """Return who starts now, with the submit time that Slurm knows."""
    job_id = _slurm_job_id(environment)
    job = _ask_slurm(job_id) if job_id else None
    return Start(
        job_id=job_id or environment.get("HPCDDP_LOCAL_JOB_ID"),
        restart_count=int(environment.get("SLURM_RESTART_COUNT") or 0) if job_id else 0,
        submit_time=job.get("SubmitTime") if job else None,
        host=environment.get("SLURMD_NODENAME") or socket.gethostname(),
        token=secrets.token_hex(16),
        time=time.time(),
    )


def _ask_slurm(job_id: str) -> dict[str, str] | None:
    """Return what Slurm knows about a job; None also where scontrol is missing, as it is on some compute nodes."""
    try:
        return commands.show_job(job_id)
    except commands.SlurmCommandError as error:
        sys.stderr.write(f"hpcddp: {error.message}\n")
        return None


def _slurm_job_id(environment: Mapping[str, str]) -> str | None:
    if "HPCDDP_LOCAL_JOB_ID" in environment:
        return None
    if "SLURM_ARRAY_JOB_ID" in environment:
        return f"{environment['SLURM_ARRAY_JOB_ID']}_{environment['SLURM_ARRAY_TASK_ID']}"
    return environment.get("SLURM_JOB_ID")


def _derived_run_id(environment: Mapping[str, str]) -> str:
    job_id = _slurm_job_id(environment)
    if job_id is None:
        raise UserError("this script was rendered for sbatch; run it with sbatch, or use hpcddp submit --cluster local")
    cluster = re.sub(r"[^A-Za-z0-9._-]", "-", environment.get("SLURM_CLUSTER_NAME") or "cluster")
    return f"{cluster}-{job_id}"


def _newest_start(run: RunDirectory) -> Start | None:
    number = run.newest_attempt()
    document = None if number is None else read_json(run.attempt(number).start)
    return None if document is None else Start(**document)


def _is_alive(start: Start) -> bool:
    """Return whether the job of an earlier start still runs or waits, as far as anybody can tell."""
    if start.job_id is None:
        return False
    if start.submit_time is None:
        return start.host == socket.gethostname() and Path(f"/proc/{start.job_id}").exists()
    job = _ask_slurm(start.job_id)
    return job is not None and job.get("SubmitTime") == start.submit_time and job.get("JobState") not in _ENDED_STATES


def _has_finished(run: RunDirectory) -> bool:
    result = read_json(run.result)
    return result is not None and result.get("status") == "finished"


def _keep_job_file(run: RunDirectory, text: str) -> None:
    """Write the resolved job of the newest attempt: it may have moved to other resources, never to other training."""
    if run.job_file.exists() and (before := run.job_file.read_text(encoding="utf-8")) != text:
        _refuse_another_training(run, before, text)
    write_text(run.job_file, text)


def _refuse_another_training(run: RunDirectory, before: str, text: str) -> None:
    from hpcddp.spec.continuation import training_changes
    from hpcddp.spec.write import parse_resolved

    for key, old, new in training_changes(parse_resolved(before), parse_resolved(text)):
        raise RunDirectoryError(
            f"the run directory {run.path} holds another job file than this script: {key} is {json.dumps(old)} there "
            f"and {json.dumps(new)} here, which would be another training; bring the old value back, or use another "
            "run id or run_root"
        )


def _create_attempt(run: RunDirectory) -> AttemptDirectory:
    """Create the next attempt's directory; two scripts at once get two numbers."""
    run.attempts.mkdir(mode=0o700, exist_ok=True)
    number = run.newest_attempt()
    attempt = run.attempt(0 if number is None else number + 1)
    attempt.path.mkdir(mode=0o700)
    return attempt


def _taken_away(environment: Mapping[str, str]) -> str | None:
    """Return how Slurm took the job away (requeued, preempted, cancelled), or None if the tasks ended by themselves."""
    job_id = _slurm_job_id(environment)
    job = _ask_slurm(job_id) if job_id else None
    if job is None:
        return None
    preempted = job.get("PreemptTime", "None") != "None"
    if job.get("JobState") == "RUNNING" and not preempted:
        return None
    return f"Slurm {'preempted' if preempted else 'ended'} job {job_id} (state {job.get('JobState')})"


def _outlast_grace(environment: Mapping[str, str]) -> None:
    """Stay until Slurm takes a preempted job away: one that ends within the grace time is never requeued (measured)."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while (job_id := _slurm_job_id(environment)) is not None:
        job = _ask_slurm(job_id)
        in_grace = job is None or (job.get("JobState") == "RUNNING" and job.get("Requeue") == "1")
        if not in_grace:
            return
        time.sleep(_ASK_EVERY_S)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m hpcddp.launch.attempt")
    commands_of = parser.add_subparsers(dest="command", required=True)
    begin_parser = commands_of.add_parser("begin")
    begin_parser.add_argument("--run-root", required=True)
    begin_parser.add_argument("--name", required=True)
    begin_parser.add_argument("--run-id")
    end_parser = commands_of.add_parser("end")
    end_parser.add_argument("--code", type=int, required=True)
    end_parser.add_argument("--cancelled", action="store_true")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run ``begin`` or ``end`` and return the exit code of this process."""
    options = _parse(arguments)
    try:
        if options.command == "end":
            attempt = AttemptDirectory.from_text(environment["HPCDDP_ATTEMPT_DIR"])
            code, text = end(attempt, code=options.code, environment=environment, cancelled=options.cancelled)
            sys.stderr.write(f"hpcddp: {text}\n")
            return code
        directory = begin(
            run_root=options.run_root,
            name=options.name,
            run_id=options.run_id,
            job_text=sys.stdin.read(),
            environment=environment,
        )
    except HpcddpError as error:
        sys.stderr.write(f"hpcddp: {error.message}\n")
        return error.exit_code
    if directory:
        sys.stdout.write(f"{directory}\n")
    else:
        sys.stderr.write("hpcddp: this run has finished already; nothing to do\n")
    return ExitCode.FINISHED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
