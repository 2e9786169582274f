from __future__ import annotations

from collections.abc import Callable

import pytest

from hpcddp.jobfile.read import ResolvedJob
from hpcddp.jobfile.resources import REFUSED_FLAGS, REFUSED_FLAGS_OF_SRUN, refused_because
from hpcddp.jobfile.slurm_flags import SBATCH, SRUN, SlurmFlags
from tests.facts import assert_facts
from tests.messages import GoldenMessages

Load = Callable[..., ResolvedJob]
Refuse = Callable[..., list[str]]


def flags_of(command: SlurmFlags) -> frozenset[str]:
    return command.with_value | command.with_optional_value | command.without_value


REFUSED = [*(("sbatch", flag) for flag in REFUSED_FLAGS), *(("srun", flag) for flag in REFUSED_FLAGS_OF_SRUN)]
# The alias with an underscore is no name of the job file.
ALLOWED = [
    *(("sbatch", flag) for flag in sorted(flags_of(SBATCH) - REFUSED_FLAGS.keys())),
    *(("srun", flag) for flag in sorted(flags_of(SRUN) - REFUSED_FLAGS_OF_SRUN.keys() - {"cpu_bind"})),
]


@pytest.mark.parametrize(("command", "flag"), REFUSED)
def test_a_flag_that_hpcddp_needs_is_refused_by_name_with_a_way_out(command: str, flag: str) -> None:
    refused = refused_because(flag, command)
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
    refused = refused_because(name, "sbatch")
    assert refused is not None
    assert refused[0].startswith(f"--{flag} cannot be set here: ")


@pytest.mark.parametrize(
    ("name", "flag"),
    [("lab", "label"), ("-u", "unbuffered"), ("K", "kill-on-bad-exit"), ("gpus-per", "gpus-per-node"), ("W", "wait")],
)
def test_other_spellings_are_those_of_srun_in_its_mapping(name: str, flag: str) -> None:
    refused = refused_because(name, "srun")
    assert refused is not None
    assert refused[0].startswith(f"--{flag} cannot be set here: ")


@pytest.mark.parametrize("name", ["mem_bind", "--comment", "b", "", "a b", "Comment", "comment\nwrap", "é", "-"])
def test_a_name_that_is_no_long_flag_is_refused(name: str, golden: GoldenMessages) -> None:
    refused = refused_because(name, "sbatch")
    assert refused is not None
    assert_facts(golden.message(refused[0]), "man sbatch", "without dashes")


@pytest.mark.parametrize(("command", "name"), ALLOWED)
def test_any_other_flag_may_be_set(command: str, name: str) -> None:
    assert refused_because(name, command) is None


def test_flags_hold_a_text_a_whole_number_or_true(load: Load) -> None:
    spec = load('resources: {sbatch: {comment: a "b", switches: 1, overcommit: true}}\n').spec
    assert spec.resources.sbatch == {"comment": 'a "b"', "switches": "1", "overcommit": True}


@pytest.mark.parametrize(
    ("value", "facts"),
    [
        (
            "false",
            ("is false", "write true for a flag", "leave it out"),
        ),
        (
            "null",
            ("is empty", "write true for a flag", "leave it out"),
        ),
        ("1.5", ("is 1.5", "write a string or an integer", 'quote it: "1.5"')),
        ("[a]", ("is a list", "write a string or an integer", 'quote it: "1.5"')),
        ("''", ("is ''", "write a text", "leave the key out")),
        (
            '"a\\rb"',
            ("is 'a\\rb'", "a carriage return", "remove it"),
        ),
    ],
)
def test_a_value_that_no_directive_carries_is_refused(value: str, facts: tuple[str, ...], refuse: Refuse) -> None:
    (line,) = refuse(f"resources: {{sbatch: {{comment: {value}}}}}\n")
    assert_facts(line, f"job.yaml:4: resources.sbatch.comment: {facts[0]}", *facts[1:])
