"""Who failed first: one record per rank and attempt, and the sentence that a person reads at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hpcddp.run.directory import AttemptDirectory
from hpcddp.run.files import create_json, read_json

_LONGEST_HEADLINE = 300


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
        waiting: whether the rank was found waiting for others, so that it is not the one that held them up.
        device: its device, None if it had none yet.
        step: optimizer steps that it had done; None before the first.
    """

    rank: int
    host: str
    time: float
    kind: str
    message: str
    traceback: str
    exit_code: int
    secondary: bool
    waiting: bool = False
    device: str | None = None
    step: int | None = None

    @property
    def place(self) -> str:
        """Which rank it is, and where: ``rank 3 on n2 (cuda:1)``."""
        return f"rank {self.rank} on {self.host}" + (f" ({self.device})" if self.device else "")

    @property
    def when(self) -> str:
        """How far it was, to be put behind a verb."""
        return "" if self.step is None else f" after step {self.step}"

    @property
    def headline(self) -> str:
        """The message's first line, cut where it would fill a screen."""
        line = self.message.strip().partition("\n")[0]
        return line if len(line) <= _LONGEST_HEADLINE else f"{line[:_LONGEST_HEADLINE]} ..."

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


def silent_ranks(attempt: AttemptDirectory) -> list[int]:
    """Return the ranks that started, as their logs show, and ended without a record."""
    started = {int(path.stem.removeprefix("rank-")) for path in attempt.path.glob("rank-*.log")}
    return sorted(rank for rank in started if not attempt.rank_error(rank).exists())


def failure_sentence(attempt: AttemptDirectory, records: Sequence[FailureRecord]) -> str:
    """Return one line that says who failed first, and how.

    Args:
        attempt: the attempt that has ended without a result.
        records: as ``read_failures`` returns them.
    """
    if records and not records[0].secondary:
        first = records[0]
        return f"rank {first.rank} on {first.host} failed first: {first.kind}: {first.headline}"
    if silent := silent_ranks(attempt):
        named = f"rank {silent[0]}" if len(silent) == 1 else f"ranks {', '.join(map(str, silent))}"
        return f"{named} ended without a word: killed, out of memory, or a crash below Python"
    return "the tasks ended without a result and without naming a cause"


def describe_failure(attempt: AttemptDirectory, records: Sequence[FailureRecord]) -> str:
    """Return what a person needs: the first failing rank, its host, its error, its traceback, and who only followed.

    Args:
        attempt: the attempt that has ended without a result.
        records: as ``read_failures`` returns them.
    """
    lines = [failure_sentence(attempt, records)]
    followers = [record for record in records if record.secondary]
    if records and not records[0].secondary:
        first, *others = records
        lines += [f"  {line}" for line in first.traceback.rstrip().splitlines()[-20:]]
        same = [str(record.rank) for record in others if not record.secondary and record.message == first.message]
        if same:
            lines.append(f"the same on {_ranks(same)}")
    if followers:
        lines.append(f"{_ranks([str(record.rank) for record in followers])} only followed: {followers[0].headline}")
    lines.append(f"the logs of the ranks are in {attempt.path}")
    return "\n".join(lines)


def _ranks(names: Sequence[str]) -> str:
    return f"rank{'s' if len(names) > 1 else ''} {', '.join(names)}"
