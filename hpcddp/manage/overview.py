"""All runs and sweeps of a run root at one moment, a sweep as one entry."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final

from hpcddp.errors import UserError
from hpcddp.jobfile.placeholders import argument_text
from hpcddp.manage.run_files import Job, RecordReader, RunFiles, read_run_files, record_or_damage
from hpcddp.manage.status import Ask, RunStatus, Statuses, statuses
from hpcddp.run.directory import RunDirectory
from hpcddp.run.events import read_event_log
from hpcddp.run.files import TAIL_BYTES, exists
from hpcddp.run.find import all_runs, submission_time
from hpcddp.run.job_records import Change, read_submission
from hpcddp.run.sweep import ManifestError, Sweep, index_of, is_element, read_sweep, sweep_of
from hpcddp.slurm import commands
from hpcddp.slurm.job import State

Entry = RunDirectory | Sweep


def entry_of(run: RunDirectory) -> Entry:
    """Return the sweep that a directory holds, or the run itself."""
    return read_sweep(run.path) or run


def entries_of(runs: Sequence[RunDirectory]) -> list[Entry]:
    """Return runs in their order, with each sweep in place of its elements."""
    entries: list[Entry] = []
    for run in runs:
        try:
            entries.append(entry_of(run))
        except ManifestError:
            # A damaged sweep does not stand in the way of the others.
            entries.append(run)
    sweep_paths = {entry.path for entry in entries if isinstance(entry, Sweep)}
    return [entry for entry in entries if isinstance(entry, Sweep) or not _is_element_of_any(entry, sweep_paths)]


def _is_element_of_any(run: RunDirectory, sweep_paths: Collection[Path]) -> bool:
    sweep_id = run.run_id.rpartition("_")[0]
    if not sweep_id:
        return False
    sweep_path = run.path.with_name(sweep_id)
    return sweep_path in sweep_paths and is_element(run.path, sweep_path)


def files_of(entry: Entry) -> list[RunFiles]:
    """Return the contents of the directory of a run, or of each element of a sweep."""
    if isinstance(entry, Sweep):
        return _files_of_elements(entry, range(len(entry.elements)))
    # An element that has not begun has no directory.
    sweep = None if exists(entry.path) else sweep_of(entry)
    if sweep is None:
        return [read_run_files(entry)]
    return _files_of_elements(sweep, [index_of(entry)])


def _files_of_elements(sweep: Sweep, indices: Iterable[int]) -> list[RunFiles]:
    """Return the contents of the directories of elements; the sweep's own files apply to those without files."""
    submission, _ = record_or_damage(lambda: read_submission(sweep.directory))
    submitted = None if submission is None else submission.time
    event_log = sweep.directory.events
    events = RecordReader().lines(event_log, lambda: read_event_log(event_log, TAIL_BYTES))
    files_of_elements = []
    for index in indices:
        job_id = sweep.job_id(index)
        job = None if job_id is None else Job(job_id=job_id, submitted=submitted)
        files = read_run_files(sweep.run(index), job=job)
        if files.attempt is None and not files.events:
            files = replace(files, events=events)
        files_of_elements.append(files)
    return files_of_elements


def values_now(values: Mapping[str, Any], changes: Sequence[Change]) -> dict[str, Any]:
    """Return the values with which an element runs now; None where a resumption has changed them in another form."""
    newest_values = dict(values)
    newest_values.update({change.key: change.after for change in changes if change.key in values})
    for key in values:
        if _is_changed_in_part(key, changes):
            newest_values[key] = None
    return newest_values


def _is_changed_in_part(key: str, changes: Sequence[Change]) -> bool:
    """Return whether changes are about the command with a placeholder, or about fields of a section."""
    if not changes:
        return False
    # It builds the models of the job file, which a table without changes does without.
    from hpcddp.jobfile.sweep import field_of

    field = field_of(key)
    return any(change.key.startswith(f"{key}.") or change.key == field != key for change in changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepStatus:
    """A sweep at one moment."""

    sweep: Sweep
    elements: tuple[RunStatus, ...]

    @property
    def counts(self) -> dict[State, int]:
        """How many elements are in which state, those with nodes or in the queue first."""
        counts = Counter(element.state for element in self.elements)
        return {state: counts[state] for state in sorted(counts, key=list(State).index)}

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
        names: dict[str, str] = {}
        for values in self.sweep.elements:
            names.update({key: key.rpartition(".")[2] for key in values})
        counts = Counter(names.values())
        sentences = []
        for values, element in zip(self.sweep.elements, self.elements, strict=True):
            changes = element.files.changes
            texts = []
            for key, value in values.items():
                later_texts = [argument_text(change.after) for change in changes if change.key == key]
                text = " -> ".join([argument_text(value), *later_texts])
                if _is_changed_in_part(key, changes):
                    # A changed command no longer tells the values of its placeholders.
                    text += " (changed)"
                name = names[key] if counts[names[key]] == 1 else key
                texts.append(f"{name}={text}")
            sentences.append(" ".join(texts))
        return sentences

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
            UserError: no element has ended without finishing, or the state of an element is unknown.
        """
        indices = []
        for index, element in enumerate(self.elements):
            if element.state is State.UNKNOWN:
                why = unanswered or next(iter(element.files.damaged), "see hpcddp why")
                raise UserError(f"nothing was resumed: the state of the run {element.run.run_id} is unknown: {why}")
            if element.state is not State.FINISHED and not element.is_alive:
                indices.append(index)
        if not indices:
            raise UserError(f"the sweep {self.sweep.sweep_id} has no run to resume: {self.rest}")
        return indices

    def as_json(self) -> dict[str, Any]:
        """Return the document that ``--json`` prints."""
        return {
            "sweep_id": self.sweep.sweep_id,
            "name": self.sweep.name,
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
        if self.name is not None and not fnmatchcase(run.name, self.name):
            return False
        return self.since is None or submission_time(run) >= self.since

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
    shows_old = everything or not wanted.is_empty
    # What has ended long ago is not even read.
    recent = [
        entry
        for index, entry in enumerate(entries)
        if shows_old or index < SHOWN or isinstance(entry, Sweep) or not exists(entry.result)
    ]
    state = overview_of(recent, ask=ask, now=now)
    lines = []
    for index, line in enumerate(state.lines):
        is_recent = shows_old or index < SHOWN or line.is_alive
        if is_recent and wanted.shows(line):
            lines.append(line)
    left_out = 0 if shows_old else len(entries) - len(lines)
    return Overview(lines=tuple(lines), left_out=left_out, unanswered=state.unanswered)


def overview_of(entries: Sequence[Entry], *, ask: Ask, now: float) -> Overview:
    """Return the state of these runs and sweeps; arguments as ``overview`` has them."""
    files_of_entries = [files_of(entry) for entry in entries]
    answer = statuses(chain.from_iterable(files_of_entries), ask=ask, now=now)
    statuses_of_runs = iter(answer.runs)
    lines: list[Line] = []
    for entry, files in zip(entries, files_of_entries, strict=True):
        elements = tuple(islice(statuses_of_runs, len(files)))
        lines.append(SweepStatus(sweep=entry, elements=elements) if isinstance(entry, Sweep) else elements[0])
    return Overview(lines=tuple(lines), unanswered=answer.unanswered)


def overview_now(entries: Sequence[Entry], environment: Mapping[str, str]) -> Overview:
    """Return the state of these runs and sweeps now; Slurm is asked once at most."""
    return overview_of(entries, ask=lambda: commands.queue(environment), now=time.time())


def sweep_status_now(sweep: Sweep, environment: Mapping[str, str]) -> tuple[SweepStatus, str | None]:
    """Return the state of a sweep now, and why Slurm could not be asked, or None; Slurm is asked once at most."""
    answer = _statuses_now(sweep, environment)
    return SweepStatus(sweep=sweep, elements=answer.runs), answer.unanswered


def status_now(run: RunDirectory, environment: Mapping[str, str]) -> RunStatus:
    """Return the state of a run now; Slurm is asked once at most."""
    (status,) = _statuses_now(run, environment).runs
    return status


def _statuses_now(entry: Entry, environment: Mapping[str, str]) -> Statuses:
    return statuses(files_of(entry), ask=lambda: commands.queue(environment), now=time.time())
