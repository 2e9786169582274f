"""The job that a batch script carries and gives to ``begin``."""

from __future__ import annotations

from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.write import OtherDefaultsError, parse_from_script
from hpcddp.run.directory import RunDirectory
from hpcddp.run.files import exists
from hpcddp.run.job_file import read_submitted_job
from hpcddp.run.ownership import check_run_directory


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
