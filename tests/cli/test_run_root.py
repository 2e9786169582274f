"""Every command that takes ``--run-root`` does what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpcddp.cli import boundary
from hpcddp.cli.main import app
from scripts.command_pages import all_commands
from tests.manage.runs import make
from tests.messages import GoldenMessages
from tests.submission.fake_sbatch import FakeSlurm, make_fake_slurm

JOB = "name: demo\nrun_root: of-the-job\nbatch: {global_batch_size: 8}\ntrain: {model: resnet18, dataset: digits}\n"
# Without a run each of these but cancel takes the newest one under the root; what it says of a run that has failed.
SAYS_OF_A_RUN = {
    "status": "chosen-run  local  digits  failed",
    "logs": "of run chosen-run",
    "why": "chosen-run (digits)",
    "report": "chosen-run-report.html",
    "cancel": "run chosen-run has ended already",
    "shell": "run chosen-run is failed",
    "stacks": "run chosen-run is failed",
    "requeue": "the run chosen-run has ended",
    "checkpoints": "digits/chosen-run/checkpoints holds no checkpoint",
}
MAKES_A_JOB = {"submit", "render"}
EXAMINES_IT = "doctor install"
# Its runs go there on a cluster alone, and are gone at its end (tests/cluster/test_rehearse.py).
LEAVES_NOTHING = "rehearse"
A_JOB = {
    "a job file": ("job.yaml",),
    "a command": ("--", "true"),
    "a sweep": ("job.yaml", "--sweep", "train.seed=0..1"),
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a project's directory with a job, where project and job each have a run root of their own."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (here / "hpcddp.yaml").write_text("run_root: of-the-project\n")
    (here / "job.yaml").write_text(JOB)
    return here


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    slurm = make_fake_slurm(tmp_path / "slurm")
    (slurm.directory / "slurm.conf").touch()
    for name, value in slurm.environment(SLURM_CONF=str(slurm.directory / "slurm.conf")).items():
        monkeypatch.setenv(name, value)
    return slurm


@pytest.fixture(params=["relative", "absolute"])
def chosen(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "../chosen" if request.param == "relative" else str(tmp_path / "chosen")


# For tests that take seconds: a run on this machine, and what doctor install imports.
ONE_PATH = pytest.mark.parametrize("chosen", ["relative"], indirect=True)


def run(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    found = boundary.run(app, words)
    captured = capsys.readouterr()
    assert found == code, captured.out + captured.err
    return captured.out if code == 0 else captured.err


def failed_run(root: Path, run_id: str) -> None:
    made = make(root, run_id).submitted("1", cluster="local").started("1").log(0, "hello\n")
    made.failed(0, message="a bug").ended("failed", reason="rank 0 failed", exit_code=70)


def files(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_every_command_with_the_option_has_a_test_here() -> None:
    with_option = {" ".join(words) for words, command in all_commands(app) if _takes_run_root(command)}
    assert with_option == SAYS_OF_A_RUN.keys() | MAKES_A_JOB | {EXAMINES_IT, LEAVES_NOTHING}


def _takes_run_root(command: Any) -> bool:
    return any("--run-root" in parameter.opts for parameter in command.params)


@ONE_PATH
@pytest.mark.usefixtures("here")
def test_its_file_system_is_examined(capsys: pytest.CaptureFixture[str], tmp_path: Path, chosen: str) -> None:
    (tmp_path / "chosen").mkdir()
    boundary.run(app, [*EXAMINES_IT.split(), "--run-root", chosen, "--json"])
    findings = json.loads(capsys.readouterr().out)["findings"]
    (found,) = (finding["found"] for finding in findings if finding["name"] == "run root")
    assert Path(found.partition(" is on ")[0]).resolve() == tmp_path / "chosen"


@pytest.mark.parametrize("command", SAYS_OF_A_RUN)
def test_a_run_is_looked_for_there(
    capsys: pytest.CaptureFixture[str], here: Path, tmp_path: Path, chosen: str, command: str
) -> None:
    failed_run(tmp_path / "chosen", "chosen-run")
    failed_run(here / "of-the-project", "other-run")
    words = (command, "--run-root", chosen, *(("last",) if command == "cancel" else ()))
    said = run(capsys, *words, code=2 if command in {"requeue", "shell", "stacks"} else 0)
    assert SAYS_OF_A_RUN[command] in said
    assert "other-run" not in said


@pytest.mark.usefixtures("slurm")
@pytest.mark.parametrize("form", A_JOB)
def test_a_new_run_lives_there(
    capsys: pytest.CaptureFixture[str], here: Path, tmp_path: Path, chosen: str, form: str
) -> None:
    before = files(here)
    words = ("submit", "--run-root", chosen, "--json", *A_JOB[form])
    preview = json.loads(run(capsys, "submit", "--dry-run", *words[1:]))
    document = json.loads(run(capsys, *words))
    (name,) = (tmp_path / "chosen").iterdir()
    (directory,) = name.iterdir()
    assert (directory / "job.sbatch").exists()
    assert Path(document["sweep_dir" if form == "a sweep" else "run_dir"]).resolve() == directory
    assert Path(preview["run_dir"]).parent.resolve() == name
    assert files(here) == before


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("form", A_JOB)
def test_a_script_keeps_its_run_there_and_says_who_said_so(capsys: pytest.CaptureFixture[str], form: str) -> None:
    words = ("render", "--run-root", "010", *A_JOB[form])
    assert " begin --run-root=010 " in run(capsys, *words)
    fields = json.loads(run(capsys, "render", "--json", *words[1:]))["fields"]
    assert fields["run_root"] == {"value": "010", "origin": "--run-root"}


@pytest.mark.usefixtures("here")
def test_set_counts_over_it_as_over_every_option_of_a_field(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("render", "job.yaml", "--json", "--set", "run_root=b", "--run-root", "a")
    assert json.loads(run(capsys, *words))["fields"]["run_root"] == {"value": "b", "origin": "--set"}


@pytest.mark.parametrize("job", [(), ("job.yaml",)], ids=["as it was", "with a job"])
def test_a_run_is_resumed_there(
    capsys: pytest.CaptureFixture[str],
    here: Path,
    slurm: FakeSlurm,
    tmp_path: Path,
    chosen: str,
    job: tuple[str, ...],
) -> None:
    run(capsys, "submit", "job.yaml", "--set", f"run_root={chosen}")
    before = files(here)
    (directory,) = (tmp_path / "chosen" / "demo").iterdir()
    # Slurm has forgotten the job, so the run has ended.
    (slurm.directory / "bin" / "scontrol").write_text(
        '#!/bin/sh\n[ "$2" != job ] || { echo Invalid job id >&2; exit 1; }\n'
    )
    document = json.loads(run(capsys, "submit", *job, "--resume", directory.name, "--run-root", chosen, "--json"))
    assert Path(document["run_dir"]).resolve() == directory
    assert files(here) == before


@pytest.mark.usefixtures("here")
def test_a_run_waits_for_another_one_there(
    capsys: pytest.CaptureFixture[str], slurm: FakeSlurm, tmp_path: Path, chosen: str
) -> None:
    run(capsys, "submit", "job.yaml", "--run-root", chosen)
    (first,) = (tmp_path / "chosen" / "demo").iterdir()
    run(capsys, "submit", "job.yaml", "--run-root", chosen, "--after", first.name)
    assert slurm.calls[-1] == ["--dependency=afterany:101", "first=0"]
    assert len(list(first.parent.iterdir())) == 2


@ONE_PATH
@pytest.mark.usefixtures("here")
def test_a_run_on_this_machine_lives_there(capsys: pytest.CaptureFixture[str], tmp_path: Path, chosen: str) -> None:
    run(capsys, "submit", "--cluster", "local", "--follow", "--run-root", chosen, "--", "true")
    (directory,) = (tmp_path / "chosen" / "true").iterdir()
    assert json.loads((directory / "result.json").read_text())["status"] == "finished"


@pytest.mark.usefixtures("slurm", "here")
def test_quiet_prints_the_id_of_a_run_or_of_a_sweep_alone(
    capsys: pytest.CaptureFixture[str], here: Path, tmp_path: Path, golden: GoldenMessages
) -> None:
    here.chmod(0o775)
    for words in (("job.yaml",), ("--", "true"), ("job.yaml", "--sweep", "train.seed=0..1")):
        assert boundary.run(app, ["submit", "--quiet", "--run-root", str(tmp_path / "r"), *words]) == 0
        captured = capsys.readouterr()
        assert captured.err == ""
        (run_id,) = captured.out.splitlines()
        assert len(list((tmp_path / "r").glob(f"*/{run_id}"))) == 1
    for other in ("--follow", "--dry-run"):
        said = run(capsys, "submit", "--quiet", other, "job.yaml", code=2)
        assert "--quiet prints the run id" in golden.message(said)
        assert said.endswith("leave it out, or --follow, --dry-run and --json\n")
