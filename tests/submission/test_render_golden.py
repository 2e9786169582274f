from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from hpcddp.jobfile import write
from hpcddp.jobfile.cluster import Cluster
from hpcddp.jobfile.read import load_job
from hpcddp.submission.render import render_script
from tests.submission.requests import request_of

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
ENVIRONMENTS = ROOT / "docs" / "environments.md"
# What the examples on the page leave out.
REST = """\
name: example
batch: {global_batch_size: 64}
train: {model: resnet18, dataset: imagefolder, data_dir: /data/train}
"""


class Case(NamedTuple):
    name: str
    job: Path
    run_id: str | None = None
    launcher: Cluster = "slurm"


CASES = (
    Case("quickstart-by-hand", ROOT / "jobs" / "quickstart.yaml"),
    Case("quickstart-here", ROOT / "jobs" / "quickstart.yaml", run_id="r1", launcher="local"),
    Case("quickstart-in-salloc", ROOT / "jobs" / "quickstart.yaml", run_id="r1", launcher="here"),
    Case("imagenet", ROOT / "jobs" / "resnet50_imagenet.yaml", run_id="20260401-120000-ab12"),
    Case("cifar10", ROOT / "jobs" / "resnet18_cifar10.yaml", run_id="r1"),
    Case("sweep", GOLDEN / "sweep.yaml", run_id="20260401-120000-ab12"),
    Case("ranged", GOLDEN / "ranged.yaml", run_id="r1"),
    Case("everything", GOLDEN / "everything.yaml", run_id="r1"),
    # Each is the example below its heading in docs/environments.md.
    Case("modules", ENVIRONMENTS, run_id="r1"),
    Case("conda", ENVIRONMENTS, run_id="r1"),
    Case("venv", ENVIRONMENTS, run_id="r1"),
    Case("uv", ENVIRONMENTS, run_id="r1"),
    Case("uv-here", ENVIRONMENTS, run_id="r1", launcher="local"),
    Case("apptainer", ENVIRONMENTS, run_id="r1"),
    Case("apptainer-here", ENVIRONMENTS, run_id="r1", launcher="local"),
    Case("pyxis", ENVIRONMENTS, run_id="r1"),
)


def examples() -> dict[str, str]:
    """Return the examples of the page on environments by their headings."""
    text = ENVIRONMENTS.read_text(encoding="utf-8")
    return {heading.lower(): body for heading, body in re.findall(r"## (\w+)\n\n```yaml\n(.*?)```", text, re.DOTALL)}


def job_file(case: Case, directory: Path) -> Path:
    if case.job != ENVIRONMENTS:
        return case.job
    path = directory / "job.yaml"
    path.write_text(REST + examples()[case.name.removesuffix("-here")], encoding="utf-8")
    return path


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_the_whole_script_is_as_it_was_when_a_person_last_read_it(
    case: Case, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A release, or a field that no case gives, changes no script.
    monkeypatch.setattr(write, "__version__", "VERSION")
    job = load_job(job_file(case, tmp_path))
    python = job.spec.environment.python or "/opt/hpcddp/bin/python"
    text = render_script(request_of(job, python=python, run_id=case.run_id, cluster=case.launcher)).text
    golden = GOLDEN / f"{case.name}.sh"
    if request.config.getoption("--update-golden"):
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_every_golden_script_is_clean_shell(case: Case) -> None:
    golden = str(GOLDEN / f"{case.name}.sh")
    commands = [["bash", "-n", golden]]
    # scripts/test installs it; scripts/test fast needs Python only.
    if shutil.which("shellcheck") is not None:
        commands.append(["shellcheck", "--severity=style", "--exclude=SC1091", golden])
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_no_golden_script_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.glob("*.sh")} == {case.name for case in CASES}


def test_every_example_of_an_environment_has_a_golden_script() -> None:
    assert set(examples()) == {case.name for case in CASES if case.job == ENVIRONMENTS and "here" not in case.name}
