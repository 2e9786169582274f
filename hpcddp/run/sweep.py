"""A sweep on disk: one submission of many runs, its manifest, and where each of its elements is.

A sweep has a directory like a run's, ``<run_root>/<name>/<sweep_id>/``, with the manifest ``sweep.json``. Element i is
a run of its own, ``<run_root>/<name>/<sweep_id>_<i>/``, whose directory is made when it first starts: an element
without one waits, or was cancelled before it began.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from hpcddp.errors import UserError
from hpcddp.run.directory import RunDirectory
from hpcddp.run.files import create_bytes, write_text
from hpcddp.run.record import FORMAT, Record, RecordError, read_record


class ManifestError(UserError):
    """A sweep's manifest cannot be read."""

    kind = "manifest"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Elements that Slurm got as one job array: array index k is element ``first + k``.

    Args:
        job_id: the array's job id.
        first: the first of its elements.
        count: how many they are.
    """

    job_id: str
    first: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepManifest(Record):
    """What ``sweep.json`` holds; fields as ``Sweep`` has them."""

    ADVICE: ClassVar[str] = "it is no manifest of a sweep; restore a copy of it"

    sweep_id: str
    elements: tuple[Mapping[str, Any], ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """A sweep that was submitted.

    Args:
        sweep_id: its id, of the form of a run's id.
        elements: each element's values by key path, in order.
        chunks: the job arrays, in order; usually one.
    """

    sweep_id: str
    path: Path
    elements: tuple[Mapping[str, Any], ...]
    chunks: tuple[Chunk, ...]

    @property
    def directory(self) -> RunDirectory:
        """The sweep's own directory, with its job file, its script and its submission."""
        return RunDirectory(self.path)

    @property
    def name(self) -> str:
        """The name of the sweep's job."""
        return self.directory.name

    @property
    def manifest(self) -> Path:
        """The file that holds all of this."""
        return self.directory.sweep_manifest

    @property
    def logs(self) -> Path:
        """Where the batch scripts of the elements write, a file for each; a run's ``batch.log`` is a link to it."""
        return self.directory.sweep_logs

    def batch_log(self, job_id: str) -> Path:
        """Return the log of the batch script of an element, by what Slurm calls it, ``123_4``."""
        return self.logs / f"{job_id}.log"

    def run_id(self, index: int) -> str:
        """Return the run id of an element."""
        return element_id(self.sweep_id, index)

    def run(self, index: int) -> RunDirectory:
        """Return the run directory of an element; it exists once the element has started."""
        return RunDirectory(self.path.with_name(self.run_id(index)))

    def job_id(self, index: int) -> str | None:
        """Return what Slurm called an element when the sweep was submitted, ``123_4``; None if that is not known.

        An element that was resumed has another job since; its own ``submission.json`` says which.
        """
        for chunk in self.chunks:
            if 0 <= index - chunk.first < chunk.count:
                return f"{chunk.job_id}_{index - chunk.first}"
        return None


def element_id(sweep_id: str, index: int) -> str:
    """Return the run id of an element of a sweep."""
    return f"{sweep_id}_{index}"


def is_element(run: Path, sweep: Path) -> bool:
    """Return whether a run directory is that of an element of the sweep in another directory."""
    sweep_id, _, number = run.name.rpartition("_")
    return run.parent == sweep.parent and sweep_id == sweep.name and number.isdecimal()


def write_sweep(sweep: Sweep) -> None:
    """Write the manifest into the sweep's directory, in place of one that is there."""
    write_text(sweep.manifest, _manifest(sweep))


def create_sweep(sweep: Sweep) -> bool:
    """Write the manifest unless there is one, and return whether this call did."""
    return create_bytes(sweep.manifest, _manifest(sweep).encode())


def read_sweep(directory: Path) -> Sweep | None:
    """Return the sweep of a directory, or None if it holds none.

    Raises:
        ManifestError: its manifest cannot be read.
    """
    path = RunDirectory(directory).sweep_manifest
    try:
        manifest = read_record(path, SweepManifest)
    except RecordError as error:
        if isinstance(error.__cause__, PermissionError):
            raise ManifestError(f"{path} cannot be read: it is closed to you; ask its owner") from error
        raise ManifestError(error.message) from error
    if manifest is None:
        return None
    if manifest.sweep_id != Path(manifest.sweep_id).name or "\0" in manifest.sweep_id:
        raise ManifestError(f"{path} is damaged: its sweep_id is not a name; {SweepManifest.ADVICE}")
    return Sweep(
        sweep_id=manifest.sweep_id, path=directory.absolute(), elements=manifest.elements, chunks=manifest.chunks
    )


def sweep_of(run: RunDirectory) -> Sweep | None:
    """Return the sweep that a run is an element of, or None if it is a run of its own."""
    sweep_id, _, number = run.run_id.rpartition("_")
    if not (sweep_id and number.isascii() and number.isdecimal()):
        return None
    sweep = read_sweep(run.path.with_name(sweep_id))
    named = sweep is not None and int(number) < len(sweep.elements) and sweep.run_id(int(number)) == run.run_id
    return sweep if named else None


def index_of(run: RunDirectory) -> int:
    """Return which element of its sweep a run is."""
    return int(run.run_id.rpartition("_")[2])


def _manifest(sweep: Sweep) -> str:
    """Return the manifest's text: JSON, with a line for each element."""
    encode = json.JSONEncoder(ensure_ascii=False).encode
    lines = ",\n".join(f"  {encode(element)}" for element in sweep.elements)
    chunks = ",\n".join(f"  {json.dumps(asdict(chunk))}" for chunk in sweep.chunks)
    name = json.dumps(sweep.sweep_id)
    return f'{{\n"format": {FORMAT},\n"sweep_id": {name},\n"elements": [\n{lines}\n],\n"chunks": [\n{chunks}\n]\n}}\n'
