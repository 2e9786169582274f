"""A controller of one job, in place of Slurm's commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from hpcddp.slurm import commands
from hpcddp.slurm.controller import Controller
from hpcddp.slurm.hostlist import expand
from hpcddp.slurm.job import moment_of
from hpcddp.supervise import requeue_job

AWAY = commands.SlurmUnavailableError("scontrol failed: Unable to contact slurm controller", returncode=1)
MISSING = commands.SlurmMissingError("scontrol was not found; Slurm's commands must be on PATH here")
REFUSED = commands.SlurmCommandError("scontrol requeue failed: Requested operation is presently disabled", returncode=1)


NOW = 1.8e9
SCRIPT = "#!/bin/bash\n"


class FakeSlurm:
    """Answers like scontrol, and records what it is asked to do.

    Attributes:
        job: the fields of the job.
        calls: what was asked of it, a line each.
        start_times: the start times that were set, in seconds from now by its clock.
        errors: what the next commands fail with, in order; None lets one through.
        is_forbidden: whether it must not run the job again.
        running_steps: the steps that have not ended.
        ignored_requeues: how many requeues it accepts and does not carry out.
        needed_nodes: the nodes without which it could not start the job.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **fields: str) -> None:
        self.job: dict[str, str] | None = {
            "JobState": "RUNNING", "Restarts": "0", "PreemptTime": "None", "Reason": "None", "Requeue": "1", **fields,
        }  # fmt: skip
        self.calls: list[str] = []
        self.start_times: list[float] = []
        self.is_forbidden = False
        self.running_steps: list[str] = []
        self.errors: list[commands.SlurmCommandError | None] = []
        self.ignored_requeues = 0
        self.needed_nodes: set[str] = set()
        self.waited = 0.0
        monkeypatch.setattr(commands, "show_job", self.show_job)
        monkeypatch.setattr(commands, "requeue", self.requeue)
        monkeypatch.setattr(commands, "update_job", self.update_job)
        monkeypatch.setattr(commands, "script_of_job", lambda *_: SCRIPT)
        monkeypatch.setattr(commands, "test_script", self.test_script)
        monkeypatch.setattr(commands, "step_exists", lambda step_id, _: step_id in self.running_steps)
        monkeypatch.setattr(requeue_job, "ask_controller", self.ask_controller)
        monkeypatch.setattr("time.sleep", self.sleep)

    def ask_controller(self, _: Mapping[str, str]) -> Controller:
        return Controller(now=NOW, requeue_delay_s=121, kill_wait_s=30.0)

    def show_job(self, job_id: str) -> dict[str, str] | None:
        self._fail()
        assert job_id == "7"
        return self.job

    def requeue(self, job_id: str) -> None:
        self.calls.append(f"requeue {job_id}")
        self._fail()
        if self.ignored_requeues:
            self.ignored_requeues -= 1
        elif self.job is not None and self.job["JobState"] == "RUNNING":
            self.become_requeued()

    def update_job(self, job_id: str, **fields: str) -> None:
        if "StartTime" in fields:
            self.start_times.append((moment_of(fields["StartTime"]) or 0) - NOW)
        elif fields == {"Requeue": "0"}:
            self.is_forbidden = True
        else:
            self.calls.append(f"update {job_id} {fields}")
        self._fail()

    def test_script(self, script: str, *, environment: Mapping[str, str], options: Sequence[str]) -> None:
        del environment
        assert script == SCRIPT
        self._fail()
        (option,) = options
        if self.needed_nodes & set(expand(option.removeprefix("--exclude="))):
            raise commands.SlurmCommandError("Requested node configuration is not available", returncode=1)

    def become(self, state: str, **fields: str) -> None:
        """Change the job."""
        assert self.job is not None
        self.job = {**self.job, "JobState": state, **fields}

    def become_requeued(self) -> None:
        """Show the job as requeued and ending: Slurm leaves out PreemptTime then."""
        assert self.job is not None
        self.become("COMPLETING", Restarts=str(int(self.job["Restarts"]) + 1))
        self.job.pop("PreemptTime", None)

    def sleep(self, seconds: float) -> None:
        self.waited += seconds

    def _fail(self) -> None:
        if self.errors and (error := self.errors.pop(0)) is not None:
            raise error
