"""A finding of ``hpcddp check``, the rule that made it, and the subject that rules look at.

A subject asks Slurm, builds the model of a training, and reads what earlier runs have measured, when a rule needs it.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hpcddp.batch.plan import BatchPlan
from hpcddp.errors import UserError
from hpcddp.jobfile.datasets import DATASETS
from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.problems import Problem
from hpcddp.jobfile.sections import Train
from hpcddp.manage.run_progress import progress_of
from hpcddp.run.directory import RunDirectory
from hpcddp.run.events import read_events
from hpcddp.run.job_records import read_plan
from hpcddp.run.metrics import read_metrics
from hpcddp.run.record import RecordError
from hpcddp.slurm import commands
from hpcddp.slurm.controller import Version, version_of
from hpcddp.submission.request import SubmitRequest

if TYPE_CHECKING:
    from hpcddp.batch.job import JobPlan
    from hpcddp.batch.samples import SampleCount
    from hpcddp.script.parse import Script


_SHELL: Final = re.compile(r"sh\b")


class Severity(StrEnum):
    """How bad a finding is; ``hpcddp check`` exits with 2 for errors and warnings, and with 0 for notes alone."""

    ERROR = "error"
    """The job fails, is refused, or does something else than the text says."""
    WARNING = "warning"
    """The job fails, or wastes what it gets, in circumstances that are common."""
    NOTE = "note"
    """The text is right, and easily misread."""


def split_message(message: str) -> tuple[str, str]:
    """Return what a message of hpcddp says is wrong, and what it says to do instead.

    The parts stand before and behind its last semicolon; a message without one is the first part alone.
    """
    problem, semicolon, fix = message.rpartition("; ")
    return (problem, fix) if semicolon else (message, "correct it")


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """The repair of one line of a script.

    Args:
        line: the number of the line, counted from 1.
        lines: what stands there afterwards; no lines remove it.
    """

    line: int
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """A place that breaks a rule.

    Args:
        problem: what is there, a sentence without its full stop.
        fix: what to write instead.
        line: the line of the script; None for the whole script, and in a job file.
        key: the key path in the job file; empty for the whole file, and in a script.
        edits: the repair, where it is mechanical.
    """

    problem: str
    fix: str
    line: int | None = None
    key: str = ""
    edits: tuple[Edit, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A job before its submission, as a job file or as a script that a person gives to sbatch.

    Args:
        text: the script that sbatch would get.
        directory: the directory of submission.
        request: the request of a job file; None for a script of the user's own, and for a job file that is wrong.
        problems: what is wrong with the job file.
        reads_data: whether rules may open the data of the job.
        has_slurm: whether Slurm may be asked.
    """

    text: str
    directory: Path
    environment: Mapping[str, str]
    request: SubmitRequest | None = None
    problems: tuple[Problem, ...] = ()
    reads_data: bool = False
    has_slurm: bool = False

    @property
    def has_script(self) -> bool:
        """Whether there is a script for a shell: a job file that is wrong has none, and sbatch runs Python too."""
        first_line = self.text.partition("\n")[0]
        return not self.problems and (not first_line.startswith("#!") or _SHELL.search(first_line) is not None)

    @property
    def spec(self) -> JobSpec | None:
        """The job of a job file; None for a script."""
        return None if self.request is None else self.request.job.spec

    @cached_property
    def plan(self) -> JobPlan | None:
        """The batch plan; None for a job without a batch, one whose batch cannot be split, and a sweep."""
        from hpcddp.batch.job import plan_job

        if self.request is None or self.request.job.spec.sweep is not None:
            # The elements of a sweep may differ in what is planned.
            return None
        try:
            first_plan = self.request.plan
            if first_plan is None or first_plan.batch.samples is not None or self.data is None:
                return first_plan
            return plan_job(self.request.job.spec, samples=self.data.samples)
        except UserError:
            return None

    @cached_property
    def data(self) -> SampleCount | None:
        """The training data as ``hpcddp plan`` counts it; None for other jobs, and where data is not read."""
        from hpcddp.batch.samples import count_samples

        spec = self.spec
        if spec is None or spec.train is None or spec.batch.unit == "group" or not self.reads_data:
            return None
        python = spec.environment.interpreter or sys.executable
        return count_samples(spec.train, spec.batch, directory=self.directory, python=python)

    @cached_property
    def model_refusal(self) -> str | None:
        """Why torchvision does not build the model of a training; None if it does, and where it cannot be told."""
        return None if self.spec is None else model_refusal(self.spec, directory=self.directory)

    @cached_property
    def measured(self) -> Measured | None:
        """What the newest run of this job has measured; None where no run has."""
        if self.spec is None or self.plan is None:
            return None
        runs = self.directory / self.spec.run_root / self.spec.name
        # Also where a directory above it may not be read.
        if not os.path.isdir(runs):  # noqa: PTH112  Path.is_dir raises there
            return None
        return measured_in(runs, self.plan.batch)

    @cached_property
    def answer(self) -> SlurmAnswer | None:
        """What Slurm answers to the script; None where it is not asked."""
        return ask_slurm(self.text, self.environment, self.directory) if self.has_slurm else None

    @cached_property
    def slurm_version(self) -> Version:
        """The version of the Slurm that is here; empty where there is none."""
        return installed_version(self.environment) if self.has_slurm else ()

    @cached_property
    def script(self) -> Script:
        """The script, as it is parsed."""
        from hpcddp.script.parse import parse_script

        return parse_script(self.text)


@dataclass(frozen=True, slots=True)
class Example:
    """A job file or a script that breaks a rule, or keeps it.

    Args:
        files: other files in the directory, by name, which the rule looks at.
        environment: variables of the submitter.
        given: what the files hold, for its page: ``after a run whose steps took 10 s``.
    """

    text: str
    files: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    given: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One row of a table of rules; its page and its tests are made from it.

    Args:
        code: its name, which ``# hpcddp: ignore CODE`` takes.
        severity: how bad its findings are.
        otherwise: what happens otherwise, a sentence without its full stop.
        sources: where that is stated or was seen: man pages, issues, pages.
        find: yields the places that break it.
        bad: an example that breaks it.
        good: the same example, repaired.
        is_slow: whether it starts processes or reads data; ``submit`` leaves such a rule out.
    """

    code: str
    severity: Severity
    otherwise: str
    sources: tuple[str, ...]
    find: Callable[[Subject], Iterator[Hit]]
    bad: Example
    good: Example
    is_slow: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A place that breaks a rule, as it is reported.

    Args:
        file: the file that the line is in.
        line: its line, counted from 1; None if it has none.
    """

    rule: Rule
    hit: Hit
    file: str
    line: int | None

    @property
    def fails(self) -> bool:
        """Whether ``hpcddp check`` exits with 2 for it."""
        return self.rule.severity is not Severity.NOTE

    @property
    def location(self) -> str:
        """The file, and the line if it has one."""
        return self.file if self.line is None else f"{self.file}:{self.line}"

    @property
    def in_short(self) -> str:
        """The finding in one line."""
        return f"{self.location}: {self.rule.severity} {self.rule.code}: {self.hit.problem}; {self.hit.fix}"

    def as_json(self) -> dict[str, Any]:
        """Return the finding as ``hpcddp check --json`` prints it."""
        return {
            "code": self.rule.code,
            "severity": self.rule.severity.value,
            "file": self.file,
            "line": self.line,
            "key": self.hit.key or None,
            "problem": self.hit.problem,
            "otherwise": self.rule.otherwise,
            "fix": self.hit.fix,
            "can_fix": bool(self.hit.edits),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmAnswer:
    """What Slurm answers to a script.

    Args:
        refusal: why Slurm would refuse the job; None if it would take it, or does not answer.
        start: when and where the job would start now, in Slurm's words; None where that is not known.
    """

    refusal: str | None = None
    start: str | None = None


def ask_slurm(script: str, environment: Mapping[str, str], directory: Path) -> SlurmAnswer:
    """Return what Slurm answers to a script; nothing is submitted.

    Args:
        script: the text of the script.
        environment: the environment of sbatch.
        directory: where the job would run.
    """
    try:
        return SlurmAnswer(
            start=commands.test_script(script, environment=environment, options=[f"--chdir={directory}"])
        )
    except commands.SlurmUnavailableError:
        return SlurmAnswer()
    except commands.SlurmCommandError as error:
        return SlurmAnswer(refusal=error.message)


def installed_version(environment: Mapping[str, str]) -> Version:
    """Return the version of the Slurm on this machine, as ``sbatch --version`` prints it; empty if it does not."""
    try:
        printed = commands.ask("sbatch", "--version", environment=environment)
    except commands.SlurmCommandError:
        return ()
    # Debian's packages print "slurm-wlm 24.11.5".
    return version_of(printed.split()[-1] if printed.split() else "")


# As in hpcddp.batch.samples: what the user's code prints does not reach the pipe.
_PROGRAM: Final = """
import json, os, sys
directory, name, arguments, classes = sys.argv[1:]
answer = os.dup(1)
os.dup2(2, 1)
sys.path.insert(0, directory)
import torch
from hpcddp.train.errors import ModelError
from hpcddp.train.model.replica import build_model
try:
    with torch.device("meta"):
        build_model(name, json.loads(arguments), int(classes))
    refusal = None
except ModelError as error:
    # Another error may be one of the meta device.
    if not isinstance(error.__cause__, (TypeError, ValueError)):
        raise
    refusal = error.message
os.write(answer, json.dumps(refusal).encode())
"""
_MOST_CLASSES: Final = 1000


def _class_count(train: Train) -> int:
    """Return the number of classes: that of the job, else of its data set, else the most that a data set has."""
    if train.num_classes is not None:
        return train.num_classes
    dataset = DATASETS.get(train.dataset)
    if dataset is not None and dataset.classes is not None:
        return dataset.classes
    return _MOST_CLASSES


def model_refusal(spec: JobSpec, *, directory: Path, timeout_s: float = 60.0) -> str | None:
    """Return why torchvision does not build the model of a training; None if it does, or if this machine cannot tell.

    A child process builds it on torch's meta device, which gives tensors no memory.

    Args:
        directory: the directory of submission, in which the user's own modules are found.
        timeout_s: how long building may take, in seconds.
    """
    train = spec.train
    if train is None:
        return None
    python = spec.environment.interpreter or sys.executable
    words = [str(directory), train.model, json.dumps(dict(train.model_args)), str(_class_count(train))]
    try:
        done = subprocess.run(
            [python, "-P", "-c", _PROGRAM, *words],
            cwd=directory,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    try:
        refusal = json.loads(done.stdout)
    except ValueError:
        # The user's code has ended the process itself.
        return None
    return refusal if isinstance(refusal, str) else None


_MOST_RUNS: Final = 5
_TAIL_BYTES: Final = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a run has measured.

    Args:
        step_s: seconds of a step, evaluations and saves included.
        save_s: seconds of its longest save, of those that its log still names; None if it has saved nothing.
    """

    run_id: str
    step_s: float
    save_s: float | None


def measured_in(runs: Path, batch: BatchPlan) -> Measured | None:
    """Return what the newest run with the same global batch on as many ranks has measured; None if none has.

    Only the newest runs are looked at.

    Args:
        runs: the folder of a job's runs, ``<run_root>/<name>``; it need not exist.
        batch: the batch of the job.
    """
    try:
        newest = sorted((path for path in runs.iterdir() if path.is_dir()), key=lambda path: path.name, reverse=True)
    except OSError:
        return None
    for path in newest[:_MOST_RUNS]:
        # A record that cannot be read is as if it were not there.
        with suppress(OSError, RecordError):
            measured = _measured_by(RunDirectory(path), batch)
            if measured is not None:
                return measured
    return None


def _measured_by(run: RunDirectory, batch: BatchPlan) -> Measured | None:
    plan = read_plan(run)
    if plan is None or plan.facts.get("global_batch_size") != batch.global_batch_size:
        return None
    if plan.facts.get("world_size") != batch.world_size:
        return None
    progress = progress_of(read_metrics(run.metrics, _TAIL_BYTES).records)
    if progress is None or not progress.steps_per_s:
        return None
    saves = [event.facts.get("seconds") for event in read_events(run.events, _TAIL_BYTES) if event.kind == "save"]
    seconds = [float(value) for value in saves if isinstance(value, int | float) and 0 < value < math.inf]
    return Measured(run_id=run.run_id, step_s=1 / progress.steps_per_s, save_s=max(seconds, default=None))
