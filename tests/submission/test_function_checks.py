"""A function that a job names, and that its ranks could not import, is told before the job queues."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hpcddp.jobfile.job import JobSpec
from hpcddp.submission.checks import check_submittable
from hpcddp.submission.request import SubmissionError
from tests.messages import GoldenMessages
from tests.submission.requests import request_of

MODELS = """
import os as system
from math import sqrt
raise RuntimeError("this module is never imported")
def build(num_classes): ...
if system.name == "posix":
    class Net: ...
else:
    from elsewhere import Other
small = lambda num_classes: None
first, (second, *rest) = [None] * 3
def outer():
    def inner(): ...
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory of submission, with a module and a package."""
    (tmp_path / "own_models.py").write_text(MODELS)
    (tmp_path / "own_package" / "deep").mkdir(parents=True)
    (tmp_path / "own_package" / "__init__.py").write_text("")
    (tmp_path / "own_package" / "deep" / "losses.py").write_text("async def margin(logits, labels): ...\n")
    (tmp_path / "own_package" / "free.py").write_text("globals()['made'] = print\n")
    (tmp_path / "own_package" / "lazy.py").write_text("def __getattr__(name): ...\n")
    (tmp_path / "own_package" / "all.py").write_text("from own_models import *\n")
    (tmp_path / "broken.py").write_text("def build(:\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def job(**changes: Any) -> JobSpec:
    train = {"model": "resnet18", "dataset": "digits", **changes.pop("train", {})}
    return JobSpec.model_validate({"name": "a", "batch": {"global_batch_size": 8}, "train": train, **changes})


def refusal(spec: JobSpec, **fields: Any) -> str:
    with pytest.raises(SubmissionError) as caught:
        check_submittable(request_of(spec, cluster="slurm", **fields))
    assert caught.value.hint is not None
    assert caught.value.hint.endswith(" add --force.")
    assert check_submittable(request_of(spec, cluster="slurm", force=True, **fields)) == (caught.value.message,)
    return caught.value.message


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("own_model:build", ("{here} nor {python} ", "; did you mean own_models?")),
        ("own_models:biuld", ("({here}/own_models.py) defines no biuld; ", "; did you mean build?")),
        ("own_models:inner", ("({here}/own_models.py) defines no inner; ", " write the name of a function")),
        ("own_package.dep.losses:f", ("own_package has no module dep; ", "; did you mean deep?")),
        ("own_models.sub:f", ("own_models ({here}/own_models.py) ", "not a package")),
        ("broken:build", ("{here}/broken.py is not valid Python (line 1): ",)),
        ("zzzzzz:f", (" has a module zzzzzz; ", " submit from the directory ")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("key", ["model", "dataset", "loss"])
def test_a_function_that_is_not_there_is_refused_with_the_one_that_was_meant(
    here: Path, golden: GoldenMessages, key: str, name: str, facts: tuple[str, ...]
) -> None:
    message = golden.message(refusal(job(train={key: name})), {sys.executable: "PYTHON"})
    assert message.startswith(f"train.{key} is {name}, and ")
    assert all(fact.format(here=here, python=sys.executable) in message for fact in facts)


@pytest.mark.parametrize(
    "name",
    [
        "own_models:build", "own_models:Net", "own_models:Other", "own_models:small", "own_models:rest",
        "own_models:sqrt", "own_models:system", "own_package.deep.losses:margin", "own_package.free:any",
        "own_package.lazy:any", "own_package.all:any", "torchvision.models:resnet18", "math:sqrt",
        "logging:basicConfig",
    ],
)  # fmt: skip
def test_a_function_that_may_be_there_is_accepted_and_its_module_is_not_imported(name: str) -> None:
    before = set(sys.modules)
    assert check_submittable(request_of(job(train={"model": name}), cluster="slurm")) == ()
    assert not {"own_models", "own_package"} & (set(sys.modules) - before)


@pytest.mark.parametrize("expression", [f"{'-' * 100_000}1", f"a{'.a' * 100_000}"])
def test_a_module_that_is_nested_too_deeply_to_be_parsed_is_not_judged(here: Path, expression: str) -> None:
    (here / "deep.py").write_text(f"x = {expression}\n\n\ndef build(num_classes): ...\n")
    assert check_submittable(request_of(job(train={"model": "deep:build"}), cluster="slurm")) == ()


def test_entrypoint_and_group_are_checked_too() -> None:
    spec = JobSpec.model_validate({"name": "a", "entrypoint": "own_models:man"})
    assert refusal(spec).startswith("entrypoint is own_models:man, and ")
    spec = job(batch={"global_batch_size": 8, "unit": "group", "group": "own_models:grup"})
    assert refusal(spec).startswith("batch.group is own_models:grup, and ")


def test_pythonpath_is_searched(tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "far.py").write_text("def build(num_classes): ...\n")
    spec = job(train={"model": "far:build"})
    assert "has a module far" in refusal(spec)
    assert check_submittable(request_of(spec, cluster="slurm", environment={"PYTHONPATH": str(elsewhere)})) == ()
    spec = job(train={"model": "far:build"}, environment={"env": {"PYTHONPATH": str(elsewhere)}})
    assert check_submittable(request_of(spec, cluster="slurm")) == ()


def test_what_another_environment_may_hold_is_not_refused() -> None:
    # Shell lines may add packages; the modules of the directory of submission are looked at all the same.
    changed = {"setup": ["export PYTHONPATH=/elsewhere"]}
    assert check_submittable(request_of(job(train={"model": "far:build"}, environment=changed), cluster="slurm")) == ()
    spec = job(train={"model": "own_models:biuld"}, environment=changed)
    (note,) = check_submittable(request_of(spec, cluster="slurm"))
    assert "did you mean build?" in note
