"""The command line of the batch script: ``python -m hpcddp.supervise`` begin, mounts, stage, watch or end.

Each command imports its own modules alone: every start and every end of a job waits for them.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

from hpcddp.errors import HpcddpError, printable, write_message
from hpcddp.run.directory import AttemptDirectory, RunDirectory
from hpcddp.run.failure import beginning
from hpcddp.run.files import ignore_output_errors, why_unreadable
from hpcddp.slurm.job import slurm_job_id
from hpcddp.stop.reasons import ExitCode


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m hpcddp.supervise")
    commands_of = parser.add_subparsers(dest="command", required=True)
    begin_parser = commands_of.add_parser("begin")
    begin_parser.add_argument("--run-root", required=True)
    begin_parser.add_argument("--name", required=True)
    begin_parser.add_argument("--run-id")
    begin_parser.add_argument("--element", type=int)
    begin_parser.add_argument("--warning", action="append", default=[])
    stage_parser = commands_of.add_parser("stage")
    stage_parser.add_argument("--source", required=True)
    stage_parser.add_argument("--target", required=True)
    mounts_parser = commands_of.add_parser("mounts")
    mounts_parser.add_argument("--run", required=True)
    watch_parser = commands_of.add_parser("watch")
    watch_parser.add_argument("--pid", type=int, required=True)
    watch_parser.add_argument("--warn", action="store_true")
    end_parser = commands_of.add_parser("end")
    end_parser.add_argument("--code", type=int, required=True)
    end_parser.add_argument("--cancelled", action="store_true")
    end_parser.add_argument("--may-restart", action="store_true")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run one of the commands and return the exit code of this process."""
    options = _parse(arguments)
    try:
        return _COMMANDS[options.command](options, environment)
    except HpcddpError as error:
        write_message(error.message)
        return error.exit_code
    except OSError as error:
        where = "" if error.filename is None else f"{printable(str(error.filename))} cannot be used: "
        write_message(f"{where}{why_unreadable(error)}")
        return ExitCode.INFRASTRUCTURE


def _begin(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Begin an attempt and print its directory; a requeued job that does not start is not requeued again."""
    from hpcddp.supervise.begin import begin
    from hpcddp.supervise.refusals import BeingRequeuedError

    try:
        directory = begin(
            run_root=options.run_root,
            name=options.name,
            run_id=options.run_id,
            job_text=_read_job(),
            environment=environment,
            element=options.element,
            warnings=options.warning,
        )
    except BeingRequeuedError:
        raise
    except Exception:
        _forbid_next_start(environment)
        raise
    if directory:
        _print_attempt(AttemptDirectory.from_text(directory))
        return ExitCode.FINISHED
    _forbid_next_start(environment)
    write_message("this run has ended already; nothing to do")
    return ExitCode.FINISHED


def _read_job() -> str:
    """Return the job that the script gives on standard input: UTF-8, whatever the locale is.

    Raises:
        DamagedJobError: it is not UTF-8.
    """
    from hpcddp.jobfile.write import DamagedJobError

    content = sys.stdin.buffer.read()
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise DamagedJobError.because(f"line {line} is not UTF-8") from None


def _forbid_next_start(environment: Mapping[str, str]) -> None:
    from hpcddp.supervise.requeue_job import forbid_requeue

    job_id = slurm_job_id(environment)
    if job_id is not None and "SLURM_RESTART_COUNT" in environment:
        forbid_requeue(job_id)


def _stage(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    from hpcddp.jobfile.environment import Stage
    from hpcddp.supervise.stage import stage

    return stage(Stage(source=options.source, target=options.target), environment)


def _mounts(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Print the directories that the tasks of a run need in a container: the project, and the copy of its code."""
    from hpcddp.run.code import read_copy

    del environment
    if options.run:
        record, copy = read_copy(RunDirectory(Path(options.run)))
        sys.stdout.write(f"{record.root}\n{copy}\n")
    return ExitCode.FINISHED


def _watch(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    from hpcddp.supervise.watch import watch

    attempt = AttemptDirectory.from_text(environment["HPCDDP_ATTEMPT_DIR"])
    watch(attempt, options.pid, environment=environment, warn=options.warn)
    return ExitCode.FINISHED


def _end(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    from hpcddp.supervise.end import end

    # Slurm signals the whole job when it is requeued, its commands that run then too.
    for signum in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)
    attempt = AttemptDirectory.from_text(environment["HPCDDP_ATTEMPT_DIR"])
    ending = end(
        attempt,
        code=options.code,
        environment=environment,
        cancelled=options.cancelled,
        may_restart=options.may_restart,
    )
    write_message(ending.text)
    if ending.next_attempt is not None:
        _print_attempt(ending.next_attempt)
    return ending.exit_code


def _print_attempt(attempt: AttemptDirectory) -> None:
    """Print the directory of an attempt, whose tasks the script starts next."""
    sys.stderr.write(beginning(attempt))
    sys.stdout.write(f"{attempt.path}\n")


_COMMANDS: Final[Mapping[str, Callable[[argparse.Namespace, Mapping[str, str]], int]]] = MappingProxyType(
    {"begin": _begin, "stage": _stage, "mounts": _mounts, "watch": _watch, "end": _end}
)


if __name__ == "__main__":
    ignore_output_errors()
    sys.exit(main(sys.argv[1:], os.environ))
