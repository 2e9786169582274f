"""All runs of a run root at one moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hpcddp.manage.format import NOTHING, duration_text, number_text, step_text, used_text
from hpcddp.manage.states import State
from hpcddp.manage.status import Ask, RunStatus, statuses
from hpcddp.manage.sweeps import Entry, SweepStatus, entries_of, traces_of
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


Paint = Callable[[str, State], str]
"""Gives a text the colour of a state, or returns it as it is."""
_BETWEEN: Final = "  "
_COLUMNS: Final = ("run", "name", "state", "attempt", "step", "loss", "samples/s", "eta", "nodes", "time")
_HEADER: Final = {name: name for name in _COLUMNS}
_RIGHT: Final = frozenset({"attempt", "step", "loss", "samples/s", "eta", "nodes"})
# What a narrow terminal goes without, the first first.
_SPARED: Final = ("nodes", "samples/s", "attempt", "loss", "name", "time", "eta")


def elements_table(sweep: SweepStatus, *, width: int | None, paint: Paint) -> list[str]:
    """Return the elements of a sweep as a table, with their values in place of their name; arguments as ``table``."""
    rows = [{**_cells(element), "name": values} for element, values in zip(sweep.elements, sweep.values, strict=True)]
    return _table(sweep.elements, rows, {**_HEADER, "name": "values"}, width=width, paint=paint)


def table(lines: Sequence[Line], *, width: int | None, paint: Paint) -> list[str]:
    """Return the lines of the table.

    Args:
        lines: runs and sweeps.
        width: columns of the terminal; None prints everything.
        paint: gives the state its colour.
    """
    rows = [_cells(line) if isinstance(line, RunStatus) else _front(line) for line in lines]
    return _table(lines, rows, _HEADER, width=width, paint=paint)


def _table(
    lines: Sequence[Line],
    rows: Sequence[Mapping[str, str]],
    header: Mapping[str, str],
    *,
    width: int | None,
    paint: Paint,
) -> list[str]:
    widths = {name: max(len(row.get(name, "")) for row in [header, *rows]) for name in _COLUMNS}
    columns = _that_fit(widths, width)
    shown = [_row(header, columns, widths, _plain)]
    shown += [_line(line, row, columns, widths, paint) for line, row in zip(lines, rows, strict=True)]
    spared = [header[name] for name in _COLUMNS if name not in columns]
    if spared:
        shown.append(f"(no room here for {', '.join(spared)})")
    return [*shown, *_damaged(lines)]


def _damaged(lines: Sequence[Line]) -> Iterator[str]:
    """Yield a sentence for each record that cannot be read, so that its run may be shown in a wrong state."""
    for line in lines:
        for run in [line] if isinstance(line, RunStatus) else line.elements:
            yield from run.traces.damaged


def _plain(text: str, _: State) -> str:
    return text


def _that_fit(widths: Mapping[str, int], width: int | None) -> tuple[str, ...]:
    columns: tuple[str, ...] = _COLUMNS
    for spared in _SPARED:
        if width is None or sum(widths[name] + len(_BETWEEN) for name in columns) - len(_BETWEEN) <= width:
            break
        columns = tuple(name for name in columns if name != spared)
    return columns


def _line(line: Line, cells: Mapping[str, str], columns: Sequence[str], widths: Mapping[str, int], paint: Paint) -> str:
    if isinstance(line, RunStatus):
        return _row(cells, columns, widths, lambda text, _: paint(text, line.state))
    front = [f"{cells[name]:<{widths[name]}}" for name in columns if name in cells]
    return _BETWEEN.join([*front, f"sweep of {len(line.elements)}: {line.sentence}"])


def _front(sweep: SweepStatus) -> dict[str, str]:
    return {"run": sweep.sweep.sweep_id, "name": sweep.sweep.path.parent.name}


def _row(cells: Mapping[str, str], columns: Sequence[str], widths: Mapping[str, int], paint: Paint) -> str:
    texts = []
    for name in columns:
        side = ">" if name in _RIGHT else "<"
        text = f"{cells[name]:{side}{widths[name]}}"
        texts.append(paint(text, State.UNKNOWN) if name == "state" else text)
    return _BETWEEN.join(texts).rstrip()


def _cells(status: RunStatus) -> dict[str, str]:
    progress = status.traces.progress
    return {
        "run": status.run.run_id,
        "name": status.run.path.parent.name,
        "state": str(status.state),
        "attempt": number_text(status.traces.attempt, "d"),
        "step": step_text(status.step, status.traces.total_steps),
        "loss": number_text(progress.loss if progress else None, ".4g"),
        "samples/s": number_text(progress.samples_per_s if progress else None, ",.0f"),
        "eta": duration_text(status.eta_s),
        "nodes": number_text(status.nodes, "d"),
        "time": used_text(status.used_s, status.limit_s),
    }


def details(status: RunStatus, *, paint: Paint) -> list[str]:
    """Return one run, a fact on each line."""
    traces, job = status.traces, status.job
    cells = _cells(status)
    hosts = job.node_list if job is not None and job.node_list else ", ".join(status.hosts or ())
    known = traces.job
    facts = {
        "run": f"{cells['run']}  ({cells['name']})",
        "state": paint(cells["state"], status.state) + _because(status),
        "job": NOTHING if known is None else f"{known.job_id}{' (a process)' if known.local else ''}",
        "attempt": cells["attempt"],
        "step": cells["step"],
        "loss": cells["loss"],
        "samples/s": cells["samples/s"],
        "eta": cells["eta"],
        "nodes": f"{cells['nodes']}{f' ({hosts})' if hosts else ''}",
        "time": cells["time"],
        "directory": str(status.run.path),
    }
    return [*(f"{name:<10} {text}" for name, text in facts.items() if text != NOTHING), *traces.damaged]


def _because(status: RunStatus) -> str:
    """Return why it is in its state, in the words of Slurm or of its result; empty where nobody says."""
    job = status.job
    if job is not None and status.state in {State.PENDING, State.HELD, State.REQUEUED}:
        return "" if job.reason == "None" else f": {job.reason}"
    result = status.traces.result
    return f": {result.reason}" if result is not None and result.reason else ""
