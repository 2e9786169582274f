"""A sweep from the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcddp.jobfile.overrides import sweep_overrides
from hpcddp.jobfile.problems import JobFileError
from hpcddp.jobfile.read import ResolvedJob, load_job
from tests.facts import assert_facts
from tests.jobfile.conftest import GOOD
from tests.messages import GoldenMessages


def load(
    directory: Path, *axes: str, file: str | None = None, more: str = "", parallel: int | None = None
) -> ResolvedJob:
    job = directory / "job.yaml"
    job.write_text(GOOD + more)
    overrides = sweep_overrides(axes, None if file is None else directory / file, parallel)
    return load_job(job, options=overrides)


def refusal(directory: Path, *axes: str, file: str | None = None, more: str = "", parallel: int | None = None) -> str:
    with pytest.raises(JobFileError) as caught:
        load(directory, *axes, file=file, more=more, parallel=parallel)
    return str(caught.value).replace(f"{directory}/", "")


@pytest.mark.parametrize(
    ("axis", "values"),
    [
        ("train.seed=0..4", (0, 1, 2, 3, 4)),
        ("train.seed=0..1,7", (0, 1, 7)),
        ("learning_rate.base=0.1,1e-3", (0.1, 1e-3)),
        ("train.clip_grad_norm=null,1.0", (None, 1.0)),
        ("train.model=resnet18,'resnet34'", ("resnet18", "resnet34")),
        ("environment.env.LR=0.10,1e-3,no", ("0.10", "1e-3", "no")),
        ("environment.env.SEED=0..2", ("0", "1", "2")),
        ("environment.env.SEED=0..0", ("0",)),
        ("environment.env.SEED=1..2,07", ("1", "2", "07")),
        ('environment.env.WORD="a, b",$HOME', ("a, b", "$HOME")),
        ("train.model_args.layers=[1, 2]", ([1, 2],)),
        ("environment.env.RANGE=v1.0..v1.4,1.2...1.4,..", ("v1.0..v1.4", "1.2...1.4", "..")),
        ("train.model_args.layers=[1, 2],[3]", ([1, 2], [3])),
    ],
)
def test_values_are_written_as_behind_set(axis: str, values: tuple[Any, ...], tmp_path: Path) -> None:
    assert load(tmp_path, axis).spec.sweep == {axis.partition("=")[0]: values}


def test_several_axes_are_a_grid_in_place_of_the_job_files(tmp_path: Path) -> None:
    job = load(
        tmp_path, "learning_rate.base=0.1,0.2", "train.seed=0..1", more="sweep: {train.epochs: [1, 2]}\n", parallel=3
    )
    assert job.spec.sweep == {"learning_rate.base": (0.1, 0.2), "train.seed": (0, 1)}
    assert job.spec.max_parallel == 3
    assert job.origins["sweep.train.seed"] == "--sweep"
    assert job.origins["max_parallel"] == "--max-parallel"


@pytest.mark.parametrize(
    ("axes", "facts"),
    [
        (("",), ("--sweep: is ''", "expected KEY.PATH=VALUES", "write for example --sweep train.seed=0..4")),
        (("lr",), ("--sweep: is 'lr'", "write for example --sweep train.seed=0..4")),
        (
            ("learning_rate.base=0.1..0.4",),
            ("--sweep learning_rate.base: holds 0.1..0.4", "or the values, as in 0.1,0.2,0.4"),
        ),
        (("train.seed=1", "train.seed=2"), ("--sweep train.seed: is given twice", "write all values behind one")),
        (
            ("train.seed=[1",),
            (
                "--sweep train.seed: is not a list of values",
                "write them with commas between them",
                "quote a string with commas",
            ),
        ),
        (
            ("train.seed=",),
            ("--sweep train.seed: lists no value", "write for example [0, 1, 2]", "leave the key out"),
        ),
        (("train.seed=-1",), ("--sweep: element 0", "train.seed is -1", "at least 0", "write 0 or more")),
        (("train.seed=\0",), ("--sweep train.seed: contains a NUL character", "remove it")),
        (
            ("train.seed=0..9999", "train.epochs=1..11"),
            ("--sweep: has 110000 elements", "at most 100000", "split it into several sweeps"),
        ),
    ],
)
def test_an_option_that_cannot_be_is_refused_by_its_name(
    axes: tuple[str, ...], facts: tuple[str, ...], tmp_path: Path, golden: GoldenMessages
) -> None:
    assert_facts(golden.message(refusal(tmp_path, *axes)), *facts)


@pytest.mark.parametrize(
    ("axis", "values"),
    [
        ("learning_rate.base=[0.05, 0.2]", (0.05, 0.2)),
        ("train.seed=[3]", (3,)),
        ("environment.env.LR=[1e-3, 0.2]", ("1e-3", "0.2")),
    ],
)
def test_values_may_stand_in_brackets(axis: str, values: tuple[object, ...]) -> None:
    (_, override) = sweep_overrides([axis], None, None)
    assert tuple(override.value) == values


def test_max_parallel_without_a_sweep_is_refused(tmp_path: Path, golden: GoldenMessages) -> None:
    message = golden.message(refusal(tmp_path, parallel=3))
    assert_facts(message, "--max-parallel", "is 3", "no sweep", "write one, or remove it")


FILES = {
    "list.yaml": "- {train.seed: 1, learning_rate.base: 0.5}\n- {train.seed: 2}\n",
    "list.json": '[{"train.seed": 1, "learning_rate.base": 0.5}, {"train.seed": 2}]',
    "list.csv": "train.seed,learning_rate.base\n1,0.5\n2,\n\n",
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_lists_the_elements(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(FILES[name])
    assert load(tmp_path, file=name).spec.sweep == ({"train.seed": 1, "learning_rate.base": 0.5}, {"train.seed": 2})


def test_cells_of_a_csv_are_yaml_but_variables_are_texts(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(
        'train.optimizer,environment.env.WORD\n"{name: sgd}",007\n"{name: adamw}","a, ""b"""\n'
    )
    assert load(tmp_path, file="a.csv").spec.sweep == (
        {"train.optimizer": {"name": "sgd"}, "environment.env.WORD": "007"},
        {"train.optimizer": {"name": "adamw"}, "environment.env.WORD": 'a, "b"'},
    )


BAD_FILES = {
    ("a.csv", ""): ("a.csv: contains no element", "write a list of mappings"),
    ("a.csv", "train.seed,train.seed\n1,2\n"): ("a.csv:1: has an empty or a duplicate key path", "name each once"),
    ("a.csv", "train.seed\n1,2\n"): ("a.csv:2: has 2 cells", "1 in its first line", "write the same number"),
    ("a.csv", 'train.seed\n"1"2\n'): ("a.csv:2: is not valid CSV (',' expected after '\"')", "check quotes and commas"),
    ("a.csv", "train.seed\n.inf\n"): ("a.csv:2: has a cell for train.seed", "not a finite number", "write a number"),
    ("b.csv", 'train.seed\n1\n"[.nan]"\n'): ("b.csv:3: has a cell for train.seed", "not a finite number"),
    ("a.json", '[{"train.seed": 1}, {"train.seed": NaN}]'): ("a.json: sweep: element 1", "an integer"),
    ("b.json", '{"learning_rate.base": [0.1, 1e999]}'): ("b.json:1: is too large for a number", "quote it"),
    ("b.yaml", "- {train.seed: 1}\n- {train.seed: .nan}\n"): ("b.yaml:2: is not a finite number", "write a number"),
    ("a.json", "[{]"): ("a.json:1: is not valid YAML", "check indentation, quotes and brackets"),
    ("a.yaml", "- {train.seed: -1}\n"): ("a.yaml: sweep: element 0", "train.seed is -1", "at least 0"),
    ("a.yaml", "x"): ("a.yaml: sweep: is 'x'", "write for example {train.seed: [0, 1, 2]}"),
}


@pytest.mark.parametrize(("file", "facts"), BAD_FILES.items(), ids=map(" ".join, BAD_FILES))
def test_a_file_that_cannot_be_is_refused_with_its_line(
    file: tuple[str, str], facts: tuple[str, ...], tmp_path: Path, golden: GoldenMessages
) -> None:
    name, text = file
    (tmp_path / name).write_text(text)
    assert_facts(golden.message(refusal(tmp_path, file=name)), *facts)


@pytest.mark.parametrize(
    ("text", "fact"),
    [(f'[{{"train.seed": {"1" * 5000}}}]', "a number of 5000 characters"), ("[" * 10_000, "20 levels deep")],
    ids=["digits", "levels"],
)
def test_json_with_too_much_in_it_is_refused(text: str, fact: str, tmp_path: Path, golden: GoldenMessages) -> None:
    (tmp_path / "a.json").write_text(text)
    assert_facts(golden.message(refusal(tmp_path, file="a.json")), "a.json:1: is", fact)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert refusal(tmp_path, file="nothing.csv") == "nothing.csv: does not exist; check the path"


def test_a_file_beside_axes_is_refused(tmp_path: Path, golden: GoldenMessages) -> None:
    (tmp_path / "a.csv").write_text("train.seed\n1\n")
    message = golden.message(refusal(tmp_path, "train.seed=1", file="a.csv"))
    assert_facts(message, "--sweep-file: cannot be combined with --sweep", "into the file")
