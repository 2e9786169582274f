"""Records of hpcddp 0.1.0, which name no format, are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcddp.run.directory import RunDirectory
from hpcddp.run.events import Event, read_events
from hpcddp.run.files import read_json, write_json
from hpcddp.run.job_records import (
    PublishedAddress,
    Rank,
    newest_start,
    read_address,
    read_decision,
    read_ranks,
    read_refusal,
    read_submission,
    write_decision,
)
from hpcddp.run.metrics import read_plan
from hpcddp.run.record import RecordError
from hpcddp.run.result import read_result
from hpcddp.run.sweep import Chunk, read_sweep
from hpcddp.stop.reasons import Cause, StopReason


def test_records_without_a_format_are_read(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    attempt = run.attempt(0)
    attempt.path.mkdir(parents=True)
    write_json(attempt.ranks, [{"host": "n1", "gpu": None}, {"host": "n2"}])
    assert read_ranks(attempt) == (Rank(host="n1"), Rank(host="n2"))
    write_json(tmp_path / "refused-7.json", "it belongs to another job 7")
    assert read_refusal(run, "7") == "it belongs to another job 7"
    # What a checkpointer of the user's own program wrote.
    write_json(attempt.start, {"host": "n1", "pid": 12, "job_id": None, "time": 1.5})
    start = newest_start(run)
    assert start is not None
    assert (start.host, start.pid, start.restart_count, start.token) == ("n1", 12, 0, "")
    write_json(run.submission, {"cluster": "slurm", "job_id": "7", "directory": "/", "python": "python"})
    submission = read_submission(run)
    assert submission is not None
    assert (submission.job_id, submission.time) == ("7", None)
    write_json(run.result, {"status": "failed", "reason": "why", "saved_step": None, "versions": {"torch": "2"}})
    result = read_result(run)
    assert result is not None
    assert result.as_json() == {
        "status": "failed", "reason": "why", "saved_step": None, "versions": {"torch": "2"},
    }  # fmt: skip
    write_json(tmp_path / "sweep.json", {"sweep_id": "s", "elements": [{"seed": 1}], "chunks": [
        {"job_id": "7", "first": 0, "count": 1}]})  # fmt: skip
    sweep = read_sweep(tmp_path)
    assert sweep is not None
    assert (sweep.elements, sweep.chunks) == (({"seed": 1},), (Chunk(job_id="7", first=0, count=1),))


def test_a_plan_an_address_a_decision_and_an_event_without_a_format_are_read(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    attempt = run.attempt(0)
    attempt.path.mkdir(parents=True)
    write_json(run.plan, {"global_batch_size": 8, "steps_per_epoch": None, "total_steps": 5, "notes": []})
    plan = read_plan(run)
    assert plan is not None
    assert (plan.steps_per_epoch, plan.total_steps, plan.facts["global_batch_size"]) == (None, 5, 8)
    write_json(attempt.rendezvous, {"host": "n1", "addresses": ["10.0.0.1"], "port": 20000, "token": "x"})
    assert read_address(attempt) == PublishedAddress(host="n1", addresses=("10.0.0.1",), port=20000)
    for reason in StopReason:
        write_json(attempt.decision, {"attempt": 0, "step": 3, "reason": reason.word, "cause": "preemption",
                                      "saved": True, "save_s": 0.5, "time": 1.0})  # fmt: skip
        decision = read_decision(attempt)
        assert decision is not None
        assert (decision.reason, decision.known_cause) == (reason, Cause.PREEMPTION)
        write_decision(attempt, decision)
        assert read_json(attempt.decision)["reason"] == reason.word
    run.events.write_text(
        '{"event": "requeue", "time": 1.0, "attempt": 0, "step": null, "reason": "r", "by": "user"}\n'
    )
    assert read_events(run.events) == [Event(kind="requeue", time=1.0, attempt=0, reason="r", by="user")]


def test_a_reason_to_stop_that_nobody_knows_is_damage(tmp_path: Path) -> None:
    attempt = RunDirectory(tmp_path).attempt(0)
    attempt.path.mkdir(parents=True)
    write_json(attempt.decision, {"attempt": 0, "step": 3, "reason": "bored", "cause": None, "saved": True,
                                  "save_s": 0.5, "time": 1.0})  # fmt: skip
    with pytest.raises(RecordError, match='its reason is "bored"'):
        read_decision(attempt)
