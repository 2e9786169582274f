"""Collectives that the ranks of an attempt were in when they hung, from the traces of torch's flight recorder.

torch writes a trace as a pickle or as JSON. The watchdog of a rank keeps the JSON; a pickle is never read. The keys are
those of ``torch/csrc/distributed/c10d/FlightRecorder.hpp``, version 2.10.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hpcddp.run.directory import AttemptDirectory
from hpcddp.run.files import open_regular, write_text
from hpcddp.run.record import LARGEST_RECORD, parse_json

_COMPLETED: Final = "completed"
# Of each process group the newest finished ones, and the oldest unfinished ones.
_FINISHED_KEPT: Final = 20
_UNFINISHED_KEPT: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One call of a collective on one rank.

    Args:
        group: its process group: the name, which is the same on all of its ranks, and the description.
        number: which collective of the group it is, counted from 1.
        call: its name and what it was called with: ``all_reduce Float[3]``.
        is_finished: whether it has ended.
    """

    group: str
    number: int
    call: str
    is_finished: bool


def write_trace(attempt: AttemptDirectory, rank: int, trace: str) -> None:
    """Keep the trace of a rank, without most of the finished collectives.

    Args:
        trace: the JSON text that torch returned.

    Raises:
        OSError: the file cannot be written.
    """
    document = json.loads(trace)
    entries = document.get("entries", [])
    finished = _by_group(entries, is_finished=True)
    unfinished = _by_group(entries, is_finished=False)
    kept = [entry for group in finished.values() for entry in group[-_FINISHED_KEPT:]]
    kept += [entry for group in unfinished.values() for entry in group[:_UNFINISHED_KEPT]]
    document["entries"] = sorted(kept, key=lambda entry: entry.get("record_id", 0))
    write_text(attempt.rank_collectives(rank), json.dumps(document) + "\n")


def _by_group(entries: Sequence[Mapping[str, Any]], *, is_finished: bool) -> dict[int | None, list[Mapping[str, Any]]]:
    groups: dict[int | None, list[Mapping[str, Any]]] = {}
    for entry in entries:
        if _is_finished(entry) is is_finished:
            groups.setdefault(entry.get("pg_id"), []).append(entry)
    return groups


def _is_finished(entry: Mapping[str, Any]) -> bool:
    # gloo retires a collective and leaves its state as it was; NCCL's watchdog retires it some time after its end.
    return bool(entry.get("retired")) or entry.get("state") == _COMPLETED


def read_collectives(attempt: AttemptDirectory) -> dict[int, tuple[Collective, ...]]:
    """Return the collectives of each rank that has left a trace, in their order; a damaged trace is left out."""
    collectives: dict[int, tuple[Collective, ...]] = {}
    for path in sorted(attempt.path.glob("collectives-rank-*.json")):
        number = path.stem.removeprefix("collectives-rank-")
        if number.isascii() and number.isdecimal():
            try:
                collectives[int(number)] = _collectives_in(path)
            except (OSError, ValueError):
                continue
    return dict(sorted(collectives.items()))


def _collectives_in(path: Path) -> tuple[Collective, ...]:
    with open_regular(path) as (stream, size):
        if size > LARGEST_RECORD:
            raise ValueError(f"it has {size} bytes")
        document = parse_json(stream.read())
    entries = document.get("entries", []) if isinstance(document, dict) else None
    if not isinstance(entries, list):
        raise ValueError("it has no list of entries")  # noqa: TRY004  read_collectives leaves out what is damaged
    return tuple(collective for entry in entries if (collective := _collective(entry)) is not None)


def _collective(entry: object) -> Collective | None:
    """Return the collective of an entry; None for a message between two ranks, and for what is no entry."""
    if not isinstance(entry, dict):
        return None
    match entry:
        case {
            "is_p2p": False,
            "collective_seq_id": int(number),
            "process_group": [str(name), str(description)],
            "profiling_name": str(call),
        }:
            return Collective(
                group=f"{name} ({description})",
                number=number,
                call=f"{call.rpartition(':')[2]}{_tensors(entry)}",
                is_finished=_is_finished(entry),
            )
        case _:
            return None


def _tensors(entry: Mapping[str, object]) -> str:
    """Return the types and shapes of the inputs: `` Float[3]``."""
    types = entry.get("input_dtypes")
    shapes = entry.get("input_sizes")
    if not (isinstance(types, list) and isinstance(shapes, list)):
        return ""
    return "".join(f" {kind}{shape}" for kind, shape in zip(types, shapes, strict=False))
