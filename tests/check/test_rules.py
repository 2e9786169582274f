"""Every rule finds its bad example, and nothing in its good one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcddp.check.check import LAYERS, RULES
from hpcddp.check.finding import Rule
from tests.check.examples import report_of

NEEDS_SLURM = {"slurm-refuses", "beyond-the-cluster"}
HERE = [rule for rule in RULES.values() if rule.code not in NEEDS_SLURM]
SLOW = {rule.code for rule in HERE if rule.is_slow}
MARKS = [pytest.mark.slow, pytest.mark.depends_on("hpcddp/check", "hpcddp/jobfile", "hpcddp/train", "tests/check")]


def parametrized(rules: list[Rule]) -> list[object]:
    return [pytest.param(rule, id=rule.code, marks=MARKS if rule.code in SLOW else []) for rule in rules]


@pytest.mark.parametrize("rule", parametrized(HERE))
def test_a_rule_finds_its_bad_example(rule: Rule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = report_of(rule.bad, tmp_path, monkeypatch, {"PATH": os.environ["PATH"]})
    assert {finding.rule.code for finding in report.findings} == {rule.code}


@pytest.mark.parametrize("rule", parametrized(HERE))
def test_nothing_is_found_in_a_good_example(rule: Rule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = report_of(rule.good, tmp_path, monkeypatch, {"PATH": os.environ["PATH"]})
    assert report.findings == ()


def test_each_rule_has_a_code_of_its_own_and_says_where_it_is_from() -> None:
    assert len(RULES) == sum(len(rules) for rules in LAYERS.values())
    assert all(rule.sources and not rule.otherwise.endswith(".") for rule in RULES.values())
