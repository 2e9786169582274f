"""How the programs of a user's own ended: one record per rank and attempt, written by the task that started it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from hpcddp.run.directory import AttemptDirectory
from hpcddp.run.record import Record, RecordError, read_record, write_record
from hpcddp.stop.reasons import ExitCode

Told = Literal["terminated", "warned", "deadline"]
"""Why a program was told to end: its job must leave, the time limit is near and it listens, or its time is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramExit(Record):
    """How one rank's program ended.

    Args:
        rank: the rank.
        host: its host.
        time: seconds since the epoch.
        code: its exit code; a negative one is the signal that killed it, as ``subprocess`` has it.
        told: what it had been told before; None if it ended by itself.
    """

    ADVICE: ClassVar[str] = "how the program of that rank ended is not known; the logs of the ranks may tell"

    rank: int
    host: str
    time: float
    code: int
    told: Told | None = None


def write_exit(attempt: AttemptDirectory, record: ProgramExit) -> None:
    """Write the record of a rank."""
    write_record(attempt.rank_exit(record.rank), record)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramEnd:
    """How the programs of an attempt ended, taken together.

    Args:
        exits: the records; that of a killed task is missing.
        world_size: ranks in the job.
        requested: whether the file is there that says that the program wants to go on.
        damage: a record that cannot be read; it counts as missing where Slurm says enough.
    """

    exits: Sequence[ProgramExit]
    world_size: int
    requested: bool
    damage: RecordError | None = None

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
    def is_complete(self) -> bool:
        """Whether every rank left a record. One that did not was killed together with its task, or its node is gone."""
        return len(self.exits) == self.world_size

    @property
    def finished(self) -> bool:
        """Whether every rank ended well, by itself, and wants nothing more."""
        well = self.is_complete and all(exit_.code == 0 for exit_ in self.exits)
        return well and not (self.was_told or self.wants_to_go_on)


def read_program_end(attempt: AttemptDirectory, *, world_size: int) -> ProgramEnd:
    """Return how the programs of an attempt ended.

    Args:
        attempt: the attempt.
        world_size: ranks in the job.
    """
    exits: list[ProgramExit] = []
    damage: RecordError | None = None
    for path in _exit_files(attempt):
        try:
            record = read_record(path, ProgramExit)
        except RecordError as error:
            damage = damage or error
        else:
            exits += [record] if record is not None else []
    return ProgramEnd(exits=exits, world_size=world_size, requested=attempt.requeue_file.exists(), damage=damage)


def read_exits(attempt: AttemptDirectory) -> list[ProgramExit]:
    """Return the records of the programs of an attempt.

    Raises:
        RecordError: one of them is damaged.
    """
    records = (read_record(path, ProgramExit) for path in _exit_files(attempt))
    return [record for record in records if record is not None]


def _exit_files(attempt: AttemptDirectory) -> list[Path]:
    return sorted(attempt.path.glob("exit-rank-*.json"))
