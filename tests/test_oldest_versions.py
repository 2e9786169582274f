"""hpcddp with the oldest versions of its dependencies, and without what only a training needs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.messages import GoldenMessages

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
QUICKSTART = str(ROOT / "jobs" / "quickstart.yaml")
pytestmark = pytest.mark.depends_on("pyproject.toml", "tests/test_oldest_versions.py")

PROGRAM = """\
import importlib.util, os
assert importlib.util.find_spec("hpcddp") is None
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
"""


def oldest(requirements: list[str]) -> dict[str, str]:
    """Return the lower bound of each requirement, by the name of its package."""
    bounds = {}
    for text in requirements:
        requirement = Requirement(text)
        (bounds[requirement.name],) = (one.version for one in requirement.specifier if one.operator == ">=")
    return bounds


@dataclass(frozen=True)
class Installed:
    """A virtual environment with hpcddp from its wheel.

    Args:
        bin: its programs.
        directory: where they run.
    """

    bin: Path
    directory: Path

    def python(self, code: str) -> subprocess.CompletedProcess[str]:
        return self._run("python", "-c", code)

    def hpcddp(self, *words: str, code: int = 0) -> str:
        """Run a command of the command line; return what it printed, errors first."""
        done = self._run("hpcddp", *words)
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done.stderr + done.stdout

    def _run(self, program: str, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.bin / program), *words],
            cwd=self.directory,
            env=environment(self.directory) | {"PATH": f"{self.bin}:/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )


def environment(home: Path) -> dict[str, str]:
    return {"HOME": str(home), "OMP_NUM_THREADS": "1", "SLURM_CONF": "/nonexistent", "COLUMNS": "80"}


def install(directory: Path, extras: dict[str, str]) -> Installed:
    """Install the wheel, the oldest versions of its dependencies, and more packages, into a new environment."""
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert uv is not None, "uv is one of the tools of the group dev"

    def run(*words: str) -> None:
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
        assert done.returncode == 0, done.stderr

    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory))
    (wheel,) = directory.glob("*.whl")
    run(uv, "venv", "--quiet", "--python", sys.executable, str(directory / "venv"))
    python = directory / "venv" / "bin" / "python"
    pins = [f"{name}=={version}" for name, version in {**oldest(PROJECT["dependencies"]), **extras}.items()]
    run(uv, "pip", "install", "--quiet", "--python", str(python), str(wheel), *pins)
    work = directory / "work"
    work.mkdir()
    return Installed(python.parent, work)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    """Without the extra for trainings."""
    directory = tmp_path_factory.mktemp("oldest")
    yield install(directory, {})
    shutil.rmtree(directory / "venv")


def test_the_oldest_versions_are_installed_and_nothing_of_a_training(plain: Installed) -> None:
    code = (
        "import importlib.metadata, json\n"
        "print(json.dumps([(one.name, one.version) for one in importlib.metadata.distributions()]))"
    )
    found = {canonicalize_name(name): Version(version) for name, version in json.loads(plain.python(code).stdout)}
    wanted = {canonicalize_name(name): Version(version) for name, version in oldest(PROJECT["dependencies"]).items()}
    assert {name: found[name] for name in wanted} == wanted
    assert not {"numpy", "torch", "torchvision", "scikit-learn"} & set(found)


@pytest.mark.parametrize(
    "words",
    [[], ["submit"], ["status"], ["logs"], ["plan"], ["doctor"], ["doctor", "loss"], ["sandbox"]],
    ids=" ".join,
)
def test_every_kind_of_help_is_shown(words: list[str], plain: Installed) -> None:
    shown = plain.hpcddp(*words, "--help")
    assert shown.startswith(f"Usage: {' '.join(['hpcddp', *words])} ")
    assert "\nExamples:\n  " in shown


def test_a_group_without_a_command_shows_its_help(plain: Installed) -> None:
    shown = subprocess.run(
        [str(plain.bin / "hpcddp"), "doctor"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (shown.stdout + shown.stderr).startswith("Usage: hpcddp doctor ")


def test_it_renders_plans_and_shows_the_schema_as_with_the_newest_versions(plain: Installed) -> None:
    for words in (["render", QUICKSTART, "--set", "environment.python=/p"], ["plan", QUICKSTART], ["schema"]):
        newest = subprocess.run(
            [sys.executable, "-m", "hpcddp", *words],
            cwd=plain.directory,
            env={**environment(plain.directory), "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        if words == ["schema"]:
            assert (
                json.loads(plain.hpcddp(*words))["properties"].keys() == json.loads(newest.stdout)["properties"].keys()
            )
        else:
            assert plain.hpcddp(*words) == newest.stdout


def test_a_first_job_is_in_the_wheel(plain: Installed) -> None:
    path = f"{plain.bin}:/nonexistent"
    done = subprocess.run(
        [str(plain.bin / "hpcddp"), "init", "--job", "first.yaml"],
        cwd=plain.directory,
        env={**environment(plain.directory), "PATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (plain.directory / "first.yaml").read_text().endswith(Path(QUICKSTART).read_text().partition("\nname:")[2])


def test_a_training_is_refused_with_the_command_that_installs_what_it_needs(
    plain: Installed, golden: GoldenMessages
) -> None:
    python = plain.bin / "python"
    message = plain.hpcddp("submit", QUICKSTART, "--cluster", "local", code=2)
    golden.message(message, {str(python): "PYTHON"})
    assert f"needs torch, numpy, scikit-learn, torchvision, which {python} does" in message
    assert message.endswith(f"run: {python} -m pip install 'hpcddp[train]'\n")
    assert not (plain.directory / "runs").exists()


def test_a_rank_without_torch_says_so_in_one_sentence(plain: Installed) -> None:
    # With lines of setup only the node knows what is installed.
    words = ["--set", "environment.setup=['echo ready']", "--set", "resources.tasks_per_node=1"]
    shown = plain.hpcddp("submit", QUICKSTART, *words, "--cluster", "local", "--follow", code=1)
    python = plain.bin / "python"
    for text in (shown, plain.hpcddp("why")):
        sentence = " ".join(text.split())
        assert f" needs torch, numpy, which {python} does not have;" in sentence
        assert f" run: {python} -m pip install 'hpcddp[train]'" in sentence


@pytest.mark.parametrize("name", ["Stopper", "Checkpointer", "additive_loss", "evaluate"])
def test_a_public_name_without_torch_says_what_to_install(name: str, plain: Installed, golden: GoldenMessages) -> None:
    done = plain.python(f"from hpcddp import {name}")
    python = plain.bin / "python"
    message = done.stderr.splitlines()[-1]
    golden.message(message, {str(python): "PYTHON"})
    assert message.startswith("hpcddp.packages.MissingPackageError: ")
    assert f" needs torch, numpy, which {python} does" in message
    assert message.endswith(f"run: {python} -m pip install 'hpcddp[train]'")


@pytest.mark.parametrize(("command", "code"), [("loss", 2), ("ddp", 2)])
def test_an_examination_without_torch_says_what_to_install(command: str, code: int, plain: Installed) -> None:
    argument = "losses:dice" if command == "loss" else QUICKSTART
    shown = plain.hpcddp("doctor", command, argument, code=code)
    assert shown.startswith(f"hpcddp: hpcddp doctor {command} needs torch")
    assert len(shown.splitlines()) == 1


def test_a_plain_command_needs_no_hpcddp_in_its_own_environment(plain: Installed) -> None:
    bare = plain.directory / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True, timeout=60)
    (plain.directory / "train.py").write_text(PROGRAM)
    words = ["submit", "--cluster", "local", "--tasks-per-node", "2", "--name", "bare"]
    dry = plain.hpcddp(*words, "--dry-run", "--", str(bare / "bin" / "python"), "train.py")
    assert "bare" in dry
    shown = plain.hpcddp(*words, "--follow", "--", str(bare / "bin" / "python"), "train.py")
    assert "rank 0 of 2\n" in shown
    assert "finished" in plain.hpcddp("status")
    assert "finished" in plain.hpcddp("why")
    assert "rank 1 of 2" in plain.hpcddp("logs")


@pytest.mark.parametrize(
    ("name", "version"),
    [
        # As NVIDIA's images name them.
        ("torch", "2.10.0a0+b558c986e8.nv25.11"),
        ("torchvision", "0.25.0a0+1e53952f"),
    ],
)
def test_pre_releases_of_a_vendors_image_satisfy_the_bounds(name: str, version: str) -> None:
    bounds = {one.name: one.specifier for one in map(Requirement, PROJECT["optional-dependencies"]["train"])}
    # As pip asks for a version that is installed (pip/_internal/resolution/resolvelib/requirements.py).
    assert bounds[name].contains(Version(version), prereleases=True)


@pytest.mark.long
def test_the_oldest_torch_trains(tmp_path: Path) -> None:
    installed = install(tmp_path, oldest(PROJECT["optional-dependencies"]["train"]))
    shown = installed.hpcddp("submit", QUICKSTART, "--cluster", "local", "--follow", "--set", "train.epochs=1")
    assert "finished" in shown
    shutil.rmtree(tmp_path / "venv")
