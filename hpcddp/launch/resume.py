"""Handing a run over again: the same run id under a new job id."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hpcddp.launch.array import ArrayPlace
from hpcddp.launch.cause import ask_slurm, slurm_job_id
from hpcddp.launch.claim import ENDED_STATES, has_finished, is_alive, newest_start, refuse_another_training
from hpcddp.launch.element import place_of
from hpcddp.launch.paragraph import resume_command
from hpcddp.launch.render import render_script
from hpcddp.launch.site_rules import check_site
from hpcddp.launch.submission import Cluster, Submission, hand_over
from hpcddp.launch.submit import run_directory, write_run
from hpcddp.launch.submittable import SubmissionError, check_submittable
from hpcddp.run.directory import RunDirectory
from hpcddp.run.events import append_event
from hpcddp.run.files import read_json
from hpcddp.run.sweep import index_of, read_sweep, sweep_of
from hpcddp.spec.element import element_spec
from hpcddp.spec.job import JobSpec
from hpcddp.spec.read import ResolvedJob
from hpcddp.spec.write import parse_resolved


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """Where a run went when it was handed over last.

    Args:
        cluster: where.
        job_id: Slurm's job id, or the process id of a local run.
        directory: the directory of submission.
        python: the interpreter of its tasks.
    """

    cluster: Cluster
    job_id: str
    directory: Path
    python: str


def _read_before(run: RunDirectory) -> Before | None:
    """Return where a run went before, or None if its script was submitted by hand."""
    document = read_json(run.submission)
    if document is None:
        return None
    return Before(
        cluster=document["cluster"],
        job_id=document["job_id"],
        directory=Path(document["directory"]),
        python=document["python"],
    )


def resume(run: RunDirectory, *, environment: Mapping[str, str], dependency: str | None = None) -> Submission:
    """Continue a run that has ended before its work was done, with the script that it has.

    Args:
        run: the run.
        environment: the submitter's environment.
        dependency: what it waits for, in sbatch's words; None waits for nothing.

    Raises:
        SubmissionError: the run is alive, has finished, or has no script of its own.
    """
    before = _own_script(run)
    _refuse_alive_or_finished(run, before)
    spec = _spec_of(run)
    notes = check_submittable(spec, before.cluster, environment)
    _tell(run)
    return _hand_over(run, spec, before, environment, dependency=dependency, notes=notes)


def resume_anew(
    run: RunDirectory,
    job: ResolvedJob,
    *,
    cluster: Cluster,
    python: str,
    template: str | None,
    environment: Mapping[str, str],
    dependency: str | None = None,
) -> Submission:
    """Continue a run that has ended before its work was done, with a job of other resources say.

    Args:
        run: the run.
        job: the job to render for it; it takes the place of the run's own.
        cluster: where it goes.
        python: the interpreter that the tasks run.
        template: the sbatch template's name or path, None for the default one.
        environment: the submitter's environment.
        dependency: what it waits for, in sbatch's words; None waits for nothing.

    Raises:
        HpcddpError: the run is alive or has finished, or the job is one of another run or another training.
    """
    _refuse_alive_or_finished(run, _read_before(run))
    job = job_of_run(run, job)
    notes = check_submittable(job.spec, cluster, environment)
    check_site(job, cluster, environment)
    meant = run_directory(job, run.run_id).path
    if meant.resolve() != run.path.resolve():
        raise SubmissionError(
            f"the job's run_root and name lead to {meant}, but the run is {run.path}; give the job the run's own name "
            "and run_root, and submit from where it was submitted"
        )
    refuse_another_training(run, job.spec)
    script = render_script(job, python=python, run_id=run.run_id, launcher=cluster, template=template).text
    _tell(run)
    write_run(run, job, script)
    here = Before(cluster=cluster, job_id="", directory=Path.cwd(), python=python)
    return _hand_over(run, job.spec, here, environment, dependency=dependency, notes=notes)


def continue_by_itself(run: RunDirectory, *, environment: Mapping[str, str]) -> Submission:
    """Hand the run's script over from within its own job, which ends now; the budgets go on.

    Args:
        run: the run.
        environment: the batch script's environment.

    Raises:
        HpcddpError: the run has no script of its own, or Slurm refused it.
    """
    # The run still belongs to this job until it has ended.
    return _hand_over(
        run, _spec_of(run), _own_script(run), environment, dependency=f"afterany:{slurm_job_id(environment)}"
    )


def _hand_over(
    run: RunDirectory,
    spec: JobSpec,
    before: Before,
    environment: Mapping[str, str],
    *,
    dependency: str | None = None,
    notes: tuple[str, ...] = (),
) -> Submission:
    # What is there is the result of a run that had ended; it goes on.
    run.result.unlink(missing_ok=True)
    run.submitit.mkdir(mode=0o700, exist_ok=True)
    script, place = _script_of(run)
    return hand_over(
        run,
        spec,
        cluster=before.cluster,
        script=script.read_text(encoding="utf-8"),
        python=before.python,
        directory=before.directory,
        environment=environment,
        dependency=dependency,
        place=place,
        notes=notes,
    )


def _script_of(run: RunDirectory) -> tuple[Path, ArrayPlace | None]:
    """Return a run's script: an element has that of its sweep, until it was resumed with a job of its own."""
    sweep = None if run.script.exists() else sweep_of(run)
    return (run.script, None) if sweep is None else (sweep.directory.script, place_of(sweep, index_of(run)))


def job_of_run(run: RunDirectory, job: ResolvedJob) -> ResolvedJob:
    """Return the job to continue a run with: an element of a sweep keeps its values, whatever the job says.

    Args:
        run: the run.
        job: the job that was given.

    Raises:
        SubmissionError: the job has a sweep, and the run is no element of one.
    """
    sweep = sweep_of(run)
    if sweep is None and job.spec.sweep is None:
        return job
    if sweep is None:
        raise SubmissionError(
            f"the job has a sweep, and the run {run.run_id} is no element of one; leave the sweep out: --set sweep=null"
        )
    return replace(job, spec=element_spec(job.spec, sweep.elements[index_of(run)]))


def _own_script(run: RunDirectory) -> Before:
    """Return where the run's own script went."""
    _refuse_whole_sweep(run)
    before = _read_before(run)
    if before is None:
        raise SubmissionError(
            f"the script of the run {run.path} was submitted by hand and is not kept there; give the job file too: "
            f"{resume_command(run)}"
        )
    return before


def _refuse_whole_sweep(run: RunDirectory) -> None:
    sweep = read_sweep(run.path)
    if sweep is not None:
        raise SubmissionError(
            f"{run.run_id} is a sweep of {len(sweep.elements)} runs; resume one of them: hpcddp submit --resume "
            f"{sweep.run_id(0)}"
        )


def _spec_of(run: RunDirectory) -> JobSpec:
    return parse_resolved(run.job_file.read_text(encoding="utf-8"))


def _refuse_alive_or_finished(run: RunDirectory, before: Before | None) -> None:
    if has_finished(run):
        raise SubmissionError(f"the run {run.run_id} has finished, and there is nothing to resume; see {run.result}")
    start = newest_start(run)
    # A job that waits for its first start has left no other trace than its submission.
    alive = start.job_id if start is not None and is_alive(start) else None
    if alive is None and before is not None and (start is None or start.job_id != before.job_id):
        alive = before.job_id if _is_there(before) else None
    if alive is not None:
        local = before is not None and before.cluster == "local"
        called, end = ("process", "kill") if local else ("job", "scancel")
        raise SubmissionError(
            f"the run {run.run_id} is alive as {called} {alive}; wait for its end, or end it with: {end} {alive}"
        )


def _is_there(before: Before) -> bool:
    """Return whether the newest job of a run waits or runs."""
    if before.cluster == "local":
        return Path(f"/proc/{before.job_id}").exists()
    job = ask_slurm(before.job_id)
    return job is not None and job.get("JobState") not in ENDED_STATES


def _tell(run: RunDirectory) -> None:
    """Write down that a person resumes the run: its budgets begin anew."""
    append_event(
        run.events,
        kind="resume",
        time=time.time(),
        attempt=run.newest_attempt() or 0,
        reason=f"resumed by {os.environ.get('USER') or os.getuid()}",
    )
