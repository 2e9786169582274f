"""submitit executors that submit the rendered script.

submitit's own executors write a script of their own, with shell quotes in directives, the inherited environment and
another ``srun`` line. Here the script is the rendered text, so that ``render`` prints what ``submit`` submits.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from submitit import LocalExecutor, LocalJob, SlurmExecutor, SlurmJob  # noqa: TID253  the CLI imports this module late
from submitit.core.utils import DelayedSubmission  # noqa: TID253  as above

from hpcddp.errors import HpcddpError
from hpcddp.run.files import open_to_append, write_text
from hpcddp.slurm import commands
from hpcddp.slurm.job_environment import NO_DEPENDENCY, NO_LIMIT_S, PICKLE_DIGEST, Dependency


def dump_call(path: Path, function: Callable[..., Any], *arguments: str) -> str:
    """Write the pickle of a call, as submitit's programs read it, and return its sha256."""
    return _dump(path, DelayedSubmission(function, *arguments))


def _dump(path: Path, submission: DelayedSubmission) -> str:
    """Write a pickle that only its owner can read, and return its sha256."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    os.close(descriptor)
    submission.dump(path)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _only(submissions: Sequence[DelayedSubmission]) -> DelayedSubmission:
    """Return the one submission; submitit's job arrays would use a plain executor with a script of its own."""
    if len(submissions) != 1:
        raise HpcddpError(f"{len(submissions)} functions were submitted at once; one script runs one function")
    return submissions[0]


class RenderedSlurmExecutor(SlurmExecutor):
    """Submits a rendered script through ``sbatch --parsable``.

    Args:
        folder: the run's submitit folder.
        tasks: the number of tasks that it starts, over all nodes.
        environment: the environment of sbatch, which Slurm stores with the job.
        directory: the working directory of the job.
        dependency: what the job waits for.
        options: options of sbatch that take precedence over the directives of the script.
    """

    def __init__(
        self,
        folder: Path,
        *,
        script: str,
        tasks: int,
        environment: Mapping[str, str],
        directory: Path,
        dependency: Dependency = NO_DEPENDENCY,
        options: Sequence[str] = (),
    ) -> None:
        super().__init__(folder)
        self._directory = directory
        self._dependency = dependency
        self._options = options
        self._script = script
        self._tasks = tasks
        self._environment = dict(environment)

    @classmethod
    def affinity(cls) -> int:
        """Return 2, "available": submitit would look for srun in the environment of this process."""
        return 2

    def _internal_process_submissions(self, delayed_submissions: list[DelayedSubmission]) -> list[Any]:
        pickle = self.folder / f"{uuid.uuid4().hex}.pkl"
        digest = _dump(pickle, _only(delayed_submissions))
        script = self.folder / f".submission_file_{pickle.stem}.sh"
        write_text(script, self._script)
        environment = {**self._environment, **self._dependency.environment, PICKLE_DIGEST: digest}
        try:
            job_id = commands.sbatch(
                script,
                environment=environment,
                directory=self._directory,
                dependency=self._dependency.text,
                options=self._options,
            )
        except HpcddpError:
            pickle.unlink()
            script.unlink()
            raise
        job: SlurmJob[Any] = SlurmJob(folder=self.folder, job_id=job_id, tasks=list(range(self._tasks)))
        job.paths.move_temporary_file(script, "submission_file")
        job.paths.move_temporary_file(pickle, "submitted_pickle")
        return [job]


class RenderedLocalExecutor(LocalExecutor):
    """Runs a rendered script on this machine, in a session of its own that outlives the terminal.

    submitit's controller starts its tasks on this machine too, or srun starts them in an allocation.

    Args:
        folder: the run's submitit folder.
        program: the command that runs the script.
        log: the file that gets the script's own output.
        command: the command line of one task.
        tasks: the number of tasks to start.
        time_limit_s: their time limit, in seconds; None for no limit.
        signal_lead_s: how long before the time limit submitit sends its signal, in seconds.
        directory: the working directory of the script.
        allocation: Slurm's id of the allocation for the tasks; None has them on this machine.
    """

    def __init__(
        self,
        folder: Path,
        *,
        program: Sequence[str],
        log: Path,
        command: str,
        tasks: int,
        time_limit_s: int | None,
        signal_lead_s: int,
        environment: Mapping[str, str],
        directory: Path,
        allocation: str | None = None,
    ) -> None:
        super().__init__(folder)
        self._directory = directory
        self._program = program
        self._log = log
        self._tasks = tasks
        self._allocation = allocation
        self._environment = {**environment, "SUBMITIT_LOCAL_TIMEOUT_S": str(time_limit_s or NO_LIMIT_S)}
        if allocation is not None:
            # All that srun needs. The other variables of the allocation are options of srun, which would override the
            # job's own.
            self._environment["SLURM_JOB_ID"] = allocation
            return
        # The variables that submitit's controller reads (submitit/local/local.py, Controller.__init__).
        self._environment |= {
            "SUBMITIT_EXECUTOR": "local",
            "SUBMITIT_LOCAL_COMMAND": command,
            "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
            "SUBMITIT_LOCAL_NODEID": "0",
            "SUBMITIT_LOCAL_NTASKS": str(tasks),
            "SUBMITIT_LOCAL_SIGNAL_DELAY_S": str(signal_lead_s),
            # The controller's parent, the script, is the job: its process id is the job id.
            "SUBMITIT_LOCAL_WITH_SHELL": "1",
            "SUBMITIT_STDERR_TO_STDOUT": "1",
        }

    def _internal_process_submissions(self, delayed_submissions: list[DelayedSubmission]) -> list[Any]:
        pickle = self.folder / f"{uuid.uuid4().hex}.pkl"
        digest = _dump(pickle, _only(delayed_submissions))
        if self._allocation is not None:
            # Slurm's job id is what its tasks know; an earlier attempt in the same allocation has left a file there.
            pickle = pickle.replace(self.folder / f"{self._allocation}_submitted.pkl")
        log = open_to_append(self._log)
        try:
            process = subprocess.Popen(
                self._program,
                cwd=self._directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**self._environment, PICKLE_DIGEST: digest},
                start_new_session=True,
            )
        finally:
            os.close(log)
        # A script that has ended would stay a zombie until this process ends or waits for it.
        threading.Thread(target=process.wait, daemon=True).start()
        job: LocalJob[Any] = LocalJob(
            folder=self.folder, job_id=str(process.pid), tasks=list(range(self._tasks)), process=process
        )
        if self._allocation is None:
            job.paths.move_temporary_file(pickle, "submitted_pickle")
        return [job]
