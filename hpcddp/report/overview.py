"""All runs of a run root at one moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hpcddp.report.status import Ask, RunStatus, statuses
from hpcddp.report.sweeps import Entry, SweepStatus, entries_of, traces_of
from hpcddp.run.find import all_runs
from hpcddp.run.sweep import Sweep

SHOWN: Final = 20
"""How many of the newest runs are shown unless all are asked for; those that are alive are always shown."""

Line = RunStatus | SweepStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """Runs and sweeps at one moment.

    Args:
        lines: one for each run or sweep that is shown, the newest first.
        left_out: how many older ones, all ended, are not.
        unanswered: why Slurm could not be asked; None if it was, or did not have to be.
    """

    lines: tuple[Line, ...]
    left_out: int = 0
    unanswered: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the document that ``--json`` prints."""
        return {
            "runs": [line.as_json() for line in self.lines if isinstance(line, RunStatus)],
            "sweeps": [line.as_json() for line in self.lines if isinstance(line, SweepStatus)],
            "left_out": self.left_out,
            "slurm": self.unanswered,
        }


def overview(run_root: Path, *, ask: Ask, now: float, everything: bool) -> Overview:
    """Return the runs under a root.

    Args:
        run_root: where runs live; it need not exist.
        ask: asks Slurm; it is called once at most.
        now: seconds since the epoch.
        everything: whether all of them are shown.
    """
    entries = entries_of(all_runs(run_root))
    # What has ended long ago is not even read.
    read = [entry for place, entry in enumerate(entries) if everything or place < SHOWN or _may_live(entry)]
    found = overview_of(read, ask=ask, now=now)
    lines = tuple(line for place, line in enumerate(found.lines) if everything or place < SHOWN or _is_alive(line))
    return Overview(lines=lines, left_out=len(entries) - len(lines), unanswered=found.unanswered)


def overview_of(entries: Sequence[Entry], *, ask: Ask, now: float) -> Overview:
    """Return the state of these runs and sweeps; arguments as ``overview`` has them."""
    traces = [traces_of(entry) for entry in entries]
    answer = statuses([one for several in traces for one in several], ask=ask, now=now)
    left = iter(answer.runs)
    lines: list[Line] = []
    for entry, several in zip(entries, traces, strict=True):
        runs = tuple(next(left) for _ in several)
        lines.append(SweepStatus(sweep=entry, elements=runs) if isinstance(entry, Sweep) else runs[0])
    return Overview(lines=tuple(lines), unanswered=answer.unanswered)


def _may_live(entry: Entry) -> bool:
    return isinstance(entry, Sweep) or not entry.result.exists()


def _is_alive(line: Line) -> bool:
    return line.is_alive if isinstance(line, SweepStatus) else line.state.is_alive
