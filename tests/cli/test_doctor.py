from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpcddp.cli import boundary
from hpcddp.cli.main import app
from tests.messages import GoldenMessages

LOSSES = """\
import torch
from torch.nn import functional

def mean(outputs, targets):
    print("called")
    return functional.mse_loss(outputs, targets)

def total(outputs, targets):
    return functional.mse_loss(outputs, targets, reduction="sum")

def batch():
    return torch.ones(8, 2), torch.zeros(8, 2)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    # A name of its own, because Python keeps modules that it has imported.
    (tmp_path / "losses_of_the_command.py").write_text(LOSSES)
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], function: str, *options: str) -> tuple[int, str, str]:
    code = boundary.run(app, ["doctor", "loss", f"losses_of_the_command:{function}", *options])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_mean_exits_0_and_what_the_loss_prints_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "mean")
    assert (code, err) == (0, "")
    assert out.startswith("losses_of_the_command:mean: MEAN\n")
    assert "called" not in out


def test_a_defect_exits_1_and_json_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "total", "--world-size", "3", "--batch", "10", "--json")
    assert (code, err) == (1, "")
    document: dict[str, Any] = json.loads(out)
    assert (document["verdict"], document["defect"]) == ("SUM", True)
    assert document["plain_ddp"]["shares"] == [4, 3, 3]
    assert document["plain_ddp"]["gradient_ratio"] == pytest.approx(1 / 3)
    assert (document["helpers"], document["loss_reduction"]) == (["DeclaredLoss"], "sum")


def test_own_batches_are_used(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "mean", "--data", "losses_of_the_command:batch", "--json")
    assert code == 0
    assert json.loads(out)["tried_on"]["shapes"] == "outputs [8, 2], targets [8, 2]"


def test_a_loss_that_cannot_be_run_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "missing")
    assert (code, out) == (2, "")
    assert err.startswith("hpcddp: importing losses_of_the_command:missing failed ")
    code, out, _ = run(capsys, "missing", "--json")
    assert (code, json.loads(out)["error"]["kind"]) == (2, "doctor")


def test_the_help_says_which_verdicts_are_a_defect(capsys: pytest.CaptureFixture[str], golden: GoldenMessages) -> None:
    assert boundary.run(app, ["doctor", "loss", "--help"]) == 0
    help_text = " ".join(capsys.readouterr().out.split())
    exit_codes = golden.message(help_text[help_text.index("The exit code") : help_text.index(" Arguments:")])
    assert "0 for MEAN;" in exit_codes
    assert "what plain DDP gets wrong: SUM" in exit_codes
