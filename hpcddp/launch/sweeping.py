"""Submitting a sweep: one script, one array, one manifest.

submitit's ``map_array`` writes a pickle for each function and makes a job object for each. Here the elements differ in
a few numbers only, which the script knows, so that one pickle serves all of them: ``begin`` lays it where a
``submitit.SlurmJob`` of an element looks for it.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpcddp.errors import HpcddpError
from hpcddp.launch.array import FIRST, PICKLE_DIGEST
from hpcddp.launch.claim import group_writable_warnings
from hpcddp.launch.element import PICKLE
from hpcddp.launch.render import render_script
from hpcddp.launch.site_rules import check_site
from hpcddp.launch.submission import Cluster
from hpcddp.launch.submit import make_run_directory, run_directory
from hpcddp.launch.submittable import SubmissionError
from hpcddp.launch.sweep_checks import check_sweep_submittable
from hpcddp.run.files import write_json, write_text
from hpcddp.run.sweep import Chunk, Sweep, write_sweep
from hpcddp.slurm import commands
from hpcddp.slurm.inheritance import submission_environment
from hpcddp.spec.read import ResolvedJob
from hpcddp.spec.sweep import tabulate
from hpcddp.spec.write import dump_job

_TOO_LONG = "Invalid job array specification"


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSubmission:
    """A sweep that was handed over.

    Args:
        sweep: the sweep.
        dropped: inherited variables that sbatch did not get, because they would have overridden directives.
        notes: what may be in the way of its jobs, a sentence each.
    """

    sweep: Sweep
    dropped: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def warnings(self) -> list[str]:
        """What the user should know, a sentence each."""
        return [*self.notes, *group_writable_warnings(self.sweep.path)]

    def as_json(self) -> dict[str, Any]:
        """Return what ``submit --json`` prints."""
        sweep = self.sweep
        return {
            "sweep_id": sweep.sweep_id,
            "sweep_dir": str(sweep.path),
            "cluster": "slurm",
            "job_ids": [chunk.job_id for chunk in sweep.chunks],
            "chunks": [asdict(chunk) for chunk in sweep.chunks],
            "elements": [
                {
                    "run_id": sweep.run_id(index),
                    "job_id": sweep.job_id(index),
                    "run_dir": str(sweep.run(index).path),
                    "values": values,
                }
                for index, values in enumerate(sweep.elements)
            ],
            "dropped_environment": list(self.dropped),
            "warnings": self.warnings,
        }


def submit_sweep(
    job: ResolvedJob,
    *,
    cluster: Cluster,
    sweep_id: str,
    python: str,
    template: str | None,
    environment: Mapping[str, str],
    dependency: str | None = None,
) -> SweepSubmission:
    """Write the sweep's directory and hand all elements over.

    Args:
        job: the resolved job, with its sweep.
        cluster: where it is to go; a sweep goes to Slurm alone.
        sweep_id: the id of the sweep.
        python: the interpreter that the tasks run.
        template: the sbatch template's name or path, None for the default one.
        environment: the submitter's environment.
        dependency: what it waits for, in sbatch's words; None waits for nothing.

    Raises:
        HpcddpError: the sweep could not be handed over; nothing is left behind.
    """
    notes = check_sweep_submittable(job.spec, cluster, environment)
    check_site(job, cluster, environment)
    script = render_script(job, python=python, run_id=sweep_id, template=template).text
    directory = run_directory(job, sweep_id)
    sweep = Sweep(sweep_id=sweep_id, path=directory.path, elements=tabulate(job.spec.sweep).elements(), chunks=())
    make_run_directory(directory, "slurm")
    try:
        for folder in (directory.submitit, sweep.logs):
            folder.mkdir(mode=0o700)
        write_text(directory.job_file, dump_job(job.spec, environment_values=False))
        write_text(directory.script, script)
        clean, dropped = submission_environment(environment)
        clean[PICKLE_DIGEST] = _dump(sweep)
        chunks = _Arrays(directory.script, clean, dependency, job.spec.max_parallel).submit(len(sweep.elements))
    except (HpcddpError, OSError):
        shutil.rmtree(directory.path)
        raise
    sweep = Sweep(sweep_id=sweep_id, path=sweep.path, elements=sweep.elements, chunks=tuple(chunks))
    write_sweep(sweep)
    place = {"cluster": "slurm", "job_id": chunks[0].job_id, "directory": str(Path.cwd()), "python": python}
    write_json(directory.submission, {**place, "time": time.time()})
    return SweepSubmission(sweep=sweep, dropped=dropped, notes=notes)


def _dump(sweep: Sweep) -> str:
    """Write the one pickle, and return its sha256."""
    from hpcddp.launch import executors, work

    return executors.dump_call(sweep.directory.submitit / PICKLE, work.run, str(sweep.path))


@dataclass(frozen=True, slots=True)
class _Arrays:
    """The calls of sbatch, as few as the site's limits allow.

    Args:
        script: the script of all elements.
        environment: what sbatch gets.
        dependency: what the sweep waits for.
        max_parallel: how many elements run at once; None is all.
    """

    script: Path
    environment: Mapping[str, str]
    dependency: str | None
    max_parallel: int | None

    def submit(self, count: int) -> list[Chunk]:
        """Submit so many elements; where one array is refused, those before it are cancelled again."""
        if count < commands.DEFAULT_LARGEST_ARRAY:
            # Nearly every site allows this, and a question to the controller takes as long as a submission.
            try:
                return [self._submit(0, count, count, None)]
            except commands.SlurmCommandError as error:
                if _TOO_LONG not in error.message:
                    raise
        largest = commands.largest_array(self.environment)
        if largest < 1:
            raise SubmissionError(
                "this Slurm allows no job arrays (MaxArraySize); submit each run by itself, with --set"
            )
        done: list[Chunk] = []
        try:
            for first in range(0, count, largest):
                before = done[-1].job_id if done and self.max_parallel is not None else None
                done.append(self._submit(first, min(largest, count - first), count, before))
        except HpcddpError:
            for chunk in done:
                commands.cancel([chunk.job_id], self.environment)
            raise
        return done

    def _submit(self, first: int, count: int, total: int, before: str | None) -> Chunk:
        """Submit one array. Where only so many may run at once, it waits for the one before it."""
        waits = [self.dependency] if self.dependency else []
        waits += [f"afterany:{before}"] if before else []
        at_once = "" if self.max_parallel is None else f"%{self.max_parallel}"
        job_id = commands.sbatch(
            self.script,
            environment={**self.environment, **({FIRST: str(first)} if first else {})},
            directory=Path.cwd(),
            dependency=",".join(waits) or None,
            options=() if count == total else (f"--array=0-{count - 1}{at_once}",),
        )
        return Chunk(job_id=job_id, first=first, count=count)
