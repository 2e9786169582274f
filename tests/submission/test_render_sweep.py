"""The script of a sweep: what each element's tasks see, and what it asks sbatch for."""

from __future__ import annotations

import subprocess
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from hpcddp.jobfile.fields import UNEXPANDED_RANGE
from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.read import ResolvedJob
from hpcddp.submission.render import render_script
from tests.examples import examples
from tests.messages import GoldenMessages
from tests.submission.hostile_text import MARKER, TEXT
from tests.submission.requests import request_of
from tests.submission.script_runner import ScriptRunner

VARIABLES = ("V_A", "V_B")


def job(sweep: Any, **more: Any) -> ResolvedJob:
    fields = {"name": "demo", "batch": {"global_batch_size": 8}, "train": {"model": "resnet18", "dataset": "digits"}}
    return ResolvedJob(spec=JobSpec.model_validate({**fields, "sweep": sweep, **more}), origins={})


def directive(text: str, flag: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(f"#SBATCH --{flag}="))


def test_the_array_has_an_index_for_each_element() -> None:
    sweep = {"train.seed": [1, 2, 3], "train.epochs": [1, 2]}
    assert (
        directive(render_script(request_of(job(sweep), python="py", run_id="r1")).text, "array")
        == "#SBATCH --array=0-5"
    )
    limited = render_script(request_of(job(sweep, max_parallel=2), python="py", run_id="r1")).text
    assert directive(limited, "array") == "#SBATCH --array=0-5%2"


def test_every_element_has_a_log_of_its_own() -> None:
    sweep = {"train.seed": [1, 2]}
    text = render_script(request_of(job(sweep), python="py", run_id="r1")).text
    assert directive(text, "output") == "#SBATCH --output=runs/demo/r1/logs/%A_%a.log"
    by_hand = render_script(request_of(job(sweep), python="py", run_id=None)).text
    assert directive(by_hand, "output") == "#SBATCH --output=%x-%A_%a.out"


def test_the_beginning_is_told_which_element_it_is(runner: ScriptRunner) -> None:
    text = render_script(request_of(job({"train.seed": [1, 2]}), python=str(runner.python), run_id="r1")).text
    code, errors = runner.run(text, SLURM_ARRAY_TASK_ID="1", HPCDDP_SWEEP_FIRST="40")
    assert (code, errors) == (0, "")
    assert "--element=41" in runner.words("begin")
    assert "HPCDDP_SWEEP_INDEX=41" in runner.words("environment")


def test_a_sweep_that_does_not_run_as_an_array_says_so(runner: ScriptRunner, golden: GoldenMessages) -> None:
    text = render_script(request_of(job({"train.seed": [1, 2]}), python=str(runner.python), run_id="r1")).text
    code, errors = runner.run(text)
    assert code != 0
    # The shell writes its own name and the line before it.
    assert golden.message(errors[errors.index("SLURM_ARRAY_TASK_ID") :]).startswith("SLURM_ARRAY_TASK_ID: a sweep ")
    assert runner.words("begin") == []


def test_a_swept_variable_takes_the_place_of_the_jobs_own(runner: ScriptRunner) -> None:
    swept = job({"environment.env.V_A": ["x", "y"]}, environment={"env": {"V_A": "own", "V_B": "b"}})
    text = render_script(request_of(swept, python=str(runner.python), run_id="r1")).text
    runner.run(text, SLURM_ARRAY_TASK_ID="1")
    assert {"V_A=y", "V_B=b"} <= set(runner.words("environment"))


NO_RANGE = TEXT.filter(lambda text: UNEXPANDED_RANGE.fullmatch(text) is None)


@examples(0.3)
@given(
    values=st.lists(NO_RANGE, min_size=1, max_size=3, unique=True),
    others=st.lists(NO_RANGE, min_size=1, max_size=2, unique=True),
    data=st.data(),
)
def test_every_value_of_a_grid_arrives_byte_for_byte(values: list[str], others: list[str], data: st.DataObject) -> None:
    swept = job({"environment.env.V_A": values, "train.seed": [1, 2], "environment.env.V_B": others})
    elements = list(product(values, (1, 2), others))
    index = data.draw(st.integers(0, len(elements) - 1))
    value, _, other = elements[index]
    assert seen_by(swept, index) == {"V_A": value, "V_B": other}


def test_the_numbers_of_a_range_are_values_of_a_variable() -> None:
    swept = job({"environment.env.V_A": "8..10", "environment.env.V_B": ["0..0"]})
    assert seen_by(swept, 2) == {"V_A": "10", "V_B": "0"}


@examples(0.2)
@given(values=st.lists(TEXT, min_size=1, max_size=4, unique=True), data=st.data())
def test_every_value_of_a_list_arrives_byte_for_byte(values: list[str], data: st.DataObject) -> None:
    listed = job([{"environment.env.V_A": value, "environment.env.V_B": "same"} for value in values])
    index = data.draw(st.integers(0, len(values) - 1))
    assert seen_by(listed, index) == {"V_A": values[index], "V_B": "same"}


def seen_by(swept: ResolvedJob, index: int) -> dict[str, str]:
    """Run the script of one element, and return the swept variables as its task sees them."""
    with tempfile.TemporaryDirectory() as directory:
        runner = ScriptRunner(Path(directory))
        runner.set_up()
        text = render_script(request_of(swept, python=str(runner.python), run_id="r1")).text
        subprocess.run(["/bin/bash", "-n"], input=text.encode(), check=True)
        code, errors = runner.run(text, SLURM_ARRAY_TASK_ID=str(index))
        assert (code, errors) == (0, "")
        assert not (runner.directory / MARKER).exists()
        seen = dict(word.partition("=")[::2] for word in runner.words("environment"))
        return {name: seen[name] for name in VARIABLES}
