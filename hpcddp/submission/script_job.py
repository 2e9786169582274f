"""The job that a batch script carries and gives to ``begin``."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.write import DamagedJobError, OtherDefaultsError, parse_from_script
from hpcddp.run.directory import RunDirectory
from hpcddp.run.files import exists
from hpcddp.run.job_file import read_submitted_job
from hpcddp.run.moved import script_owner, usable_script
from hpcddp.run.ownership import check_run_directory, refuse_another_training
from hpcddp.run.result import resume_command
from hpcddp.run.sweep import Sweep, index_of
from hpcddp.submission.sweep_element import element_of

# The call of begin in the default template, with the job as its here-document.
_CARRIED_JOB = re.compile(r"hpcddp\.supervise begin .*? <<'(HPCDDP_JOB\w*)'\n(.*?)^\1$", re.DOTALL | re.MULTILINE)


def read_job_of_script(job_text: str, submitted: RunDirectory) -> JobSpec:
    """Return the job of a script; where its defaults are those of another version, from the job file in its directory.

    Args:
        job_text: the job in the script, as ``dump_for_script`` writes it.
        submitted: the directory of its run or of its sweep.

    Raises:
        OtherDefaultsError: the defaults are those of another version, and there is no job file.
        DamagedJobError: the job was changed and is not valid.
    """
    try:
        return parse_from_script(job_text)
    except OtherDefaultsError:
        if not exists(submitted.job_file):
            raise
        check_run_directory(submitted.path)
        return read_submitted_job(submitted)


def refuse_edited_job(run: RunDirectory) -> None:
    """Refuse the script with which a run continues, if ``begin`` would refuse the job in it.

    Raises:
        RunDirectoryError: the job is another training; or there is no script.
        DamagedJobError: the job is not valid.
        ElementError: the sweep in it does not have the element that the run is.
    """
    spec = _job_of_script(run)
    if spec is None:
        return
    owner = script_owner(run)
    if owner is not run:
        spec = element_of(owner, index_of(run), spec, {}).spec
    refuse_another_training(run, spec)


def refuse_edited_jobs(sweep: Sweep, elements: Sequence[int]) -> None:
    """Refuse elements of a sweep as ``refuse_edited_job`` does; the script that they share is read once."""
    shares_job: bool | None = None
    for index in elements:
        run = sweep.run(index)
        if not run.script.exists():
            if shares_job is None:
                shares_job = _job_of_script(run) == read_submitted_job(sweep.directory)
            if shares_job:
                continue
        refuse_edited_job(run)


def _job_of_script(run: RunDirectory) -> JobSpec | None:
    """Return the job in the script with which a run continues; None if a template of the user's own hides it."""
    carried_job = _CARRIED_JOB.search(usable_script(run))
    if carried_job is None:
        return None
    owner = script_owner(run)
    try:
        return read_job_of_script(carried_job[2], owner)
    except DamagedJobError as error:
        raise DamagedJobError(
            f"the job in {owner.script} is damaged: {error.reason}; restore a copy of the script, or give the job file "
            f"too: {resume_command(run, with_job=True)}"
        ) from error
