"""How a rank ended that left no record: from what srun and a crashing process say."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Final

from hpcddp.run.directory import AttemptDirectory
from hpcddp.run.files import read_tail

# srun: error: n2: task 1: Killed      srun: error: n[1-2]: tasks 0-1,3: Exited with exit code 3   (srun 22.05.8)
_SRUN: Final = re.compile(r"srun: error: (?P<hosts>\S+): tasks? (?P<tasks>[0-9,-]+): (?P<how>.+)", re.ASCII)
_PYXIS: Final = re.compile(r"error: pyxis: (?P<why>.+)")
_FATAL: Final = "Fatal Python error: "
# What the shell in a container says (the sbatch template), and what apptainer says before it starts a container.
_LAST_WORDS: Final = ("hpcddp: this task cannot start: ", "FATAL: ")
_TAIL_BYTES: Final = 64 * 1024
_HINTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "Killed": "by SIGKILL, most often because memory ran out",
        "Out Of Memory": "its memory limit was exceeded",
    }
)


def exits_in(text: str) -> dict[int, str]:
    """Return how tasks ended, as srun says it; the first word about a task counts, what follows is srun's own doing.

    Args:
        text: what the batch script printed.
    """
    exits: dict[int, str] = {}
    for match in _SRUN.finditer(text):
        how = match["how"].strip()
        for task in _numbers(match["tasks"]):
            exits.setdefault(task, how)
    return exits


def _numbers(text: str) -> list[int]:
    numbers: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def exit_of(attempt: AttemptDirectory, rank: int) -> str | None:
    """Return how a rank of the attempt ended, in a few words, or None if nobody says.

    Args:
        attempt: the attempt.
        rank: a rank without a record.
    """
    log = read_tail(attempt.rank_log(rank), _TAIL_BYTES)
    if _FATAL in log:
        # faulthandler, below the last line that Python could still print.
        return log.rpartition(_FATAL)[2].partition("\n")[0].strip()
    how = exits_in(_since_start(attempt)).get(rank)
    if how is None:
        return None
    hint = next((hint for word, hint in _HINTS.items() if how.startswith(word)), None)
    return f"{how} ({hint})" if hint else how


def container_error(attempt: AttemptDirectory) -> str | None:
    """Return what pyxis said first when it did not start the containers of an attempt, or None."""
    # slurmstepd: error: pyxis: failed to import docker image
    found = _PYXIS.search(_since_start(attempt))
    return found["why"].strip() if found else None


def never_started(attempt: AttemptDirectory, rank: int) -> str | None:
    """Return why a rank's container or interpreter did not start, or None if it did.

    Args:
        attempt: the attempt.
        rank: a rank without a record.
    """
    last = read_tail(attempt.rank_log(rank), _TAIL_BYTES).rstrip().rpartition("\n")[2]
    return next((last.removeprefix(start).strip() for start in _LAST_WORDS if last.startswith(start)), None)


def beginning(attempt: AttemptDirectory) -> str:
    """Return the line that the batch script prints when an attempt begins; what is above it is of earlier ones."""
    return f"hpcddp: attempt {attempt.number} of run {attempt.run.run_id} begins\n"


def first_to_end(attempt: AttemptDirectory, ranks: Collection[int]) -> list[int]:
    """Return those of some ranks that srun saw end first; none if it says nothing of them.

    Args:
        attempt: the attempt.
        ranks: the ranks.
    """
    for match in _SRUN.finditer(_since_start(attempt)):
        if named := [task for task in _numbers(match["tasks"]) if task in ranks]:
            return named
    return []


def _since_start(attempt: AttemptDirectory) -> str:
    """Return what the batch script has printed in an attempt."""
    following = attempt.run.attempt(attempt.number + 1)
    printed = read_tail(attempt.run.batch_log, _TAIL_BYTES).rpartition(beginning(attempt))[2]
    return printed.partition(beginning(following))[0]
