"""One element of a sweep: how it becomes a run of its own when it starts."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpcddp.errors import UserError
from hpcddp.launch.array import FIRST, ArrayPlace
from hpcddp.launch.claim import make_private_directory
from hpcddp.launch.first_plan import write_first_plan
from hpcddp.run.directory import RunDirectory
from hpcddp.run.files import read_json, write_json, write_text
from hpcddp.run.find import find_run
from hpcddp.run.sweep import Chunk, Sweep, create_sweep, index_of, sweep_of
from hpcddp.spec.element import element_spec
from hpcddp.spec.sweep import tabulate
from hpcddp.spec.write import dump_job, parse_resolved

PICKLE = "submitted.pkl"
"""The pickle of a whole sweep, in its submitit folder: the same function for every element."""


class ElementError(UserError):
    """A sweep has no such element."""

    kind = "element"


@dataclass(frozen=True, slots=True, kw_only=True)
class Element:
    """An element that starts.

    Args:
        sweep: its sweep, as far as the script knows it: with the one array that it runs in.
        index: which element it is.
        job_text: its own resolved job.
        sweep_text: the resolved job of the sweep.
    """

    sweep: Sweep
    index: int
    job_text: str
    sweep_text: str

    @property
    def run(self) -> RunDirectory:
        """Its run."""
        return self.sweep.run(self.index)


def element_of(directory: Path, sweep_id: str, index: int, job_text: str, environment: Mapping[str, str]) -> Element:
    """Return the element that a script starts.

    Args:
        directory: where the runs of its name lie.
        sweep_id: the sweep's id.
        index: which element it is.
        job_text: the resolved job of the sweep.
        environment: the batch script's environment.

    Raises:
        ElementError: the sweep is shorter than that.
    """
    spec = parse_resolved(job_text)
    table = tabulate(spec.sweep)
    if not 0 <= index < len(table):
        raise ElementError(
            f"the sweep {sweep_id} has no element {index}; submit it with --array=0-{len(table) - 1}, or a part of that"
        )
    first = int(environment.get(FIRST) or 0)
    chunk = Chunk(job_id=environment.get("SLURM_ARRAY_JOB_ID", ""), first=first, count=len(table) - first)
    sweep = Sweep(sweep_id=sweep_id, path=directory / sweep_id, elements=table.elements(), chunks=(chunk,))
    text = dump_job(element_spec(spec, table.element(index)), environment_values=False)
    return Element(sweep=sweep, index=index, job_text=text, sweep_text=job_text)


def settle(element: Element, job_id: str, digest: str | None) -> None:
    """Give an element, whose directory is there, what ``submit`` gives to a run of its own.

    Args:
        element: the element.
        job_id: what Slurm calls it.
        digest: the sha256 of the pickle that was submitted; None if none was.
    """
    run, sweep = element.run, element.sweep
    _keep_sweep(element)
    if not run.plan.exists():
        write_first_plan(run, parse_resolved(element.job_text))
    by_hand = not sweep.directory.script.exists()
    if not by_hand and (read_json(run.submission) or {}).get("job_id") != job_id:
        write_submission(sweep, element.index, job_id, directory=Path.cwd(), python=sys.executable)
    log = sweep.batch_log(job_id)
    if log.exists() and not run.batch_log.exists():
        # Somebody else may do the same; the link is the same then.
        with suppress(FileExistsError):
            run.batch_log.symlink_to(os.path.relpath(log, run.path))
    pickle = sweep.directory.submitit / PICKLE
    if digest is not None and pickle.exists() and hashlib.sha256(pickle.read_bytes()).hexdigest() == digest:
        run.submitit.mkdir(mode=0o700, exist_ok=True)
        shutil.copyfile(pickle, run.submitit / f"{job_id}_submitted.pkl")


def write_submission(sweep: Sweep, index: int, job_id: str, *, directory: Path, python: str) -> None:
    """Write where an element went."""
    place = {"cluster": "slurm", "job_id": job_id, "directory": str(directory), "python": python}
    document = {**place, "time": time.time(), "sweep": sweep.sweep_id, "index": index}
    write_json(sweep.run(index).submission, document)


def _keep_sweep(element: Element) -> None:
    """Make the sweep's directory where the script was submitted by hand."""
    sweep = element.sweep
    if read_json(sweep.manifest) is None:
        make_private_directory(sweep.path)
        write_text(sweep.directory.job_file, element.sweep_text)
        create_sweep(sweep)


def place_of(sweep: Sweep, index: int) -> ArrayPlace:
    """Return how one element of a sweep runs again by itself."""
    first = next((chunk.first for chunk in sweep.chunks if 0 <= index - chunk.first < chunk.count), 0)
    return ArrayPlace(index=index - first, first=first, log=sweep.run(index).batch_log)


def begin_element(sweep: Sweep, index: int) -> RunDirectory:
    """Return the run of an element, with what it needs to be resumed even if it was cancelled before it began.

    Args:
        sweep: a sweep that was submitted.
        index: which element.
    """
    run, submitted = sweep.run(index), read_json(sweep.directory.submission)
    if not run.path.exists() and submitted is not None:
        make_private_directory(run.path)
        run.submitit.mkdir(mode=0o700)
        spec = parse_resolved(sweep.directory.job_file.read_text(encoding="utf-8"))
        write_text(run.job_file, dump_job(element_spec(spec, sweep.elements[index]), environment_values=False))
        write_text(run.batch_log, "")
        job_id = sweep.job_id(index) or ""
        write_submission(sweep, index, job_id, directory=Path(submitted["directory"]), python=submitted["python"])
    return run


def find_to_resume(text: str, run_root: Path) -> RunDirectory:
    """Return the run that is to be resumed, which may be an element that was cancelled before it began.

    Args:
        text: what ``find_run`` takes.
        run_root: where runs live.

    Raises:
        NoRunError: there is no such run, or there are several.
    """
    run = find_run(text, run_root)
    sweep = None if run.path.exists() else sweep_of(run)
    return run if sweep is None else begin_element(sweep, index_of(run))
