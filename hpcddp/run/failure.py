"""Who failed first: one record per rank and attempt, and the sentence that a person reads at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hpcddp.run.directory import AttemptDirectory
from hpcddp.run.files import create_json, read_json


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRecord:
    """Why one rank ended.

    Args:
        rank: the rank.
        host: its host.
        time: seconds since the epoch.
        kind: the error's kind or the exception's type.
        message: its sentence.
        traceback: the whole traceback.
        exit_code: what the task exits with.
        secondary: whether the rank only failed because another one had gone.
    """

    rank: int
    host: str
    time: float
    kind: str
    message: str
    traceback: str
    exit_code: int
    secondary: bool

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> FailureRecord:
        """Return the record that ``write_failure`` wrote."""
        return cls(**document)


def write_failure(attempt: AttemptDirectory, record: FailureRecord) -> None:
    """Write the record of a rank; a rank's first record stays."""
    create_json(attempt.rank_error(record.rank), asdict(record))


def read_failures(attempt: AttemptDirectory) -> list[FailureRecord]:
    """Return the records of an attempt, the first cause first: primary before secondary, then by time."""
    documents = [read_json(path) for path in attempt.path.glob("error-rank-*.json")]
    records = [FailureRecord.from_document(document) for document in documents if document is not None]
    return sorted(records, key=lambda record: (record.secondary, record.time, record.rank))


def describe_failure(records: Sequence[FailureRecord]) -> str:
    """Return what a person needs: the first failing rank, its host, its error, its traceback, and who only followed.

    Args:
        records: as ``read_failures`` returns them; at least one.
    """
    first, *others = records
    lines = [f"rank {first.rank} on {first.host} failed first: {first.kind}: {first.message}"]
    lines += [f"  {line}" for line in first.traceback.rstrip().splitlines()[-20:]]
    same = [record.rank for record in others if record.message == first.message]
    followers = [record.rank for record in others if record.secondary and record.message != first.message]
    if same:
        lines.append(f"the same on ranks {', '.join(map(str, sorted(same)))}")
    if followers:
        lines.append(f"ranks {', '.join(map(str, sorted(followers)))} only followed")
    return "\n".join(lines)
