"""Random crashes of one of eight ranks, with stragglers among the others."""

from __future__ import annotations

import random
from dataclasses import dataclass

from hpcddp.manage.format import ranks_text

RANKS = 8
# What happens to one rank: an exception, or an end without an error message.
KINDS = ("exception", "oserror=ENOENT", "kill", "kill=SEGV", "kill=ABRT", "exit=3", "exit=0")
_WITH_A_RECORD = ("exception", "oserror=ENOENT")


@dataclass(frozen=True)
class Crash:
    """A crash.

    Attributes:
        rank: the rank that fails first.
        step: the step after which it fails.
        kind: how, in the words of ``HPCDDP_FAULTS``.
        stragglers: ranks that take longer for each step, the failing one among them or not.
    """

    rank: int
    step: int
    kind: str
    stragglers: tuple[int, ...]

    @property
    def faults(self) -> str:
        """What the tasks arm. A straggler that fails is slow first."""
        slow = [f"sleep=0.2@step,rank={rank}" for rank in self.stragglers]
        return ";".join([*slow, f"{self.kind}@step:{self.step},rank={self.rank}"])

    @property
    def leaves_a_record(self) -> bool:
        """Whether the rank can still write a failure record."""
        return self.kind in _WITH_A_RECORD


def crash(seed: int) -> Crash:
    """Return a crash; the same for the same seed, and of every kind in turn."""
    generator = random.Random(seed)
    stragglers = tuple(sorted(generator.sample(range(RANKS), generator.randint(1, 3))))
    return Crash(generator.randrange(RANKS), generator.randint(2, 12), KINDS[seed % len(KINDS)], stragglers)


def check(told: Crash, lines: str) -> None:
    """Compare what was printed with what was done."""
    first, *middle, last = lines.splitlines()
    assert first.startswith(f"attempt 0: rank {told.rank} on "), lines
    assert f" after step {told.step}" in first, lines
    others = ranks_text([rank for rank in range(RANKS) if rank != told.rank])
    assert last.startswith(f"ranks {others} failed as a consequence: "), lines
    if told.leaves_a_record:
        assert any("hpcddp/stop/faults.py" in line for line in middle), lines
    else:
        assert "ended without an error message" in first, lines
