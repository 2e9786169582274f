"""Continuing a run on this machine: stopped by Ctrl-C, resumed, and refused where there is nothing to resume."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hpcddp.run.directory import RunDirectory
from hpcddp.run.events import append_event, read_events
from hpcddp.run.files import read_json
from hpcddp.run.job_file import write_exported_values
from hpcddp.run.job_records import SubmissionRecord, write_submission_record
from hpcddp.run.record import write_record
from hpcddp.run.result import Result
from tests.messages import GoldenMessages
from tests.submission.local_run import script_process
from tests.submission.local_training import JOB, start, steps_of, submit, wait_for_step, write_job


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_job(tmp_path)


def test_a_followed_run_that_is_interrupted_saves_and_goes_on_when_it_is_resumed(
    directory: Path, golden: GoldenMessages
) -> None:
    follower = start(directory, "job.yaml", "--cluster", "local", "--follow", "--set", "resources.tasks_per_node=1")
    run = wait_for_step(directory, 30)
    follower.send_signal(signal.SIGINT)
    out, error = follower.communicate(timeout=120)
    assert follower.returncode == 130, error
    (stopping,) = [line for line in error.splitlines() if line.startswith("stopping: ")]
    assert " SIGTERM, " in golden.message(stopping)
    assert "; Ctrl-C again " in stopping
    result = read_json(run.result)
    resume = f"hpcddp submit --resume {run.path}"
    assert (result["status"], result["exit_code"], result["resume"]) == ("cancelled", 130, resume)
    stopped = result["saved_step"]
    assert 30 <= stopped == steps_of(run)[-1] < 138
    assert out.count("cancelled") == 1
    last_lines = out[out.index("cancelled") :]
    golden.message(last_lines, {f" {stopped} ": " STEP ", run.run_id: "RUN"})
    assert f"; step {stopped} is saved\n" in last_lines
    assert f": {resume}\n" in last_lines

    code, out, error = submit(directory, "--resume", run.run_id, "--follow", "--json")
    assert code == 0, error
    assert json.loads(out)["status"] == "finished"
    assert steps_of(run) == list(range(1, 139))
    kinds = [event.kind for event in read_events(run.events)]
    assert (kinds.count("start"), kinds.count("resume")) == (2, 1)


def ended(directory: Path, **submission: Any) -> RunDirectory:
    """A run of which only the files are left."""
    run = RunDirectory(directory / "runs" / "again" / "r1")
    run.path.mkdir(parents=True, mode=0o700)
    run.script.write_text("true\n")
    run.job_file.write_text(JOB)
    write_exported_values(run, {})
    record: dict[str, Any] = {
        "cluster": "local", "job_id": "999999", "directory": str(directory), "python": sys.executable, "time": 0.0,
        "host": socket.gethostname(), "run_dir": str(run.path), **submission,
    }  # fmt: skip
    write_submission_record(run, SubmissionRecord(**record))
    return run


def test_a_finished_run_is_not_resumed(directory: Path, golden: GoldenMessages) -> None:
    run = ended(directory)
    write_record(run.result, Result(status="finished"))
    code, out, error = submit(directory, "--resume", "r1")
    assert (code, out) == (2, "")
    assert golden.message(error).startswith("hpcddp: the run r1 has finished, ")
    assert f"; see {run.result}\n" in error
    assert error.endswith(f": hpcddp submit --resume {run.path} --set train.epochs=N\n")


def test_a_run_that_is_alive_is_not_resumed(directory: Path, golden: GoldenMessages) -> None:
    with script_process() as process:
        run = ended(directory, job_id=str(process.pid))
        code, out, error = submit(directory, "--resume", "r1")
    assert (code, out) == (2, "")
    message = golden.message(error, {f" {process.pid} ": " PID "})
    assert f"process {process.pid} of the run r1 has not ended; " in message
    assert message.endswith(f": hpcddp cancel {run.path}\n")
    assert read_events(run.events) == []


def test_of_two_resumptions_at_once_one_is_submitted(directory: Path, golden: GoldenMessages) -> None:
    run = ended(directory)
    # Else the first job may have ended before the second resumption begins.
    run.job_file.write_text(JOB + "environment: {setup: [sleep 600]}\n")
    with ThreadPoolExecutor(2) as threads:
        said = list(threads.map(lambda _: submit(directory, "--resume", "r1", "--json"), range(2)))
    submitted = [json.loads(out) for code, out, _ in said if code == 0]
    refused = [json.loads(out)["error"]["message"] for code, out, _ in said if code == 2]
    for document in submitted:
        os.killpg(int(document["job_id"]), signal.SIGKILL)
    assert len(submitted) == 1
    job_id = submitted[0]["job_id"]
    (message,) = refused
    assert f"process {job_id} of the run r1 has not ended; " in golden.message(message, {f" {job_id} ": " PID "})
    assert [event.kind for event in read_events(run.events)] == ["resume"]


def test_a_file_of_the_run_that_is_too_large_to_be_kept_is_named(directory: Path, golden: GoldenMessages) -> None:
    run = ended(directory)
    run.plan.touch()
    os.truncate(run.plan, 1 << 36)
    job = directory / "again.yaml"
    job.write_text(JOB)
    code, _, error = submit(directory, str(job), "--resume", "r1")
    assert code == 2
    assert golden.message(error).startswith(f"hpcddp: nothing was submitted: {run.plan} has {1 << 36} bytes, ")
    assert error.endswith("; remove it\n")
    assert read_events(run.events) == []


@pytest.mark.parametrize("target", ["nowhere", "job.yaml"])
def test_a_run_whose_event_log_is_a_link_is_not_resumed(directory: Path, golden: GoldenMessages, target: str) -> None:
    run = ended(directory)
    run.events.unlink(missing_ok=True)
    run.events.symlink_to(directory / target)
    before = sorted(path.name for path in run.path.rglob("*"))
    code, _, error = submit(directory, "--resume", "r1")
    assert code == 2
    assert f" {run.events} cannot be written (it is a symbolic link); " in golden.message(error)
    assert sorted(path.name for path in run.path.rglob("*")) == before
    assert (directory / "job.yaml").read_text() == JOB


@pytest.mark.parametrize("case", ["of another host", "that runs something else"])
def test_a_process_with_the_id_of_a_local_run_is_not_the_run(directory: Path, case: str) -> None:
    with script_process() as process:
        is_elsewhere = case == "of another host"
        pid = process.pid if is_elsewhere else os.getpid()
        ended(directory, job_id=str(pid), host="elsewhere" if is_elsewhere else socket.gethostname())
        code, out, error = submit(directory, "--resume", "r1", "--dry-run")
    assert code == 0, error
    assert out.startswith("#!/bin/bash\n")


def test_a_run_whose_script_was_submitted_by_hand_needs_its_job_file(directory: Path, golden: GoldenMessages) -> None:
    run = ended(directory)
    run.submission.unlink()
    append_event(run.events, kind="start", time=0.0, attempt=0)
    code, _, error = submit(directory, "--resume", "r1")
    assert code == 2
    assert f" {run.path} was submitted by hand, " in golden.message(error)
    assert error.endswith(f": hpcddp submit JOB --resume {run.path}\n")


def test_a_job_of_another_run_is_refused(directory: Path, golden: GoldenMessages) -> None:
    run = ended(directory)
    code, _, error = submit(directory, "job.yaml", "--resume", "r1", "--cluster", "local", "--set", "name=other")
    assert code == 2
    message = golden.message(error)
    assert f"run_root and name lead to {directory}/runs/other/r1, " in message
    assert f" the run is {run.path}; " in message


def test_without_a_run_a_job_is_needed(directory: Path, golden: GoldenMessages) -> None:
    code, out, error = submit(directory)
    assert (code, out) == (2, "")
    assert golden.message(error).startswith("hpcddp: no JOB is given; ")
    assert " or --resume RUN " in error
