"""Check a job file or an sbatch script with the tables of rules, and repair what is mechanical.

The rules about this machine and about the cluster stand here; those about the text stand in their modules.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from hpcddp.api import read_job, request_to_submit
from hpcddp.batch.job import short_epoch
from hpcddp.check import directive_rules, job_rules, shell_rules
from hpcddp.check.finding import Edit, Example, Finding, Hit, Rule, Severity, Subject, split_message
from hpcddp.check.search import findings_of, without_ignored
from hpcddp.errors import UserError
from hpcddp.jobfile.cluster import ClusterFacts
from hpcddp.jobfile.document import BYTE_ORDER_MARK, read_text
from hpcddp.jobfile.problems import JobFileError, Problem
from hpcddp.run.files import user_and_groups
from hpcddp.site.facts import ask_site, read_site
from hpcddp.site.rules import broken_site_rules, is_about
from hpcddp.slurm.commands import SlurmCommandError
from hpcddp.slurm.job_environment import submission_environment
from hpcddp.submission.checks import check_submittable, notes_about, obstacles_to
from hpcddp.submission.render import render_script
from hpcddp.submission.request import SubmissionError, SubmitRequest
from hpcddp.submission.submit import choose_cluster


def _refusals(subject: Subject) -> Iterator[Hit]:
    """Yield why ``submit`` refuses the job."""
    request = subject.request
    if request is None:
        return
    for sentence in (*_sweep(request)[0], *_no_plan(request)):
        yield _hit(sentence)
    if not request.elements:
        yield from (_hit(obstacle.sentence) for obstacle in obstacles_to(request) if obstacle.certain)


def _warnings(subject: Subject) -> Iterator[Hit]:
    """Yield what ``submit`` warns of."""
    request = subject.request
    if request is None:
        return
    for sentence in (*_sweep(request)[1], *notes_about(replace(request, run_id="new"))):
        yield _hit(sentence)
    if not request.elements:
        yield from (_hit(obstacle.sentence) for obstacle in obstacles_to(request) if not obstacle.certain)
        if subject.plan is not None:
            yield from (_hit(sentence) for sentence in short_epoch(subject.plan.batch))


def _hit(sentence: str) -> Hit:
    problem, fix = split_message(sentence)
    # Sentences about a field begin with its key path.
    key = problem.split(maxsplit=1)[0].rstrip(",:")
    return Hit(key=key, problem=problem, fix=fix)


def _sweep(request: SubmitRequest) -> tuple[list[str], list[str]]:
    """Return why the elements of a sweep are refused, and what ``submit`` warns of; two empty lists for one run."""
    if not request.elements:
        return [], []
    try:
        return [], list(check_submittable(request))
    except UserError as error:
        return error.message.splitlines(), []


def _no_plan(request: SubmitRequest) -> list[str]:
    """Return why the batch cannot be split."""
    try:
        _ = request.plan
    except UserError as error:
        return [error.message]
    return []


MACHINE_RULES: Final = (
    Rule(
        code="submit-refuses",
        severity=Severity.ERROR,
        otherwise="`hpcddp submit` refuses the job on this machine",
        sources=("hpcddp submit",),
        find=_refusals,
        bad=Example("name: a\ncommand: [python, trian.py]\n", files={"train.py": ""}, given="beside a file train.py"),
        good=Example("name: a\ncommand: [python, train.py]\n", files={"train.py": ""}),
    ),
    Rule(
        code="submit-warns",
        severity=Severity.WARNING,
        otherwise="`hpcddp submit` warns, because the job may not run, or not as it is meant",
        sources=("hpcddp submit",),
        find=_warnings,
        bad=Example("name: a\ncommand: [python, train.py, --data, $DATA]\n", files={"train.py": ""}),
        good=Example("name: a\ncommand: [bash, -c, 'python train.py --data $DATA']\n", files={"train.py": ""}),
    ),
)
"""The rules about this machine."""


def _limits(subject: Subject) -> Iterator[Hit]:
    """Yield requests that no partition, QOS or account of the cluster grants."""
    facts = _facts(subject)
    if subject.spec is not None and facts is not None:
        for key, sentence in broken_site_rules(subject.spec, facts):
            said, fix = split_message(sentence)
            yield Hit(key=key, problem=f"{key} {said}", fix=fix)


def _facts(subject: Subject) -> ClusterFacts | None:
    """Return the facts about the cluster: those of the job's profile, else those that Slurm states now."""
    cluster = None if subject.request is None else subject.request.job.cluster
    if cluster is not None and is_about(cluster, subject.environment):
        return cluster
    if not subject.has_slurm:
        return None
    user, groups = user_and_groups()
    try:
        answers = ask_site(subject.environment, user=user)
    except SlurmCommandError:
        return None
    return read_site(answers, user=user, groups=groups, today=f"{datetime.now().astimezone():%Y-%m-%d}")


def _overriding_variables(subject: Subject) -> Iterator[Hit]:
    """Yield variables that sbatch reads as options; ``hpcddp submit`` does not pass them on."""
    if subject.request is not None or subject.problems:
        return
    for name, value in sorted(subject.environment.items()):
        if name.startswith("SBATCH_"):
            yield Hit(problem=f"{name} is {value!r} in this shell", fix=f"call unset {name} before sbatch")


def _refused_by_slurm(subject: Subject) -> Iterator[Hit]:
    """Yield why Slurm would refuse the script."""
    if subject.answer is not None and subject.answer.refusal is not None:
        yield Hit(problem=subject.answer.refusal, fix="change the request, or ask the cluster's administrators")


_SCRIPT = "#!/bin/bash\n#SBATCH --time=0:10:00\nsrun python train.py\n"

CLUSTER_RULES: Final = (
    Rule(
        code="beyond-the-cluster",
        severity=Severity.ERROR,
        otherwise="Slurm refuses the job, or keeps it pending for ever",
        sources=("slurm.conf(5), EnforcePartLimits", "sacctmgr(1)"),
        find=_limits,
        bad=Example("name: a\nresources: {partition: no-such-partition}\ncommand: [python, train.py]\n"),
        good=Example("name: a\ncommand: [python, train.py]\n"),
    ),
    Rule(
        code="variable-overrides",
        severity=Severity.WARNING,
        otherwise="sbatch takes the value of the variable in place of the one in the script",
        sources=("sbatch(1), INPUT ENVIRONMENT VARIABLES",),
        find=_overriding_variables,
        bad=Example(_SCRIPT, environment={"SBATCH_TIMELIMIT": "5"}, given="in a shell with SBATCH_TIMELIMIT=5"),
        good=Example(_SCRIPT),
    ),
    Rule(
        code="slurm-refuses",
        severity=Severity.ERROR,
        otherwise="sbatch refuses the script",
        sources=("sbatch(1), --test-only",),
        find=_refused_by_slurm,
        bad=Example("#!/bin/bash\n#SBATCH --ntasks=1000000\nsrun python train.py\n"),
        good=Example("#!/bin/bash\n#SBATCH --ntasks=1\nsrun python train.py\n"),
    ),
)
"""The rules about the cluster."""

LAYERS: Final[Mapping[str, tuple[Rule, ...]]] = MappingProxyType(
    {
        "script": (*directive_rules.RULES, *shell_rules.RULES),
        "job": job_rules.RULES,
        "machine": MACHINE_RULES,
        "cluster": CLUSTER_RULES,
    }
)
"""The rules, by what they look at: the text of the script, the job file, this machine, the cluster."""
RULES: Final = MappingProxyType({rule.code: rule for rules in LAYERS.values() for rule in rules})
"""All rules, by their codes."""
_MOST_REPAIRS: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a check has found.

    Args:
        findings: the findings, in the order of their lines, without those that a comment ignores.
        not_checked: what was not looked at, and why, a sentence each.
        start: when Slurm would start the job now, in its words; None where it was not asked, or would refuse it.
    """

    file: str
    findings: tuple[Finding, ...]
    not_checked: tuple[str, ...] = ()
    start: str | None = None

    @property
    def fails(self) -> bool:
        """Whether there is an error or a warning."""
        return any(finding.fails for finding in self.findings)

    def count(self, severity: Severity) -> int:
        """Return how many findings have a severity."""
        return sum(finding.rule.severity is severity for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """Return the document of ``hpcddp check --json``."""
        return {
            "file": self.file,
            "findings": [finding.as_json() for finding in self.findings],
            "not_checked": list(self.not_checked),
            "start": self.start,
        }


def check_file(file: Path, overrides: Sequence[str] | None, environment: Mapping[str, str]) -> Report:
    """Check a job file or a script with all rules, from the working directory.

    Args:
        file: the job file or the script.
        overrides: the values of ``--set``, for a job file.

    Raises:
        UserError: the file cannot be read, or there are overrides for a script.
    """
    text = read_file(file)
    has_slurm, not_checked = _find_slurm(environment)
    if is_script(file, text):
        if overrides:
            raise UserError(f"--set {overrides[0]} overrides a job file, and {file} is a script; change the script")
        subject = Subject(text=text, directory=Path.cwd(), environment=environment, has_slurm=has_slurm)
    else:
        subject = _job_subject(file, overrides, environment, has_slurm=has_slurm)
    findings: list[Finding] = []
    for layer, rules in LAYERS.items():
        findings += findings_of(file, text, subject, rules, of_script=layer == "script")
    return Report(
        file=str(file),
        findings=tuple(sorted(without_ignored(findings, str(file), text), key=_place)),
        not_checked=not_checked,
        start=None if subject.answer is None else subject.answer.start,
    )


def read_file(file: Path) -> str:
    """Return the text of a job file or a script, with its line breaks as they are.

    Raises:
        UserError: it cannot be read, or is no text.
    """
    text = read_text(file, keeps_mark=True)
    if isinstance(text, Problem):
        raise UserError(str(text))
    if not text.removeprefix(BYTE_ORDER_MARK).strip():
        raise UserError(f"{file} is empty; name a job file, or a script for sbatch")
    return text


_SCRIPT_SUFFIXES: Final = frozenset({".sh", ".bash", ".sbatch", ".slurm", ".sub", ".job"})
_JOB_FILE_SUFFIXES: Final = frozenset({".yaml", ".yml", ".json"})


def is_script(file: Path, text: str) -> bool:
    """Return whether a file is a script for sbatch, not a job file.

    Raises:
        UserError: it is a program that neither is.
    """
    text = text.removeprefix(BYTE_ORDER_MARK)
    has_directives = re.search("^#SBATCH", text, re.MULTILINE) is not None
    if file.suffix == ".py" and not has_directives:
        raise UserError(f"{file} is a Python program; check the job file or the script that starts it")
    if text.startswith("#!") or file.suffix in _SCRIPT_SUFFIXES:
        return True
    return has_directives and file.suffix not in _JOB_FILE_SUFFIXES


def _find_slurm(environment: Mapping[str, str]) -> tuple[bool, tuple[str, ...]]:
    """Return whether Slurm can be asked here, and what cannot be checked without it."""
    try:
        if choose_cluster("auto", environment) == "slurm":
            return True, ()
    except SubmissionError as error:
        return False, (f"the cluster was not asked: {error.message}",)
    return False, ("the cluster was not asked: there is no Slurm on this machine",)


def _job_subject(
    file: Path, overrides: Sequence[str] | None, environment: Mapping[str, str], *, has_slurm: bool
) -> Subject:
    directory = Path.cwd()
    try:
        resolved = read_job(file, overrides)
        request = request_to_submit(resolved, run_id=None, environment=environment)
        script = render_script(request).text
    except JobFileError as error:
        return Subject(text="", directory=directory, environment=environment, problems=error.values["problems"])
    except UserError as error:
        problem = Problem(file=str(file), sentence=error.message)
        return Subject(text="", directory=directory, environment=environment, problems=(problem,))
    return Subject(
        text=script,
        directory=directory,
        # What `submit` passes on.
        environment=submission_environment(environment)[0],
        request=request,
        reads_data=True,
        has_slurm=has_slurm,
    )


def _place(finding: Finding) -> tuple[bool, str, int]:
    return finding.line is None, finding.file, finding.line or 0


def repaired(text: str, directory: Path, environment: Mapping[str, str]) -> str:
    """Return a script with all its mechanical repairs.

    Each repair may move lines or make another one needless, so the rules look again after each.

    Args:
        text: the script, with its line breaks as they are.
        directory: the directory of submission.
    """
    for _ in range(_MOST_REPAIRS):
        subject = Subject(text=text, directory=directory, environment=environment)
        findings = findings_of(Path("script"), text, subject, LAYERS["script"], of_script=True)
        edits = next(
            (finding.hit.edits for finding in without_ignored(findings, "script", text) if finding.hit.edits), ()
        )
        if not edits:
            return text
        text = _edited(text, edits)
    return text


def _edited(text: str, edits: Sequence[Edit]) -> str:
    lines = text.split("\n")
    for edit in sorted(edits, key=lambda edit: edit.line, reverse=True):
        lines[edit.line - 1 : edit.line] = edit.lines
    return "\n".join(lines)
