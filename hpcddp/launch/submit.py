"""From a resolved job to a running one: the run directory, the script, the executor."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from hpcddp.errors import HpcddpError
from hpcddp.launch.claim import make_private_directory
from hpcddp.launch.first_plan import write_first_plan
from hpcddp.launch.render import render_script
from hpcddp.launch.site_rules import check_site
from hpcddp.launch.submission import Cluster, Submission, hand_over
from hpcddp.launch.submittable import SubmissionError, check_submittable
from hpcddp.run.directory import RunDirectory
from hpcddp.run.files import write_text
from hpcddp.slurm import commands
from hpcddp.spec.read import ResolvedJob
from hpcddp.spec.sweep import tabulate
from hpcddp.spec.write import dump_job

# Where Slurm's packages and its configless mode keep the configuration (slurm.conf(5)).
_CONFIGURATIONS = ("/etc/slurm/slurm.conf", "/etc/slurm-llnl/slurm.conf", "/run/slurm/conf/slurm.conf")
# submitit.core.utils.JobPaths replaces these anywhere in a path.
_SUBMITIT_TAGS = ("%j", "%t", "%A", "%a")


def new_run_id(now: datetime, token: str) -> str:
    """Return a run id that sorts by time and does not collide.

    Args:
        now: the time of submission.
        token: some random letters.
    """
    return f"{now:%Y%m%d-%H%M%S}-{token}"


def choose_cluster(requested: Literal["auto", "slurm", "local"], environment: Mapping[str, str]) -> Cluster:
    """Return where the job goes.

    Args:
        requested: the user's word; ``auto`` is Slurm where sbatch and a configuration are found.
        environment: the submitter's environment.

    Raises:
        SubmissionError: Slurm was asked for and is not here, or its controller does not answer.
    """
    if requested == "local":
        return "local"
    named = environment.get("SLURM_CONF")
    if named and not Path(named).is_file():
        # Whoever sets it wants that Slurm: this machine is no substitute, and Slurm's commands would fail.
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


def preview(job: ResolvedJob, *, cluster: Cluster, run_id: str, python: str, template: str | None) -> dict[str, Any]:
    """Return what ``submit`` would do: where the job would go, its run directory, its script."""
    run = run_directory(job, run_id)
    script = render_script(job, python=python, run_id=run_id, launcher=cluster, template=template).text
    document = {"cluster": cluster, "run_id": run_id, "run_dir": str(run.path), "script": script}
    return document if job.spec.sweep is None else {**document, "elements": tabulate(job.spec.sweep).elements()}


def submit(
    job: ResolvedJob,
    *,
    cluster: Cluster,
    run_id: str,
    python: str,
    template: str | None,
    environment: Mapping[str, str],
    dependency: str | None = None,
) -> Submission:
    """Write the run directory and hand the job over.

    Args:
        job: the resolved job.
        cluster: where it goes.
        run_id: the id of the new run.
        python: the interpreter that the tasks run.
        template: the sbatch template's name or path, None for the default one.
        environment: the submitter's environment.
        dependency: what it waits for, in sbatch's words; None waits for nothing.

    Raises:
        HpcddpError: the job could not be handed over; nothing is left behind.
    """
    warnings = check_submittable(job.spec, cluster, environment)
    check_site(job, cluster, environment)
    script = render_script(job, python=python, run_id=run_id, launcher=cluster, template=template).text
    run = run_directory(job, run_id)
    make_run_directory(run, cluster)
    try:
        run.submitit.mkdir(mode=0o700)
        write_run(run, job, script)
        # Slurm would create it with the submitter's umask.
        write_text(run.batch_log, "")
        return hand_over(
            run,
            job.spec,
            cluster=cluster,
            script=script,
            python=python,
            directory=Path.cwd(),
            environment=environment,
            dependency=dependency,
            notes=warnings,
        )
    except (HpcddpError, OSError):
        shutil.rmtree(run.path)
        raise


def make_run_directory(run: RunDirectory, cluster: Cluster) -> None:
    """Make the directory of a new run.

    Raises:
        SubmissionError: it is there already, or its path means something else to somebody who reads it.
    """
    _check_path(run.path, cluster)
    make_private_directory(run.path.parent)
    try:
        run.path.mkdir(mode=0o700)
    except FileExistsError:
        raise SubmissionError(f"the run directory {run.path} exists already; use another run id or run_root") from None


def _check_path(path: Path, cluster: Cluster) -> None:
    """Refuse a path that means something else to submitit or to sbatch (sbatch(1), FILENAME PATTERN)."""
    patterns = ("%", "\\") if cluster == "slurm" else _SUBMITIT_TAGS
    if (found := next((pattern for pattern in patterns if pattern in str(path)), None)) is not None:
        reader = "sbatch" if cluster == "slurm" else "submitit"
        raise SubmissionError(
            f"the run directory {path} holds {found}, which {reader} replaces; choose another run_root"
        )


def run_directory(job: ResolvedJob, run_id: str) -> RunDirectory:
    """Return the directory of a run of ``job``."""
    return RunDirectory(Path(job.spec.run_root).absolute() / job.spec.name / run_id)


def write_run(run: RunDirectory, job: ResolvedJob, script: str) -> None:
    """Write what a run is made from: the resolved job, its plan as far as it is known, the script."""
    write_text(run.job_file, dump_job(job.spec, environment_values=False))
    write_first_plan(run, job.spec)
    write_text(run.script, script)
