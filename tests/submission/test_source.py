"""What ran: the commit, the uncommitted changes and the packages of a submission are recorded, and never fail it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from hpcddp.cli import boundary
from hpcddp.cli.main import app
from hpcddp.jobfile.read import load_job
from hpcddp.run.code import Source, SourceRecord, add_source, read_sources
from hpcddp.run.directory import RunDirectory
from hpcddp.run.git import Git
from hpcddp.submission.request import SubmitRequest
from hpcddp.submission.source import LARGEST_DIFF, ask_git, installed_packages
from tests.messages import GoldenMessages
from tests.submission.fake_sbatch import FakeSlurm, make_fake_slurm

JOB = "name: demo\nbatch: {global_batch_size: 8}\ntrain: {model: resnet18, dataset: digits}\n"


def git(directory: Path, *words: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "init.defaultBranch=main")
    done = subprocess.run(["git", *identity, *words], cwd=directory, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text("lr = 0.1\n")
    git(project, "init")
    git(project, "add", ".")
    git(project, "commit", "-m", "first")
    return project


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    slurm = make_fake_slurm(tmp_path / "slurm")
    (slurm.directory / "slurm.conf").touch()
    for name, value in slurm.environment(SLURM_CONF=str(slurm.directory / "slurm.conf")).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return slurm


def asked(directory: Path, **environment: str) -> dict[str, Any]:
    return ask_git(Git(directory, {**os.environ, **environment}))


def test_a_clean_commit_is_recorded_with_its_branch(project: Path) -> None:
    commit = git(project, "rev-parse", "HEAD")
    assert asked(project) == {
        "commit": commit, "branch": "main", "git_unknown": None, "dirty": False, "diff": "", "is_diff_cut": False,
    }  # fmt: skip


def test_the_diff_holds_staged_and_unstaged_changes_and_no_untracked_file(project: Path) -> None:
    (project / "below").mkdir()
    (project / "train.py").write_text("lr = 0.2\n")
    (project / "staged.py").write_text("staged = 1\n")
    git(project, "add", "staged.py")
    (project / ".env").write_text("WANDB_API_KEY=secret\n")
    found = asked(project / "below")
    assert found["dirty"] is True
    assert "+lr = 0.2" in found["diff"]
    assert "+staged = 1" in found["diff"]
    assert "secret" not in found["diff"]


def test_a_commit_without_a_branch_has_none(project: Path) -> None:
    git(project, "checkout", "--detach")
    assert asked(project)["branch"] is None


def test_a_large_diff_is_cut_after_a_whole_line(project: Path) -> None:
    (project / "train.py").write_text("a line of thirty characters...\n" * 100_000)
    found = asked(project)
    assert found["is_diff_cut"] is True
    assert LARGEST_DIFF - 100 < len(found["diff"]) <= LARGEST_DIFF
    assert found["diff"].endswith("characters...\n")


def test_what_git_cannot_say_is_a_sentence(project: Path, tmp_path: Path, golden: GoldenMessages) -> None:
    def unknown(directory: Path, **environment: str) -> str:
        record = asked(directory, **environment)
        assert record["commit"] is None
        return golden.message(record["git_unknown"])

    (tmp_path / "plain").mkdir()
    (tmp_path / "empty").mkdir()
    git(tmp_path / "empty", "init")
    ceiling = {"GIT_CEILING_DIRECTORIES": str(tmp_path)}
    assert "not in a git repository" in unknown(tmp_path / "plain", **ceiling)
    assert "no commit yet" in unknown(tmp_path / "empty")
    assert "git was not found" in unknown(project, PATH=str(tmp_path))
    assert "(git config safe.directory)" in unknown(project, GIT_TEST_ASSUME_DIFFERENT_OWNER="1")


def test_a_git_that_hangs_is_ended_with_its_children(project: Path, tmp_path: Path) -> None:
    program = tmp_path / "bin" / "git"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nsleep 600 &\nsleep 600\n")
    program.chmod(0o700)
    began = time.monotonic()
    found = ask_git(Git(project, {"PATH": f"{program.parent}:{os.environ['PATH']}"}, timeout_s=0.3))
    assert found == {"commit": None, "branch": None, "git_unknown": "git rev-parse did not end within 0.3 s"}
    assert time.monotonic() - began < 60


def test_a_slow_diff_leaves_the_commit(project: Path, tmp_path: Path, golden: GoldenMessages) -> None:
    real = subprocess.run(["which", "git"], capture_output=True, text=True, check=True).stdout.strip()
    program = tmp_path / "bin" / "git"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\ncase "$*" in *diff*) sleep 600;; esac\nexec {real} "$@"\n')
    program.chmod(0o700)
    found = ask_git(Git(project, {"PATH": f"{program.parent}:{os.environ['PATH']}"}, timeout_s=2))
    assert found["commit"] == git(project, "rev-parse", "HEAD")
    message = golden.message(found["git_unknown"])
    assert message.startswith("git diff ")
    assert message.endswith(" 2 s")
    assert Source(time=0, **found).sentence.endswith(f"changes unknown: {message}")


def test_programs_that_a_configuration_names_are_not_started(project: Path, tmp_path: Path) -> None:
    for key in ("diff.external", "core.fsmonitor", "core.pager", "diff.x.textconv"):
        git(project, "config", key, f"touch {tmp_path}/started;")
    (project / ".gitattributes").write_text("*.py diff=x\n")
    (project / "train.py").write_text("lr = 0.2\n")
    assert "+lr = 0.2" in asked(project)["diff"]
    assert not (tmp_path / "started").exists()


def request(directory: Path, text: str = JOB) -> SubmitRequest:
    (directory / "job.yaml").write_text(text)
    return SubmitRequest(
        job=load_job(directory / "job.yaml"), run_id="r", cluster="slurm", python=sys.executable, template=None,
        directory=directory, environment=dict(os.environ),
    )  # fmt: skip


def test_the_packages_are_those_that_this_interpreter_imports(tmp_path: Path) -> None:
    found = installed_packages(request(tmp_path))
    assert found["python"] == sys.executable
    for name in ("torch", "ruamel-yaml", "typer", "scikit-learn"):
        assert found["packages"][name] == version(name)


def test_the_packages_of_another_environment_are_found_by_their_names(tmp_path: Path) -> None:
    packages = tmp_path / "env" / "lib" / "python3.12" / "site-packages"
    for name in ("Some_Package-1.2.dist-info", "old-0.9-py3.12.egg-info", "some.thing", "no_version.dist-info"):
        (packages / name).mkdir(parents=True)
    found = installed_packages(request(tmp_path, f"{JOB}environment: {{venv: env}}\n"))
    packages_found = {"old": "0.9", "some-package": "1.2"}
    assert found == {"python": "env/bin/python", "python_version": "3.12", "packages": packages_found}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ("{container: {image: a.sif, runtime: apptainer}}", "container a.sif"),
        ("{conda: torch}", "conda environment torch"),
        ("{venv: nowhere}", "nowhere/bin/python"),
    ],
)
def test_packages_that_are_not_known_here_are_said_to_be_unknown(
    tmp_path: Path, golden: GoldenMessages, environment: str, place: str
) -> None:
    found = installed_packages(request(tmp_path, f"{JOB}environment: {environment}\n"))
    assert place in golden.message(found["packages_unknown"])
    assert "packages" not in found


def submit(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert boundary.run(app, ["submit", *words, "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


@pytest.mark.usefixtures("slurm")
def test_a_submission_records_its_source_and_why_shows_it(
    capsys: pytest.CaptureFixture[str], project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    (project / "job.yaml").write_text(JOB)
    (project / "train.py").write_text("lr = 0.3\n")
    run = RunDirectory(Path(submit(capsys, "job.yaml")["run_dir"]))
    (source,) = read_sources(run)
    assert (source.commit, source.branch, source.dirty) == (git(project, "rev-parse", "HEAD"), "main", True)
    assert "+lr = 0.3" in source.diff
    assert run.source.stat().st_mode & 0o777 == 0o600
    assert boundary.run(app, ["why", str(run.path)]) == 0
    said = capsys.readouterr().out
    assert f": commit {git(project, 'rev-parse', 'HEAD')[:12]} of branch main, " in said
    assert "uncommitted changes" in said


@pytest.mark.usefixtures("slurm")
def test_the_elements_of_a_sweep_have_the_source_of_the_sweep(
    capsys: pytest.CaptureFixture[str], project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    (project / "job.yaml").write_text(JOB)
    document = submit(capsys, "job.yaml", "--sweep", "train.seed=0..1")
    (source,) = read_sources(RunDirectory(Path(document["elements"][1]["run_dir"])))
    assert source.commit == git(project, "rev-parse", "HEAD")


@pytest.mark.usefixtures("slurm")
def test_a_submission_needs_no_git(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    slurm: FakeSlurm,
    monkeypatch: pytest.MonkeyPatch,
    golden: GoldenMessages,
) -> None:
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    for name in ("bash", "wc", "cat", "srun"):
        (bin_ / name).symlink_to(f"/usr/bin/{'true' if name == 'srun' else name}")
    monkeypatch.setenv("PATH", f"{slurm.directory / 'bin'}:{bin_}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(JOB)
    (source,) = read_sources(RunDirectory(Path(submit(capsys, "job.yaml")["run_dir"])))
    assert golden.message(source.sentence).startswith("commit unknown: git was not found")


def test_a_submission_like_the_one_before_it_adds_nothing_and_ten_are_kept(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    for number in range(12):
        add_source(run, Source(time=number, attempt=number, commit=f"c{number}"))
        add_source(run, Source(time=number + 0.5, attempt=number + 1, commit=f"c{number}"))
    assert [source.commit for source in read_sources(run)] == [f"c{number}" for number in range(2, 12)]
    assert [source.attempt for source in read_sources(run)] == list(range(2, 12))


@pytest.mark.parametrize("content", [b"", b"{", b'{"submissions": 3}', b'{"submissions": [{"time": "now"}]}', b"\xff"])
def test_a_damaged_record_is_one_sentence_and_the_next_submission_replaces_it(tmp_path: Path, content: bytes) -> None:
    run = RunDirectory(tmp_path / "digits" / "run-1")
    run.attempts.mkdir(parents=True)
    run.source.write_bytes(content)
    done = subprocess.run(
        [sys.executable, "-m", "hpcddp", "why", str(run.path)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0
    assert done.stdout.count("source.json") == 1
    assert SourceRecord.ADVICE in done.stdout
    add_source(run, Source(time=1, commit="c"))
    assert [source.commit for source in read_sources(run)] == ["c"]
