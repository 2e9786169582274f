from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Literal, NamedTuple

import pytest

from hpcddp.launch.render import render_script
from hpcddp.spec.read import load_job

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"


class Case(NamedTuple):
    name: str
    job: Path
    run_id: str | None = None
    launcher: Literal["slurm", "local"] = "slurm"


CASES = (
    Case("quickstart-by-hand", ROOT / "jobs" / "quickstart.yaml"),
    Case("quickstart-here", ROOT / "jobs" / "quickstart.yaml", run_id="r1", launcher="local"),
    Case("imagenet", ROOT / "jobs" / "resnet50_imagenet.yaml", run_id="20260401-120000-ab12"),
    Case("cifar10", ROOT / "jobs" / "resnet18_cifar10.yaml", run_id="r1"),
    Case("sweep", GOLDEN / "sweep.yaml", run_id="20260401-120000-ab12"),
    Case("everything", GOLDEN / "everything.yaml", run_id="r1"),
)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_the_whole_script_is_as_it_was_when_a_person_last_read_it(case: Case, request: pytest.FixtureRequest) -> None:
    job = load_job(case.job)
    python = job.spec.environment.python or "/opt/hpcddp/bin/python"
    text = render_script(job, python=python, run_id=case.run_id, launcher=case.launcher).text
    golden = GOLDEN / f"{case.name}.sh"
    if request.config.getoption("--update-golden"):
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_every_golden_script_is_clean_shell(case: Case) -> None:
    golden = str(GOLDEN / f"{case.name}.sh")
    for command in (["bash", "-n", golden], ["shellcheck", "--severity=style", "--exclude=SC1091", golden]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_no_golden_script_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.glob("*.sh")} == {case.name for case in CASES}
