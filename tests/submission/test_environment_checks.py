from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

import hpcddp
from hpcddp.packages import pip_requirement
from hpcddp.submission import environment_checks
from tests.messages import GoldenMessages
from tests.submission.submitting import errors_of, program, virtual, warnings_of

CONDA = """#!/bin/sh
[ "$*" = "env list --json" ] && echo '{{"envs": ["{base}", "{base}/envs/train", "{base}/envs/empty"]}}'
"""


def test_a_virtual_environment_that_can_run_hpcddp_is_in_nobodys_way(here: Path) -> None:
    virtual(Path("my venv"))
    assert warnings_of(here, {"venv": "my venv"}) == []


def test_a_virtual_environment_without_an_interpreter_is_named(here: Path, golden: GoldenMessages) -> None:
    Path("empty").mkdir()
    (error,) = errors_of(here, {"venv": "empty"})
    assert golden.message(error).startswith("environment.venv is 'empty', ")
    assert "but empty/bin/python does not exist; " in error
    assert "(python -m venv empty)" in error


@pytest.mark.parametrize(
    ("origin", "requirement"),
    [
        ({"url": "file:///home/me/hpcddp%20clone", "dir_info": {"editable": True}}, "/home/me/hpcddp clone"),
        ({"url": "https://example.org/hpcddp.git", "vcs_info": {}}, "hpcddp"),
        ({}, "hpcddp"),
        (None, "hpcddp"),
    ],
)
def test_hpcddp_is_installed_elsewhere_from_where_it_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, origin: dict[str, Any] | None, requirement: str
) -> None:
    metadata = tmp_path / "hpcddp-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: hpcddp\nVersion: 1.0\n")
    if origin is not None:
        (metadata / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert pip_requirement() == requirement


REQUIREMENT = shlex.quote(pip_requirement())


def test_a_virtual_environment_without_hpcddp_is_told_how_to_get_it(here: Path, golden: GoldenMessages) -> None:
    virtual(Path("bare venv"), with_hpcddp=False)
    (error,) = errors_of(here, {"venv": "bare venv"})
    assert golden.message(error, {REQUIREMENT: "HPCDDP"}).startswith("environment.venv is 'bare venv', ")
    assert "No module named 'hpcddp'" in error
    assert error.endswith(f"; run: 'bare venv/bin/python' -m pip install {REQUIREMENT}")
    # Lines that run before may bring it.
    assert warnings_of(here, {"venv": "bare venv", "setup": ("export PYTHONPATH=/opt/hpcddp",)}) == [error]


def test_another_version_of_hpcddp_is_a_warning(
    here: Path, monkeypatch: pytest.MonkeyPatch, golden: GoldenMessages
) -> None:
    version = hpcddp.__version__
    virtual(Path("venv"))
    monkeypatch.setattr("hpcddp.submission.environment_checks.__version__", "99.0")
    (warning,) = warnings_of(here, {"venv": "venv"})
    assert golden.message(warning, {version: "VERSION"}).startswith("environment.venv is 'venv', ")
    assert f"python has hpcddp {version}, " in warning
    assert warning.endswith(" is 99.0; install the same")


def test_an_interpreter_of_the_users_own_is_looked_at_too(here: Path, golden: GoldenMessages) -> None:
    python = str(virtual(Path("bare"), with_hpcddp=False) / "bin" / "python")
    (error,) = errors_of(here, {"python": python})
    assert golden.message(error, {REQUIREMENT: "HPCDDP"}).startswith(f"environment.python is '{python}', ")
    assert error.endswith(f"; run: {python} -m pip install {REQUIREMENT}")
    for name in ("/no/such/python", "python9.99"):
        (error,) = errors_of(here, {"python": name})
        assert golden.message(error).startswith(f"environment.python is {name!r}, ")
        assert "no program of that name; " in error
    # Modules may add it on the node.
    (*_, note) = warnings_of(here, {"python": "python9.99", "modules": ["python/9.99"]})
    assert note == error


def test_a_uv_project_says_what_to_run(here: Path, golden: GoldenMessages) -> None:
    def refusal() -> str:
        (error,) = errors_of(here, {"uv": "project"})
        assert golden.message(error, {REQUIREMENT: "HPCDDP"}).startswith("environment.uv is 'project', ")
        return error

    assert "but project/pyproject.toml does not exist; " in refusal()
    Path("project").mkdir()
    Path("project/pyproject.toml").touch()
    error = refusal()
    assert "the directory project/.venv does not exist; " in error
    assert "(python -m pip install uv)" in error
    assert error.endswith(" run: uv sync --project project")
    program(here, "uv")
    assert refusal().endswith("project/.venv does not exist; run: uv sync --project project")
    virtual(Path("project/.venv"), with_hpcddp=False)
    assert refusal().endswith(f"; run: uv add --project project {REQUIREMENT}")


def test_a_uv_environment_older_than_its_lock_file_is_a_warning(here: Path, golden: GoldenMessages) -> None:
    Path("project").mkdir()
    Path("project/pyproject.toml").touch()
    virtual(Path("elsewhere"))
    at = {"UV_PROJECT_ENVIRONMENT": str(Path("elsewhere").absolute())}
    program(here, "uv", '#!/bin/sh\necho "$@" > asked\nexit 1\n')
    (warning,) = warnings_of(here, {"uv": "project"}, more=at)
    assert golden.message(warning).startswith("environment.uv is 'project', ")
    assert warning.endswith("; run: uv sync --project project")
    assert Path("asked").read_text() == "sync --check --frozen --inexact --offline --project project\n"
    program(here, "uv")
    assert warnings_of(here, {"uv": "project"}, more=at) == []


def conda(here: Path) -> Path:
    base = here / "conda"
    (base / "condabin").mkdir(parents=True)
    virtual(base)
    virtual(base / "envs" / "train")
    (base / "envs" / "empty").mkdir()
    program(here, "conda", CONDA.format(base=base))
    return base


def test_conda_environments_are_found_by_name_and_by_directory(here: Path) -> None:
    base = conda(here)
    for name in ("train", "base", f"{base}/envs/train"):
        assert warnings_of(here, {"conda": name}) == []
    (here / "bin" / "conda").rename(here / "conda.exe")
    assert warnings_of(here, {"conda": "train"}, more={"CONDA_EXE": str(here / "conda.exe")}) == []


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("gone", "make it: conda create --name gone python"),
        ("./gone", "make it: conda create --prefix ./gone python"),
        ("empty", "{here}/conda/envs/empty/bin/python does not exist; install python and hpcddp in it"),
    ],
)
def test_a_conda_environment_that_cannot_be_used_is_named(
    here: Path, golden: GoldenMessages, name: str, advice: str
) -> None:
    conda(here)
    (error,) = errors_of(here, {"conda": name})
    assert golden.message(error).startswith(f"environment.conda is '{name}', ")
    assert error.endswith(advice.format(here=here))
    # A module may bring another conda.
    assert warnings_of(here, {"conda": name, "modules": ("miniforge",)}, more={"MODULESHOME": "/m"}) == []


def test_where_conda_is_not_here_only_this_machine_is_certain(here: Path, golden: GoldenMessages) -> None:
    (warning,) = warnings_of(here, {"conda": "train"})
    assert golden.message(warning).startswith("environment.conda needs conda, ")
    assert "CONDA_EXE" in warning
    assert warning.endswith("environment.modules")
    assert errors_of(here, {"conda": "train"}, "local") == [warning]


def test_modules_without_the_module_command_are_a_warning(
    here: Path, monkeypatch: pytest.MonkeyPatch, golden: GoldenMessages
) -> None:
    monkeypatch.setattr(environment_checks, "_MODULE_PROFILES", (str(here / "modules.sh"),))
    (warning,) = warnings_of(here, {"modules": ("cuda",)})
    assert golden.message(warning).startswith("environment.modules needs the module command, ")
    assert "; the job ends at its start" in warning
    assert warnings_of(here, {"modules": ("cuda",)}, more={"LMOD_CMD": "/lmod"}) == []
    (here / "modules.sh").touch()
    assert warnings_of(here, {"modules": ("cuda",)}) == []


def test_a_program_that_does_not_run_counts_as_one_that_says_no(here: Path, golden: GoldenMessages) -> None:
    Path("venv/bin").mkdir(parents=True)
    Path("venv/bin/python").write_text("not for this machine")
    Path("venv/bin/python").chmod(0o700)
    (error,) = errors_of(here, {"venv": "venv"})
    assert golden.message(error, {REQUIREMENT: "HPCDDP"}).startswith("environment.venv is 'venv', ")
    assert "([Errno 8] Exec format error" in error
    assert os.access("venv/bin/python", os.X_OK)


def test_data_to_copy_that_is_not_here_is_a_warning_and_an_error_on_this_machine(
    here: Path, golden: GoldenMessages
) -> None:
    stage = {"stage": {"source": "/nowhere/a.tar", "target": "/tmp/a"}}
    (warning,) = warnings_of(here, stage)
    assert golden.message(warning).startswith("environment.stage.source is '/nowhere/a.tar', which is not here; ")
    assert errors_of(here, stage, cluster="local") == [warning]
    (here / "a.tar").touch()
    stage["stage"]["source"] = str(here / "a.tar")
    assert warnings_of(here, stage) == []


def test_a_data_directory_that_the_nodes_get_by_a_copy_need_not_be_here(here: Path, golden: GoldenMessages) -> None:
    stage = {"stage": {"source": str(here), "target": "/scratch-of-node/images"}}
    train = {"model": "resnet18", "dataset": "imagefolder", "data_dir": "/scratch-of-node/images/full"}
    assert warnings_of(here, stage, train=train) == []
    (error,) = errors_of(here, stage, train=train | {"data_dir": "/scratch-of-node/images2"})
    assert golden.message(error).startswith("train.data_dir is '/scratch-of-node/images2', ")


def test_an_empty_data_directory_is_refused_like_a_missing_one(here: Path, golden: GoldenMessages) -> None:
    (here / "data").mkdir()
    train = {"model": "resnet18", "dataset": "cifar10", "data_dir": str(here / "data")}
    (error,) = errors_of(here, {}, train=train)
    assert golden.message(error).startswith(f"train.data_dir is '{here}/data', but that directory is empty; ")
    (here / "data" / "file").touch()
    assert warnings_of(here, {}, train=train) == []
    (error,) = errors_of(here, {}, train=train | {"data_dir": str(here / "data" / "file")})
    assert golden.message(error).startswith(f"train.data_dir is '{here}/data/file', but that is not a directory; ")


OTHER_PYTHON = "#!/bin/sh\necho {version} torch sklearn\n"


def test_an_interpreter_without_the_packages_of_a_training_is_told_how_to_get_them(
    here: Path, golden: GoldenMessages
) -> None:
    python = virtual(Path("venv"), with_hpcddp=False) / "bin" / "python"
    python.unlink()
    python.write_text(OTHER_PYTHON.format(version=hpcddp.__version__))
    python.chmod(0o700)
    (error,) = errors_of(here, {"venv": "venv"})
    assert " torch, scikit-learn, which venv/bin/python does not have" in golden.message(error)
    assert error.endswith("; run: venv/bin/python -m pip install 'hpcddp[train]'")
    # Lines and variables that come before may bring them, and an image has its own.
    assert warnings_of(here, {"venv": "venv", "setup": ("true",)}) == [error]
    assert warnings_of(here, {"venv": "venv", "env": {"PYTHONPATH": "/opt/torch"}}) == [error]


def test_this_interpreter_is_asked_for_the_packages_of_the_job_and_only_for_those(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def is_missing(name: str) -> bool:
        asked.append(name)
        return False

    monkeypatch.setattr(environment_checks, "is_installed", is_missing)
    Path("m.py").write_text("def build(num_classes): ...\ndef run(context): ...\n")
    Path("d.py").write_text("def build(split): ...\n")
    jobs: list[tuple[dict[str, Any], list[str]]] = [
        ({"train": {"model": "resnet18", "dataset": "digits"}}, ["torch", "numpy", "sklearn", "torchvision"]),
        ({"train": {"model": "m:build", "dataset": "d:build"}}, ["torch", "numpy"]),
        (
            {"train": {"model": "m:build", "dataset": "imagefolder", "data_dir": str(here)}},
            ["torch", "numpy", "torchvision"],
        ),
        ({"train": None, "entrypoint": "m:run", "batch": {}}, ["torch", "numpy"]),
        ({"train": None, "command": ["true"], "batch": {}}, []),
    ]
    for job, names in jobs:
        asked.clear()
        if names:
            (error,) = errors_of(here, {}, **job)
            assert (
                f" needs {', '.join(names).replace('sklearn', 'scikit-learn')}, which {sys.executable} does " in error
            )
        else:
            assert warnings_of(here, {}, **job) == []
        assert asked == names
    asked.clear()
    assert warnings_of(here, {"container": {"image": "nvcr.io#nvidia/pytorch", "runtime": "pyxis"}}) != []
    assert asked == []


@pytest.mark.parametrize(
    "setup",
    [
        ['export X="a', 'echo "$(true)"'],
        ["if true; then", "echo a"],
        ["f() {"],
        ["echo a )"],
        ["cat >settings <<EOF", "lr: 1"],
    ],
)
def test_a_setup_that_bash_cannot_read_is_refused(here: Path, setup: list[str]) -> None:
    (error,) = errors_of(here, {"setup": setup})
    assert error.startswith("environment.setup is not valid bash (line "), error


@pytest.mark.parametrize(
    "setup",
    [
        ["if true; then", "echo a", "fi"],
        ["cat <<E", "a )", "E"],
        ["export X='a", "b'"],
        ["shopt -s extglob", "ls !(a|b)"],
    ],
)
def test_a_setup_of_several_lines_that_belong_together_is_accepted(here: Path, setup: list[str]) -> None:
    assert warnings_of(here, {"setup": setup}) == []
