"""A function that a job names, and that its ranks could not import, is told before the job queues."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.user_source import Module, collective_in
from hpcddp.submission.checks import check_submittable
from hpcddp.submission.request import SubmissionError
from hpcddp.train import losses
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
        ("own_models:biuld", ("({here}/own_models.py) defines no biuld; ", "; did you mean own_models:build?")),
        ("own_models:inner", ("({here}/own_models.py) defines no inner; ", " write the name of a function")),
        ("own_package.dep.losses:f", ("own_package has no module dep; ", "; did you mean own_package.deep?")),
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


TAKES = """
import functools
def build(num_classes, depth, width=64): ...
def free(num_classes, **rest): ...
def data(split, *, size): ...
def bare(): ...
class Net:
    def __init__(self, num_classes, depth=3): ...
@functools.cache
def cached(): ...
def replaced(): ...
replaced = functools.partial(print)
"""


@pytest.mark.parametrize(
    ("train", "fact"),
    [
        ({"model": "takes:build"}, "build needs the argument depth; write it into train.model_args"),
        (
            {"model": "takes:build", "model_args": {"depth": 1, "widht": 2}},
            "build takes no argument widht, which train.model_args gives; did you mean width?",
        ),
        ({"model": "takes:Net", "model_args": {"blocks": 2}}, "Net takes no argument blocks, which train.model_args"),
        ({"model": "takes:bare"}, "bare takes no argument num_classes, which hpcddp passes; add it"),
        ({"dataset": "takes:data"}, "data needs the argument size; write it into train.dataset_args"),
        (
            {"dataset": "takes:data", "dataset_args": {"sise": 3}},
            "data takes no argument sise, which train.dataset_args gives; did you mean size?",
        ),
    ],
)
def test_arguments_that_a_function_of_the_user_does_not_take_are_refused(
    here: Path, train: dict[str, Any], fact: str, golden: GoldenMessages
) -> None:
    (here / "takes.py").write_text(TAKES)
    assert fact in golden.message(refusal(job(train=train)))


@pytest.mark.parametrize(
    "train",
    [
        {"model": "takes:build", "model_args": {"depth": 3}},
        {"model": "takes:free", "model_args": {"x": 3}},
        {"model": "takes:Net", "model_args": {"depth": 3}},
        {"model": "takes:cached"},
        {"model": "takes:replaced"},
        {"dataset": "takes:data", "dataset_args": {"size": 3}},
    ],
)
def test_arguments_that_a_function_takes_or_may_take_are_accepted(here: Path, train: dict[str, Any]) -> None:
    (here / "takes.py").write_text(TAKES)
    assert check_submittable(request_of(job(train=train), cluster="slurm")) == ()


def test_entrypoint_and_group_are_checked_too() -> None:
    spec = JobSpec.model_validate({"name": "a", "entrypoint": "own_models:man"})
    assert refusal(spec).startswith("entrypoint is own_models:man, and ")
    spec = job(batch={"global_batch_size": 8, "unit": "group", "group": "own_models:grup"})
    assert refusal(spec).startswith("batch.group is own_models:grup, and ")


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("def main(): ...", "main takes no argument"),
        ("def main(context, rank): ...", "main needs 2 arguments"),
        ("def main(context, *, rank): ...", "main needs the argument rank"),
        ("class main: ...", "main is a class"),
    ],
)
def test_an_entrypoint_that_cannot_be_called_with_the_context_is_refused(
    here: Path, golden: GoldenMessages, source: str, what: str
) -> None:
    (here / "mine.py").write_text(source)
    message = golden.message(refusal(JobSpec.model_validate({"name": "a", "entrypoint": "mine:main"})))
    assert message.startswith(f"entrypoint is mine:main, and in {here}/mine.py {what}, ")
    assert message.endswith("; write def main(context)")


@pytest.mark.parametrize(
    "source",
    [
        "def main(context): ...",
        "def main(context=None, rank=0): ...",
        "def main(*words, rank=0, **more): ...",
        "@task\ndef main(): ...",
        "async def main(context, /): ...",
        "def main(): ...\nmain = wrapped(main)",
        "from other import main",
    ],
)
def test_an_entrypoint_that_may_be_called_with_the_context_is_accepted(source: str, here: Path) -> None:
    (here / "mine.py").write_text(source)
    spec = JobSpec.model_validate({"name": "a", "entrypoint": "mine:main"})
    assert check_submittable(request_of(spec, cluster="slurm")) == ()


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
    assert "did you mean own_models:build?" in note


COLLECTIVES = {
    "all_reduce": "import torch.distributed as dist\ndef loss(x, y):\n    dist.all_reduce(x)\n    return x.mean()\n",
    "all_gather": "from torch.distributed import all_gather\ndef loss(x, y):\n    all_gather([], x)\n",
    "broadcast": "import torch\ndef loss(x, y):\n    torch.distributed.broadcast(x, 0)\n",
    "gather_with_grad": "import hpcddp\ndef both(x): return hpcddp.gather_with_grad(x)\ndef loss(x, y): return both(x)",
    "additive_loss": "class Dice:\n    def __call__(self, x, y):\n        return additive_loss(f, x)\nloss = Dice()\n",
}


def test_every_helper_of_hpcddp_counts_as_a_collective() -> None:
    helpers = [name for name in losses.__all__ if name.islower()]
    assert "additive_loss" in helpers
    for name in helpers:
        body = ast.parse(f"def loss(x, y): return hpcddp.{name}(x)").body
        module = Module(name="own_loss", is_package=False, body=body)
        assert collective_in(module, "loss", lambda _: None) == name


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_loss_of_shares_that_calls_a_collective_is_refused(name: str, here: Path, golden: GoldenMessages) -> None:
    (here / "own_loss.py").write_text(COLLECTIVES[name])
    message = golden.message(refusal(job(train={"loss": "own_loss:loss"})))
    for reduction in ("sum", "per_sample"):
        assert refusal(job(train={"loss": "own_loss:loss", "loss_reduction": reduction})) == message
    assert f"loss calls {name}, " in message
    assert "; write train.loss_reduction: global, and check " in message
    declared = job(train={"loss": "own_loss:loss", "loss_reduction": "global"})
    assert check_submittable(request_of(declared, cluster="slurm")) == ()


IMPORTED = {
    "from": "from my_losses.dice import dice\ndef loss(x, y): return dice(x, y)\n",
    "as": "from my_losses.dice import dice as loss\n",
    "relative": "from .dice import dice as loss\n",
    "package": "from my_losses import dice as loss\n",
    "module": "from my_losses import dice as terms\ndef loss(x, y): return terms.dice(x, y)\n",
    "dotted": "import my_losses.dice\nclass Both:\n    def f(self): my_losses.dice.dice()\nloss = Both()\n",
    "renamed": "import my_losses.dice as terms\ndef loss(x, y): return terms.dice(x, y)\n",
}


@pytest.mark.parametrize("form", IMPORTED)
def test_a_collective_in_a_module_that_the_loss_imports_is_seen(form: str, here: Path) -> None:
    package = here / "my_losses"
    package.mkdir()
    (package / "__init__.py").write_text("from .dice import dice\nraise RuntimeError('it is never imported')\n")
    (package / "dice.py").write_text("import torch.distributed as dist\ndef dice(x, y):\n    dist.all_reduce(x)\n")
    (package / "own_loss.py").write_text(IMPORTED[form])
    (here / "own_loss.py").write_text(IMPORTED[form])
    name = "my_losses.own_loss" if form == "relative" else "own_loss"
    message = refusal(job(train={"loss": f"{name}:loss"}))
    assert "loss calls all_reduce (in module my_losses.dice), " in message


def test_the_code_of_installed_packages_is_not_followed(here: Path) -> None:
    """Their losses call collectives only where an argument asks for it."""
    (here / "site-packages").mkdir()
    (here / "site-packages" / "bought.py").write_text("def dice(x, y, sync=False):\n    all_reduce(x)\n")
    (here / "own_loss.py").write_text("import bought\ndef loss(x, y): return bought.dice(x, y)\n")
    spec = job(train={"loss": "own_loss:loss"}, environment={"env": {"PYTHONPATH": str(here / "site-packages")}})
    assert check_submittable(request_of(spec, cluster="slurm")) == ()


@pytest.mark.parametrize(
    "source",
    [
        "from my_losses import nothing as loss\n",
        "import torch\ndef loss(x, y): return torch.nn.functional.mse_loss(x, y)\n",
        "from own_loss import loss\n",
        "from .. import loss\n",
        "def loss(x, y): return x.gather(1, y[:, None]).mean()\n",
        "import torch.distributed as dist\ndef other(x): dist.all_reduce(x)\ndef loss(x, y): return x.mean()\n",
        "def loss(x, y):\n    # no all_reduce(x) here\n    return 'all_reduce(x)'\n",
        "from functools import reduce\ndef loss(x, y): return reduce(max, x)\n",
    ],
)
def test_a_loss_that_calls_no_collective_is_accepted(source: str, here: Path) -> None:
    (here / "own_loss.py").write_text(source)
    assert check_submittable(request_of(job(train={"loss": "own_loss:loss"}), cluster="slurm")) == ()
