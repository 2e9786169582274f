"""A finding of ``hpcddp check``, the rule that made it, and the subject that rules look at."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hpcddp.errors import UserError
from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.problems import Problem
from hpcddp.submission.request import SubmitRequest

if TYPE_CHECKING:
    from hpcddp.batch.job import JobPlan
    from hpcddp.batch.samples import SampleCount
    from hpcddp.check.measured import Measured
    from hpcddp.check.slurm_answer import SlurmAnswer
    from hpcddp.script.parse import Script
    from hpcddp.slurm.versions import Version


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
        from hpcddp.check.model_arguments import model_refusal

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
        from hpcddp.check.measured import measured_in

        return measured_in(runs, self.plan.batch)

    @cached_property
    def answer(self) -> SlurmAnswer | None:
        """What Slurm answers to the script; None where it is not asked."""
        from hpcddp.check.slurm_answer import ask_slurm

        return ask_slurm(self.text, self.environment, self.directory) if self.has_slurm else None

    @cached_property
    def slurm_version(self) -> Version:
        """The version of the Slurm that is here; empty where there is none."""
        from hpcddp.check.slurm_answer import installed_version

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
