"""What the batch script runs before and after the tasks: ``begin`` claims the run, ``end`` says what became of it."""

from __future__ import annotations

import argparse
import os
import re
import secrets
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from hpcddp.errors import HpcddpError, UserError
from hpcddp.launch.array import PICKLE_DIGEST
from hpcddp.launch.cause import ask_slurm, slurm_job_id
from hpcddp.launch.claim import (
    RunDirectoryError,
    Start,
    conflict,
    has_finished,
    is_alive,
    make_private_directory,
    newest_start,
    refuse_another_training,
)
from hpcddp.launch.element import element_of, settle
from hpcddp.launch.paragraph import resume_command
from hpcddp.launch.progress import tell_progress
from hpcddp.launch.requeue import expedite
from hpcddp.launch.situation import limits_of
from hpcddp.launch.supervisor import end
from hpcddp.run.directory import AttemptDirectory, RunDirectory
from hpcddp.run.events import append_event, read_events
from hpcddp.run.exits import beginning
from hpcddp.run.files import read_json, write_json, write_text
from hpcddp.slurm import commands
from hpcddp.spec.job import JobSpec
from hpcddp.spec.write import parse_resolved
from hpcddp.stop.budgets import exceeded, spent_of
from hpcddp.stop.cause import Cause
from hpcddp.stop.exit_codes import ExitCode

NO_LIMIT_S = 10 * 365 * 24 * 3600
"""What stands for no time limit of a local run; submitit has no word for it."""

_UNKNOWN_TIMES = frozenset({"", "Unknown", "None", "N/A"})


class BudgetError(HpcddpError):
    """The run has been started as often as it may."""

    kind = "budget"
    exit_code: ClassVar[int] = ExitCode.NO_PROGRESS


def begin(
    *,
    run_root: str,
    name: str,
    run_id: str | None,
    job_text: str,
    environment: Mapping[str, str],
    element: int | None = None,
) -> str:
    """Claim the run directory for one more attempt.

    Args:
        run_root: where runs live; relative to the working directory.
        name: the job's name.
        run_id: the run's id; None derives ``<cluster name>-<job id>``.
        job_text: the resolved job file.
        environment: the batch script's environment.
        element: which element of a sweep it is, whose id and job these are; None is a run of its own.

    Returns:
        The attempt's directory, or an empty text if the run has finished already and nothing is left to do.

    Raises:
        RunDirectoryError: the directory belongs to another job, or is not safe.
        BudgetError: the run was started often enough.
    """
    start = _observe(environment)
    directory, own_id = Path(run_root).absolute() / name, run_id or _derived_run_id(environment)
    run = RunDirectory(directory / own_id)
    of_sweep = None
    if element is not None:
        sweep_id = run_id or own_id.rpartition("_")[0]
        of_sweep = element_of(directory, sweep_id, element, job_text, environment)
        run, job_text = of_sweep.run, of_sweep.job_text
    make_private_directory(run.path)
    previous = newest_start(run)
    alive = previous is not None and previous.job_id != start.job_id and is_alive(previous)
    refused = run.path / f"refused-{start.job_id}.json"
    # A job that was refused once stays refused: after a requeue it would look like a requeue of the run's own job.
    if (why := read_json(refused) or conflict(previous, start, previous_alive=alive)) is not None:
        if previous is not None and previous.job_id == start.job_id:
            write_json(refused, why)
        raise RunDirectoryError(f"the run directory {run.path} is taken: {why}; use another run id or run_root")
    if has_finished(run):
        return ""
    _keep_job_file(run, job_text)
    if of_sweep is not None:
        settle(of_sweep, start.job_id or "", environment.get(PICKLE_DIGEST))
    if previous is not None:
        _settle(run, previous, start, parse_resolved(job_text))
    # A result is written when a run has ended for good; this one is being continued.
    run.result.unlink(missing_ok=True)
    attempt = _create_attempt(run)
    write_json(attempt.start, start.as_json())
    append_event(
        run.events, kind="start", time=start.time, attempt=attempt.number, job_id=start.job_id, host=start.host
    )
    return str(attempt.path)


def _observe(environment: Mapping[str, str]) -> Start:
    """Return who starts now, with the submit time that Slurm knows."""
    job_id = slurm_job_id(environment)
    job = ask_slurm(job_id) if job_id else None
    now = time.time()
    return Start(
        job_id=job_id or environment.get("HPCDDP_LOCAL_JOB_ID"),
        restart_count=int(environment.get("SLURM_RESTART_COUNT") or 0) if job_id else 0,
        submit_time=job.get("SubmitTime") if job else None,
        host=environment.get("SLURMD_NODENAME") or socket.gethostname(),
        token=secrets.token_hex(16),
        time=now,
        end_time=end_time_of(job, environment, now=now),
    )


def end_time_of(job: Mapping[str, str] | None, environment: Mapping[str, str], *, now: float) -> float | None:
    """Return when a job's time is over, in seconds since the epoch; None without a limit, or if nobody can tell.

    Args:
        job: what Slurm says about the job; None without an answer.
        environment: the batch script's environment.
        now: seconds since the epoch.
    """
    if job is not None:
        text = job.get("EndTime", "")
        limited = job.get("TimeLimit") != "UNLIMITED" and text not in _UNKNOWN_TIMES
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S")) if limited else None
    if environment.get("SLURM_JOB_END_TIME"):
        return float(environment["SLURM_JOB_END_TIME"])
    limit_s = environment.get("SUBMITIT_LOCAL_TIMEOUT_S")
    return now + float(limit_s) if limit_s and int(limit_s) < NO_LIMIT_S else None


def _settle(run: RunDirectory, previous: Start, start: Start, spec: JobSpec) -> None:
    """Write down what Slurm did by itself, and refuse a start that the budgets do not allow.

    They are checked here because Slurm's own requeues ask nobody, and before anything heavy is imported.
    """
    events = read_events(run.events)
    number = run.newest_attempt() or 0
    if previous.job_id == start.job_id and start.restart_count:
        if not any(event["event"] == "requeue" and event["attempt"] == number for event in events):
            if spec.command is not None:
                tell_progress(run.attempt(number), now=start.time, asked=False)
            _tell_requeue(run, start, number, events)
            events = read_events(run.events)
        if not spec.requeue.left_to_slurm:
            # It was allowed for this one requeue only.
            _forbid_requeue(start)
    why = exceeded(spent_of(events), limits_of(spec))
    if why is None:
        return
    document = {"status": "failed", "reason": why, "exit_code": int(ExitCode.NO_PROGRESS), "attempts": number + 1}
    write_json(run.result, {**document, "resume": resume_command(run)})
    append_event(run.events, kind="failure", time=start.time, attempt=number, reason=why, exit_code=93)
    raise BudgetError(f"run {run.run_id} is not started again: {why}. To go on: {resume_command(run)}")


def _tell_requeue(run: RunDirectory, start: Start, number: int, events: Sequence[Mapping[str, Any]]) -> None:
    stops = [event for event in events if event["event"] == "stop" and event["attempt"] == number]
    cause = stops[-1].get("cause") if stops else None
    append_event(
        run.events,
        kind="requeue",
        time=start.time,
        attempt=number,
        reason="Slurm requeued the job by itself",
        cause=cause or str(Cause.REQUEUED),
        job_id=start.job_id,
        by="slurm",
    )


def _forbid_requeue(start: Start) -> None:
    try:
        commands.update_job(start.job_id or "", Requeue="0")
    except commands.SlurmCommandError as error:
        sys.stderr.write(f"hpcddp: {error.message}\n")


def _derived_run_id(environment: Mapping[str, str]) -> str:
    job_id = slurm_job_id(environment)
    if job_id is None:
        raise UserError("this script was rendered for sbatch; run it with sbatch, or use hpcddp submit --cluster local")
    cluster = re.sub(r"[^A-Za-z0-9._-]", "-", environment.get("SLURM_CLUSTER_NAME") or "cluster")
    return f"{cluster}-{job_id}"


def _keep_job_file(run: RunDirectory, text: str) -> None:
    """Write the resolved job of the newest attempt: it may have moved to other resources, never to other training."""
    refuse_another_training(run, parse_resolved(text))
    write_text(run.job_file, text)


def _create_attempt(run: RunDirectory) -> AttemptDirectory:
    """Create the next attempt's directory; two scripts at once get two numbers."""
    run.attempts.mkdir(mode=0o700, exist_ok=True)
    number = run.newest_attempt()
    attempt = run.attempt(0 if number is None else number + 1)
    attempt.path.mkdir(mode=0o700)
    return attempt


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m hpcddp.launch.attempt")
    commands_of = parser.add_subparsers(dest="command", required=True)
    begin_parser = commands_of.add_parser("begin")
    begin_parser.add_argument("--run-root", required=True)
    begin_parser.add_argument("--name", required=True)
    begin_parser.add_argument("--run-id")
    begin_parser.add_argument("--element", type=int)
    end_parser = commands_of.add_parser("end")
    end_parser.add_argument("--code", type=int, required=True)
    end_parser.add_argument("--cancelled", action="store_true")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run ``begin`` or ``end`` and return the exit code of this process."""
    options = _parse(arguments)
    try:
        if options.command == "end":
            return _end(options, environment)
        directory = begin(
            run_root=options.run_root,
            name=options.name,
            run_id=options.run_id,
            job_text=sys.stdin.read(),
            environment=environment,
            element=options.element,
        )
    except HpcddpError as error:
        sys.stderr.write(f"hpcddp: {error.message}\n")
        return error.exit_code
    if directory:
        sys.stderr.write(beginning(AttemptDirectory.from_text(directory)))
        sys.stdout.write(f"{directory}\n")
    else:
        sys.stderr.write("hpcddp: this run has finished already; nothing to do\n")
    return ExitCode.FINISHED


def _end(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    # Slurm signals the whole job when it is requeued, its commands that run then too.
    for signum in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)
    attempt = AttemptDirectory.from_text(environment["HPCDDP_ATTEMPT_DIR"])
    ending = end(attempt, code=options.code, environment=environment, cancelled=options.cancelled)
    sys.stderr.write(f"hpcddp: {ending.text}\n")
    if ending.expedite is not None:
        expedite(ending.expedite)
    return ending.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
