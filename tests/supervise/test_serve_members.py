"""The process that runs the membership service beside srun: until when it stays."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpcddp.polling import wait_until as wait_for
from hpcddp.processes import Process
from hpcddp.run.directory import RunDirectory
from hpcddp.run.events import read_events
from hpcddp.run.job_records import read_members_address, read_start, write_start
from hpcddp.slurm import commands
from hpcddp.supervise import serve_members as serve_members_module
from hpcddp.supervise.serve_members import Events, _serve, serve_members
from hpcddp.task.channel import Channel, connect
from tests.supervise.attempts import Scenario
from tests.waiting import wait_until

ON_SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURMD_NODENAME": "n1"}
JOB = """
name: demo
resources: {nodes: 1, tasks_per_node: 2, time_limit: 10}
batch: {global_batch_size: 8}
train: {model: resnet18, dataset: digits}
requeue: {max_failures: 1}
"""


def connect_rank(scenario: Scenario, number: int) -> Channel:
    """Connect to the service as a rank does, when it has published its address."""
    attempt = scenario.attempt
    wait_until(lambda: read_members_address(attempt) is not None, "the address of the service", 30)
    published, start = read_members_address(attempt), read_start(attempt)
    assert published is not None
    assert start is not None
    hello = {"number": number, "process": str(number), "task": {"SLURMD_NODENAME": "n1"}, "identity": {}}
    deadline = time.monotonic() + 30
    return connect(published.addresses, published.port, start.token.encode(), hello, deadline=deadline)


def set_end(scenario: Scenario, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let the job end in so many seconds."""
    now = time.time()
    end = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(now + seconds))
    job = {"JobState": "RUNNING", "TimeLimit": "01:00:00", "EndTime": end}
    monkeypatch.setattr(commands, "show_job", lambda _: job)
    start = read_start(scenario.attempt)
    assert start is not None
    write_start(scenario.attempt, replace(start, time=now - 100, end_time=now + seconds))


@contextmanager
def service_beside_srun(
    scenario: Scenario,
) -> Iterator[tuple[threading.Thread, subprocess.Popen[bytes], list[Channel]]]:
    """Serve two ranks, which are connections alone, beside a process in place of srun."""
    with subprocess.Popen(["sleep", "600"]) as srun:
        service = threading.Thread(
            target=serve_members,
            args=(scenario.attempt, srun.pid, ["python"]),
            kwargs={"environment": ON_SLURM},
            daemon=True,
        )
        service.start()
        channels = [connect_rank(scenario, number) for number in range(2)]
        yield service, srun, channels
        for channel in channels:
            channel.close()
        srun.kill()


def end_process(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(timeout=10)


def test_ranks_that_hang_do_not_keep_the_script_beyond_the_end_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``watch`` kills srun some seconds before the end, so that the script can decide."""
    scenario = Scenario(tmp_path, ON_SLURM, job=JOB)
    set_end(scenario, monkeypatch, 4)
    with service_beside_srun(scenario) as (service, srun, _):
        end_process(srun)
        service.join(timeout=15)
        assert not service.is_alive()
    assert "the job's time is over" in capsys.readouterr().err


def test_an_event_that_waits_is_written_before_the_service_ends_with_the_job(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    events = Events(run.attempt(0))
    events.append("rank 1 was lost")
    run.path.mkdir()
    ended_srun = Process(pid=0, parent=0, start=0)
    service: Any = SimpleNamespace(handle=lambda: None, members={0}, has_ended=False, only_stuck_ranks_are_left=False)
    job_end: Any = SimpleNamespace(has_come=lambda: True)
    newcomers: Any = None
    _serve(ended_srun, service, newcomers, events, job_end)
    assert [event.reason for event in read_events(run.events)] == ["rank 1 was lost"]


@pytest.mark.parametrize("answers", [True, False])
def test_srun_is_ended_soon_if_the_rank_that_is_left_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, answers: bool
) -> None:
    """One that answers may save."""
    monkeypatch.setattr(serve_members_module, "_ANSWER_PATIENCE_S", 1.0)
    scenario = Scenario(tmp_path, ON_SLURM, job=JOB)
    set_end(scenario, monkeypatch, 3600)
    with service_beside_srun(scenario) as (_, srun, channels):
        channels[0].send({"failed": True})
        channels[0].close()
        if answers:
            channels[1].send({"ending": True})
        has_ended = wait_for(lambda: srun.poll() is not None, timeout_s=8, poll_s=0.05)
        assert has_ended is not answers


def test_ranks_that_are_at_work_after_the_end_of_srun_keep_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = Scenario(tmp_path, ON_SLURM, job=JOB)
    set_end(scenario, monkeypatch, 3600)
    with service_beside_srun(scenario) as (service, srun, _):
        end_process(srun)
        service.join(timeout=3)
        assert service.is_alive()
    service.join(timeout=30)
    assert not service.is_alive()


def test_a_rank_that_does_not_end_after_the_run_and_srun_does_not_keep_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other one has finished; ``watch`` has gone with srun."""
    monkeypatch.setattr(serve_members_module, "_END_PATIENCE_S", 1.0)
    scenario = Scenario(tmp_path, ON_SLURM, job=JOB)
    set_end(scenario, monkeypatch, 3600)
    with service_beside_srun(scenario) as (service, srun, channels):
        channels[0].send({"done": True})
        end_process(srun)
        service.join(timeout=15)
        assert not service.is_alive()
    assert "the run has ended, and some new processes have not; they are ended" in capsys.readouterr().err


def test_an_event_is_written_when_the_run_directory_is_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDirectory(tmp_path / "run")
    events = Events(run.attempt(0))
    events.append("rank 1 was lost", step=7, cause="crash", dead=[1])
    assert "rank 1 was lost; " in capsys.readouterr().err
    run.path.mkdir()
    events.append("a new process of rank 1 joined")
    first, second = read_events(run.events)
    assert (first.reason, first.step, first.cause, first.facts["dead"]) == ("rank 1 was lost", 7, "crash", [1])
    assert second.reason == "a new process of rank 1 joined"
    assert first.time <= second.time
    assert events.write() is None
    assert len(read_events(run.events)) == 2
