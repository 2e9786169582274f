"""Where the ranks of an attempt run: ``ranks.json`` once all have met, ``here-rank-N.json`` of each of a command."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from hpcddp.run.directory import AttemptDirectory
from hpcddp.run.record import Record, RecordError, read_record, write_record

_ADVICE = "without it the hosts of the ranks are not known; everything else works"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank(Record):
    """Where a rank runs.

    Args:
        host: its host.
        gpu: its GPU; None if it has none, or runs a command.
    """

    ADVICE: ClassVar[str] = _ADVICE

    host: str
    gpu: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks(Record):
    """Where each rank of an attempt runs.

    Args:
        ranks: all of them, in their order.
    """

    ADVICE: ClassVar[str] = _ADVICE

    ranks: tuple[Rank, ...]

    @classmethod
    def upgraded(cls, document: object) -> object:
        """Return a document of version 0, which is the list alone, in the layout of version 1."""
        return {"ranks": document} if isinstance(document, list) else document


def write_ranks(attempt: AttemptDirectory, ranks: Sequence[Rank]) -> None:
    """Write where all ranks of an attempt run."""
    write_record(attempt.ranks, Ranks(ranks=tuple(ranks)))


def read_ranks(attempt: AttemptDirectory) -> tuple[Rank, ...] | None:
    """Return where all ranks of an attempt run, or None before they have met.

    Raises:
        RecordError: the record is damaged.
    """
    found = read_record(attempt.ranks, Ranks)
    return None if found is None else found.ranks


def known_hosts(attempt: AttemptDirectory) -> list[str] | None:
    """Return the host of each rank, or None if they are not known, also where the record is damaged."""
    try:
        ranks = read_ranks(attempt)
    except RecordError:
        return None
    return None if ranks is None else [rank.host for rank in ranks]


def report_rank(attempt: AttemptDirectory, rank: int, place: Rank) -> None:
    """Write where one rank of a command runs."""
    write_record(attempt.rank_here(rank), place)


def reported_ranks(attempt: AttemptDirectory, world_size: int) -> list[Rank]:
    """Return where the ranks of a command run, those that have reported it.

    Raises:
        RecordError: a report is damaged.
    """
    reports = [read_record(attempt.rank_here(rank), Rank) for rank in range(world_size)]
    return [report for report in reports if report is not None]
