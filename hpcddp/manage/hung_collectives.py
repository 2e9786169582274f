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
    open_numbers: list[int] = []
    for collectives in collectives_by_rank.values():
        open_numbers += [collective.number for collective in collectives if not collective.is_finished]
    if not open_numbers:
        return None
    first_open = min(open_numbers)
    ranks_by_call: dict[str, list[int]] = {}
    ranks_by_last: dict[int, list[int]] = {}
    for rank, collectives in collectives_by_rank.items():
        reached = next((collective for collective in collectives if collective.number == first_open), None)
        last = max((collective.number for collective in collectives), default=0)
        if reached is not None and not reached.is_finished:
            ranks_by_call.setdefault(reached.call, []).append(rank)
        elif last < first_open:
            ranks_by_last.setdefault(last, []).append(rank)
    parts = [f"{numbered_text('rank', ranks)} in {call}" for call, ranks in ranks_by_call.items()]
    for last, ranks in ranks_by_last.items():
        parts.append(f"{numbered_text('rank', ranks)} not there yet (last: {last or 'none'})")
    if silent_ranks:
        parts.append(f"{numbered_text('rank', silent_ranks)} without a trace")
    sentence = f"collective {first_open} of the process group {group} did not end: {', '.join(parts)}"
    if len(ranks_by_call) > 1:
        sentence += "; the ranks call different collectives"
    return sentence
