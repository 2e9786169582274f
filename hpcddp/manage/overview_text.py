"""Runs and sweeps as text: a table with a line for each, and one run fact by fact."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from hpcddp.manage.format import NOTHING, duration_text, number_text, one_line, step_text, used_text
from hpcddp.manage.overview import Line, SweepStatus
from hpcddp.manage.status import RunStatus
from hpcddp.manage.table import Column, table_lines, table_width
from hpcddp.run.find import token_of
from hpcddp.slurm.job import State

if TYPE_CHECKING:
    from hpcddp.manage.ranking import Ranking

Paint = Callable[[str, State], str]
"""Gives a text the colour of a state, or returns it as it is."""
_COLUMNS: Final = ("run", "job", "name", "state", "attempt", "step", "loss", "samples/s", "eta", "nodes", "time")
_NUMBERS: Final = frozenset({"attempt", "step", "loss", "samples/s", "eta", "nodes"})
# On a narrow terminal run ids are shortened, then columns are dropped in this order.
_DROPPED_COLUMNS: Final = ("nodes", "eta", "time", "job", "samples/s", "attempt", "name", "loss")


def elements_table(sweep: SweepStatus, *, ranking: Ranking | None = None, width: int | None, paint: Paint) -> list[str]:
    """Return the elements of a sweep as a table, with their values in place of their name; arguments as ``table``.

    Args:
        ranking: the order of the elements, and the metric that stands in place of the loss; None is that of the sweep.
    """
    titles = {"name": "values"}
    values = sweep.values
    rows = [{**_cells(element), "name": values[index]} for index, element in enumerate(sweep.elements)]
    order: Sequence[int] = range(len(rows))
    if ranking is not None:
        titles["loss"] = one_line(ranking.metric)
        order = list(ranking.values)
        for index, value in ranking.values.items():
            rows[index]["loss"] = number_text(value, ".5g")
    elements = [sweep.elements[index] for index in order]
    return _table(elements, [rows[index] for index in order], titles=titles, width=width, paint=paint)


def table(lines: Sequence[Line], *, width: int | None, paint: Paint) -> list[str]:
    """Return the lines of the table.

    Args:
        width: columns of the terminal; None prints everything.
        paint: gives the state its colour.
    """
    rows = [_cells(line) if isinstance(line, RunStatus) else _sweep_cells(line) for line in lines]
    return _table(lines, rows, titles={}, width=width, paint=paint)


def _table(
    lines: Sequence[Line],
    rows: Sequence[Mapping[str, str]],
    *,
    titles: Mapping[str, str],
    width: int | None,
    paint: Paint,
) -> list[str]:
    def paint_state(row: int, text: str) -> str:
        line = lines[row]
        return paint(text, line.state) if isinstance(line, RunStatus) else text

    columns = {}
    for name in _COLUMNS:
        cells = [one_line(row.get(name, "")) for row in rows]
        columns[name] = Column(title=titles.get(name, name), cells=cells, is_number=name in _NUMBERS)
    sweep_rows = {row for row, line in enumerate(lines) if isinstance(line, SweepStatus)}
    columns["state"] = replace(columns["state"], long_rows=sweep_rows, paint=paint_state)
    hidden = _hide_columns(columns, width)
    return [*table_lines(list(columns.values()), hidden=hidden), *remarks_on(lines)]


def _hide_columns(columns: dict[str, Column], width: int | None) -> list[str]:
    """Shorten run ids and remove columns until the rest fits; return the titles of the columns that were removed."""
    if width is None or table_width(columns.values()) <= width:
        return []
    titles = [column.title for column in columns.values()]
    columns["run"] = replace(columns["run"], cells=_short_run_ids(columns["run"].cells))
    for name in _DROPPED_COLUMNS:
        if table_width(columns.values()) <= width:
            break
        del columns[name]
    shown_titles = {column.title for column in columns.values()}
    return [title for title in titles if title not in shown_titles]


def _short_run_ids(run_ids: Sequence[str]) -> list[str]:
    """Return the short form of each run id, or the whole id if another run has the same short form."""
    tokens = [token_of(run_id) for run_id in run_ids]
    counts = Counter(tokens)
    return [token if counts[token] == 1 else run_id for run_id, token in zip(run_ids, tokens, strict=True)]


def remarks_on(lines: Sequence[Line]) -> Iterator[str]:
    """Yield what users should know besides the states, a sentence each."""
    for line in lines:
        runs = [line] if isinstance(line, RunStatus) else line.elements
        for run in runs:
            yield from map(one_line, run.remarks)


def _cells(status: RunStatus) -> dict[str, str]:
    files = status.files
    job_text = NOTHING
    if files.job is not None:
        job_text = "local" if files.job.local else files.job.job_id
    return {
        "run": status.run.run_id,
        "job": job_text,
        "name": status.run.name,
        "state": str(status.state),
        "attempt": number_text(files.attempt, "d"),
        "step": step_text(status.step, files.total_steps),
        "loss": number_text(files.progress.loss if files.progress else None, ".4g"),
        "samples/s": number_text(files.progress.samples_per_s if files.progress else None, ",.0f"),
        "eta": duration_text(status.eta_s),
        "nodes": number_text(status.nodes, "d"),
        "time": used_text(status.used_s, status.limit_s),
    }


def _sweep_cells(status: SweepStatus) -> dict[str, str]:
    """Return the cells of a sweep; that of its state reaches over the columns that follow."""
    sweep = status.sweep
    job_text = "".join(chunk.job_id for chunk in sweep.chunks[:1])
    if len(sweep.chunks) > 1:
        job_text += "+"
    return {
        "run": sweep.sweep_id,
        "job": job_text,
        "name": sweep.name,
        "state": f"sweep of {len(status.elements)}: {status.sentence}",
    }


def details(status: RunStatus, *, paint: Paint) -> list[str]:
    """Return one run, a fact on each line."""
    cells = _cells(status)
    run = status.run
    token = token_of(run.run_id)
    names = run.name if token == run.run_id else f"{run.name}, short {token}"
    job_text = NOTHING
    if status.files.job is not None:
        job_text = status.files.job.job_id
        if status.files.job.local:
            job_text += " (a process)"
    nodes_text = cells["nodes"]
    hosts = "" if status.job is None else status.job.node_list
    hosts = hosts or ", ".join(status.hosts or ())
    if hosts:
        nodes_text += f" ({hosts})"
    facts = {
        "run": one_line(f"{run.run_id}  ({names})"),
        "state": paint(cells["state"], status.state) + one_line(_reason_text(status)),
        "job": one_line(job_text),
        "attempt": cells["attempt"],
        "step": cells["step"],
        "loss": cells["loss"],
        "samples/s": cells["samples/s"],
        "eta": cells["eta"],
        "nodes": one_line(nodes_text),
        "time": cells["time"],
        "directory": one_line(str(run.path)),
    }
    lines = [f"{name:<10} {text}" for name, text in facts.items() if text != NOTHING]
    return [*lines, *map(one_line, [*status.metric_sentences(), *status.remarks])]


def _reason_text(status: RunStatus) -> str:
    """Return why it is in its state, in the words of Slurm or of its result; empty if that is not known."""
    job = status.job
    if job is not None and status.state in {State.PENDING, State.HELD, State.REQUEUED}:
        return "" if job.reason == "None" else f": {job.reason}"
    result = status.files.result
    return f": {result.reason}" if result is not None and result.reason else ""
