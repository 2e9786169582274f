"""What runs are doing, and what became of them: their files, and one question to Slurm for all of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hpcddp.report.judging import Answers, needs_process, needs_slurm, queued, state_of
from hpcddp.report.processes import is_there
from hpcddp.report.states import State
from hpcddp.report.traces import Traces, read_traces
from hpcddp.run.directory import RunDirectory
from hpcddp.slurm.commands import SlurmCommandError
from hpcddp.slurm.queue import QueuedJob

# What Slurm takes for the end of a job without a limit is a year away (slurm.h, YEAR_SECONDS).
_UNLIMITED_S: Final = 360 * 24 * 3600.0

Ask = Callable[[], Sequence[QueuedJob]]
"""Asks Slurm for the user's jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """A run at one moment.

    Args:
        traces: what its files say.
        state: what it is doing, or what became of it.
        job: what Slurm says of its job; None if it says nothing, or was not asked.
        now: the moment, in seconds since the epoch.
    """

    traces: Traces
    state: State
    job: QueuedJob | None
    now: float

    @property
    def run(self) -> RunDirectory:
        """Its directory."""
        return self.traces.run

    @property
    def step(self) -> int | None:
        """Optimizer steps done; None where the run tells of none."""
        result, progress = self.traces.result or {}, self.traces.progress
        saved = [event["step"] or 0 for event in self.traces.events if event["event"] == "save"]
        known = [result.get("steps"), progress.step if progress else None, max(saved, default=None)]
        return next((step for step in known if step is not None), None)

    @property
    def eta_s(self) -> float | None:
        """Seconds until its last step, for one that makes steps now."""
        progress = self.traces.progress
        if self.state is not State.RUNNING or progress is None:
            return None
        return progress.eta_s(self.traces.total_steps, self.now)

    @property
    def used_s(self) -> float | None:
        """Seconds that the newest attempt has run, up to now or to its end."""
        start = self.traces.start
        if self.state.has_nodes and self.job is not None:
            return self.job.used_s
        if start is None or self.state is State.PENDING:
            return None
        ended = self.now if self.state.has_nodes else self.traces.ended
        return None if ended is None else max(0.0, ended - float(start["time"]))

    @property
    def limit_s(self) -> float | None:
        """Its job's time limit in seconds; None without one, or if it is not known."""
        if self.job is not None:
            return self.job.limit_s
        start = self.traces.start
        if start is None or start.get("end_time") is None:
            return None
        # Slurm counts limits in minutes, and the attempt began a moment after its job.
        limit_s = round((float(start["end_time"]) - float(start["time"])) / 60) * 60.0
        return limit_s if limit_s < _UNLIMITED_S else None

    @property
    def hosts(self) -> Sequence[str] | None:
        """The hosts of the newest attempt; None before its ranks have met."""
        if self.traces.attempt is None:
            return None
        ranks = _ranks(self.run, self.traces.attempt)
        return None if ranks is None else list(dict.fromkeys(rank["host"] for rank in ranks))

    @property
    def nodes(self) -> int | None:
        """How many nodes it has, had last, or wants."""
        if self.job is not None and self.job.nodes:
            return self.job.nodes
        hosts = self.hosts
        if hosts is None:
            return None if self.traces.start is None else 1
        return len(hosts)

    def as_json(self) -> dict[str, Any]:
        """Return the document that ``--json`` prints."""
        traces, progress, job = self.traces, self.traces.progress, self.traces.job
        return {
            "run_id": self.run.run_id,
            "name": self.run.path.parent.name,
            "run_dir": str(self.run.path),
            "state": str(self.state),
            "job_id": None if job is None else job.job_id,
            "cluster": None if job is None else "local" if job.local else "slurm",
            "slurm_state": None if self.job is None else self.job.state,
            "slurm_reason": None if self.job is None else self.job.reason,
            "attempt": traces.attempt,
            "step": self.step,
            "total_steps": traces.total_steps,
            "loss": None if progress is None else progress.loss,
            "samples_per_s": None if progress is None else progress.samples_per_s,
            "eta_s": self.eta_s,
            "nodes": self.nodes,
            "hosts": self.hosts,
            "used_s": self.used_s,
            "limit_s": self.limit_s,
            "result": traces.result,
        }


def _ranks(run: RunDirectory, attempt: int) -> list[Mapping[str, Any]] | None:
    try:
        document: list[Mapping[str, Any]] = json.loads(run.attempt(attempt).ranks.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return document


@dataclass(frozen=True, slots=True, kw_only=True)
class Statuses:
    """What runs are doing.

    Args:
        runs: each run, in the order in which they were asked for.
        unanswered: why Slurm could not be asked, a sentence; None if it was, or did not have to be.
    """

    runs: tuple[RunStatus, ...]
    unanswered: str | None = None


def statuses(found: Iterable[Traces], *, ask: Ask, now: float) -> Statuses:
    """Return what runs are doing. Slurm is asked once at most, and only if one of them needs it.

    Args:
        found: what the files of the runs say.
        ask: asks Slurm.
        now: seconds since the epoch.
    """
    everything = list(found)
    jobs: dict[str, QueuedJob] | None = None
    unanswered = None
    if any(map(needs_slurm, everything)):
        try:
            jobs = {job.job_id: job for job in ask()}
        except SlurmCommandError as error:
            unanswered = error.message
    local = [traces for traces in everything if needs_process(traces)]
    answers = Answers(jobs=jobs, processes={traces.run: is_there(traces) for traces in local})
    return Statuses(runs=tuple(_status(traces, answers, now) for traces in everything), unanswered=unanswered)


def _status(traces: Traces, answers: Answers, now: float) -> RunStatus:
    state = state_of(traces, answers)
    if traces.result is None and not state.is_alive:
        # It may have come to its end between the two looks.
        again = read_traces(traces.run, job=traces.job)
        traces = traces if again.attempt is None and again.result is None else again
        state = state_of(traces, answers)
    return RunStatus(traces=traces, state=state, job=queued(traces, answers), now=now)
