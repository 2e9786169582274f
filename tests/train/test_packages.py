"""What is missing is one sentence with the command that installs it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcddp import packages
from hpcddp.packages import MissingPackageError, require, shipped_directory
from tests.messages import GoldenMessages

PROJECT = Path(__file__).parents[2]


def load_digits() -> object:
    from hpcddp.train.data.builtin import load_digits as load

    return load()


def load_imagefolder() -> object:
    from hpcddp.train.data.builtin import load_imagefolder as load

    return load(data_dir=PROJECT, augment=True, image_size=224, resize=None)


def load_cifar10() -> object:
    from hpcddp.train.data.builtin import load_cifar10 as load

    return load(data_dir=PROJECT, augment=True)


def build_model() -> object:
    from hpcddp.train.model.replica import build_model

    return build_model("resnet18", {}, 10)


@pytest.mark.parametrize(
    ("use", "purpose", "package"),
    [
        (load_digits, "train.dataset: digits", "scikit-learn"),
        (load_cifar10, "train.dataset: cifar10", "torchvision"),
        (load_imagefolder, "train.dataset: imagefolder", "torchvision"),
        (build_model, "train.model: resnet18", "torchvision"),
    ],
)
def test_what_needs_a_package_says_so_where_it_is_missing(
    golden: GoldenMessages, use: Callable[[], Any], purpose: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import hpcddp.train  # noqa: F401  it needs torch itself

    monkeypatch.setattr(packages, "find_spec", lambda _: None)
    with pytest.raises(MissingPackageError) as caught:
        use()
    message = golden.message(caught.value, {sys.executable: "PYTHON"})
    assert f"{purpose} needs {package}" in message
    assert f"run: {sys.executable} -m pip install 'hpcddp[train]'" in message


def test_nothing_is_said_of_what_is_installed() -> None:
    require("a test", "pytest", "pydantic")


@pytest.mark.parametrize(("name", "file"), [("jobs", "quickstart.yaml"), ("templates", "sbatch.sh.j2")])
def test_a_checkout_has_its_files_beside_the_package(name: str, file: str) -> None:
    assert shipped_directory(name) == PROJECT / name
    assert (shipped_directory(name) / file).is_file()
