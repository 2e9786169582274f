"""What the ranks of a generation say when they leave it: whether their states differ, and what they were working on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from hpcddp.slurm.hostlist import ranges_text

_SAMPLES_NAMED: Final = 16


def why_states_differ(checksums: Mapping[int, Mapping[int, int]]) -> str | None:
    """Return which ranks have different states after the same step; None if there are none.

    Args:
        checksums: the checksum of the state of each rank, by step, and by the number of the rank.
    """
    for step, checksum_of_rank in sorted(checksums.items()):
        ranks_by_state: dict[int, list[int]] = {}
        for rank, checksum in sorted(checksum_of_rank.items()):
            ranks_by_state.setdefault(checksum, []).append(rank)
        if len(ranks_by_state) > 1:
            groups = " and ".join(_ranks_text(ranks) for ranks in ranks_by_state.values())
            return f"after step {step} the states of {groups} differ"
    return None


def _ranks_text(ranks: Sequence[int]) -> str:
    noun = "rank" if len(ranks) == 1 else "ranks"
    return f"{noun} {ranges_text(ranks)}"


def samples_text(samples: Sequence[int], count: int) -> str:
    """Return the end of a sentence about a step that names its samples; empty if none is known.

    Args:
        samples: their numbers, or the first of them.
        count: how many there are.
    """
    if not samples:
        return ""
    named = ", ".join(map(str, samples[:_SAMPLES_NAMED]))
    more = f" and {count - _SAMPLES_NAMED:,} more" if count > _SAMPLES_NAMED else ""
    return f", on the samples {named}{more}"
