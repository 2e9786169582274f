"""The ranks of a generation, the change from one to the next, and what each rank is told when the next one forms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcddp.task.channel import Channel


@dataclass(slots=True, eq=False)
class Member:
    """A rank that is connected.

    Args:
        number: its number among the tasks of the job, which it keeps in each generation.
        channel: the connection to it.
        task: the variables of srun of its task, as those of its newest process.
        process: what names its process, to its sentinel too.
        identity: what must be the same for all.
        left: what it has said when it left the generation; None while it trains.
        is_done: whether it has said that it ends, by itself or as it was told.
        must_leave: whether it has said that the job must leave its nodes.
        has_joined: whether the event log says that this new process has joined; it may not have the state yet.
    """

    number: int
    channel: Channel
    task: Mapping[str, str]
    process: str
    identity: Mapping[str, str]
    left: Mapping[str, Any] | None = None
    is_done: bool = False
    must_leave: bool = False
    has_joined: bool = False

    @property
    def position(self) -> tuple[int, int]:
        """Optimizer steps done when it left, and those at its last evaluation; (-1, -1) for a new process."""
        if self.left is None:
            return -1, -1
        return int(self.left["step"]), int(self.left["evaluated_step"])

    @property
    def checksum(self) -> int | None:
        """The checksum of its state when it left; None for a new process."""
        return None if self.left is None else self.left.get("checksum")

    @property
    def is_new(self) -> bool:
        """Whether it has no state when a generation forms."""
        return self.position[0] < 0

    @property
    def port(self) -> int:
        """The port on which it listens in case that it becomes rank 0."""
        return 0 if self.left is None else int(self.left["port"])

    @property
    def node(self) -> str:
        """The name of its node in Slurm."""
        return self.task.get("SLURMD_NODENAME", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class NewGeneration:
    """A generation that has taken the place of another one.

    Args:
        failures: how the ranks had died, by number, for each generation that has broken since the ranks last trained:
            more than one if ranks died while the others formed a generation, or waited. Empty for a join.
        joined: the nodes of the ranks that are new, by number.
        world_size: how many ranks it has.
        step: optimizer steps done.
        seconds: from the first death, or from the last step before a join, until the ranks train again.
    """

    failures: Sequence[Mapping[int, str]]
    joined: Mapping[int, str]
    world_size: int
    step: int
    seconds: float

    @property
    def dead(self) -> Mapping[int, str]:
        """How all of them had died, by number."""
        return {number: how for dead in self.failures for number, how in dead.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class LastGeneration:
    """Why no generation follows another one, where that is because of the work itself.

    Args:
        reason: why, as an event tells it.
        step: optimizer steps done.
        samples: the numbers of the samples of the step that broke, one of which may be the cause; may be cut.
        is_cascade: whether so many generations have broken at this step that another attempt would break there too.
    """

    reason: str
    step: int
    samples: Sequence[int] = ()
    is_cascade: bool = False


@dataclass(slots=True)
class Change:
    """A change of generation that is under way, from the first rank that leaves until the ranks train again.

    Args:
        began: when, on the monotonic clock.
        deadline: until when all must have left, on the monotonic clock; infinity before a join.
        explain_until: until when srun must have said how the newest dead has ended, on the monotonic clock.
        dead: how those that have died since the last failure was counted were ended, by number; None while srun has
            not said it.
        failures: how those before them were ended, for each failure that is counted.
        awaited: the numbers whose new processes the others wait for.
        started: how many new processes have been started, by number.
    """

    began: float
    deadline: float = float("inf")
    explain_until: float = 0.0
    dead: dict[int, str | None] = field(default_factory=dict)
    failures: list[dict[int, str]] = field(default_factory=list)
    awaited: set[int] = field(default_factory=set)
    started: Counter[int] = field(default_factory=Counter)

    def count_failure(self) -> None:
        """Count the newest deaths, all of which are explained, as one failure."""
        self.failures.append({number: how or "" for number, how in self.dead.items()})
        self.dead = {}

    @property
    def counted_deaths(self) -> dict[int, str]:
        """How those of the counted failures were ended, by number; the newest death of a number."""
        return {number: how for dead in self.failures for number, how in dead.items()}


def formations(
    members: Mapping[int, Member], position: tuple[int, int], recorder: int
) -> Mapping[int, Mapping[str, Any]]:
    """Return what each rank of the next generation is told, by its number: ``hpcddp.task.member:Formation``.

    Args:
        members: all of its ranks, by number.
        position: the highest position of those that are not new.
        recorder: the number of the rank that has written all records of the training until it left.
    """
    numbers = sorted(members)
    source = min(number for number, member in members.items() if member.position == position)
    rank_0 = members[numbers[0]]
    return {
        number: {
            "rank": rank,
            "world_size": len(numbers),
            "address": rank_0.channel.other_address,
            "port": rank_0.port,
            "source": numbers.index(source),
            "shares_state": any(member.position != position for member in members.values()),
            "completes_records": numbers[0] != recorder or rank_0.position != position,
        }
        for rank, number in enumerate(numbers)
    }
