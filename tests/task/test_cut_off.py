"""A rank that does not reach the membership service: which side of the network it is on, by Slurm."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest

from hpcddp.jobfile.job import JobSpec
from hpcddp.run.directory import AttemptDirectory, RunDirectory
from hpcddp.run.events import read_events
from hpcddp.slurm import commands
from hpcddp.stop.reasons import ExitCode
from hpcddp.task import cut_off
from hpcddp.task.process_state import PROCESS_STATE

SPEC = JobSpec.model_validate({"name": "a", "command": ["true"]})
RUNNING = {"JobState": "RUNNING", "BatchHost": "n1"}


class EndedError(Exception):
    """The process would have ended."""


class Rank:
    """A rank on n3, and the Slurm that it asks."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.attempt: AttemptDirectory = RunDirectory(directory).attempt(0)
        self.attempt.path.mkdir(parents=True)
        self.answers: list[dict[str, str] | Exception | None] = []
        self.calls: list[str] = []
        self.saves = 0
        monkeypatch.setattr(PROCESS_STATE, "host", "n3")
        monkeypatch.setattr(PROCESS_STATE, "save_last_step", self.save)
        monkeypatch.setattr(commands, "show_job", self._show_job)
        monkeypatch.setattr(commands, "requeue", lambda job_id: self.calls.append(f"requeue {job_id}"))
        monkeypatch.setattr(
            commands, "update_job", lambda job_id, **fields: self.calls.append(f"update {job_id} {fields}")
        )
        monkeypatch.setattr(cut_off, "exit_process", self._exit)
        monkeypatch.setattr(cut_off, "_POLL_S", 0.0)

    def save(self) -> None:
        self.saves += 1

    def _show_job(self, _: str) -> dict[str, str] | None:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    @staticmethod
    def _exit(code: int) -> NoReturn:
        raise EndedError(code)

    def end(self) -> int:
        """Let the rank end, and return its exit code."""
        with pytest.raises(EndedError) as ended:
            cut_off.end_cut_off(self.attempt, "7", SPEC)
        return int(ended.value.args[0])


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rank:
    return Rank(tmp_path / "run", monkeypatch)


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param({**RUNNING, "NodeList": "n[1-2]"}, id="its node is lost"),
        pytest.param({**RUNNING, "NodeList": "n[1-3]", "JobState": "COMPLETED"}, id="the job has ended"),
        pytest.param(None, id="Slurm has forgotten the job"),
    ],
)
def test_a_rank_on_the_lost_side_writes_nothing(rank: Rank, answer: dict[str, str] | None) -> None:
    rank.answers = [{**RUNNING, "NodeList": "n[1-3]"}, commands.SlurmUnavailableError("away"), answer]
    assert rank.end() == ExitCode.INFRASTRUCTURE
    assert (rank.saves, rank.calls, rank.answers) == (0, [], [])
    assert list(rank.attempt.path.iterdir()) == []


def test_without_the_node_of_the_script_the_step_is_saved_and_one_rank_requeues_the_job(rank: Rank) -> None:
    rank.answers = [{**RUNNING, "NodeList": "n[2-3]"}] * 2
    assert rank.end() == ExitCode.STOPPED
    # Another rank, in the same process.
    PROCESS_STATE.save_last_step = rank.save
    assert rank.end() == ExitCode.STOPPED
    assert rank.saves == 2
    assert [call for call in rank.calls if call.startswith("requeue")] == ["requeue 7"]
    (event,) = read_events(rank.attempt.run.events)
    assert (event.kind, event.cause) == ("requeue", "node_failure")


def test_a_rank_that_cannot_write_requeues_the_job_all_the_same(rank: Rank) -> None:
    rank.attempt.path.rmdir()
    rank.answers = [{**RUNNING, "NodeList": "n[2-3]"}]
    assert rank.end() == ExitCode.STOPPED
    assert rank.calls[-1] == "requeue 7"
