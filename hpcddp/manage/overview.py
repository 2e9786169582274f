"""All runs and sweeps of a run root at one moment, a sweep as one entry; and their tables."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, Self

from hpcddp.errors import UserError
from hpcddp.jobfile.placeholders import argument_text
from hpcddp.jobfile.sweep import field_of
from hpcddp.manage.format import NOTHING, duration_text, number_text, one_line, step_text, used_text
from hpcddp.manage.run_files import Job, RunFiles, read_run_files, readable, readable_lines
from hpcddp.manage.status import Ask, RunStatus, statuses
from hpcddp.run.directory import RunDirectory
from hpcddp.run.events import Event, read_event_log
from hpcddp.run.files import TAIL_BYTES, exists
from hpcddp.run.find import all_runs, submission_time, token_of
from hpcddp.run.job_records import Change, read_submission
from hpcddp.run.sweep import ManifestError, Sweep, index_of, is_element, read_sweep, sweep_of
from hpcddp.slurm import commands
from hpcddp.slurm.states import State

Entry = RunDirectory | Sweep


def entry_of(run: RunDirectory) -> Entry:
    """Return the sweep that a directory holds, or the run itself."""
    return read_sweep(run.path) or run


def entries_of(runs: Sequence[RunDirectory]) -> list[Entry]:
    """Return runs in their order, with each sweep in place of its elements."""
    entries = [_listed(run) for run in runs]
    sweeps = {entry.path for entry in entries if isinstance(entry, Sweep)}
    return [entry for entry in entries if isinstance(entry, Sweep) or _of(entry, sweeps) is None]


def _listed(run: RunDirectory) -> Entry:
    try:
        return entry_of(run)
    except ManifestError:
        # One that is damaged does not stand in the way of the others.
        return run


def _of(run: RunDirectory, sweeps: set[Path]) -> Path | None:
    """Return which of these sweeps a run is an element of."""
    path = run.path.with_name(run.run_id.rpartition("_")[0] or run.run_id)
    return path if path in sweeps and is_element(run.path, path) else None


def files_of(entry: Entry) -> list[RunFiles]:
    """Return the contents of the directory of a run, or of each element of a sweep."""
    if isinstance(entry, Sweep):
        files = _SweepFiles.of(entry)
        return [files.of_element(index) for index, _ in enumerate(entry.elements)]
    sweep = None if exists(entry.path) else sweep_of(entry)
    return [read_run_files(entry)] if sweep is None else [_SweepFiles.of(sweep).of_element(index_of(entry))]


@dataclass(frozen=True, slots=True, kw_only=True)
class _SweepFiles:
    """The files of a sweep's own directory; they apply to elements without files of their own."""

    sweep: Sweep
    events: tuple[Event, ...]
    submitted: float | None

    @classmethod
    def of(cls, sweep: Sweep) -> Self:
        submission, _ = readable(lambda: read_submission(sweep.directory))
        log = sweep.directory.events
        events, _ = readable_lines(log, lambda: read_event_log(log, TAIL_BYTES))
        return cls(sweep=sweep, events=events, submitted=None if submission is None else submission.time)

    def of_element(self, index: int) -> RunFiles:
        job_id = self.sweep.job_id(index)
        job = None if job_id is None else Job(job_id=job_id, submitted=self.submitted)
        files = read_run_files(self.sweep.run(index), job=job)
        return files if files.attempt is not None or files.events else replace(files, events=self.events)


def short_keys(sweep: Sweep) -> dict[str, str]:
    """Return what each key of a sweep is called: its last word where that is enough."""
    keys = dict.fromkeys(key for values in sweep.elements for key in values)
    words = Counter(key.rpartition(".")[2] for key in keys)
    return {key: last if words[last := key.rpartition(".")[2]] == 1 else key for key in keys}


def value_texts(values: Mapping[str, Any], changes: Sequence[Change]) -> dict[str, str]:
    """Return the values of an element as texts, with what resumptions have changed: ``0.1 -> 0.3``, or ``(changed)``.

    A changed command no longer tells the values of its placeholders.
    """
    texts = {}
    for key, value in values.items():
        later = [argument_text(change.after) for change in changes if change.key == key]
        changed = " (changed)" if _is_changed_in_part(key, changes) else ""
        texts[key] = " -> ".join([argument_text(value), *later]) + changed
    return texts


def values_now(values: Mapping[str, Any], changes: Sequence[Change]) -> dict[str, Any]:
    """Return the values with which an element runs now; None where a resumption has changed them in another form."""
    changed = {change.key: change.after for change in changes}
    return {
        key: None if _is_changed_in_part(key, changes) else changed.get(key, value) for key, value in values.items()
    }


def _is_changed_in_part(key: str, changes: Sequence[Change]) -> bool:
    """Return whether changes are about the command with a placeholder, or about fields of a section."""
    field = field_of(key)
    return any(change.key.startswith(f"{key}.") or change.key == field != key for change in changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepStatus:
    """A sweep at one moment.

    Args:
        sweep: the sweep.
        elements: each of its elements.
    """

    sweep: Sweep
    elements: tuple[RunStatus, ...]

    @property
    def counts(self) -> dict[State, int]:
        """How many elements are in which state, those with nodes or in the queue first."""
        counted = Counter(element.state for element in self.elements)
        return {state: counted[state] for state in sorted(counted, key=list(State).index)}

    @property
    def is_alive(self) -> bool:
        """Whether any element waits or runs."""
        return any(state.is_alive for state in self.counts)

    @property
    def sentence(self) -> str:
        """The counts in words."""
        return ", ".join(f"{count} {state}" for state, count in self.counts.items())

    @property
    def values(self) -> list[str]:
        """What tells each element from the others, ``base=0.1 seed=0``: a key is its last word where that is enough."""
        short = short_keys(self.sweep)
        return [
            " ".join(f"{short[key]}={text}" for key, text in value_texts(values, element.files.changes).items())
            for values, element in zip(self.sweep.elements, self.elements, strict=True)
        ]

    @property
    def count_alive(self) -> int:
        """How many elements wait or run."""
        return sum(element.is_alive for element in self.elements)

    @property
    def count_finished(self) -> int:
        """How many elements have finished."""
        return self.counts.get(State.FINISHED, 0)

    @property
    def rest(self) -> str:
        """The elements that a resumption does not change, in words."""
        return f"{self.count_finished} finished, {self.count_alive} alive"

    def elements_to_resume(self, unanswered: str | None) -> list[int]:
        """Return the indices of the elements that have ended and not finished.

        Args:
            unanswered: why Slurm could not be asked; None if it was.

        Raises:
            UserError: there is no such element, or the state of an element is unknown.
        """
        unknown = next((element for element in self.elements if element.state is State.UNKNOWN), None)
        if unknown is not None:
            why = unanswered or next(iter(unknown.files.damaged), "see hpcddp why")
            raise UserError(f"nothing was resumed: the state of the run {unknown.run.run_id} is unknown: {why}")
        left = [
            index
            for index, element in enumerate(self.elements)
            if element.state is not State.FINISHED and not element.is_alive
        ]
        if not left:
            raise UserError(f"the sweep {self.sweep.sweep_id} has no run to resume: {self.rest}")
        return left

    def as_json(self) -> dict[str, Any]:
        """Return the document that ``--json`` prints."""
        return {
            "sweep_id": self.sweep.sweep_id,
            "name": self.sweep.path.parent.name,
            "run_dir": str(self.sweep.path),
            "counts": {str(state): count for state, count in self.counts.items()},
            "elements": [
                {**element.as_json(), "values": values_now(values, element.files.changes)}
                for element, values in zip(self.elements, self.sweep.elements, strict=True)
            ],
        }


def one_run(run: RunDirectory) -> RunDirectory:
    """Return the run if it is one.

    Raises:
        UserError: it is a sweep of many.
    """
    sweep = read_sweep(run.path)
    if sweep is not None:
        raise UserError(
            f"{sweep.sweep_id} is a sweep of {len(sweep.elements)} runs; name one of them, such as {sweep.run_id(0)}"
        )
    return run


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which runs to show; all of them without a condition.

    Args:
        states: a run is in one of these states, a sweep has an element in one; empty for any state.
        name: a pattern of the job's name (``fnmatch``); None for any name.
        since: when the run was submitted at the earliest, in seconds since the epoch; None for any time.
    """

    states: frozenset[State] = frozenset()
    name: str | None = None
    since: float | None = None

    @property
    def is_empty(self) -> bool:
        """Whether it lets every run through."""
        return not self.states and self.name is None and self.since is None

    def may_show(self, entry: Entry) -> bool:
        """Return whether the name and the time of a run or sweep match."""
        run = entry.directory if isinstance(entry, Sweep) else entry
        named = self.name is None or fnmatchcase(run.path.parent.name, self.name)
        return named and (self.since is None or submission_time(run) >= self.since)

    def shows(self, line: Line) -> bool:
        """Return whether the state of a run or sweep matches."""
        states = {line.state} if isinstance(line, RunStatus) else line.counts.keys()
        return not self.states or not self.states.isdisjoint(states)


def overview(run_root: Path, *, ask: Ask, now: float, everything: bool, wanted: Filter | None = None) -> Overview:
    """Return the runs under a root.

    Args:
        run_root: where runs live; it need not exist.
        ask: asks Slurm; it is called once at most.
        now: seconds since the epoch.
        everything: whether all of them are shown, and those of this user in all other roots.
        wanted: which runs to show; with a condition, those that ended long ago are shown too.
    """
    wanted = wanted or Filter()
    entries = [entry for entry in entries_of(all_runs(run_root, everywhere=everything)) if wanted.may_show(entry)]
    everything = everything or not wanted.is_empty
    # What has ended long ago is not even read.
    read = [entry for place, entry in enumerate(entries) if everything or place < SHOWN or _may_live(entry)]
    found = overview_of(read, ask=ask, now=now)
    lines = tuple(
        line
        for place, line in enumerate(found.lines)
        if (everything or place < SHOWN or line.is_alive) and wanted.shows(line)
    )
    left_out = 0 if everything else len(entries) - len(lines)
    return Overview(lines=lines, left_out=left_out, unanswered=found.unanswered)


def overview_of(entries: Sequence[Entry], *, ask: Ask, now: float) -> Overview:
    """Return the state of these runs and sweeps; arguments as ``overview`` has them."""
    files = [files_of(entry) for entry in entries]
    answer = statuses([one for several in files for one in several], ask=ask, now=now)
    left = iter(answer.runs)
    lines: list[Line] = []
    for entry, several in zip(entries, files, strict=True):
        runs = tuple(next(left) for _ in several)
        lines.append(SweepStatus(sweep=entry, elements=runs) if isinstance(entry, Sweep) else runs[0])
    return Overview(lines=tuple(lines), unanswered=answer.unanswered)


def overview_now(entries: Sequence[Entry], environment: Mapping[str, str]) -> Overview:
    """Return the state of these runs and sweeps now; Slurm is asked once at most."""
    return overview_of(entries, ask=lambda: commands.queue(environment), now=time.time())


def sweep_status_now(sweep: Sweep, environment: Mapping[str, str]) -> tuple[SweepStatus, str | None]:
    """Return the state of a sweep now, and why Slurm could not be asked, or None; Slurm is asked once at most."""
    files = files_of(sweep)
    answer = statuses(files, ask=lambda: commands.queue(environment), now=time.time())
    return SweepStatus(sweep=sweep, elements=answer.runs), answer.unanswered


def status_now(run: RunDirectory, environment: Mapping[str, str]) -> RunStatus:
    """Return the state of a run now; Slurm is asked once at most."""
    (status,) = statuses(files_of(run), ask=lambda: commands.queue(environment), now=time.time()).runs
    return status


def _may_live(entry: Entry) -> bool:
    return isinstance(entry, Sweep) or not exists(entry.result)


Paint = Callable[[str, State], str]
"""Gives a text the colour of a state, or returns it as it is."""
_BETWEEN: Final = "  "
_COLUMNS: Final = ("run", "job", "name", "state", "attempt", "step", "loss", "samples/s", "eta", "nodes", "time")
_HEADER: Final = {name: name for name in _COLUMNS}
_RIGHT: Final = frozenset({"attempt", "step", "loss", "samples/s", "eta", "nodes"})
# On a narrow terminal run ids are shortened, then columns are dropped in this order.
_DROPPED_COLUMNS: Final = ("nodes", "eta", "time", "name", "job", "samples/s", "attempt", "loss")


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
    rows = [{name: one_line(text) for name, text in row.items()} for row in rows]
    widths = _widths(header, rows)
    columns = _that_fit(widths, width)
    if len(columns) < len(_COLUMNS):
        rows = _with_tokens(rows)
        widths = _widths(header, rows)
        columns = _that_fit(widths, width)
    shown = [_row(header, columns, widths, _plain)]
    shown += [_line(line, row, columns, widths, paint) for line, row in zip(lines, rows, strict=True)]
    dropped = [header[name] for name in _COLUMNS if name not in columns]
    if dropped:
        shown.append(f"(columns hidden: {', '.join(dropped)})")
    return [*shown, *remarks_on(lines)]


def _widths(header: Mapping[str, str], rows: Sequence[Mapping[str, str]]) -> dict[str, int]:
    return {name: max(len(row.get(name, "")) for row in [header, *rows]) for name in _COLUMNS}


def _with_tokens(rows: Sequence[Mapping[str, str]]) -> list[Mapping[str, str]]:
    """Return the rows with the short form of each run id that no other row has."""
    counted = Counter(token_of(row["run"]) for row in rows)
    return [{**row, "run": token} if counted[token := token_of(row["run"])] == 1 else row for row in rows]


def remarks_on(lines: Sequence[Line]) -> Iterator[str]:
    """Yield what users should know besides the states, a sentence each."""
    for line in lines:
        for run in [line] if isinstance(line, RunStatus) else line.elements:
            yield from map(one_line, run.remarks)


def _plain(text: str, _: State) -> str:
    return text


def _that_fit(widths: Mapping[str, int], width: int | None) -> tuple[str, ...]:
    columns: tuple[str, ...] = _COLUMNS
    for dropped in _DROPPED_COLUMNS:
        if width is None or sum(widths[name] + len(_BETWEEN) for name in columns) - len(_BETWEEN) <= width:
            break
        columns = tuple(name for name in columns if name != dropped)
    return columns


def _line(line: Line, cells: Mapping[str, str], columns: Sequence[str], widths: Mapping[str, int], paint: Paint) -> str:
    if isinstance(line, RunStatus):
        return _row(cells, columns, widths, lambda text, _: paint(text, line.state))
    front = [f"{cells[name]:<{widths[name]}}" for name in columns if name in cells]
    return _BETWEEN.join([*front, f"sweep of {len(line.elements)}: {line.sentence}"])


def _front(sweep: SweepStatus) -> dict[str, str]:
    job_ids = ", ".join(chunk.job_id for chunk in sweep.sweep.chunks[:1])
    more = "+" if len(sweep.sweep.chunks) > 1 else ""
    return {"run": sweep.sweep.sweep_id, "job": job_ids + more, "name": sweep.sweep.path.parent.name}


def _row(cells: Mapping[str, str], columns: Sequence[str], widths: Mapping[str, int], paint: Paint) -> str:
    texts = []
    for name in columns:
        side = ">" if name in _RIGHT else "<"
        text = f"{cells[name]:{side}{widths[name]}}"
        texts.append(paint(text, State.UNKNOWN) if name == "state" else text)
    return _BETWEEN.join(texts).rstrip()


def _cells(status: RunStatus) -> dict[str, str]:
    progress = status.files.progress
    return {
        "run": status.run.run_id,
        "job": _job_text(status),
        "name": status.run.path.parent.name,
        "state": str(status.state),
        "attempt": number_text(status.files.attempt, "d"),
        "step": step_text(status.step, status.files.total_steps),
        "loss": number_text(progress.loss if progress else None, ".4g"),
        "samples/s": number_text(progress.samples_per_s if progress else None, ",.0f"),
        "eta": duration_text(status.eta_s),
        "nodes": number_text(status.nodes, "d"),
        "time": used_text(status.used_s, status.limit_s),
    }


def _job_text(status: RunStatus) -> str:
    job = status.files.job
    if job is None:
        return NOTHING
    return "local" if job.local else job.job_id


def details(status: RunStatus, *, paint: Paint) -> list[str]:
    """Return one run, a fact on each line."""
    files, job = status.files, status.job
    cells = _cells(status)
    hosts = job.node_list if job is not None and job.node_list else ", ".join(status.hosts or ())
    known = files.job
    facts = {
        "run": one_line(f"{cells['run']}  ({cells['name']}{_short(cells['run'])})"),
        "state": paint(cells["state"], status.state) + one_line(_because(status)),
        "job": NOTHING if known is None else one_line(f"{known.job_id}{' (a process)' if known.local else ''}"),
        "attempt": cells["attempt"],
        "step": cells["step"],
        "loss": cells["loss"],
        "samples/s": cells["samples/s"],
        "eta": cells["eta"],
        "nodes": one_line(f"{cells['nodes']}{f' ({hosts})' if hosts else ''}"),
        "time": cells["time"],
        "directory": one_line(str(status.run.path)),
    }
    lines = [f"{name:<10} {text}" for name, text in facts.items() if text != NOTHING]
    return [*lines, *map(one_line, [*status.metric_sentences(), *status.remarks])]


def _short(run_id: str) -> str:
    token = token_of(run_id)
    return "" if token == run_id else f", short {token}"


def _because(status: RunStatus) -> str:
    """Return why it is in its state, in the words of Slurm or of its result; empty if that is not known."""
    job = status.job
    if job is not None and status.state in {State.PENDING, State.HELD, State.REQUEUED}:
        return "" if job.reason == "None" else f": {job.reason}"
    result = status.files.result
    return f": {result.reason}" if result is not None and result.reason else ""
