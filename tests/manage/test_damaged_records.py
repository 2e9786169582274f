"""Every command says one sentence about a damaged record, or does without it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from hpcddp.errors import HpcddpError
from hpcddp.jobfile.write import parse_resolved
from hpcddp.manage.control import DamagedRunError, RequeueCommands, cancel, requeue
from hpcddp.manage.first_error import failed_attempt, first_error
from hpcddp.manage.logs import merged, sources
from hpcddp.manage.overview import overview_of
from hpcddp.manage.overview_text import details
from hpcddp.manage.report import report_of
from hpcddp.manage.status import RunStatus
from hpcddp.manage.why import explain
from hpcddp.run.directory import AttemptDirectory
from hpcddp.run.events import append_event
from hpcddp.run.failure import write_failure
from hpcddp.run.job_file import write_exported_values
from hpcddp.run.job_records import (
    Decision,
    FailureRecord,
    ProgramExit,
    Rank,
    SubmissionRecord,
    write_decision,
    write_exit,
    write_plan_record,
    write_ranks,
    write_submission_record,
)
from hpcddp.run.result import Result, write_result
from hpcddp.slurm.commands import QueuedJob
from hpcddp.slurm.job import State
from hpcddp.stop.reasons import StopReason
from hpcddp.submission.resume import request_to_resume, resume
from hpcddp.supervise.end import end
from tests.manage.runs import queued
from tests.messages import GoldenMessages
from tests.run.damage import DAMAGES, Damage, link, newer, truncate, wrong_type
from tests.supervise.attempts import PREEMPTED, SLURM, Command, Scenario
from tests.supervise.fake_slurm import FakeSlurm

Find = Callable[[AttemptDirectory], Path]
RECORDS: Final[Mapping[str, Find]] = {
    "submission": lambda attempt: attempt.run.submission,
    "start": lambda attempt: attempt.start,
    "result": lambda attempt: attempt.run.result,
    "decision": lambda attempt: attempt.decision,
    "ranks": lambda attempt: attempt.ranks,
    "plan": lambda attempt: attempt.run.plan,
    "failure": lambda attempt: attempt.rank_error(1),
    "exit": lambda attempt: attempt.rank_exit(0),
    "job": lambda attempt: attempt.run.job_file,
    "events": lambda attempt: attempt.run.events,
    "metrics": lambda attempt: attempt.run.metrics,
}


@dataclass(frozen=True)
class Case:
    """What a command does with a run, and the records that it cannot do without."""

    act: Callable[[Scenario], str]
    names: frozenset[str]


def status_of(scenario: Scenario) -> RunStatus:
    return look(scenario, [queued("7")])


def look(scenario: Scenario, jobs: Sequence[QueuedJob]) -> RunStatus:
    (line,) = overview_of([scenario.attempt.run], ask=lambda: jobs, now=0.0).lines
    assert isinstance(line, RunStatus)
    return line


def show_logs(scenario: Scenario) -> str:
    return "\n".join(line.text for line in merged(sources(scenario.attempt, ranks=(), batch=True)))


def nothing(*_: object) -> None:
    """Stands for Slurm."""


def request_requeue(scenario: Scenario) -> str:
    commands = RequeueCommands(may_requeue=lambda _: True, warn=nothing, allow=nothing, requeue=nothing)
    return requeue(status_of(scenario), commands, sleep=nothing)


def begin_again(scenario: Scenario) -> str:
    with pytest.MonkeyPatch.context() as patch:
        FakeSlurm(patch, Restarts="1")
        return str(scenario.begin({**SLURM, "SLURM_RESTART_COUNT": "1"}).path)


def resume_run(scenario: Scenario) -> str:
    run = scenario.attempt.run
    return str(resume(run, request_to_resume(run, environment=dict(os.environ))))


COMMANDS: Final[Mapping[str, Case]] = {
    "status": Case(
        lambda scenario: "\n".join(details(status_of(scenario), paint=lambda text, _: text)),
        frozenset({"submission", "start", "result", "ranks", "plan"}),
    ),
    "why": Case(
        lambda scenario: "\n".join(explain(status_of(scenario)).lines()),
        frozenset({"submission", "start", "result", "ranks", "plan"}),
    ),
    "logs": Case(show_logs, frozenset()),
    "cancel": Case(
        lambda scenario: cancel(status_of(scenario), end=nothing), frozenset({"submission", "start", "result"})
    ),
    "requeue": Case(request_requeue, frozenset({"submission", "start", "result", "job"})),
    "submit --resume": Case(
        resume_run,
        frozenset({"submission", "start", "result", "job"}),
    ),
    "end": Case(
        lambda scenario: end(scenario.attempt, code=1, environment=SLURM).text,
        frozenset({"result", "decision", "failure"}),
    ),
    "begin": Case(begin_again, frozenset({"start", "result"})),
}


@pytest.fixture
def scenario(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scenario:
    fake = FakeSlurm(monkeypatch)
    monkeypatch.setattr("time.monotonic", lambda: fake.waited)
    return Scenario(tmp_path, SLURM)


def lay_down(scenario: Scenario, record: str) -> None:
    """Write all records that such a run may have; a result only where it is the one that is damaged."""
    attempt = scenario.attempt
    submission = SubmissionRecord(
        cluster="slurm", job_id="7", directory="/", python="python", time=0.0, run_dir=str(attempt.run.path)
    )
    write_submission_record(attempt.run, submission)
    attempt.run.script.write_text("#!/bin/bash\n")
    write_exported_values(attempt.run, {})
    write_ranks(attempt, [Rank(host="n1"), Rank(host="n2")])
    write_plan_record(attempt.run, {"total_steps": 100, "steps_per_epoch": 10})
    if record == "job":
        # JSON is YAML.
        spec = parse_resolved(attempt.run.job_file.read_text())
        attempt.run.job_file.write_text(json.dumps(spec.model_dump(mode="json", exclude_defaults=True)))
    if record == "events":
        append_event(attempt.run.events, kind="save", time=1.0, attempt=0, step=3)
    if record == "metrics":
        attempt.run.metrics.write_text('{"step": 1, "time": 1.0, "loss": 2.0}\n')
    if record == "result":
        write_result(attempt.run, Result(status="failed", reason="why"))
    if record == "decision":
        decision = Decision(
            attempt=0, step=1, reason=StopReason.TERMINATED, cause=None, saved=True, save_s=0.0, time=0.0
        )
        write_decision(attempt, decision)
    if record == "failure":
        failure = FailureRecord(
            rank=1, host="n2", time=0.0, kind="ValueError", message="no", traceback="", exit_code=70, secondary=False
        )
        attempt.rank_log(0).unlink()
        write_failure(attempt, failure)
    write_exit(attempt, ProgramExit(rank=0, host="n1", time=0.0, code=0))


def damaged_records() -> Iterator[object]:
    """Return each damage of each record; the third that runs each time has all records and all damages."""
    for row, record in enumerate(RECORDS):
        for column, (name, damage) in enumerate(DAMAGES.items()):
            marks = [] if (row + column) % 3 == 0 else [pytest.mark.long("the same damages of other records")]
            yield pytest.param(record, damage, id=f"{record}-{name}", marks=marks)


@pytest.mark.parametrize(("record", "damage"), list(damaged_records()))
def test_a_damaged_record_is_one_sentence_in_every_command(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch, record: str, damage: Damage
) -> None:
    # Of a log that is too large, so many bytes are read by every command.
    monkeypatch.setattr("hpcddp.run.record.LARGEST_RECORD", 1 << 20)
    path = RECORDS[record](scenario.attempt)
    lay_down(scenario, record)
    if path.suffix == ".jsonl" and damage in {newer, wrong_type}:
        # Of several lines; the readers of logs have tests of their own.
        path.write_text(path.read_text().splitlines()[-1])
    damage(path)
    for name, command in COMMANDS.items():
        try:
            said = command.act(scenario)
        except HpcddpError as error:
            said = error.message
            assert "\n" not in said, name
        except OSError as error:
            # A log that nobody can append to; the command lines print both.
            said = f"{error.filename}: {error.strerror}"
            assert record == "events", (name, said)
        assert record not in command.names or str(path) in said, (name, said)
        assert "Error:" not in said, (name, said)


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_the_end_of_a_command_is_not_decided_by_a_damaged_exit_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Damage
) -> None:
    fake = FakeSlurm(monkeypatch)
    monkeypatch.setattr("time.monotonic", lambda: fake.waited)
    command = Command(tmp_path, SLURM)
    command.leave(0, 0)
    damage(command.attempt.rank_exit(1))
    ending = end(command.attempt, code=0, environment=SLURM)
    assert str(command.attempt.rank_exit(1)) in ending.text
    assert command.result is not None
    assert (ending.exit_code, command.result["status"]) == (71, "stopped")
    assert fake.calls == []


def test_a_command_with_a_damaged_exit_record_is_requeued_where_slurm_says_why_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeSlurm(monkeypatch)
    command = Command(tmp_path, SLURM)
    fake.become("RUNNING", **PREEMPTED)
    command.leave(143, 143, notice="terminated")
    truncate(command.attempt.rank_exit(1))
    assert (end(command.attempt, code=143, environment=SLURM).exit_code, fake.calls) == (75, ["requeue 7"])


def test_a_run_with_a_damaged_decision_is_requeued_where_slurm_says_why_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeSlurm(monkeypatch)
    scenario = Scenario(tmp_path, SLURM)
    fake.become("RUNNING", **PREEMPTED)
    scenario.stop()
    truncate(scenario.attempt.decision)
    ending = end(scenario.attempt, code=75, environment=SLURM)
    assert (ending.exit_code, fake.calls) == (75, ["requeue 7"])
    assert "the newest checkpoint is of step 12" in ending.text
    assert f"{scenario.attempt.decision} is damaged" in capsys.readouterr().err


def test_a_command_has_finished_although_nobody_can_read_when_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeSlurm(monkeypatch)
    command = Command(tmp_path, SLURM)
    command.leave(0, 0)
    truncate(command.attempt.start)
    assert end(command.attempt, code=0, environment=SLURM).exit_code == 0
    assert command.result is not None
    assert (command.result["status"], "wall_s" in command.result) == ("finished", False)


@pytest.mark.parametrize("name", ["events", "metrics"])
def test_a_run_whose_log_cannot_be_read_is_shown_with_a_sentence(scenario: Scenario, name: str) -> None:
    lay_down(scenario, "start")
    log = scenario.attempt.run.path / f"{name}.jsonl"
    log.touch()
    link(log)
    for command in ("status", "why"):
        said = COMMANDS[command].act(scenario)
        assert f"{log} cannot be read (it is a symbolic link); put a regular file in its place, or move it away" in said


def test_the_first_error_is_shown_where_the_event_log_is_a_link(scenario: Scenario) -> None:
    lay_down(scenario, "failure")
    link(scenario.attempt.run.events)
    attempt = failed_attempt(scenario.attempt.run)
    assert attempt is not None
    assert first_error(attempt).ranks == (1,)


def test_a_pipe_in_place_of_a_log_is_a_sentence(scenario: Scenario, golden: GoldenMessages) -> None:
    lay_down(scenario, "start")
    logs = [scenario.attempt.run.events, scenario.attempt.run.metrics]
    rank_log = scenario.attempt.rank_log(0)
    for path in (*logs, rank_log):
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    for path in logs:
        assert f"{path} is not a regular file" in COMMANDS["status"].act(scenario)
    (placeholder,) = [line for line in COMMANDS["logs"].act(scenario).splitlines() if "cannot be read" in line]
    assert "a named pipe" in golden.message(placeholder)


def test_the_end_of_a_run_whose_events_cannot_be_read_is_one_sentence(scenario: Scenario) -> None:
    scenario.stop()
    link(scenario.attempt.run.events)
    ending = end(scenario.attempt, code=75, environment=SLURM)
    assert (ending.exit_code, f"{scenario.attempt.run.events} cannot be read" in ending.text) == (71, True)


def test_a_run_whose_result_is_damaged_has_ended_and_is_not_lost(scenario: Scenario, golden: GoldenMessages) -> None:
    lay_down(scenario, "result")
    truncate(scenario.attempt.run.result)
    status = look(scenario, ())
    assert status.state is State.UNKNOWN
    assert "its outcome is unknown" in golden.message(explain(status).why)
    append_event(scenario.attempt.run.events, kind="finish", time=1.0, attempt=0)
    status = look(scenario, ())
    assert status.state is State.FINISHED
    answer = explain(status)
    assert "event log says that it has finished" in golden.message(answer.why)
    assert f"{scenario.attempt.run.result} is damaged" in "\n".join(answer.lines())


def test_why_and_status_agree_on_a_run_that_was_cancelled_and_whose_result_is_empty(scenario: Scenario) -> None:
    lay_down(scenario, "result")
    scenario.attempt.run.result.write_text("")
    append_event(scenario.attempt.run.events, kind="stop", time=1.0, attempt=0, cause="cancelled")
    status = look(scenario, ())
    assert status.state is State.CANCELLED
    assert explain(status).why == (
        "it has ended, and its event log says that it was cancelled: its result cannot be read"
    )


@pytest.mark.parametrize("name", ["job_file", "events"])
def test_an_empty_file_that_is_never_written_so_is_told(scenario: Scenario, name: str) -> None:
    path: Path = getattr(scenario.attempt.run, name)
    path.write_text("")
    status = look(scenario, ())
    (damage,) = [sentence for sentence in status.files.damaged if str(path) in sentence]
    assert damage.startswith(f"{path} is damaged: it is empty; ")
    assert damage in "\n".join(explain(status).lines())
    assert [sentence for sentence in report_of(status).damaged if str(path) in sentence] == [damage]


def test_cancelling_a_run_whose_result_is_damaged_is_bad_input(scenario: Scenario, golden: GoldenMessages) -> None:
    lay_down(scenario, "result")
    truncate(scenario.attempt.run.result)
    with pytest.raises(DamagedRunError, match=r"result\.json is damaged") as caught:
        COMMANDS["cancel"].act(scenario)
    assert golden.message(caught.value).startswith("nothing was cancelled: ")
    assert caught.value.exit_code == 2
