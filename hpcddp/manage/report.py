"""The numbers of a report about runs: outcome, metrics, attempts, goodput, checkpoints, first error, what ran."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Final

from hpcddp.errors import HpcddpError, UserError, did_you_mean
from hpcddp.jobfile.job import JobSpec
from hpcddp.manage.attempt_times import AttemptRecords, AttemptTimes, Goodput, Phase, attempt_times
from hpcddp.manage.first_error import FirstError, failed_attempt, first_error
from hpcddp.manage.format import duration_text
from hpcddp.manage.hindrances import hindrances
from hpcddp.manage.overview import SweepStatus, values_now
from hpcddp.manage.ranking import sort_key
from hpcddp.manage.run_files import RecordReader, closed_directory_sentence
from hpcddp.manage.run_metrics import RunMetrics, read_run_metrics
from hpcddp.manage.status import RunStatus
from hpcddp.run.code import Source, read_sources
from hpcddp.run.directory import AttemptDirectory, RunDirectory
from hpcddp.run.events import Event, read_event_log
from hpcddp.run.failure import read_failures
from hpcddp.run.job_file import read_submitted_job
from hpcddp.run.job_records import (
    Rank,
    Start,
    SubmissionRecord,
    known_hosts,
    read_exits,
    read_ranks,
    read_start,
    read_submission,
)
from hpcddp.run.record import Lines
from hpcddp.slurm.job import State
from hpcddp.stop.reasons import Cause

_GOOD_GOODPUT: Final = 0.95
_LOAD_FASTER: Final = (
    "Load the data faster: the ranks waited for it. Ask for more CPUs for each task (resources.cpus_per_task), which "
    "train.num_workers follows, or read from a faster disk (environment.stage)."
)
_INSTRUCTIONS: Final[Mapping[Phase, str]] = {
    Phase.START_UP: "Shorten the start-up: put environment and data on a faster disk.",
    Phase.EVALUATION: "Evaluate less often (train.eval_every).",
    Phase.SAVE: "Save less often (checkpoint.every), or to a faster disk: the training waited for its saves.",
    Phase.STOP: "Shorten the end: what runs after the last step, the save at a stop, and hooks of the job.",
}
_OTHER_INSTRUCTION: Final = (
    "Profile the loop between its steps: this time is neither in steps nor in recorded evaluations and saves."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The one change that would help most.

    Args:
        sentence: what to do, and how much time it is about.
        phase: the phase that it shortens; None if nothing needs to be done.
    """

    sentence: str
    phase: Phase | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the document of ``--json``."""
        return {"sentence": self.sentence, "phase": None if self.phase is None else str(self.phase)}


def advice_for(
    run_id: str, goodput: Goodput, *, events: Sequence[Event], data_wait_share: float, is_local: bool
) -> Advice:
    """Return the one change that would help a run, or the next one like it, most.

    Args:
        data_wait_share: the part of the duration of its steps in which they waited for data, 0..1; 0 if it is unknown.
        is_local: whether it ran without a job of its own in Slurm, so that it has no queue and no time limit.
    """
    if goodput.value is None:
        return Advice(sentence=f"The goodput is unknown: {goodput.unknown}.")
    attempts_with_loss = _attempts_with_loss(goodput, events)
    phase = _largest_phase_to_shorten(goodput, has_loss=bool(attempts_with_loss))
    phase_share = 0.0
    if phase is not None:
        phase_share = goodput.share(phase)

    data_wait_of_all = data_wait_share * goodput.share(Phase.TRAINING)
    if data_wait_of_all > 1 - _GOOD_GOODPUT and data_wait_of_all > phase_share:
        sentence = f"{_LOAD_FASTER} That was {data_wait_of_all:.0%} of the time on the nodes."
        return Advice(sentence=sentence, phase=Phase.TRAINING)

    if phase is None or goodput.value >= _GOOD_GOODPUT:
        sentence = f"Nothing to change: {goodput.value:.1%} of the time on the nodes was training that counts."
        return Advice(sentence=sentence)

    if phase is Phase.LOST:
        instruction = _lose_less(run_id, goodput, events, attempts_with_loss)
    elif phase is Phase.START_UP and not is_local:
        instruction = _start_less_often(goodput, events)
    else:
        instruction = _INSTRUCTIONS.get(phase, _OTHER_INSTRUCTION)
    duration = duration_text(goodput.seconds[phase])
    sentence = f"{instruction} That was {duration}, {phase_share:.0%} of the time on the nodes"
    queue_s = goodput.seconds.get(Phase.QUEUE, 0.0)
    if not is_local and queue_s > _on_nodes_s(goodput):
        sentence += (
            f". The queue took longer, {duration_text(queue_s)}: fewer nodes or a shorter time limit may start earlier"
        )
    return Advice(sentence=f"{sentence}.", phase=phase)


def _largest_phase_to_shorten(goodput: Goodput, *, has_loss: bool) -> Phase | None:
    """Return the phase with the largest part of the time on the nodes, except the training; None without one."""
    phases = [phase for phase in goodput.seconds if phase not in {Phase.QUEUE, Phase.TRAINING}]
    if not has_loss and Phase.LOST in phases:
        # The user has cancelled the attempts that lost steps.
        phases.remove(Phase.LOST)
    return max(phases, key=goodput.share, default=None)


def _attempts_with_loss(goodput: Goodput, events: Sequence[Event]) -> list[AttemptTimes]:
    """Return the attempts that lost steps, without those that the user has cancelled."""
    cancelled = _attempts_ended_by(events, Cause.CANCELLED)
    attempts = [attempt for attempt in goodput.attempts if attempt.seconds.get(Phase.LOST)]
    return [attempt for attempt in attempts if attempt.number not in cancelled]


def _attempts_ended_by(events: Sequence[Event], *causes: Cause) -> set[int]:
    """Return the numbers of the attempts that ended for one of these causes."""
    return {event.attempt for event in events if event.cause in causes}


def _on_nodes_s(goodput: Goodput) -> float:
    return sum(attempt.on_nodes_s for attempt in goodput.attempts)


def _lose_less(run_id: str, goodput: Goodput, events: Sequence[Event], attempts: Sequence[AttemptTimes]) -> str:
    """Return how a run loses less of the time of these attempts, in which something was lost."""
    command = f"hpcddp logs {run_id} --first-error"
    count = sum(attempt.lost_steps != 0 for attempt in attempts)
    if not count:
        return f"Remove the cause of the failure; {command} shows it."
    instruction = "Save more often (checkpoint.every)"
    interval_s = _best_interval_s(events, time_between_failures_s=_on_nodes_s(goodput) / count)
    if interval_s is not None:
        minutes = max(1, round(interval_s / 60))
        instruction = f"Save every {minutes} minutes (checkpoint.every: {minutes}min)"
    total = len(goodput.attempts)
    return f"{instruction}: {count} of {total} attempts lost steps that were not saved; {command} shows why."


def _best_interval_s(events: Sequence[Event], *, time_between_failures_s: float) -> float | None:
    """Return the interval between saves that loses least, in seconds, or None if the cost of a save is not known.

    J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17(9), 1974:
    sqrt(2 * cost of a save * mean time between failures).
    """
    costs = []
    for event in events:
        if event.kind == "save":
            cost = event.facts.get("blocked_s", event.facts.get("seconds"))
            if isinstance(cost, int | float):
                costs.append(float(cost))
    if not costs:
        return None
    mean_cost = sum(costs) / len(costs)
    return math.sqrt(2 * max(0.1, mean_cost) * time_between_failures_s)


def _start_less_often(goodput: Goodput, events: Sequence[Event]) -> str:
    """Return how a run on Slurm spends less time in its start-ups."""
    ended_by_slurm = _attempts_ended_by(events, Cause.PREEMPTION, Cause.TIME_LIMIT)
    if not ended_by_slurm:
        return f"{_INSTRUCTIONS[Phase.START_UP].removesuffix('.')}, or train longer in a job."
    return (
        f"Start less often: {len(ended_by_slurm)} of {len(goodput.attempts)} attempts ended at the time limit or by a "
        "preemption. A longer time_limit, or a QOS that is not preempted, makes fewer."
    )


# What has a curve, and is not a metric of the training.
_BOOKKEEPING: Final = frozenset({"lr", "samples_per_s"})
_RANKED_BY: Final = ("val_accuracy", "val_loss", "loss")


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """What is known of a run.

    Args:
        spec: its job; None if it cannot be read.
        submission: its newest submission; None if it cannot be read.
        error: its first error; None if nothing failed.
        sources: what its submissions would run.
        values: the values of an element of a sweep.
        values_text: what tells the element from the others; empty for a run of its own.
        damaged: a sentence for each record that cannot be read.
        has_gpus: whether its ranks are GPUs.
        missing: which record is missing for the times of its attempts, a sentence; None if none is.
    """

    status: RunStatus
    attempts: tuple[AttemptTimes, ...] = ()
    measured: RunMetrics = field(default_factory=RunMetrics)
    events: tuple[Event, ...] = ()
    spec: JobSpec | None = None
    submission: SubmissionRecord | None = None
    error: FirstError | None = None
    sources: tuple[Source, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    values_text: str = ""
    damaged: tuple[str, ...] = ()
    has_gpus: bool = False
    missing: str | None = None

    @property
    def run(self) -> RunDirectory:
        """Its directory."""
        return self.status.run

    @property
    def reason(self) -> str | None:
        """Why it is in its state."""
        result = self.status.files.result
        return None if result is None else result.reason

    @property
    def is_local(self) -> bool:
        """Whether it runs without a job of its own in Slurm."""
        return self.submission is not None and self.submission.cluster != "slurm"

    @property
    def device(self) -> str:
        """The device type; the time on the nodes is counted in hours of such devices."""
        if self.has_gpus:
            return "GPU"
        return "device" if self.spec is None else "CPU rank"

    @property
    def goodput(self) -> Goodput:
        """Where its time went."""
        return Goodput(attempts=self.attempts, missing=self.missing)

    def changes(self, attempt: int) -> list[str]:
        """Return what a resumption has changed in the training from an attempt on."""
        return [str(change) for change in self.status.files.changes if change.attempt == attempt]

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of what it measured, without the bookkeeping."""
        return tuple(name for name in self.measured.names if name not in _BOOKKEEPING)

    @property
    def began(self) -> float | None:
        """When its first attempt began."""
        return self.attempts[0].began if self.attempts else None

    @property
    def throughput(self) -> dict[str, float] | None:
        """Samples per second of its steps: the median, and the tenth and the ninetieth percentile; None if unknown."""
        rates = sorted(self.measured.values("samples_per_s"))
        if not rates:
            return None
        last = len(rates) - 1
        return {"p10": rates[round(0.1 * last)], "median": rates[round(0.5 * last)], "p90": rates[round(0.9 * last)]}

    @property
    def data_wait(self) -> dict[str, float] | None:
        """How long the steps waited for data, in seconds, and the part of their duration; None if unknown.

        In each attempt, the wait of the rank that waited longest.
        """
        accounts = [attempt.account for attempt in self.attempts if attempt.account is not None]
        train_s = sum(account.train_s for account in accounts)
        if not train_s:
            return None
        wait_s = sum(account.wait_s for account in accounts)
        return {"seconds": wait_s, "share": min(1.0, wait_s / train_s)}

    @property
    def slowest_rank(self) -> dict[str, Any] | None:
        """The slowest rank of the newest attempt that measured it, with the attempt and the host; None if unknown."""
        for attempt in reversed(self.attempts):
            if attempt.account is not None and attempt.account.slowest is not None:
                slowest = attempt.account.slowest
                hosts = known_hosts(self.run.attempt(attempt.number))
                host = hosts[slowest.rank] if 0 <= slowest.rank < len(hosts) else None
                return {"attempt": attempt.number, "host": host, **asdict(slowest)}
        return None

    @property
    def hindrances(self) -> list[str]:
        """What makes the ranks of the newest attempt slow, a sentence each."""
        return list(hindrances(self.status))

    @property
    def saves(self) -> dict[str, float] | None:
        """How many saves there were, and their durations in seconds; None without one."""
        facts = [event.facts.get("seconds") for event in self.events if event.kind == "save"]
        durations = [float(seconds) for seconds in facts if isinstance(seconds, int | float)]
        if not durations:
            return None
        return {"count": len(durations), "mean": sum(durations) / len(durations), "longest": max(durations)}

    @property
    def code_changes(self) -> list[tuple[int, str]]:
        """The attempts before which code of the project had changed since the submission, and what had, a sentence."""
        return [(event.attempt, str(event.reason)) for event in self.events if event.kind == "code"]

    @property
    def advice(self) -> Advice:
        """The one change that would help most."""
        data_wait_share = 0.0 if self.data_wait is None else self.data_wait["share"]
        return advice_for(
            self.run.run_id,
            self.goodput,
            events=self.events,
            data_wait_share=data_wait_share,
            is_local=self.is_local,
        )

    def as_json(self) -> dict[str, Any]:
        """Return the document of ``--json``."""
        goodput = self.goodput
        hours = goodput.device_hours or {}
        phases = {
            str(phase): {"seconds": round(seconds, 3), "device_hours": hours.get(phase)}
            for phase, seconds in goodput.seconds.items()
        }
        metrics = {}
        for name in self.metrics:
            extremes = {"last": self.measured.last(name), "best": self.measured.best(name)}
            metrics[name] = {which: extreme and asdict(extreme) for which, extreme in extremes.items()}
        attempts = []
        for attempt in self.attempts:
            attempts.append(attempt.as_json())
            changes = self.changes(attempt.number)
            if changes:
                attempts[-1]["changes"] = changes
        source = None
        if self.sources:
            newest = self.sources[-1]
            source = {
                "commit": newest.commit,
                "branch": newest.branch,
                "dirty": newest.dirty,
                "unknown": newest.git_unknown,
                "packages": dict(newest.packages),
            }
        document: dict[str, Any] = {
            "run_id": self.run.run_id,
            "name": self.run.name,
            "run_dir": str(self.run.path),
            "state": str(self.status.state),
            "reason": self.reason,
        }
        if self.values:
            document["values"] = values_now(self.values, self.status.files.changes)
        return document | {
            "step": self.status.step,
            "total_steps": self.status.files.total_steps,
            "metrics": metrics,
            "attempts": attempts,
            "device": self.device,
            "device_hours": goodput.total_device_hours,
            "phases": phases,
            "goodput": goodput.value,
            "goodput_unknown": goodput.unknown,
            "advice": self.advice.as_json(),
            "samples_per_s": self.throughput,
            "data_wait": self.data_wait,
            "slowest_rank": self.slowest_rank,
            "hindrances": self.hindrances,
            "first_error": None if self.error is None else self.error.as_json(),
            "source": source,
            "code_changes": [{"attempt": attempt, "what": sentence} for attempt, sentence in self.code_changes],
            "damaged": list(self.damaged),
        }


def ranked(reports: Sequence[RunReport], sort: str | None = None) -> tuple[str | None, list[RunReport]]:
    """Return the metric by which runs are ranked, and the runs, the best first; those without a value are the last.

    Args:
        sort: the metric that the user names; None is one that the runs have.

    Raises:
        UserError: no run has logged the metric that the user names.
    """
    names: list[str] = []
    for report in reports:
        names += report.metrics
    if sort is not None and sort not in names:
        instead = did_you_mean(sort, names, f"write one of {', '.join(sorted(set(names)))}")
        raise UserError(f"--sort is {sort!r}, which none of the runs has logged; {instead}")
    if not names:
        return None, list(reports)
    metric = sort or next((name for name in _RANKED_BY if name in names), names[0])

    def key(report: RunReport) -> float:
        best = report.measured.best(metric)
        return sort_key(metric, None if best is None else best.value)

    return metric, sorted(reports, key=key)


def report_of(status: RunStatus) -> RunReport:
    """Return what is known of a run; a record that cannot be read is a sentence in it."""
    try:
        return _report_of(status)
    except OSError as error:
        sentence = closed_directory_sentence(status.run, error)
        return RunReport(status=status, damaged=(sentence,))


def _report_of(status: RunStatus) -> RunReport:
    run = status.run
    event_reader = RecordReader()
    events = event_reader.lines(run.events, lambda: read_event_log(run.events))
    reader = RecordReader([*status.files.remarks, *event_reader.damage])
    spec = reader.read(lambda: read_submitted_job(run)) if run.job_file.exists() else None
    submission = reader.read(lambda: read_submission(run))
    sources: tuple[Source, ...] = reader.read(lambda: read_sources(run)) or ()
    attempts: list[AttemptRecords] = []
    has_gpus = spec is not None and spec.uses_gpus
    missing = "lines of its event log are damaged" if event_reader.damage else None
    for number in sorted(run.attempt_numbers()):
        directory = run.attempt(number)
        start = reader.read(partial(read_start, directory))
        ranks: Sequence[Rank] = reader.read(partial(read_ranks, directory)) or ()
        has_gpus = has_gpus or any(rank.gpu for rank in ranks)
        if start is None:
            missing = missing or f"the start of attempt {number} cannot be read"
            continue
        times = [source.time for source in sources if source.attempt == number]
        if number == 0 and submission is not None and submission.job_id == start.job_id:
            times.append(submission.time)
        times += [event.time for event in events if event.kind in {"requeue", "resume"}]
        # Its job was queued by the last of these between the start before and its own.
        previous_began = attempts[-1].began if attempts else -math.inf
        queued = max((time for time in times if previous_began < time <= start.time), default=None)
        attempts.append(_attempt_records(directory, start, queued=queued, ranks=_count_ranks(ranks, start, spec)))
    measured = reader.read(lambda: read_run_metrics(run.metrics)) or RunMetrics()
    metrics_lines: Lines[Event] = Lines(records=(), damaged=measured.damaged)
    reader.add(metrics_lines.sentence(run.metrics))
    error = None
    # Its records may be unreadable.
    with suppress(HpcddpError):
        attempt = failed_attempt(run)
        error = None if attempt is None else first_error(attempt)
    times_of_attempts = attempt_times(
        attempts,
        events,
        measured,
        is_alive=status.state.has_nodes,
        is_finished=status.state is State.FINISHED,
        now=status.now,
    )
    return RunReport(
        status=status,
        attempts=times_of_attempts,
        measured=measured,
        events=events,
        spec=spec,
        submission=submission,
        error=error,
        sources=sources,
        damaged=tuple(reader.damage),
        has_gpus=has_gpus,
        missing=missing,
    )


def _attempt_records(
    attempt: AttemptDirectory, start: Start, *, queued: float | None, ranks: int | None
) -> AttemptRecords:
    """Return what the records say of an attempt; records of exits that cannot be read are left out."""
    failures = read_failures(attempt)
    exits = []
    with suppress(HpcddpError):
        exits = read_exits(attempt)
    failure_times = [failure.time for failure in failures]
    exit_times = [program_exit.time for program_exit in exits]
    return AttemptRecords(
        number=attempt.number,
        began=start.time,
        queued=queued,
        submit_time=start.submit_time,
        ranks=ranks,
        alive_times=(*failure_times, *exit_times),
        failed_at=min(failure_times, default=None),
        failure_step=max((failure.step for failure in failures if failure.step is not None), default=None),
    )


def _count_ranks(ranks: Sequence[Rank], start: Start, spec: JobSpec | None) -> int | None:
    """Return how many ranks an attempt has; None if that is not known."""
    if ranks and ranks[0].launcher is None:
        return len(ranks)
    # Where a launcher such as torchrun starts the ranks, the record is about the tasks.
    if spec is None:
        return None
    return spec.world_size if start.nodes is None else spec.sized(start.nodes).world_size


def reports_of(lines: Sequence[RunStatus | SweepStatus]) -> list[RunReport]:
    """Return what is known of runs, and of the elements of sweeps."""
    reports = []
    for line in lines:
        if isinstance(line, RunStatus):
            reports.append(report_of(line))
        else:
            for element, values, text in zip(line.elements, line.sweep.elements, line.values, strict=True):
                reports.append(replace(report_of(element), values=values, values_text=text))
    return reports
