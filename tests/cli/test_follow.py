"""What ``submit --follow`` prints besides the steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import typer

from hpcddp.cli.follow import follow_run
from hpcddp.manage import follow as watch
from hpcddp.run.directory import RunDirectory
from tests.manage.runs import make


@dataclass
class Submitted:
    """What ``follow_run`` reads of a submission."""

    run: RunDirectory
    cluster: str = "slurm"
    job_id: str = "7"
    epochs: int = 1
    first_attempt: int = 0
    job: Any = field(default=None)


def test_ctrl_c_names_the_commands_that_follow_again_and_that_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    made = make(tmp_path).submitted()
    made.run.job_file.write_text(
        "name: digits\ntrain: {model: resnet18, dataset: digits}\nbatch: {global_batch_size: 8}\n"
    )
    monkeypatch.setattr(watch, "follow", interrupted)
    with pytest.raises(typer.Exit) as ended:
        follow_run(Submitted(made.run))  # type: ignore[arg-type]
    assert ended.value.exit_code == 130
    assert capsys.readouterr().err == (
        f"\nno longer following; run run-1 goes on\nto follow it again   hpcddp logs {made.run.path} --follow\n"
        f"to end it           hpcddp cancel {made.run.path}\n"
    )
