"""What stands at the fields of the job file, and what follows from it."""

from __future__ import annotations

from typing import Any

import pytest

from hpcddp.cli.field_options import field_options
from hpcddp.jobfile.field_facts import AS_IN_JOB, facts_of
from hpcddp.jobfile.job import JobSpec, example_of, field_paths, is_secret, on_resume
from hpcddp.jobfile.messages import field_named
from hpcddp.jobfile.overrides import read_options
from hpcddp.jobfile.read import load_job
from hpcddp.jobfile.sections import Train
from hpcddp.jobfile.slurm_flags import SBATCH

FIELDS = list(field_paths())


def test_every_required_field_has_an_example_and_no_other_field_has_one() -> None:
    assert {path for path, field in FIELDS if facts_of(field).example is not None} == {
        path for path, field in FIELDS if field.is_required()
    }


def test_the_examples_are_valid() -> None:
    examples: dict[str, Any] = {}
    for path, field in FIELDS:
        if field.is_required():
            section = examples
            for key in path[:-1]:
                section = section.setdefault(key, {})
            section[path[-1]] = example_of(path)
    assert JobSpec.model_validate(examples).name == "my-job"


def test_no_key_path_but_that_of_a_required_field_has_an_example() -> None:
    assert example_of(()) is None
    assert example_of(("train", "epochs")) is None
    assert example_of(("train", "model", "x")) is None


def test_every_flag_is_one_of_sbatch_and_is_named_once() -> None:
    flags = [facts_of(field).flag for _, field in FIELDS if facts_of(field).flag is not None]
    assert [flag for flag in flags if SBATCH.long_flags_of(str(flag)) != [flag]] == []
    assert len(set(flags)) == len(flags)


def test_every_option_has_names_of_its_own() -> None:
    names = [name for option in field_options() for name in (option.name, option.letter) if name is not None]
    assert sorted(set(names)) == sorted(names)


def test_what_other_tools_call_a_field_means_one_field() -> None:
    words = [(word, ".".join(path)) for path, field in FIELDS for word in facts_of(field).other_names]
    assert [(word, field_named(word)) for word, _ in words] == words


def test_the_values_with_which_doctor_ddp_compares_are_valid() -> None:
    values = {name: facts_of(field).ddp_value for name, field in Train.model_fields.items()}
    changed = {name: value for name, value in values.items() if value is not AS_IN_JOB}
    assert Train.model_validate({"model": "resnet18", "dataset": "digits", **changed}).device == "cpu"


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("name", "always"),
        ("run_root", "always"),
        ("resources.nodes", "always"),
        ("environment.env.A", "always"),
        ("batch.split", "always"),
        ("batch.tail", "never"),
        ("batch.global_batch_size", "by name"),
        ("learning_rate.base", "by name"),
        ("command", "by name"),
        ("train", "never"),
        ("train.epochs", "by name"),
        ("train.model_args.depth", "never"),
        ("absent", "never"),
    ],
)
def test_whether_a_resumption_may_change_a_field_stands_at_it_or_at_its_section(key: str, expected: str) -> None:
    assert on_resume(tuple(key.split("."))) == expected


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("environment", True),
        ("environment.env", True),
        ("environment.env.A", True),
        ("environment.setup.0", True),
        ("environment.pass_env", False),
        ("name", False),
    ],
)
def test_a_secret_is_hidden_with_the_section_that_it_is_in(key: str, expected: bool) -> None:  # noqa: FBT001
    assert is_secret(tuple(key.split("."))) is expected


def test_the_option_of_a_text_takes_it_as_it_is_and_that_of_another_value_reads_it() -> None:
    words = {
        "resources.partition": ("--partition", "010"),
        "resources.mail_user": ("--mail-user", "007"),
        "resources.mem": ("--mem", "0"),
        "resources.nodes": ("--nodes", "2"),
    }
    job = {"name": "a", "command": ["true"]}
    resources = load_job(job, options=read_options(words, None)).spec.resources
    assert (resources.partition, resources.mail_user, resources.mem, resources.nodes) == ("010", "007", "0", 2)
