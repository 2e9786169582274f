"""The program that every task runs: ``python -P -u -m hpcddp.launch.task``.

It listens to signals before anything else, learns who it is, sends its output to its own log, sets the thread count
before any numerical library is loaded, and turns an exception into a record and an exit code. Where submitit submitted
the job it goes through submitit, so that a ``submitit.Job`` has its result and its exception.
"""

from __future__ import annotations

from hpcddp.stop.signals import LISTENER

if __name__ == "__main__":
    # Before the imports below, which take long enough for a signal to come in between.
    LISTENER.install()

import faulthandler
import hashlib
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from hpcddp.launch.array import PICKLE_DIGEST
from hpcddp.launch.attribution import failure_of, last_words, leave_record
from hpcddp.launch.claim import RunDirectoryError
from hpcddp.launch.hearing import attend
from hpcddp.launch.lifeline import LIFELINE, leave
from hpcddp.launch.siblings import fail
from hpcddp.launch.stamping import stamp
from hpcddp.run.directory import AttemptDirectory
from hpcddp.slurm.rank_env import RankEnv
from hpcddp.stop import faults
from hpcddp.stop.exit_codes import ExitCode

if TYPE_CHECKING:
    from hpcddp.spec.job import JobSpec

_PICKLE_TIMEOUT_S = 60.0


def main() -> int:
    """Run the task and return its exit code."""
    environment = os.environ
    if "HPCDDP_ATTEMPT_DIR" not in environment:
        sys.stderr.write(
            "hpcddp: HPCDDP_ATTEMPT_DIR is not set; a task is started by the script that hpcddp render prints\n"
        )
        return ExitCode.USER_CODE
    attempt = AttemptDirectory.from_text(environment["HPCDDP_ATTEMPT_DIR"])
    try:
        env = RankEnv.from_env(environment)
        if env.source == "submitit":
            _redirect_output(attempt.rank_log(env.rank))
        stamp(attempt.rank_log(env.rank))
        # A crash below Python leaves its stacks in the log.
        faulthandler.enable()
        LIFELINE.cause = attend(attempt, environment).answer
        faults.arm(environment.get(faults.VARIABLE), rank=env.rank, attempt=attempt.number)
        from hpcddp.spec.write import parse_resolved

        spec = parse_resolved(attempt.run.job_file.read_text(encoding="utf-8"))
        if spec.command is not None:
            LISTENER.meaning, LIFELINE.saves_alone = "it is passed on to the program", True
        environment.setdefault("OMP_NUM_THREADS", str(_cpus_of_this_task(spec)))
        # Relative imports of the user's own modules mean the directory of submission; -P keeps it from coming first.
        sys.path.append(str(Path.cwd()))
        _work(env, attempt, environment)
    except SystemExit as error:
        _record(attempt, error, exit_code=ExitCode.USER_CODE)
    except KeyboardInterrupt as error:
        _record(attempt, error, exit_code=ExitCode.INTERRUPTED)
    except Exception as error:  # noqa: BLE001  this is the task's boundary: recorded, printed, and the process ends
        _record(attempt, error)
    return ExitCode.FINISHED


def _work(env: RankEnv, attempt: AttemptDirectory, environment: Mapping[str, str]) -> None:
    digest = environment.get(PICKLE_DIGEST)
    if digest is None:
        from hpcddp.launch import work

        work.run(str(attempt.run.path))
        return
    os.environ["SUBMITIT_EXECUTOR"] = "local" if env.source == "submitit" else "slurm"
    # submitit puts handlers of its own in place of ours, until ``work.run`` puts ours back. Its warning signal becomes
    # one that never comes, since its handler would save and requeue in the middle of whatever runs.
    os.environ["SUBMITIT_PREEMPT_SIGNAL"] = "RTMAX"
    # What it says of itself would stand in the log of every rank.
    os.environ.setdefault("SUBMITIT_LOG_LEVEL", "WARNING")
    folder = attempt.run.submitit
    check_pickle(folder / f"{env.job_id}_submitted.pkl", digest)
    from submitit.core.submission import process_job

    process_job(folder)


def check_pickle(path: Path, digest: str) -> None:
    """Wait for the submitted pickle and compare it with the digest that came with the job.

    Raises:
        RunDirectoryError: the pickle is missing, or is not the one that was submitted.
    """
    deadline = time.monotonic() + _PICKLE_TIMEOUT_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise RunDirectoryError(f"{path} did not appear; every host must see the run directory")
        time.sleep(0.05)
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != digest:
        raise RunDirectoryError(f"{path} is not the file that was submitted (sha256 {found}, expected {digest})")


def _redirect_output(log: Path) -> None:
    """Send this process's output, and that of its children, to the rank's own log, as srun does on a cluster."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _cpus_of_this_task(spec: JobSpec) -> int:
    """Return how many CPUs this task may use: what it asked for, unless the kernel allows it fewer."""
    return max(1, min(spec.resources.cpus_per_task, len(os.sched_getaffinity(0))))


def _record(attempt: AttemptDirectory, error: BaseException, *, exit_code: int | None = None) -> NoReturn:
    """Write the error record, print the error, and end."""
    record = failure_of(error, exit_code=exit_code)
    leave_record(attempt, record)
    sys.stderr.write(last_words(record))
    sys.stderr.flush()
    fail(record.exit_code, attempt)


if __name__ == "__main__":
    leave(main())
