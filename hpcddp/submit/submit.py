"""The submission of a new run: choose the cluster, check and render the job, write the run directory, submit."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from hpcddp.errors import HpcddpError
from hpcddp.jobfile.cluster import Cluster
from hpcddp.run.directory import RunDirectory
from hpcddp.run.files import write_text
from hpcddp.run.ownership import make_private_directory
from hpcddp.site.rules import check_site
from hpcddp.slurm import commands
from hpcddp.submit.checks.job import check_submittable
from hpcddp.submit.checks.obstacle import SubmissionError
from hpcddp.submit.checks.sweep import check_sweep_submittable
from hpcddp.submit.first_plan import write_plan
from hpcddp.submit.render import render_script
from hpcddp.submit.request import SubmitRequest
from hpcddp.submit.submission import Submission, submit_script

# The paths that Slurm's packages and its configless mode use (slurm.conf(5)).
_CONFIGURATIONS = ("/etc/slurm/slurm.conf", "/etc/slurm-llnl/slurm.conf", "/run/slurm/conf/slurm.conf")
# submitit.core.utils.JobPaths replaces these wherever they are in a path.
_SUBMITIT_TAGS = ("%j", "%t", "%A", "%a")


def new_run_id(now: datetime, token: str) -> str:
    """Return a run id that sorts by the time of submission.

    Args:
        now: the time of submission.
        token: random letters, which make ids of the same second different.
    """
    return f"{now:%Y%m%d-%H%M%S}-{token}"


def choose_cluster(requested: Literal["auto", "slurm", "local"], environment: Mapping[str, str]) -> Cluster:
    """Return the cluster to submit to.

    Args:
        requested: the value of ``--cluster``; ``auto`` is Slurm where sbatch and a configuration are found.
        environment: the submitter's environment.

    Raises:
        SubmissionError: Slurm was requested and not found, or its controller does not answer.
    """
    if requested == "local":
        return "local"
    named = environment.get("SLURM_CONF")
    if named and not Path(named).is_file():
        # A user who sets it wants that Slurm and not this machine, and Slurm's commands would fail.
        raise SubmissionError(
            f"SLURM_CONF is {named!r}, and there is no such file; correct or unset it, or use --cluster local"
        )
    has_sbatch = shutil.which("sbatch", path=environment.get("PATH")) is not None
    configured = bool(named) or any(Path(path).is_file() for path in _CONFIGURATIONS)
    if not (has_sbatch and configured):
        if requested == "slurm":
            missing = "sbatch was not found" if not has_sbatch else "no slurm.conf was found"
            raise SubmissionError(
                f"--cluster slurm: {missing}; submit on a login node, set SLURM_CONF, or use --cluster local"
            )
        return "local"
    if not commands.controller_answers(environment):
        raise SubmissionError("Slurm's controller does not answer; try again later, or run here with --cluster local")
    return "slurm"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedJob:
    """A job that is checked and rendered; all that is left is to write its directory and to submit it.

    Args:
        request: the request.
        script: the text of its script.
        notes: what may keep the job from running, a sentence each.
    """

    request: SubmitRequest
    script: str
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the document of ``submit --dry-run --json``."""
        run, table = self.request.run, self.request.sweep_table
        document = {
            "cluster": self.request.cluster,
            "run_id": run.run_id,
            "run_dir": str(run.path),
            "script": self.script,
        }
        return document if table is None else {**document, "elements": table.elements()}


def prepare(request: SubmitRequest) -> PreparedJob:
    """Check and render a job or a sweep, without a change to anything.

    Raises:
        HpcddpError: the job cannot run, or cannot be rendered.
    """
    table = request.sweep_table
    notes = check_submittable(request) if table is None else check_sweep_submittable(request, table)
    check_site(request.job, request.cluster, request.environment)
    return PreparedJob(request=request, script=render_script(request).text, notes=notes)


def submit(request: SubmitRequest) -> Submission:
    """Write the directory of a new run, and submit its job.

    Raises:
        HpcddpError: the job could not be submitted; nothing is left behind.
    """
    job, run = prepare(request), request.run
    make_run_directory(run, request.cluster)
    try:
        run.submitit.mkdir(mode=0o700)
        write_run(run, job)
        # Slurm would create it with the submitter's umask.
        write_text(run.batch_log, "")
        return submit_script(run, request, job.script, notes=job.notes)
    except (HpcddpError, OSError):
        shutil.rmtree(run.path)
        raise


def make_run_directory(run: RunDirectory, cluster: Cluster) -> None:
    """Make the directory of a new run.

    Raises:
        SubmissionError: it exists already, or sbatch or submitit would change its path.
    """
    check_path(run.path, cluster)
    make_private_directory(run.path.parent)
    try:
        run.path.mkdir(mode=0o700)
    except FileExistsError:
        raise SubmissionError(f"the run directory {run.path} exists already; use another run id or run_root") from None


def check_path(path: Path, cluster: Cluster) -> None:
    """Refuse a path in which submitit or sbatch replaces a pattern (sbatch(1), FILENAME PATTERN).

    Raises:
        SubmissionError: the path holds such a pattern.
    """
    patterns = ("%", "\\") if cluster == "slurm" else _SUBMITIT_TAGS
    if (found := next((pattern for pattern in patterns if pattern in str(path)), None)) is not None:
        reader = "sbatch" if cluster == "slurm" else "submitit"
        raise SubmissionError(
            f"the run directory {path} holds {found}, which {reader} replaces; choose another run_root"
        )


def write_run(run: RunDirectory, job: PreparedJob) -> None:
    """Write the resolved job, its batch plan and its script into a run directory."""
    write_text(run.job_file, job.request.job_text)
    write_plan(run, job.request.plan)
    write_text(run.script, job.script)
