"""The whole rehearsal: the undisturbed run, a run under each fault, a verdict on each, and the result as text."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

from hpcddp.errors import UserError, counted
from hpcddp.jobfile.read import ResolvedJob
from hpcddp.manage.table import Column, table_lines
from hpcddp.rehearse.compare import Comparison, compare, compare_saved
from hpcddp.rehearse.faults import FAULTS, REQUEUE, SANDBOX_FAULTS, Fault
from hpcddp.rehearse.guard import clean_up, guarded
from hpcddp.rehearse.plan import Place, gpus_here, make_small
from hpcddp.rehearse.project import read_project
from hpcddp.rehearse.trial import (
    MARK,
    Disturbed,
    Stage,
    Undisturbed,
    run_disturbed,
    run_undisturbed,
)
from hpcddp.run.metrics import finite_number
from hpcddp.sandbox import sandbox as sandboxes
from hpcddp.sandbox.request import Request, default_hosts
from hpcddp.submission.interrupts import interrupted_by_signals

Verdict = Literal["equal", "rounding", "came back", "differs", "starts over", "not compared", "not tried", "lost"]
"""``rounding``: equal but for the rounding of sums. ``came back``: the good end with another world size. ``lost``: it
did not come back."""
_GOOD: Final = frozenset({"equal", "rounding", "came back"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialReport:
    """What became of the run under one fault.

    Args:
        comparison: how it differs from the undisturbed one; None if it did not come back.
    """

    fault: Fault
    disturbed: Disturbed
    comparison: Comparison | None
    verdict: Verdict

    @property
    def is_good(self) -> bool:
        """Whether the run came back as it should."""
        return self.verdict in _GOOD

    def as_json(self) -> dict[str, Any]:
        """Return it as a JSON document."""
        disturbed = self.disturbed
        comparison = self.comparison
        document: dict[str, Any] = {
            "fault": self.fault.name,
            "verdict": self.verdict,
            "ok": self.is_good,
            "after_step": disturbed.step,
            "ended_as": disturbed.ended_as,
            "damaged_file": disturbed.damaged,
            "steps_repeated": disturbed.course.steps_repeated(),
            "restart_s": None if disturbed.restart_s is None else round(disturbed.restart_s, 1),
            "problem": disturbed.problem or disturbed.not_tried,
        }
        if comparison is None:
            return document
        first_metric = asdict(comparison.metrics[0]) if comparison.metrics else None
        tensors = [
            {"file": saved.file, "name": saved.value.name, "largest_difference": finite_number(saved.value.largest)}
            for saved in comparison.saved.differences
        ]
        return {
            **document,
            "first_metric": first_metric,
            "tensors": tensors,
            "same_parameters": comparison.same_parameters,
            "files_compared": comparison.saved.files,
            "files_not_compared": list(comparison.saved.unreadable),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsalReport:
    """The result of a rehearsal.

    Args:
        name: the name of the job.
        ranks: the ranks of the rehearsed job.
        changes: what was made smaller.
        undisturbed: the run without a fault.
        trials: the runs under the faults.
    """

    name: str
    ranks: int
    changes: tuple[str, ...]
    undisturbed: Undisturbed
    trials: tuple[TrialReport, ...]

    @property
    def is_good(self) -> bool:
        """Whether the run came back as it should after every fault."""
        return all(trial.is_good for trial in self.trials)

    def as_json(self) -> dict[str, Any]:
        """Return it as a JSON document."""
        steps = self.undisturbed.steps
        return {
            "job": self.name,
            "ok": self.is_good,
            "ranks": self.ranks,
            "changes": list(self.changes),
            "undisturbed": {
                "seconds": round(self.undisturbed.seconds, 1),
                "steps": len(steps) or None,
                "files": [file.name for file in self.undisturbed.files],
            },
            "faults": [trial.as_json() for trial in self.trials],
        }


FAULTS_IN: Final[Mapping[Place, Sequence[Fault]]] = MappingProxyType(
    {"here": FAULTS, "sandbox": SANDBOX_FAULTS, "cluster": (REQUEUE,)}
)
"""The faults that each place has."""


def choose_faults(names: Sequence[str], places: Sequence[Place]) -> dict[Place, tuple[Fault, ...]]:
    """Return the faults of these names in their own order, or all for no name, by the place that has them.

    Raises:
        UserError: no place has such a fault.
    """
    fault_names = [fault.name for place in places for fault in FAULTS_IN[place]]
    for name in names:
        if name not in fault_names:
            raise UserError(
                f"--fault is {name!r}, but no fault here has that name; write one of {', '.join(fault_names)}"
            )
    chosen: dict[Place, tuple[Fault, ...]] = {}
    for place in places:
        faults = tuple(fault for fault in FAULTS_IN[place] if not names or fault.name in names)
        if faults:
            chosen[place] = faults
    return chosen


def rehearse(
    job: ResolvedJob,
    *,
    place: Place,
    faults: Sequence[Fault],
    directory: Path,
    linked: Sequence[Path],
    keep: Path | None,
    python: str,
    environment: Mapping[str, str],
    timeout_s: float,
    say: Callable[[str], None],
) -> RehearsalReport:
    """Rehearse a job.

    Args:
        place: where it runs. In the sandbox and on the cluster, ``environment`` must name the Slurm, and so must this
            process's own environment.
        faults: the faults, in their order.
        directory: the project, in which the job would be submitted.
        linked: entries of it that every copy has as links.
        keep: the directory of the rehearsal, which stays; it must not exist. None is a temporary one.
        python: the interpreter of the tasks.
        environment: the submitter's environment.
        timeout_s: the longest time of one attempt, in seconds.
        say: shows a line of progress.

    Raises:
        HpcddpError: the job cannot be rehearsed, or does not finish without a fault.
    """
    project = read_project(directory, linked=linked)
    run_root = None
    if place == "cluster":
        run_root = Path(job.spec.run_root)
    with _directory_of_rehearsal(keep, run_root) as root:
        small = make_small(job, place=place, run_root=root, gpus=gpus_here(), environment=environment)
        stage = Stage(
            small=small,
            project=project,
            root=root,
            python=python,
            # Nothing leaves the machine, also where the program has a tracker of its own.
            environment={"WANDB_MODE": "disabled", **environment, MARK: str(root)},
            timeout_s=timeout_s,
            cluster="local" if place == "here" else "slurm",
        )
        for change in small.changes:
            say(f"made small: {change}")
        say("without a fault ...")
        reference = run_undisturbed(stage)
        say(f"without a fault: finished after {reference.seconds:.0f} s")
        trials = []
        for fault in faults:
            say(f"{fault.name}: {fault.what} ...")
            disturbed = run_disturbed(stage, fault, reference)
            trial = _judge(fault, reference, disturbed)
            say(f"{fault.name}: {trial.verdict}")
            trials.append(trial)
    return RehearsalReport(
        name=small.spec.name,
        ranks=small.spec.world_size,
        changes=small.changes,
        undisturbed=reference,
        trials=tuple(trials),
    )


@contextmanager
def _directory_of_rehearsal(keep: Path | None, run_root: Path | None) -> Iterator[Path]:
    """Make the directory of a rehearsal, and end at the end what runs there, however it ends.

    Args:
        keep: the directory; None makes a temporary one.
        run_root: the directory to make that in, which every node sees; None is that of this machine.
    """
    is_kept = keep is not None
    root = _make_temporary_directory(run_root) if keep is None else _make_kept_directory(keep)
    with guarded(root, is_kept=is_kept):
        try:
            with interrupted_by_signals():
                yield root
        finally:
            clean_up(root, is_kept=is_kept)
            if run_root is not None and not is_kept:
                with suppress(OSError):
                    # It is empty if it was made for this rehearsal.
                    run_root.rmdir()


def _make_temporary_directory(run_root: Path | None) -> Path:
    if run_root is not None:
        run_root.mkdir(parents=True, exist_ok=True)
    # A hidden directory holds no run that other commands find.
    return Path(tempfile.mkdtemp(prefix=".hpcddp-rehearse-", dir=run_root)).resolve()


def _make_kept_directory(keep: Path) -> Path:
    root = keep.absolute()
    try:
        root.mkdir(mode=0o700)
    except OSError as error:
        raise UserError(
            f"--keep is {keep}, and this directory cannot be made ({error.strerror}); name one that does not exist"
        ) from None
    return root


def _judge(fault: Fault, reference: Undisturbed, disturbed: Disturbed) -> TrialReport:
    comparison = None
    verdict: Verdict = "not tried" if disturbed.not_tried is not None else "lost"
    if disturbed.not_tried is None and disturbed.problem is None:
        saved = compare_saved(reference.files, [file for file in disturbed.files if file.name != disturbed.damaged])
        comparison = compare(reference.course, disturbed.course, saved)
        verdict = _verdict(fault, comparison, reference)
    return TrialReport(fault=fault, disturbed=disturbed, comparison=comparison, verdict=verdict)


def _verdict(fault: Fault, comparison: Comparison, reference: Undisturbed) -> Verdict:
    if comparison.starts_over:
        return "starts over"
    if fault.changes_world_size:
        return "came back"
    if not comparison.is_equal:
        return "rounding" if comparison.is_rounding else "differs"
    is_compared = reference.steps or comparison.saved.files or comparison.same_parameters is not None
    return "equal" if is_compared else "not compared"


_NAMED = 3
_TITLES = ("fault", "verdict", "after step", "repeated", "restart")


def lines_of(report: RehearsalReport) -> Iterator[str]:
    """Yield the lines of the result."""
    steps = len(report.undisturbed.steps)
    made = f", {counted(steps, 'step')} reported" if steps else ""
    yield f"{report.name} on {counted(report.ranks, 'rank')}: {report.undisturbed.seconds:.0f} s without a fault{made}"
    yield ""
    rows = [_row(trial) for trial in report.trials]
    columns = [Column(title=title, cells=[row[index] for row in rows]) for index, title in enumerate(_TITLES)]
    yield from table_lines(columns)
    for trial in report.trials:
        details = list(_details(trial))
        if details:
            yield ""
            yield f"{trial.fault.name}: {details[0]}"
            yield from (f"    {line}" for line in details[1:])
    yield from _not_compared(report)
    yield ""
    bad_faults = [trial.fault.name for trial in report.trials if not trial.is_good]
    if bad_faults:
        yield f"The run does not come back as it was after: {', '.join(bad_faults)}."
    else:
        yield f"The run comes back after {counted(len(report.trials), 'fault')}."


def _not_compared(report: RehearsalReport) -> Iterator[str]:
    """Yield a sentence about the saved files that could not be loaded, in any trial."""
    comparisons = [trial.comparison for trial in report.trials if trial.comparison is not None]
    names = list(dict.fromkeys(name for comparison in comparisons for name in comparison.saved.unreadable))
    if names:
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        yield ""
        yield f"not compared, because weights_only=True does not load them: {', '.join(names[:_NAMED])}{more}"


def _row(trial: TrialReport) -> tuple[str, ...]:
    disturbed = trial.disturbed
    repeated = disturbed.course.steps_repeated()
    return (
        trial.fault.name,
        trial.verdict,
        "-" if disturbed.step is None else str(disturbed.step),
        "-" if repeated is None else str(repeated),
        "-" if disturbed.restart_s is None else f"{disturbed.restart_s:.1f} s",
    )


def _details(trial: TrialReport) -> Iterator[str]:
    """Yield what is to be known about a trial besides its row: a problem, or what differs."""
    disturbed = trial.disturbed
    comparison = trial.comparison
    if disturbed.not_tried is not None:
        yield disturbed.not_tried
    if disturbed.problem is not None:
        yield disturbed.problem
        yield from disturbed.output
    if comparison is None:
        return
    yield from comparison.sentences()
    if trial.verdict == "came back" and not comparison.is_equal:
        yield "with another number of ranks sums have another order, so the difference does not count"
    if trial.verdict == "not compared":
        yield "the program reports no metric (hpcddp.log) and saves no file with tensors, so nothing was compared"


@contextmanager
def sandbox_of_two_hosts(environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Start a sandbox of two hosts, let this process use it in the block, and remove it at the end.

    Args:
        environment: this process's environment.

    Returns:
        The environment with the sandbox's Slurm.

    Raises:
        HpcddpError: the sandbox does not start; the message says what is missing.
    """
    with tempfile.TemporaryDirectory(prefix="hpcddp-") as directory:
        request = Request(
            directory=Path(directory).resolve(),
            hosts=default_hosts(),
            nodes=2,
            cpus_per_node=max(2, os.cpu_count() or 1),
            gpus_per_node=0,
        )
        running = sandboxes.up(request, environment=environment)
        own_configuration = os.environ.get("SLURM_CONF")
        # Slurm's commands read it from this process's own environment.
        os.environ["SLURM_CONF"] = str(running.slurm_conf)
        try:
            yield sandboxes.slurm_environment(running, environment)
        finally:
            del os.environ["SLURM_CONF"]
            if own_configuration is not None:
                os.environ["SLURM_CONF"] = own_configuration
            sandboxes.down(running.directory)
