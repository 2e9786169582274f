"""A rank that does not reach the membership service: its own node is cut off, or that of the batch script is lost.

With ``resources.min_nodes`` the job keeps running when a node is lost, and the ranks on the other nodes go on. So Slurm
says which side this is. Ranks on a node that the job has lost must write nothing. If the node of the batch script is
lost, nobody is left who decides about the run: Slurm lets the job run without its script (sbatch --no-kill, measured
with Slurm 22.05.8). The ranks then save their last step, and one of them has the job requeued.
"""

from __future__ import annotations

import time
from typing import Final, Literal, NoReturn

from hpcddp.jobfile.job import JobSpec
from hpcddp.polling import wait_until
from hpcddp.run.directory import AttemptDirectory
from hpcddp.run.events import append_event
from hpcddp.slurm import commands
from hpcddp.slurm.hostlist import HostListError, expand
from hpcddp.stop.listener import write_to_stderr
from hpcddp.stop.reasons import Cause, ExitCode
from hpcddp.task.process_state import PROCESS_STATE, exit_process

# Slurm gives up a node after SlurmdTimeout, 5 minutes by default.
_PATIENCE_S: Final = 1200.0
_POLL_S: Final = 5.0
_REASON: Final = "the node of the batch script was lost"


def end_cut_off(attempt: AttemptDirectory, job_id: str, spec: JobSpec) -> NoReturn:
    """End this rank when Slurm has said which node the job has lost."""
    save_last_step = PROCESS_STATE.save_last_step
    # The watchdog would save when it finds that the main thread waits.
    PROCESS_STATE.save_last_step = None
    PROCESS_STATE.heartbeat.expect_long()
    write_to_stderr(
        "hpcddp: the node of the batch script does not answer; waiting until Slurm says which node is lost\n"
    )
    lost = wait_until(lambda: _lost_node(job_id, PROCESS_STATE.host), timeout_s=_PATIENCE_S, poll_s=_POLL_S)
    if lost != "script":
        write_to_stderr("hpcddp: this node is cut off from the job; this rank ends and saves nothing\n")
        exit_process(ExitCode.INFRASTRUCTURE)
    write_to_stderr(f"hpcddp: {_REASON}\n")
    if save_last_step is not None:
        save_last_step()
    if _takes_the_requeue(attempt):
        _record_requeue(attempt, job_id)
        wait_until(lambda: _has_requeued(job_id, spec), timeout_s=_PATIENCE_S, poll_s=_POLL_S)
    exit_process(ExitCode.STOPPED)


def _lost_node(job_id: str, host: str) -> Literal["own", "script"] | None:
    """Return which node the job has lost, by Slurm; None while it has lost neither, or Slurm does not answer."""
    try:
        job = commands.show_job(job_id)
        if job is None:
            return "own"
        nodes = expand(job.get("NodeList", ""))
    except (commands.SlurmCommandError, HostListError):
        return None
    if job.get("JobState") != "RUNNING" or host not in nodes:
        return "own"
    if job.get("BatchHost") not in nodes:
        return "script"
    return None


def _takes_the_requeue(attempt: AttemptDirectory) -> bool:
    """Return whether this rank is the first that wants to requeue the job."""
    try:
        attempt.requeue_by_rank.touch(mode=0o600, exist_ok=False)
    except FileExistsError:
        return False
    except OSError as error:
        # Nobody else asks for it on a full disk; a second request changes nothing.
        write_to_stderr(f"hpcddp: {attempt.requeue_by_rank} cannot be written ({error.strerror})\n")
    return True


def _record_requeue(attempt: AttemptDirectory, job_id: str) -> None:
    """Record the requeue before it, because Slurm then ends this process."""
    try:
        append_event(
            attempt.run.events,
            kind="requeue",
            time=time.time(),
            attempt=attempt.number,
            reason=_REASON,
            cause=str(Cause.NODE_FAILURE),
            job_id=job_id,
            by="hpcddp",
        )
    except OSError as error:
        write_to_stderr(f"hpcddp: {attempt.run.events} cannot be written ({error.strerror})\n")


def _has_requeued(job_id: str, spec: JobSpec) -> bool:
    """Requeue the job; return whether Slurm has taken the request."""
    try:
        if not spec.requeue.left_to_slurm:
            commands.update_job(job_id, Requeue="1")
        commands.requeue(job_id)
    except commands.SlurmCommandError as error:
        write_to_stderr(f"hpcddp: {error.message}\n")
        return False
    return True
