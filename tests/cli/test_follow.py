"""What ``submit --follow`` prints besides the steps."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import typer

from hpcddp.cli.follow import PlainDisplay, _shortened, follow_run
from hpcddp.cli.submit import print_outcome
from hpcddp.manage import follow as watch
from hpcddp.manage.pending_reasons import pending_reason
from hpcddp.run.directory import RunDirectory
from hpcddp.slurm import commands
from tests.manage.runs import make
from tests.messages import GoldenMessages

TRAINING = "name: digits\ntrain: {model: resnet18, dataset: digits}\nbatch: {global_batch_size: 8}\n"


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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], golden: GoldenMessages
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    made = make(tmp_path).submitted()
    made.run.job_file.write_text(TRAINING)
    monkeypatch.setattr(watch, "follow", interrupted)
    with pytest.raises(typer.Exit) as ended:
        follow_run(Submitted(made.run))  # type: ignore[arg-type]
    assert ended.value.exit_code == 130
    _, state, follow, end = golden.message(capsys.readouterr().err).splitlines()
    assert state.endswith("run run-1 goes on")
    assert follow == f"to follow it again   hpcddp logs {made.run.path} --follow"
    assert end == f"to end it            hpcddp cancel {made.run.path}"


def test_the_second_ctrl_c_leaves_a_run_on_this_machine_that_is_being_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], golden: GoldenMessages
) -> None:
    made = make(tmp_path).submitted()
    made.run.job_file.write_text(TRAINING)

    def interrupted_twice(*_: object, interrupted: Callable[[], bool], **__: object) -> None:
        assert interrupted()
        assert not interrupted()
        raise KeyboardInterrupt

    monkeypatch.setattr(watch, "follow", interrupted_twice)
    with subprocess.Popen(["sleep", "60"]) as script, pytest.raises(typer.Exit):
        follow_run(Submitted(made.run, cluster="local", job_id=str(script.pid)))  # type: ignore[arg-type]
    _, stopping, _, state, follow = golden.message(capsys.readouterr().err).splitlines()
    assert stopping.startswith("stopping: the run gets SIGTERM,")
    assert "Ctrl-C again" in stopping
    assert state.endswith("run run-1 saves and ends")
    assert follow == f"to follow it again   hpcddp logs {made.run.path} --follow"


def test_why_a_job_waits_is_said_in_words_each_time_that_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], golden: GoldenMessages
) -> None:
    answers = [
        {"JobState": "PENDING", "Reason": "None"},
        {"JobState": "PENDING", "Reason": "Resources"},
        {"JobState": "PENDING", "Reason": "Resources"},
        {"JobState": "PENDING", "Reason": "QOSMaxJobsPerUserLimit"},
        {"JobState": "RUNNING", "Reason": "None"},
        # Of a newer Slurm.
        {"JobState": "TELEPORTING", "Reason": "None"},
        {"JobState": "COMPLETED", "Reason": "None"},
    ]
    made = make(tmp_path).submitted().ended("finished")
    monkeypatch.setattr(watch, "_QUERY_EVERY_S", 0.0)
    monkeypatch.setattr(watch, "_POLL_S", 0.0)
    monkeypatch.setattr(commands, "show_job", lambda _: answers.pop(0))
    poller = watch.JobPoller(made.run)
    outcome = watch.follow(made.run, PlainDisplay(None, 1), job_state=poller, waits_for=poller.waits_for)
    assert outcome.status == "finished"
    first, resources, limit, *end = golden.message(capsys.readouterr().err).splitlines()
    assert first.endswith("Slurm has not looked at it yet")
    assert resources.endswith(f": {pending_reason('Resources', job_id='', run='').why}")
    assert limit.endswith(f": {pending_reason('QOSMaxJobsPerUserLimit', job_id='', run='').why}")
    assert end == ["the job is running", "the job has ended"]


SPINNER = """
import time
from hpcddp.cli.follow import BarDisplay
from hpcddp.run.metrics import MetricsLine

with BarDisplay(None, 1) as display:
    display.job("pending", "jobs of higher priority come first")
    time.sleep(0.5)
    display.job("running")
    time.sleep(0.5)
    display.step(MetricsLine.from_document({"step": 4, "loss": 0.25}))
"""


def test_a_terminal_shows_a_spinner_with_the_reason_until_the_first_step() -> None:
    terminal, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    process = subprocess.Popen(
        [sys.executable, "-c", SPINNER], stdin=slave, stdout=slave, stderr=slave, env=environment
    )
    os.close(slave)
    shown = b""
    # Linux ends the output of a terminal that nobody writes to any more with EIO.
    while True:
        try:
            shown += os.read(terminal, 4096)
        except OSError:
            break
    os.close(terminal)
    assert process.wait(timeout=60) == 0
    text = shown.decode()
    first, ranks, step = (
        text.index("jobs of higher priority come first"),
        text.index("the ranks start: imports, data"),
        text.index("loss 0.2500"),
    )
    assert first < ranks < step
    # Several frames of the spinner were drawn, and none after the first step.
    assert text.count("jobs of higher priority come first") > 1
    assert "the ranks start" not in text[step:]


def test_a_line_that_would_fill_the_screen_is_shortened() -> None:
    shown = _shortened("Extension modules: " + "numpy._core, " * 300)
    assert shown.startswith("Extension modules: numpy")
    assert len(shown) < 500
    assert shown.endswith("(3,919 characters; hpcddp logs has them)")
    assert _shortened("loss 0.1 " * 40) == "loss 0.1 " * 40


def test_a_job_without_a_result_says_why_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "queue", lambda _: [])
    made = make(tmp_path).submitted()
    said = 'environment.setup: "module load x" ended with exit code 1; append "|| true" if it may fail'
    made.run.batch_log.write_text(f"hpcddp: {said}\n")
    print_outcome(Submitted(made.run), watch.Outcome(status="lost", result=None), as_json=False)  # type: ignore[arg-type]
    first, more, story = capsys.readouterr().out.splitlines()
    assert first == f"the job ended without a result: its script ended before an attempt began: {said}"
    assert more.startswith("more: hpcddp why ")
    assert story.startswith("the whole story: ")
