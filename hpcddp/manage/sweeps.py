"""Sweeps among runs: one entry for all elements of one."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from hpcddp.errors import UserError
from hpcddp.manage.run_files import Job, Traces, read_traces, readable, readable_lines
from hpcddp.manage.states import State
from hpcddp.manage.status import RunStatus
from hpcddp.run.directory import RunDirectory
from hpcddp.run.events import Event, read_event_log
from hpcddp.run.files import TAIL_BYTES
from hpcddp.run.job_records import read_submission
from hpcddp.run.sweep import ManifestError, Sweep, index_of, is_element, read_sweep, sweep_of

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


def traces_of(entry: Entry) -> list[Traces]:
    """Return what the files of a run, or of each element of a sweep, say."""
    if isinstance(entry, Sweep):
        told = _Told.of(entry)
        return [told.traces(index) for index, _ in enumerate(entry.elements)]
    sweep = None if entry.path.exists() else sweep_of(entry)
    return [read_traces(entry)] if sweep is None else [_Told.of(sweep).traces(index_of(entry))]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """What a sweep's own directory says of all its elements; it holds for those that have left no word themselves."""

    sweep: Sweep
    events: tuple[Event, ...]
    submitted: float | None

    @classmethod
    def of(cls, sweep: Sweep) -> Self:
        submission, _ = readable(lambda: read_submission(sweep.directory))
        log = sweep.directory.events
        events, _ = readable_lines(log, lambda: read_event_log(log, TAIL_BYTES))
        return cls(sweep=sweep, events=events, submitted=None if submission is None else submission.time)

    def traces(self, index: int) -> Traces:
        job_id = self.sweep.job_id(index)
        job = None if job_id is None else Job(job_id=job_id, submitted=self.submitted)
        traces = read_traces(self.sweep.run(index), job=job)
        return traces if traces.attempt is not None or traces.events else replace(traces, events=self.events)


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
        """How many elements are in which state, the liveliest first."""
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
        keys = {key for values in self.sweep.elements for key in values}
        words = Counter(key.rpartition(".")[2] for key in keys)
        short = {key: last if words[last := key.rpartition(".")[2]] == 1 else key for key in keys}
        return [
            " ".join(f"{short[key]}={json.dumps(value, ensure_ascii=False)}" for key, value in values.items())
            for values in self.sweep.elements
        ]

    def as_json(self) -> dict[str, Any]:
        """Return the document that ``--json`` prints."""
        return {
            "sweep_id": self.sweep.sweep_id,
            "name": self.sweep.path.parent.name,
            "run_dir": str(self.sweep.path),
            "counts": {str(state): count for state, count in self.counts.items()},
            "elements": [
                {**element.as_json(), "values": dict(values)}
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
