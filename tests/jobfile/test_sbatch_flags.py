from __future__ import annotations

from collections.abc import Callable

import pytest

from hpcddp.jobfile.read import ResolvedJob
from hpcddp.jobfile.resources import REFUSED_FLAGS, refused_because

Load = Callable[..., ResolvedJob]
Refuse = Callable[..., list[str]]


@pytest.mark.parametrize("flag", REFUSED_FLAGS)
def test_a_flag_that_hpcddp_needs_is_refused_by_name_with_a_way_out(flag: str) -> None:
    refused = refused_because(flag)
    assert refused is not None
    why, instead = refused
    assert why.startswith(f"--{flag} cannot be set here: ")
    assert instead


@pytest.mark.parametrize(
    ("name", "flag"),
    [
        ("open_mode", "open-mode"),
        ("--array", "array"),
        ("-J", "job-name"),
        ("J", "job-name"),
        ("t", "time"),
        ("arr", "array"),
        ("wra", "wrap"),
        ("OUTPUT", "output"),
        ("output=x", "output"),
        (" wrap", "wrap"),
        ("no-req", "no-requeue"),
    ],
)
def test_other_spellings_of_a_refused_flag_are_refused_too(name: str, flag: str) -> None:
    refused = refused_because(name)
    assert refused is not None
    assert refused[0].startswith(f"--{flag} cannot be set here: ")


@pytest.mark.parametrize("name", ["mail_type", "--comment", "b", "", "a b", "Comment", "comment\nwrap", "é", "-"])
def test_a_name_that_is_no_long_flag_is_refused(name: str) -> None:
    refused = refused_because(name)
    assert refused is not None
    assert refused[0] == "a flag is the long name that man sbatch lists, without dashes in front"


@pytest.mark.parametrize(
    "name", ["switches", "mail-type", "comment", "begin", "dependency", "nice", "mem-bind", "core-spec"]
)
def test_any_other_flag_may_be_set(name: str) -> None:
    assert refused_because(name) is None


def test_flags_hold_a_text_a_whole_number_or_true(load: Load) -> None:
    spec = load('resources: {sbatch: {comment: a "b", switches: 1, overcommit: true}}\n').spec
    assert spec.resources.sbatch == {"comment": 'a "b"', "switches": "1", "overcommit": True}


@pytest.mark.parametrize(
    ("value", "line"),
    [
        (
            "false",
            "is false, and a flag cannot be written as off; write true for a flag without a value, or leave it out",
        ),
        (
            "null",
            "is empty, and a flag cannot be written as off; write true for a flag without a value, or leave it out",
        ),
        ("1.5", 'is 1.5, and a flag takes one value; write a string or an integer, or quote it: "1.5"'),
        ("[a]", 'is a list, and a flag takes one value; write a string or an integer, or quote it: "1.5"'),
        ("''", "is '', and it is empty; write a text, or leave the key out"),
        (
            '"a\\rb"',
            "is 'a\\rb', and it holds a carriage return, which one line of a script cannot carry; remove it",
        ),
    ],
)
def test_a_value_that_no_directive_carries_is_refused(value: str, line: str, refuse: Refuse) -> None:
    assert refuse(f"resources: {{sbatch: {{comment: {value}}}}}\n") == [f"job.yaml:4: resources.sbatch.comment: {line}"]
