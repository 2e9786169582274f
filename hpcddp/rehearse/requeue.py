"""The faults of a real Slurm, after which it runs the job again by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from hpcddp.errors import HpcddpError
from hpcddp.manage.control import commands_of_slurm, requeue
from hpcddp.manage.overview import status_now
from hpcddp.rehearse.faults import SlurmAct
from hpcddp.run.directory import RunDirectory
from hpcddp.run.files import write_text
from hpcddp.slurm import commands
from hpcddp.slurm.hostlist import expand

_TAKES_BOTH_HOSTS: Final = """\
#!/bin/bash
#SBATCH --partition=high --nodes=2 --exclusive --output=/dev/null
sleep 3
"""


def cause_by_slurm(act: SlurmAct, run: RunDirectory, environment: Mapping[str, str]) -> None:
    """Cause a fault of Slurm.

    Args:
        run: the run, whose job runs.
        environment: the environment of Slurm's commands.

    Raises:
        HpcddpError: Slurm refuses it.
    """
    if act == "requeue":
        requeue(status_now(run, environment), commands_of_slurm(environment))
    elif act == "preemption":
        script = run.path.parent / "takes-both-hosts.sh"
        write_text(script, _TAKES_BOTH_HOSTS)
        commands.sbatch(script, environment=environment)
    else:
        node = _last_node_of(run, environment)
        commands.update_node(node, State="DOWN", Reason="rehearsal")
        # The job, which Slurm has requeued, needs it again.
        commands.update_node(node, State="RESUME")


def _last_node_of(run: RunDirectory, environment: Mapping[str, str]) -> str:
    job = status_now(run, environment).files.job
    fields = None if job is None else commands.show_job(job.job_id, environment=environment)
    nodes = expand(fields.get("NodeList", "")) if fields else []
    if not nodes:
        raise HpcddpError(f"the job of the run {run.run_id} has no node; it may have ended")
    return nodes[-1]
