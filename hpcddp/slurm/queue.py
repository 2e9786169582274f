"""Parser of the output of ``squeue``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

# Only fields that Slurm writes itself, none that users write. Without a width, squeue cuts values after 20 characters.
_FIELDS: Final = (
    ("JobArrayID", 40), ("State", 24), ("RestartCnt", 8), ("SubmitTime", 24), ("StartTime", 24), ("TimeUsed", 24),
    ("TimeLimit", 24), ("NumNodes", 8), ("NodeList", 300), ("Reason", 300),
)  # fmt: skip
FORMAT: Final = ",".join(f"{name}:{width}|" for name, width in _FIELDS)
"""The value of ``--Format``; every field ends with a bar (squeue(1), 22.05)."""

_TIME = re.compile(r"(?:(?:(?P<days>\d+)-)?(?P<hours>\d+):)?(?P<minutes>\d+):(?P<seconds>\d+)", re.ASCII)
_NO_TIMES: Final = frozenset({"N/A", "NONE", "Unknown", "(null)", ""})


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedJob:
    """A job that the controller knows; it forgets ended jobs after a while (slurm.conf(5), MinJobAge).

    Args:
        job_id: its id, ``123`` or ``123_4``.
        state: its state, such as ``RUNNING``.
        restarts: how often it was requeued.
        submit_time: when it was submitted or last requeued, as Slurm writes it.
        start_time: its start or its expected start; None if Slurm does not know.
        used_s: seconds that it has run; None before its start.
        limit_s: its time limit in seconds; None without one.
        nodes: how many nodes it has or requests.
        node_list: their names as Slurm writes them; empty before its start.
        reason: why it is pending, or why it ended.
    """

    job_id: str
    state: str
    restarts: int = 0
    submit_time: str = ""
    start_time: str | None = None
    used_s: int | None = None
    limit_s: int | None = None
    nodes: int = 0
    node_list: str = ""
    reason: str = "None"


def parse_queue(answer: str) -> list[QueuedJob]:
    """Return the jobs in the output of ``squeue --noheader --Format``; other lines are skipped."""
    # The reason is a text of Slurm's plugins that may contain a bar, so it is the last field.
    rows = (line.split("|", len(_FIELDS) - 1) for line in answer.splitlines())
    return [_job([field.strip(" |") for field in row]) for row in rows if len(row) == len(_FIELDS)]


def _job(row: list[str]) -> QueuedJob:
    job_id, state, restarts, submitted, start, used, limit, nodes, node_list, reason = row
    return QueuedJob(
        job_id=job_id,
        state=state,
        restarts=int(restarts) if restarts.isdecimal() else 0,
        submit_time=submitted,
        start_time=None if start in _NO_TIMES else start,
        used_s=seconds_in(used),
        limit_s=seconds_in(limit),
        nodes=int(nodes) if nodes.isdecimal() else 0,
        node_list="" if node_list in _NO_TIMES else node_list,
        reason=reason,
    )


def seconds_in(text: str) -> int | None:
    """Return the seconds of a time such as ``2-03:04:05``; None for texts such as ``UNLIMITED``."""
    match = _TIME.fullmatch(text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
