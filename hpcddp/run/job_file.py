"""What a submission writes into a run directory about its job: the resolved job, its script, the values it exports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from hpcddp.errors import HpcddpError
from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.write import parse_resolved
from hpcddp.run.directory import RunDirectory
from hpcddp.run.files import open_regular, why_unreadable
from hpcddp.run.job_records import read_start
from hpcddp.run.record import LARGEST_RECORD, Record, RecordError, read_record, write_record

_ADVICE: Final = "restore a copy of it, or give the job file too: hpcddp submit JOB --resume RUN"


def read_job_file(run: RunDirectory) -> JobSpec:
    """Return the resolved job of a run, as its newest attempt runs it: of a range of nodes, with the number it got.

    Raises:
        RecordError: its file, or the start of the attempt, is missing or damaged.
    """
    spec = read_submitted_job(run)
    newest = run.newest_attempt()
    if len(spec.node_counts) == 1 or newest is None:
        return spec
    start = read_start(run.attempt(newest))
    if start is None or start.nodes is None:
        return spec
    return spec.sized(start.nodes)


def read_submitted_job(run: RunDirectory) -> JobSpec:
    """Return the resolved job of a run as it was submitted, with its range of nodes if it has one.

    Raises:
        RecordError: its file is missing or damaged.
    """
    text = _read_text(run.job_file)
    if not text:
        raise RecordError(f"{run.job_file} is damaged: it is empty; {_ADVICE}", path=run.job_file)
    try:
        return parse_resolved(text)
    except HpcddpError as error:
        first = error.message.partition("\n")[0]
        raise RecordError(f"{run.job_file} is damaged: {first}; {_ADVICE}", path=run.job_file) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedValues(Record):
    """The values of ``environment.env`` that a script exports, by name.

    They may be secrets: beside the script, no other file holds them, and only their owner can read it.
    """

    ADVICE: ClassVar[str] = _ADVICE

    env: Mapping[str, str]


def write_exported_values(run: RunDirectory, values: Mapping[str, str]) -> None:
    """Write the values that the script of a run or of a sweep exports."""
    write_record(run.exported_values, ExportedValues(env=values))


def read_exported_values(run: RunDirectory) -> Mapping[str, str]:
    """Return the values that the script of a run or of a sweep exports.

    Raises:
        RecordError: their file is missing or damaged.
    """
    path = run.exported_values
    record = read_record(path, ExportedValues)
    if record is None:
        raise RecordError(f"{path} cannot be read (No such file or directory); {_ADVICE}", path=path)
    return record.env


def _read_text(path: Path) -> str:
    try:
        with open_regular(path) as (stream, size):
            if size > LARGEST_RECORD:
                raise RecordError(f"{path} is damaged: it has {size} bytes; {_ADVICE}", path=path)
            return stream.read().decode()
    except OSError as error:
        raise RecordError(f"{path} cannot be read ({why_unreadable(error)}); {_ADVICE}", path=path) from error
    except UnicodeDecodeError as error:
        raise RecordError(f"{path} is damaged: it is not UTF-8 at byte {error.start}; {_ADVICE}", path=path) from error
