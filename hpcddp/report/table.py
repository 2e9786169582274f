"""Runs as a table of text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from hpcddp.report.overview import Line
from hpcddp.report.states import State
from hpcddp.report.status import RunStatus
from hpcddp.report.sweeps import SweepStatus
from hpcddp.report.wording import NOTHING, duration_text, number_text, step_text, used_text

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
    return [*shown, f"(no room here for {', '.join(spared)})"] if spared else shown


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
    return [f"{name:<10} {text}" for name, text in facts.items() if text != NOTHING]


def _because(status: RunStatus) -> str:
    """Return why it is in its state, in the words of Slurm or of its result; empty where nobody says."""
    job = status.job
    if job is not None and status.state in {State.PENDING, State.HELD, State.REQUEUED}:
        return "" if job.reason == "None" else f": {job.reason}"
    reason = (status.traces.result or {}).get("reason")
    return f": {reason}" if reason else ""
