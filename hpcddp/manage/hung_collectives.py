"""Tell in which collective the ranks of an attempt hung, by the traces that they have left."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from hpcddp.manage.format import numbered_text
from hpcddp.run.collectives import Collective, read_collectives
from hpcddp.run.directory import AttemptDirectory
from hpcddp.run.failure import ranks_without_record

_GROUPS_SHOWN: Final = 4


def hung_collectives(attempt: AttemptDirectory) -> Iterator[str]:
    """Yield, for each process group, in which collective its ranks hung, and which ranks had not reached it."""
    collectives_by_rank = read_collectives(attempt)
    # The names are the keys, in the order in which they are found.
    groups: dict[str, None] = {}
    for collectives in collectives_by_rank.values():
        groups.update(dict.fromkeys(collective.group for collective in collectives))
    if not groups:
        return
    silent_ranks = ranks_without_record(attempt)
    for group in list(groups)[:_GROUPS_SHOWN]:
        collectives_of_group = {
            rank: [collective for collective in collectives if collective.group == group]
            for rank, collectives in collectives_by_rank.items()
        }
        sentence = _sentence(group, collectives_of_group, silent_ranks)
        if sentence is not None:
            yield sentence


def _sentence(
    group: str, collectives_by_rank: Mapping[int, Sequence[Collective]], silent_ranks: list[int]
) -> str | None:
    """Return which ranks wait in the first collective of a group that did not end; None if all have ended."""
    unfinished_numbers: list[int] = []
    for collectives in collectives_by_rank.values():
        unfinished_numbers += [collective.number for collective in collectives if not collective.is_finished]
    if not unfinished_numbers:
        return None
    number = min(unfinished_numbers)
    waiting_ranks = _waiting_ranks_by_call(number, collectives_by_rank)
    late_ranks = _late_ranks_by_last_number(number, collectives_by_rank)
    parts = [f"{numbered_text('rank', ranks)} in {call}" for call, ranks in waiting_ranks.items()]
    for last_number, ranks in late_ranks.items():
        parts.append(f"{numbered_text('rank', ranks)} not there yet (last: {last_number or 'none'})")
    if silent_ranks:
        parts.append(f"{numbered_text('rank', silent_ranks)} without a trace")
    sentence = f"collective {number} of the process group {group} did not end: {', '.join(parts)}"
    if len(waiting_ranks) > 1:
        sentence += "; the ranks call different collectives"
    return sentence


def _waiting_ranks_by_call(
    number: int, collectives_by_rank: Mapping[int, Sequence[Collective]]
) -> dict[str, list[int]]:
    """Return the ranks that are in the collective with a number, by what they call."""
    ranks_by_call: dict[str, list[int]] = {}
    for rank, collectives in collectives_by_rank.items():
        collective = next((collective for collective in collectives if collective.number == number), None)
        if collective is not None and not collective.is_finished:
            ranks_by_call.setdefault(collective.call, []).append(rank)
    return ranks_by_call


def _late_ranks_by_last_number(
    number: int, collectives_by_rank: Mapping[int, Sequence[Collective]]
) -> dict[int, list[int]]:
    """Return the ranks that have not reached the collective with a number, by that of their last one; 0 is none."""
    ranks_by_last_number: dict[int, list[int]] = {}
    for rank, collectives in collectives_by_rank.items():
        last_number = max((collective.number for collective in collectives), default=0)
        if last_number < number:
            ranks_by_last_number.setdefault(last_number, []).append(rank)
    return ranks_by_last_number
