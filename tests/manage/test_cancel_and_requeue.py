"""Cancelling and requeueing runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
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
from tests.messages import GoldenMessages
from tests.small_disk import fill_inodes, small_disk

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


def test_a_run_that_runs_is_told_to_end_and_writes_its_result_itself(tmp_path: Path, golden: GoldenMessages) -> None:
    made, slurm = running(tmp_path), Slurm()
    said = golden.message(cancel(look(made, queued()), end=slurm.end))
    assert slurm.calls == ["end ['7']"]
    assert "run-1 is being cancelled (job 7)" in said
    assert "its tasks are signalled" in said
    assert said.endswith(f"hpcddp submit --resume {made.run.path}")
    assert not made.run.result.exists()
    # For the supervisor, to which Slurm shows only that the job was signalled.
    assert [event.attempt for event in read_events(made.run.events) if event.kind == "cancel"] == [0]


def test_a_cancel_that_slurm_refuses_is_not_recorded(tmp_path: Path) -> None:
    def refuse(_: object) -> None:
        raise SlurmUnavailableError("scancel: error: Unable to contact slurm controller")

    made = running(tmp_path)
    with pytest.raises(SlurmUnavailableError):
        cancel(look(made, queued()), end=refuse)
    # A preemption soon after it would be refused as a requeue by the program of a cancelled job.
    assert [event for event in read_events(made.run.events) if event.kind == "cancel"] == []


def test_a_program_is_told_to_save_itself(tmp_path: Path, golden: GoldenMessages) -> None:
    made = running(tmp_path, PROGRAM)
    said = golden.message(cancel(look(made, queued()), end=Slurm().end))
    assert "(job 7): its program receives SIGTERM" in said


@pytest.mark.parametrize("started", [False, True])
def test_a_run_that_waits_is_concluded_here_for_nobody_else_could(
    tmp_path: Path, golden: GoldenMessages, *, started: bool
) -> None:
    made, slurm = make(tmp_path).submitted(), Slurm()
    if started:
        made.started().event("save", step=20).event("requeue", cause="preemption")
    said = golden.message(cancel(look(made, queued(state="PENDING", restarts=int(started))), end=slurm.end))
    assert slurm.calls == ["end ['7']"]
    assert ("step 20 is saved" in said, "had not saved a step" in said) == (started, not started)
    assert said.endswith(f": hpcddp submit --resume {made.run.path}")
    result = json.loads(made.run.result.read_text())
    assert (result["status"], result["exit_code"], result["saved_step"]) == ("cancelled", 130, 20 if started else None)
    assert result["attempts"] == int(started)
    assert result["reason"] == f"cancelled by its user before it {'ran again' if started else 'started'}"
    assert look(made).state == "cancelled"


def test_a_run_on_a_full_disk_is_cancelled_and_its_result_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_disk(tmp_path / "disk") as disk:
        made, slurm = make(disk).submitted(), Slurm()
        fill_inodes(disk)
        said = cancel(look(made, queued(state="PENDING")), end=slurm.end)
        assert slurm.calls == ["end ['7']"]
        assert "run run-1 is cancelled (job 7)" in said
        assert f"{made.run.result} cannot be written (No space left on device)" in capsys.readouterr().err


def test_a_run_that_has_ended_is_left_alone(tmp_path: Path, golden: GoldenMessages) -> None:
    made, slurm = make(tmp_path).submitted().started().ended("finished"), Slurm()
    said = golden.message(cancel(look(made, queued()), end=slurm.end))
    assert "run-1 has ended already (finished)" in said
    assert slurm.calls == []


def test_another_job_with_the_same_id_is_left_alone(tmp_path: Path, golden: GoldenMessages) -> None:
    made, slurm = make(tmp_path).submitted(), Slurm()
    said = golden.message(cancel(look(made, queued(submit_time="2030-01-01T00:00:00")), end=slurm.end))
    assert "run-1 has ended already (lost)" in said
    assert slurm.calls == []


def test_nothing_is_cancelled_blindly(tmp_path: Path, golden: GoldenMessages) -> None:
    def ask() -> list[QueuedJob]:
        raise SlurmUnavailableError("squeue failed: Unable to contact slurm controller")

    made, slurm = make(tmp_path).submitted(), Slurm()
    (status,) = statuses([read_run_files(made.run)], ask=ask, now=NOON).runs
    with pytest.raises(CancelError, match="nothing was cancelled") as caught:
        cancel(status, end=slurm.end)
    assert "run-1 is unknown" in golden.message(caught.value)
    assert slurm.calls == []


def test_a_run_on_this_machine_gets_what_ctrl_c_would_send(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: GoldenMessages
) -> None:
    made = make(tmp_path).submitted("77", cluster="local")
    monkeypatch.setattr("hpcddp.manage.status.runs_script", lambda _: True)
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    said = golden.message(cancel(look(made), end=Slurm().end))
    assert "it saves and exits" in said
    assert said.endswith(f"hpcddp submit --resume {made.run.path}")
    assert sent == [(77, signal.SIGTERM)]


def test_a_run_on_this_machine_that_ends_meanwhile_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = subprocess.Popen(["true"])
    made = make(tmp_path).submitted(str(process.pid), cluster="local")
    process.wait()
    monkeypatch.setattr("hpcddp.manage.status.runs_script", lambda _: True)
    assert cancel(look(made), end=Slurm().end) == "run run-1 has ended meanwhile; there is nothing to cancel"


def test_a_sweep_is_cancelled_in_one_go_but_for_what_has_ended(tmp_path: Path, golden: GoldenMessages) -> None:
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

    said = golden.message(cancel_sweep(status(), end=slurm.end, now=NOON))
    assert slurm.calls == ["end ['60', '50_[2-3]', '51_[0-1]']"]
    assert said.startswith("5 elements of sweep sweep")
    assert "1 running; what runs is saved" in said
    jobs[1:] = []
    assert status().sentence == "1 running, 1 finished, 4 cancelled"
    jobs[:] = []
    again = golden.message(cancel_sweep(status(), end=slurm.end, now=NOON))
    assert "already (1 finished, 4 cancelled, 1 lost)" in again


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


def test_a_live_training_is_asked_to_save_and_the_wish_is_written_down(tmp_path: Path, golden: GoldenMessages) -> None:
    made = running(tmp_path)
    slurm = Slurm(made)
    said = golden.message(requeue(look(made, queued()), slurm.commands, sleep=lambda _: None))
    assert slurm.calls == ["warn 7"]
    assert "run-1 stops at the end of" in said
    assert "Slurm runs job 7 again" in said
    assert made.attempt().requeue_request.exists()


def test_tasks_that_do_not_hear_at_first_are_asked_again(tmp_path: Path) -> None:
    made = running(tmp_path)
    slurm = Slurm(made, hears=3)
    requeue(look(made, queued()), slurm.commands, sleep=lambda _: None)
    assert slurm.calls == ["warn 7"] * 3


def test_a_wish_that_nobody_hears_is_taken_back(tmp_path: Path, golden: GoldenMessages) -> None:
    made = running(tmp_path)
    with pytest.raises(RequeueError, match="run-1 do not answer") as caught:
        requeue(look(made, queued()), Slurm().commands, sleep=lambda _: None)
    assert "try again when hpcddp status" in golden.message(caught.value)
    assert not made.attempt().requeue_request.exists()


def test_a_program_is_requeued_by_slurm_itself(tmp_path: Path, golden: GoldenMessages) -> None:
    made, slurm = running(tmp_path, PROGRAM), Slurm()
    said = golden.message(requeue(look(made, queued()), slurm.commands))
    assert slurm.calls == ["requeue 7"]
    assert said.startswith("job 7 is requeued")
    assert "run-1 receives SIGTERM" in said
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


def test_where_slurm_may_not_requeue_nothing_is_stopped(tmp_path: Path, golden: GoldenMessages) -> None:
    made, slurm = running(tmp_path), Slurm(allowed=False)
    with pytest.raises(RequeueError, match="not allowed to requeue job 7") as caught:
        requeue(look(made, queued()), slurm.commands)
    message = golden.message(caught.value)
    assert "hpcddp cancel run-1" in message
    assert message.endswith(f"hpcddp submit --resume {made.run.path}")
    assert slurm.calls == []


def test_a_job_that_hpcddp_itself_keeps_from_being_requeued_may_be(tmp_path: Path) -> None:
    made = running(tmp_path, TRAINING + ONLY_TIME)
    slurm = Slurm(made, allowed=False)
    requeue(look(made, queued()), slurm.commands, sleep=lambda _: None)
    assert slurm.calls == ["warn 7"]


@pytest.mark.parametrize(
    ("word", "facts"),
    [
        ("PENDING", ("run-1 waits to start (requeued)", "there is nothing to save")),
        ("COMPLETING", ("run-1 is stopping", "try again later")),
        ("CANCELLED", ("run-1 has ended (cancelled)", "hpcddp submit --resume")),
    ],
)
def test_what_does_not_run_is_not_requeued(
    tmp_path: Path, word: str, facts: tuple[str, ...], golden: GoldenMessages
) -> None:
    with pytest.raises(RequeueError) as caught:
        requeue(look(running(tmp_path), queued(state=word)), Slurm().commands)
    message = golden.message(caught.value)
    for fact in facts:
        assert fact in message


def test_a_finished_run_has_nothing_left_to_run(tmp_path: Path, golden: GoldenMessages) -> None:
    with pytest.raises(RequeueError, match="run-1 has finished") as caught:
        requeue(look(running(tmp_path).ended("finished")), Slurm().commands)
    assert "nothing left to run" in golden.message(caught.value)


def test_a_run_on_this_machine_is_not_requeued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: GoldenMessages
) -> None:
    made = make(tmp_path).submitted("77", cluster="local")
    monkeypatch.setattr("hpcddp.manage.status.runs_script", lambda _: True)
    with pytest.raises(RequeueError, match="runs on this machine") as caught:
        requeue(look(made), Slurm().commands)
    message = golden.message(caught.value)
    assert "hpcddp cancel run-1" in message
    assert message.endswith(f"hpcddp submit --resume {made.run.path}")


def test_the_stop_of_a_waiting_run_is_an_event(tmp_path: Path) -> None:
    made = make(tmp_path).submitted()
    cancel(look(made, queued(state="PENDING")), end=Slurm().end)
    (event,) = read_events(made.run.events)
    assert (event.kind, event.cause) == ("stop", "cancelled")


@pytest.mark.parametrize("job", [TRAINING, PROGRAM])
def test_a_suspended_run_is_not_promised_a_save(tmp_path: Path, job: str, golden: GoldenMessages) -> None:
    made = make(tmp_path).submitted().started().event("train")
    (tmp_path / "job.yaml").write_text(job)
    made.run.job_file.write_text(dump_job(load_job(tmp_path / "job.yaml").spec, environment_values=False))
    slurm = Slurm()
    sentence = golden.message(cancel(look(made, queued(state="SUSPENDED")), end=slurm.end))
    assert slurm.calls == ["end ['7']"]
    assert "Slurm kills it without a signal" in sentence
    assert "it is saved" not in sentence
    assert "saves if" not in sentence


def test_a_program_that_never_started_has_saved_nothing(tmp_path: Path) -> None:
    made = make(tmp_path).submitted()
    (tmp_path / "job.yaml").write_text(PROGRAM)
    made.run.job_file.write_text(dump_job(load_job(tmp_path / "job.yaml").spec, environment_values=False))
    sentence = cancel(look(made, queued(state="PENDING")), end=Slurm().end)
    assert "it had not saved a step. To start it again: " in sentence
