"""How the programs of a user's own ended: one record per rank and attempt, written by the task that started it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from hpcddp.run.directory import AttemptDirectory
from hpcddp.run.files import read_json, write_json
from hpcddp.stop.exit_codes import ExitCode

Told = Literal["terminated", "warned", "deadline"]
"""Why a program was told to end: its job must leave, the time limit is near and it listens, or its time is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramExit:
    """How one rank's program ended.

    Args:
        rank: the rank.
        host: its host.
        time: seconds since the epoch.
        code: its exit code; a negative one is the signal that killed it, as ``subprocess`` has it.
        told: what it had been told before; None if it ended by itself.
    """

    rank: int
    host: str
    time: float
    code: int
    told: Told | None = None


def write_exit(attempt: AttemptDirectory, record: ProgramExit) -> None:
    """Write the record of a rank."""
    write_json(attempt.rank_exit(record.rank), asdict(record))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramEnd:
    """How the programs of an attempt ended, taken together.

    Args:
        exits: the records, those of killed tasks missing.
        world_size: ranks in the job.
        requested: whether the file is there that says that the program wants to go on.
    """

    exits: Sequence[ProgramExit]
    world_size: int
    requested: bool

    @property
    def wants_to_go_on(self) -> bool:
        """Whether some rank asked to be run again: by exit code 75, or by the file."""
        return self.requested or any(exit_.code == ExitCode.STOPPED for exit_ in self.exits)

    @property
    def was_told(self) -> bool:
        """Whether some rank was told to end before it did."""
        return any(exit_.told for exit_ in self.exits)

    @property
    def out_of_time(self) -> bool:
        """Whether it was the time limit that they were told of."""
        return any(exit_.told in {"warned", "deadline"} for exit_ in self.exits)

    @property
    def finished(self) -> bool:
        """Whether every rank ended well, by itself, and wants nothing more."""
        well = len(self.exits) == self.world_size and all(exit_.code == 0 for exit_ in self.exits)
        return well and not (self.was_told or self.wants_to_go_on)


def read_program_end(attempt: AttemptDirectory, *, world_size: int) -> ProgramEnd:
    """Return how the programs of an attempt ended.

    Args:
        attempt: the attempt.
        world_size: ranks in the job.
    """
    documents: list[Any] = [read_json(path) for path in sorted(attempt.path.glob("exit-rank-*.json"))]
    exits = [ProgramExit(**document) for document in documents if document is not None]
    return ProgramEnd(exits=exits, world_size=world_size, requested=attempt.requeue_file.exists())
