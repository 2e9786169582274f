"""The program that every task runs: ``python -P -u -m hpcddp.task``.

It installs the signal listener first, then reads the environment and the job file, redirects its output to the rank's
log, sets the thread count before a numerical library is loaded, and turns an exception into a failure record and an
exit code. A job that submitit submitted runs through submitit, so that its ``submitit.Job`` gets the result or the
exception.
"""

from __future__ import annotations

from hpcddp.stop.listener import LISTENER

if __name__ == "__main__":
    # Before the imports below: they take long enough for a signal to arrive.
    LISTENER.install()

import faulthandler
import hashlib
import os
import signal
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from hpcddp.processes import wait_until
from hpcddp.run.directory import AttemptDirectory
from hpcddp.run.files import ignore_output_errors, open_to_append
from hpcddp.run.log_timestamps import record_timestamps
from hpcddp.run.ownership import RunDirectoryError
from hpcddp.slurm.job_environment import PICKLE_DIGEST
from hpcddp.slurm.rank_env import RankEnv
from hpcddp.stop import faults
from hpcddp.stop.reasons import ExitCode
from hpcddp.task.attribution import failure_record, failure_text, save_failure
from hpcddp.task.local_peers import exit_after_failure
from hpcddp.task.process_state import PROCESS_STATE, TaskInputs, exit_process
from hpcddp.task.signals import handle_signals, show_stacks_on_request

if TYPE_CHECKING:
    from hpcddp.jobfile.job import JobSpec

_PICKLE_TIMEOUT_S = 60.0
_POLL_S = 0.05


def main() -> int:
    """Run the task and return its exit code."""
    environment = os.environ
    if "HPCDDP_ATTEMPT_DIR" not in environment:
        sys.stderr.write(
            "hpcddp: HPCDDP_ATTEMPT_DIR is not set; a task is started by the script that hpcddp render prints\n"
        )
        return ExitCode.USER_CODE
    PROCESS_STATE.read_environment(environment)
    attempt = AttemptDirectory.from_text(environment["HPCDDP_ATTEMPT_DIR"])
    try:
        _run(_prepare(attempt, environment))
    except SystemExit as error:
        _exit_with_record(attempt, error, exit_code=ExitCode.USER_CODE)
    except KeyboardInterrupt as error:
        _exit_with_record(attempt, error, exit_code=ExitCode.INTERRUPTED)
    except Exception as error:  # noqa: BLE001  this is the task's boundary: recorded, printed, and the process ends
        _exit_with_record(attempt, error)
    return ExitCode.FINISHED


def _prepare(attempt: AttemptDirectory, environment: MutableMapping[str, str]) -> TaskInputs:
    """Prepare this process for the work of its job: log, signals, threads, variables, the directory of its code."""
    env = RankEnv.from_env(environment)
    log = attempt.rank_log(env.rank)
    if env.source == "submitit":
        _redirect_output(log)
    record_timestamps(log)
    # A crash below Python writes its stacks to the log.
    faulthandler.enable()
    show_stacks_on_request()
    PROCESS_STATE.cause = handle_signals(attempt, environment).answer
    faults.arm(environment.get(faults.VARIABLE), rank=env.rank, attempt=attempt.number)

    from hpcddp.jobfile.fields import INTERACTIVE_JOB_NAMES, UNNAMED_JOB
    from hpcddp.run.job_file import read_job_file
    from hpcddp.task.binding import binding_of

    text = attempt.run.job_file.read_text(encoding="utf-8")
    spec = read_job_file(attempt.run)
    binding = binding_of(spec, env, environment)
    if spec.command is not None:
        LISTENER.meaning = "it is passed on to the program"
        PROCESS_STATE.saves_alone = True
    # Slurm counts only its own requeues. A program that resumes where this is above 0 resumes in each further attempt.
    if attempt.number > env.restart_count:
        environment["SLURM_RESTART_COUNT"] = str(attempt.number)
    environment.setdefault("OMP_NUM_THREADS", str(_cpus_of_this_task(spec)))
    if environment.get("SLURM_JOB_NAME") in INTERACTIVE_JOB_NAMES:
        environment["SLURM_JOB_NAME"] = UNNAMED_JOB
    if spec.environment.stage is not None:
        environment["HPCDDP_STAGED"] = spec.environment.stage.directory(environment) or ""
    if spec.environment.code == "snapshot":
        from hpcddp.task.code import enter_copy

        enter_copy(attempt.run, environment)
    else:
        # The user's own modules are in the directory of submission; -P keeps it from coming first.
        sys.path.append(str(Path.cwd()))
    return TaskInputs(environment=environment, env=env, attempt=attempt, job_text=text, spec=spec, binding=binding)


def _run(inputs: TaskInputs) -> None:
    """Run the task, through submitit if it submitted the job."""
    PROCESS_STATE.inputs = inputs
    environment = inputs.environment
    env = inputs.env
    run = inputs.attempt.run
    digest = environment.get(PICKLE_DIGEST)
    if digest is None:
        from hpcddp.task import work

        work.run(str(run.path))
        return
    environment["SUBMITIT_EXECUTOR"] = "local" if env.source == "submitit" else "slurm"
    # submitit replaces our signal handlers until ``work.run`` installs them again. Its warning signal is set to one
    # that no process sends, since its handler would save and requeue at any point of a step.
    environment["SUBMITIT_PREEMPT_SIGNAL"] = "RTMAX"
    # Otherwise its own messages are in the log of every rank.
    environment.setdefault("SUBMITIT_LOG_LEVEL", "WARNING")
    check_pickle(run.submitit / f"{env.job_id}_submitted.pkl", digest)
    needs_no_numpy = inputs.spec.command is not None and "numpy" not in sys.modules
    with _without_numpy() if needs_no_numpy else nullcontext():
        from submitit.core.submission import process_job
    process_job(run.submitit)


@contextmanager
def _without_numpy() -> Iterator[None]:
    """Let modules that are imported now find no numpy.

    submitit imports it in case that a pickle has arrays; ours has none. The program of a command is another process, to
    which this import would give nothing but a later start.
    """
    # An import of a module that is None raises ImportError (Python reference, "The module cache").
    sys.modules["numpy"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["numpy"]


def check_pickle(path: Path, digest: str) -> None:
    """Wait for the submitted pickle and compare its sha256 with the one that the job carries.

    Raises:
        RunDirectoryError: the pickle is missing, or is not the one that was submitted.
    """
    if not wait_until(path.exists, timeout_s=_PICKLE_TIMEOUT_S, poll_s=_POLL_S):
        raise RunDirectoryError(f"{path} did not appear; every host must see the run directory")
    actual = hashlib.sha256(path.read_bytes()).hexdigest()
    if actual != digest:
        raise RunDirectoryError(f"{path} is not the file that was submitted (sha256 {actual}, expected {digest})")


def _redirect_output(log: Path) -> None:
    """Redirect the output of this process and its children to the rank's log, as srun does on a cluster."""
    descriptor = open_to_append(log)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _cpus_of_this_task(spec: JobSpec) -> int:
    """Return how many CPUs this task may use: those that the job asks for, or fewer if the kernel allows fewer."""
    return max(1, min(spec.resources.cpus_per_task, len(os.sched_getaffinity(0))))


def _exit_with_record(attempt: AttemptDirectory, error: BaseException, *, exit_code: int | None = None) -> NoReturn:
    """Write the failure record, print the error, and end the process."""
    # torch's handler raises an error when a loader process ends; a second one would prevent the record.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    record = failure_record(error, exit_code=exit_code)
    save_failure(attempt, record)
    sys.stderr.write(failure_text(record))
    sys.stderr.flush()
    exit_after_failure(record.exit_code, attempt)


if __name__ == "__main__":
    ignore_output_errors()
    exit_process(main())
