"""What a command that a signal ends returns, and what it says."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from hpcddp.cli import boundary
from hpcddp.cli.main import app
from tests.submission.fake_sbatch import make_fake_slurm

SIGNALS = pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])


@SIGNALS
@pytest.mark.parametrize(
    "step", ["check.search.check_in_short", "submission.code.read_working_tree", "submission.code.write_code"]
)
@pytest.mark.parametrize("more", [[], ["--sweep", "train.seed=0..1"]])
def test_an_interrupted_submission_says_that_nothing_was_submitted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    signum: signal.Signals,
    code: int,
    step: str,
    more: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    slurm = make_fake_slurm(tmp_path / "slurm")
    conf = slurm.directory / "slurm.conf"
    conf.touch()
    for name, value in slurm.environment(SLURM_CONF=str(conf)).items():
        monkeypatch.setenv(name, value)
    Path("job.yaml").write_text("name: x\nbatch: {global_batch_size: 8}\ntrain: {model: resnet18, dataset: digits}\n")
    monkeypatch.setattr(f"hpcddp.{step}", lambda *_: os.kill(os.getpid(), signum))
    assert boundary.run(app, ["submit", "job.yaml", "--cluster", "slurm", *more]) == code
    assert capsys.readouterr().err.endswith("hpcddp: interrupted: nothing was submitted\n")
    assert slurm.calls == []
    assert not Path("runs").exists()


@SIGNALS
def test_a_command_that_does_nothing_else_only_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], signum: signal.Signals, code: int
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: os.kill(os.getpid(), signum))
    assert boundary.run(app, ["status", "--watch", "--interval", "5"]) == code
    assert capsys.readouterr().err.strip() in {"", "no runs under runs"}
