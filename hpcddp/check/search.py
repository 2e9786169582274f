"""Search a subject with rules, and leave out what a comment in the user's file ignores."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from hpcddp.check import job_rules
from hpcddp.check.finding import Finding, Hit, Rule, Subject
from hpcddp.jobfile.document import path_of, read_document, read_text
from hpcddp.jobfile.problems import JobFileError, Problem
from hpcddp.submission.request import SubmitRequest


def check_in_short(file: Path | None, request: SubmitRequest) -> list[Finding]:
    """Check a job that is about to be submitted with the rules about its job file that take no time.

    Args:
        file: the job file; None if the command line describes the whole job.
    """
    text = "" if file is None else read_text(file)
    subject = Subject(text="", directory=request.directory, environment=request.environment, request=request)
    rules = [rule for rule in job_rules.RULES if not rule.is_slow]
    # Read again for its lines: the job is a value without them.
    lines_of = "" if isinstance(text, Problem) else text
    name = file or Path("the command line")
    return list(without_ignored(findings_of(name, lines_of, subject, rules, of_script=False), str(name), lines_of))


def findings_of(
    file: Path, text: str, subject: Subject, rules: Iterable[Rule], *, of_script: bool
) -> Iterator[Finding]:
    """Yield the findings of rules.

    Args:
        file: the file that the user wrote.
        of_script: whether the rules look at the script, which is rendered from a job file.
    """
    lines = {} if subject.request is None and not subject.problems else _lines_of_keys(text)
    is_rendered = of_script and subject.request is not None
    for rule in rules:
        if of_script and not subject.has_script:
            continue
        for hit in rule.find(subject):
            name = f"the script of {file}" if is_rendered else str(file)
            line = hit.line if hit.line is not None else _line_of_key(hit, lines)
            yield Finding(rule=rule, hit=hit, file=name, line=line)


def _lines_of_keys(text: str) -> Mapping[tuple[str, ...], int]:
    """Return the line of every key path of a job file; none of one that is not YAML."""
    try:
        return read_document(text).source.lines
    except JobFileError:
        return {}


def _line_of_key(hit: Hit, lines: Mapping[tuple[str, ...], int]) -> int | None:
    """Return the line of a key, or that of the section in which it is not given; None without either."""
    path = path_of(hit.key) if hit.key else ()
    while path and path not in lines:
        path = path[:-1]
    return lines.get(path) if path else None


_IGNORE: Final = re.compile(r"#\s*hpcddp:\s*ignore\s+([a-z0-9, -]+)")


def without_ignored(findings: Iterable[Finding], file: str, text: str) -> Iterator[Finding]:
    """Yield the findings that no comment ignores, on their line or on the line above it.

    A finding without a line in the file itself is ignored by a comment anywhere.
    """
    ignored_by_line: dict[int, set[str]] = {}
    for number, line in enumerate(text.split("\n"), 1):
        match = _IGNORE.search(line)
        if match is not None:
            ignored_by_line[number] = set(re.split("[, ]+", match[1].strip()))
    ignored_anywhere = set[str]().union(*ignored_by_line.values())
    for finding in findings:
        if finding.line is None or finding.file != file:
            ignored = ignored_anywhere
        else:
            ignored = ignored_by_line.get(finding.line, set()) | ignored_by_line.get(finding.line - 1, set())
        if finding.rule.code not in ignored:
            yield finding
