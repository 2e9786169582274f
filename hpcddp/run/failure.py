"""Who failed first: one record per rank and attempt, and the sentence that a person reads at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hpcddp.run.directory import AttemptDirectory
from hpcddp.run.exits import container_error, exit_of, first_to_end, never_started
from hpcddp.run.files import create_json, read_json

_LONGEST_HEADLINE = 300
_RANKS_NAMED = 16


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
    """Return the records of an attempt, the first cause first: a rank that only followed never comes before another.

    Clocks of hosts differ, so time decides among equals alone.
    """
    documents = [read_json(path) for path in attempt.path.glob("error-rank-*.json")]
    records = [FailureRecord.from_document(document) for document in documents if document is not None]
    return sorted(records, key=lambda record: (record.secondary, record.waiting, record.time, record.rank))


def silent_ranks(attempt: AttemptDirectory) -> list[int]:
    """Return the ranks that started, as their logs show, and ended without a record."""
    started = {int(path.stem.removeprefix("rank-")) for path in attempt.path.glob("rank-*.log")}
    return sorted(
        rank for rank in started if not (attempt.rank_error(rank).exists() or attempt.rank_exit(rank).exists())
    )


def first_silent(attempt: AttemptDirectory) -> list[int]:
    """Return the ranks that ended first of those that left no record; all of these if nobody saw which.

    When one task has gone, srun ends the others, by force if they do not answer: they leave no record either.
    """
    silent = silent_ranks(attempt)
    return first_to_end(attempt, silent) or silent


def failure_sentence(attempt: AttemptDirectory, records: Sequence[FailureRecord]) -> str:
    """Return one line that says who failed first, and how.

    Args:
        attempt: the attempt that has ended without a result.
        records: as ``read_failures`` returns them.
    """
    if named := _named(records):
        first = named[0]
        return f"{first.place} failed first{first.when}: {first.kind}: {first.headline}"
    silent = silent_ranks(attempt)
    if records and records[0].waiting:
        return _hang_sentence(attempt, records[0], silent)
    if not_started := {why for rank in silent if (why := never_started(attempt, rank)) is not None}:
        return f"{_places(attempt, silent)} did not start: {'; '.join(sorted(not_started))}"
    if silent := first_silent(attempt):
        return f"{_places(attempt, silent)} ended without a word{_step_of(records)}: {_how(attempt, silent)}"
    if (why := container_error(attempt)) is not None:
        return f"the containers did not start: pyxis: {why}"
    return "the tasks ended without a result and without naming a cause"


def _named(records: Sequence[FailureRecord]) -> list[FailureRecord]:
    """Return the records that name a cause of their own."""
    return [record for record in records if not record.secondary and not record.waiting]


def _hang_sentence(attempt: AttemptDirectory, first: FailureRecord, silent: Sequence[int]) -> str:
    if silent:
        return (
            f"{_places(attempt, silent)} stopped answering{first.when}: stopped, stuck below Python, or its host is "
            f"gone; {first.place} waited in vain"
        )
    return f"all ranks waited for each other{first.when}: {first.headline}"


def _how(attempt: AttemptDirectory, silent: Sequence[int]) -> str:
    ways = {way for rank in silent if (way := exit_of(attempt, rank)) is not None}
    return "; ".join(sorted(ways)) or "killed, out of memory, a crash below Python, or os._exit"


def _step_of(records: Sequence[FailureRecord]) -> str:
    """Return how far the others were, which is how far the silent ones were, to a step."""
    return next((record.when for record in records if record.step is not None), "")


def _places(attempt: AttemptDirectory, ranks: Sequence[int]) -> str:
    """Return ranks with their hosts, where these are known."""
    known = read_json(attempt.ranks) or []
    hosts = {rank: f" on {known[rank]['host']}" for rank in ranks if rank < len(known)}
    named = ", ".join(f"{rank}{hosts.get(rank, '')}" for rank in ranks[:_RANKS_NAMED])
    more = f" and {len(ranks) - _RANKS_NAMED} more" if len(ranks) > _RANKS_NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {named}{more}"


def describe_failure(attempt: AttemptDirectory, records: Sequence[FailureRecord]) -> str:
    """Return what a person needs: the first failing rank, its host, its error, its traceback, and who only followed.

    Args:
        attempt: the attempt that has ended without a result.
        records: as ``read_failures`` returns them.
    """
    lines = [failure_sentence(attempt, records)]
    named = _named(records)
    if named:
        first, *others = named
        lines += [f"  {line}" for line in first.traceback.rstrip().splitlines()[-20:]]
        same = [record.rank for record in others if record.message == first.message]
        different = [record for record in others if record.message != first.message]
        if same:
            lines.append(f"the same on {_places(attempt, same)}")
        lines += [f"also {record.place}: {record.kind}: {record.headline}" for record in different[:_RANKS_NAMED]]
    if waiting := [record.rank for record in records if record.waiting]:
        lines.append(f"{_places(attempt, waiting)} waited for the others; the stacks of all threads are in the logs")
    if followers := [record for record in records if record.secondary]:
        ranks = _places(attempt, [record.rank for record in followers])
        lines.append(f"{ranks} only followed: {followers[0].headline}")
    lines.append(f"the logs of the ranks are in {attempt.path}")
    return "\n".join(lines)
