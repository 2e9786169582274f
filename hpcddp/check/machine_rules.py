"""Rules about this machine: what ``hpcddp submit`` refuses here, and what it warns of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hpcddp.batch.job import short_epoch
from hpcddp.check.finding import Example, Hit, Rule, Severity, Subject, split_message
from hpcddp.errors import UserError
from hpcddp.submission.checks import check_sweep_submittable, notes_about, obstacles_to
from hpcddp.submission.request import SubmitRequest


def _refusals(subject: Subject) -> Iterator[Hit]:
    """Yield why ``submit`` refuses the job."""
    request = subject.request
    if request is None:
        return
    for sentence in (*_sweep(request)[0], *_no_plan(request)):
        yield _hit(sentence)
    if request.sweep_table is None:
        yield from (_hit(obstacle.sentence) for obstacle in obstacles_to(request) if obstacle.certain)


def _warnings(subject: Subject) -> Iterator[Hit]:
    """Yield what ``submit`` warns of."""
    request = subject.request
    if request is None:
        return
    for sentence in (*_sweep(request)[1], *notes_about(replace(request, run_id="new"))):
        yield _hit(sentence)
    if request.sweep_table is None:
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
    if request.sweep_table is None:
        return [], []
    try:
        return [], list(check_sweep_submittable(request, request.sweep_table))
    except UserError as error:
        return error.message.splitlines(), []


def _no_plan(request: SubmitRequest) -> list[str]:
    """Return why the batch cannot be split."""
    try:
        _ = request.plan
    except UserError as error:
        return [error.message]
    return []


RULES = (
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
