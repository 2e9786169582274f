"""Compare the states that the ranks of a generation have kept when they leave it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpcddp.slurm.hostlist import ranges_text


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
