"""Which jobs a new one waits for: ``--after RUN`` and ``--after-any RUN``, by run and not by job id.

Slurm starts a job at once that waits for a job it does not know (sbatch(1), ``--dependency``), so each run is looked up
here first. What waits for a requeued job waits on: the job id is the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from hpcddp.errors import UserError
from hpcddp.launch.claim import ENDED_STATES, newest_start
from hpcddp.launch.paragraph import resume_command
from hpcddp.run.directory import RunDirectory
from hpcddp.run.files import read_json
from hpcddp.run.find import find_run
from hpcddp.run.sweep import Sweep, find_element, index_of, read_sweep, sweep_of
from hpcddp.slurm import commands

AFTER = "--after"
AFTER_ANY = "--after-any"
_WORDS = {AFTER: "afterok", AFTER_ANY: "afterany"}
_FINISHED = "finished"


class DependencyError(UserError):
    """A run cannot be waited for."""

    kind = "dependency"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependency:
    """What a job waits for.

    Args:
        text: sbatch's word for it, ``afterok:12:13,afterany:14``; None if there is nothing left to wait for.
        notes: a sentence for each run that need not be waited for.
    """

    text: str | None
    notes: tuple[str, ...]


def dependency_on(
    after: Sequence[str], after_any: Sequence[str], run_root: Path, environment: Mapping[str, str]
) -> Dependency:
    """Return what waits for some runs.

    Args:
        after: the runs that must finish.
        after_any: the runs that must end, however they do.
        run_root: where runs live.
        environment: the submitter's environment.

    Raises:
        NoRunError: there is no such run.
        DependencyError: a run cannot be waited for.
    """
    parts: list[str] = []
    notes: list[str] = []
    for option, texts in ((AFTER, after), (AFTER_ANY, after_any)):
        jobs: list[str] = []
        for text in texts:
            run = find_element(text, run_root) or find_run(text, run_root)
            question = _Question(option=option, run=run, environment=environment)
            found = question.jobs()
            jobs += found
            notes += [] if found else [f"{option} {question.name}: it has ended already, and is not waited for"]
        if jobs:
            parts.append(":".join([_WORDS[option], *dict.fromkeys(jobs)]))
    return Dependency(text=",".join(parts) or None, notes=tuple(notes))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """One run that is to be waited for.

    Args:
        option: ``--after`` or ``--after-any``.
        run: the run, or a sweep.
        environment: the submitter's environment.
    """

    option: str
    run: RunDirectory
    environment: Mapping[str, str]

    @property
    def name(self) -> str:
        return self.run.run_id

    def jobs(self) -> list[str]:
        """Return the jobs to wait for; none if all has ended already."""
        sweep = read_sweep(self.run.path)
        if sweep is not None:
            return list(self._of_sweep(sweep))
        of = sweep_of(self.run)
        job_id = self._left(self.run, of.job_id(index_of(self.run)) if of is not None else None)
        if job_id is None or not self._waits_for(job_id, self._records(job_id)):
            return []
        return [job_id]

    def _of_sweep(self, sweep: Sweep) -> Iterator[str]:
        left = {index: self._left(sweep.run(index), sweep.job_id(index)) for index in range(len(sweep.elements))}
        jobs = [job_id for job_id in left.values() if job_id is not None]
        arrays = {array: self._records(array) for array in dict.fromkeys(job.partition("_")[0] for job in jobs)}
        moved = any(job_id not in {None, sweep.job_id(index)} for index, job_id in left.items())
        waiting = [job for job in jobs if self._waits_for(job, arrays[job.partition("_")[0]])]
        # A whole array is one word, and has failed for good with an element that was resumed elsewhere since.
        yield from waiting if moved else dict.fromkeys(job.partition("_")[0] for job in waiting)

    def _left(self, run: RunDirectory, submitted_as: str | None) -> str | None:
        """Return the newest job of a run, or None if the run has ended and nothing is left to wait for."""
        result = read_json(run.result)
        if result is not None and (result["status"] == _FINISHED or self.option == AFTER_ANY):
            return None
        if result is not None:
            self._refuse(
                f"{run.run_id} has ended as {result['status']} ({result['reason']}), so that it does not finish; "
                f"continue it first: {resume_command(run)}, or use {AFTER_ANY}"
            )
        document, start = read_json(run.submission) or {}, newest_start(run)
        if document.get("cluster") == "local" or (not document and start is not None and start.submit_time is None):
            self._refuse(f"{run.run_id} runs on this machine without Slurm, which cannot wait for it; wait for its end")
        job_id: str | None = document.get("job_id") or (start.job_id if start is not None else submitted_as)
        if job_id is None:
            self._refuse(f"{run.run_id} was never submitted; submit it first")
        return job_id

    def _records(self, job_id: str) -> list[dict[str, str]]:
        """Return what Slurm knows about a job."""
        records = commands.show_array(job_id, environment=self.environment)
        if not records:
            self._refuse_forgotten(job_id)
        return records

    def _waits_for(self, job_id: str, records: Sequence[Mapping[str, str]]) -> bool:
        """Return whether a job has not ended yet."""
        state = next((record["JobState"] for record in records if _is_about(record, job_id)), None)
        if state is not None and state not in ENDED_STATES:
            return True
        if self.option == AFTER and state is None:
            self._refuse_forgotten(job_id)
        if self.option == AFTER and state != "COMPLETED":
            self._refuse(
                f"job {job_id} is {state}, so that the run does not finish; continue it first, with hpcddp submit "
                f"--resume RUN, or use {AFTER_ANY}"
            )
        return False

    def _refuse_forgotten(self, job_id: str) -> NoReturn:
        self._refuse(
            f"Slurm does not know job {job_id} any more, and what waits for it would start at once; see what became of "
            f"the run, and leave {self.option} out"
        )

    def _refuse(self, why: str) -> NoReturn:
        raise DependencyError(f"{self.option} {self.name}: {why}")


def _is_about(record: Mapping[str, str], job_id: str) -> bool:
    """Return whether a record of ``scontrol show job`` is that of a job or of an array that holds it."""
    array, _, index = job_id.partition("_")
    if not index:
        return True
    if record.get("ArrayJobId") != array:
        return False
    return any(_holds(part, int(index)) for part in record.get("ArrayTaskId", "").partition("%")[0].split(","))


def _holds(part: str, index: int) -> bool:
    """Return whether an index is in a part of an array's expression: ``4``, ``4-9`` or ``0-8:2``."""
    span, _, step = part.partition(":")
    first, _, last = span.partition("-")
    if not first.isdecimal():
        return False
    return index in range(int(first), int(last or first) + 1, int(step or 1))
