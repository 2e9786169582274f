"""Cancelling and requeueing runs."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from hpcddp.jobfile.read import load_job
from hpcddp.jobfile.write import dump_job
from hpcddp.manage.control import CancelError, RequeueCommands, RequeueError, cancel, cancel_sweep, requeue
from hpcddp.manage.overview import SweepStatus, overview, overview_of
from hpcddp.manage.run_files import read_run_files
from hpcddp.manage.status import RunStatus, statuses
from hpcddp.run.events import read_events
from hpcddp.run.find import find_run
from hpcddp.run.sweep import Chunk, Sweep, write_sweep
from hpcddp.slurm.commands import QueuedJob, SlurmUnavailableError
from tests.manage.runs import NOON, FakeRun, make, queued

TRAINING = "name: digits\nbatch: {global_batch_size: 8}\ntrain: {model: resnet18, dataset: digits}\n"
PROGRAM = 'name: digits\ncommand: ["true"]\n'
ONLY_TIME = "requeue: {causes: [time_limit]}\n"


class Slurm:
    """Writes down what it is asked; its tasks hear the signal or not."""

    def __init__(self, made: FakeRun | None = None, *, hears: int = 1, allowed: bool = True) -> None:
        self.made, self.hears, self.allowed = made, hears, allowed
        self.calls: list[str] = []

    def end(self, job_ids: object) -> None:
        self.calls.append(f"end {job_ids}")

    def warn(self, job_id: str) -> None:
        self.calls.append(f"warn {job_id}")
        if self.made is not None and len(self.calls) == self.hears:
            self.made.event("signal", reason="warned")

    def allow(self, job_id: str) -> None:
        self.calls.append(f"allow {job_id}")

    def requeue(self, job_id: str) -> None:
        self.calls.append(f"requeue {job_id}")

    @property
    def commands(self) -> RequeueCommands:
        return RequeueCommands(
            may_requeue=lambda _: self.allowed, warn=self.warn, allow=self.allow, requeue=self.requeue
        )


def look(made: FakeRun, *jobs: QueuedJob) -> RunStatus:
    return statuses([read_run_files(made.run)], ask=lambda: jobs, now=NOON + 100).runs[0]


def running(tmp_path: Path, job: str = TRAINING) -> FakeRun:
    path = tmp_path / "job.yaml"
    path.write_text(job)
    made = make(tmp_path).submitted().started().event("train").event("save", step=20)
    made.run.job_file.write_text(dump_job(load_job(path).spec, environment_values=False))
    return made


def test_a_run_that_runs_is_told_to_end_and_writes_its_result_itself(tmp_path: Path) -> None:
    made, slurm = running(tmp_path), Slurm()
    said = cancel(look(made, queued()), end=slurm.end)
    assert slurm.calls == ["end ['7']"]
    assert said.startswith(
        "run run-1 is being cancelled (job 7): its tasks are signalled, and it is saved if that fits"
    )
    assert said.endswith(f"To resume later: hpcddp submit --resume {made.run.path}")
    assert not made.run.result.exists()
    # For the supervisor, to which Slurm shows only that the job was signalled.
    assert [event.attempt for event in read_events(made.run.events) if event.kind == "cancel"] == [0]


def test_a_program_is_told_to_save_itself(tmp_path: Path) -> None:
    made = running(tmp_path, PROGRAM)
    said = cancel(look(made, queued()), end=Slurm().end)
    assert "(job 7): its program receives SIGTERM, and saves if that fits into the seconds" in said


@pytest.mark.parametrize("started", [False, True])
def test_a_run_that_waits_is_concluded_here_for_nobody_else_could(tmp_path: Path, *, started: bool) -> None:
    made, slurm = make(tmp_path).submitted(), Slurm()
    if started:
        made.started().event("save", step=20).event("requeue", cause="preemption")
    said = cancel(look(made, queued(state="PENDING", restarts=int(started))), end=slurm.end)
    assert slurm.calls == ["end ['7']"]
    assert (
        "step 20 is saved. To resume later: " if started else "it had not saved a step. To start it again: "
    ) in said
    result = json.loads(made.run.result.read_text())
    assert (result["status"], result["exit_code"], result["saved_step"]) == ("cancelled", 130, 20 if started else None)
    assert result["attempts"] == int(started)
    assert result["reason"] == f"cancelled by its user before it {'ran again' if started else 'started'}"
    assert look(made).state == "cancelled"


def test_a_run_that_has_ended_is_left_alone(tmp_path: Path) -> None:
    made, slurm = make(tmp_path).submitted().started().ended("finished"), Slurm()
    said = cancel(look(made, queued()), end=slurm.end)
    assert (said, slurm.calls) == ("run run-1 has ended already (finished); there is nothing to cancel", [])


def test_another_job_with_the_same_id_is_left_alone(tmp_path: Path) -> None:
    made, slurm = make(tmp_path).submitted(), Slurm()
    said = cancel(look(made, queued(submit_time="2030-01-01T00:00:00")), end=slurm.end)
    assert (said, slurm.calls) == ("run run-1 has ended already (lost); there is nothing to cancel", [])


def test_nothing_is_cancelled_blindly(tmp_path: Path) -> None:
    def ask() -> list[QueuedJob]:
        raise SlurmUnavailableError("squeue failed: Unable to contact slurm controller")

    made, slurm = make(tmp_path).submitted(), Slurm()
    (status,) = statuses([read_run_files(made.run)], ask=ask, now=NOON).runs
    with pytest.raises(CancelError, match="nothing was cancelled: the state of the run run-1 is unknown"):
        cancel(status, end=slurm.end)
    assert slurm.calls == []


def test_a_run_on_this_machine_gets_what_ctrl_c_would_send(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make(tmp_path).submitted("77", cluster="local")
    monkeypatch.setattr("hpcddp.manage.status.is_process_alive", lambda _: True)
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    assert cancel(look(made), end=Slurm().end).startswith(
        "run run-1 was signalled; it saves and exits. To resume later: hpcddp submit"
    )
    assert sent == [(77, signal.SIGTERM)]


def test_a_sweep_is_cancelled_in_one_go_but_for_what_has_ended(tmp_path: Path) -> None:
    made, slurm = make(tmp_path, "sweep").submitted("50"), Slurm()
    elements = tuple({"train.seed": seed} for seed in range(6))
    chunks = (Chunk(job_id="50", first=0, count=4), Chunk(job_id="51", first=4, count=2))
    write_sweep(Sweep(sweep_id="sweep", path=made.run.path, elements=elements, chunks=chunks))
    make(tmp_path, "sweep_1").submitted("50_1").started("50_1").ended("finished")
    make(tmp_path, "sweep_0").submitted("60").started("60").event("train")
    jobs = [queued("60"), *(queued(job_id, "PENDING") for job_id in ("50_2", "50_3", "51_0", "51_1"))]

    def status() -> SweepStatus:
        (line,) = overview(tmp_path, ask=lambda: jobs, now=NOON, everything=True).lines
        assert isinstance(line, SweepStatus)
        return line

    said = cancel_sweep(status(), end=slurm.end, now=NOON)
    assert slurm.calls == ["end ['60', '50_[2-3]', '51_[0-1]']"]
    assert said.startswith("5 elements of sweep sweep are being cancelled, 1 running; what runs is saved if that fits")
    jobs[1:] = []
    assert status().sentence == "1 running, 1 finished, 4 cancelled"
    jobs[:] = []
    again = cancel_sweep(status(), end=slurm.end, now=NOON)
    assert again.startswith("sweep sweep has ended already (1 finished, 4 cancelled, 1 lost)")


def test_one_element_that_has_not_begun_is_cancelled_and_can_be_resumed(tmp_path: Path) -> None:
    made, slurm = running(tmp_path), Slurm()
    sweep = Sweep(sweep_id="run-1", path=made.run.path, elements=({"train.seed": 1},), chunks=(ARRAY,))
    write_sweep(sweep)
    jobs = [queued("50_0", "PENDING")]
    (line,) = overview_of([find_run("run-1_0", tmp_path)], ask=lambda: jobs, now=NOON).lines
    assert isinstance(line, RunStatus)
    cancel(line, end=slurm.end)
    assert slurm.calls == ["end ['50_0']"]
    assert json.loads(sweep.run(0).result.read_text())["status"] == "cancelled"
    assert "seed: 1" in sweep.run(0).job_file.read_text()


ARRAY = Chunk(job_id="50", first=0, count=1)


def test_a_live_training_is_asked_to_save_and_the_wish_is_written_down(tmp_path: Path) -> None:
    made = running(tmp_path)
    slurm = Slurm(made)
    said = requeue(look(made, queued()), slurm.commands, sleep=lambda _: None)
    assert slurm.calls == ["warn 7"]
    assert said.startswith(
        "run run-1 stops at the end of a step and saves, however long that takes; then Slurm runs job 7"
    )
    assert json.loads(made.attempt().requeue_request.read_text())["time"] == NOON + 100


def test_tasks_that_do_not_hear_at_first_are_asked_again(tmp_path: Path) -> None:
    made = running(tmp_path)
    slurm = Slurm(made, hears=3)
    requeue(look(made, queued()), slurm.commands, sleep=lambda _: None)
    assert slurm.calls == ["warn 7"] * 3


def test_a_wish_that_nobody_hears_is_taken_back(tmp_path: Path) -> None:
    made = running(tmp_path)
    with pytest.raises(RequeueError, match="the tasks of run run-1 do not answer; they may not have started yet"):
        requeue(look(made, queued()), Slurm().commands, sleep=lambda _: None)
    assert not made.attempt().requeue_request.exists()


def test_a_program_is_requeued_by_slurm_itself(tmp_path: Path) -> None:
    made, slurm = running(tmp_path, PROGRAM), Slurm()
    said = requeue(look(made, queued()), slurm.commands)
    assert slurm.calls == ["requeue 7"]
    assert said.startswith("job 7 is requeued: the program of run run-1 receives SIGTERM and is started again")
    # What no budget counts.
    assert made.run.attempt(0).requeue_request.exists()


def test_a_program_that_slurm_does_not_requeue_has_not_been_asked_for(tmp_path: Path) -> None:
    made, slurm = running(tmp_path, PROGRAM), Slurm()

    def refuse(_: str) -> None:
        raise SlurmUnavailableError("scontrol failed: Unable to contact slurm controller")

    with pytest.raises(SlurmUnavailableError):
        requeue(look(made, queued()), replace(slurm.commands, requeue=refuse))
    assert not made.run.attempt(0).requeue_request.exists()


def test_a_program_that_hpcddp_itself_keeps_from_being_requeued_is_let_go(tmp_path: Path) -> None:
    made, slurm = running(tmp_path, PROGRAM + ONLY_TIME), Slurm()
    requeue(look(made, queued()), slurm.commands)
    assert slurm.calls == ["allow 7", "requeue 7"]


def test_where_slurm_may_not_requeue_nothing_is_stopped(tmp_path: Path) -> None:
    made, slurm = running(tmp_path), Slurm(allowed=False)
    with pytest.raises(
        RequeueError, match="Slurm is not allowed to requeue job 7; end the run with hpcddp cancel run-1"
    ):
        requeue(look(made, queued()), slurm.commands)
    assert slurm.calls == []


def test_a_job_that_hpcddp_itself_keeps_from_being_requeued_may_be(tmp_path: Path) -> None:
    made = running(tmp_path, TRAINING + ONLY_TIME)
    slurm = Slurm(made, allowed=False)
    requeue(look(made, queued()), slurm.commands, sleep=lambda _: None)
    assert slurm.calls == ["warn 7"]


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("PENDING", r"the run run-1 waits to start \(requeued\); there is nothing to save or to requeue"),
        ("COMPLETING", r"the run run-1 is stopping, and cannot be requeued now; try again later"),
        ("CANCELLED", r"the run run-1 has ended \(cancelled\); to resume: hpcddp submit --resume"),
    ],
)
def test_what_does_not_run_is_not_requeued(tmp_path: Path, word: str, sentence: str) -> None:
    with pytest.raises(RequeueError, match=sentence):
        requeue(look(running(tmp_path), queued(state=word)), Slurm().commands)


def test_a_finished_run_has_nothing_left_to_run(tmp_path: Path) -> None:
    with pytest.raises(RequeueError, match="the run run-1 has finished; there is nothing left to run"):
        requeue(look(running(tmp_path).ended("finished")), Slurm().commands)


def test_a_run_on_this_machine_is_not_requeued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make(tmp_path).submitted("77", cluster="local")
    monkeypatch.setattr("hpcddp.manage.status.is_process_alive", lambda _: True)
    with pytest.raises(RequeueError, match="runs on this machine, where it will not be requeued; end it with hpcddp"):
        requeue(look(made), Slurm().commands)


def test_the_stop_of_a_waiting_run_is_an_event(tmp_path: Path) -> None:
    made = make(tmp_path).submitted()
    cancel(look(made, queued(state="PENDING")), end=Slurm().end)
    (event,) = read_events(made.run.events)
    assert (event.kind, event.cause) == ("stop", "cancelled")
