"""Records of a job are read as they were written."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcddp.run.directory import AttemptDirectory, RunDirectory
from hpcddp.run.files import read_json, write_json
from hpcddp.run.job_records import (
    Decision,
    Rank,
    Refusal,
    Start,
    SubmissionRecord,
    newest_start,
    read_decision,
    read_ranks,
    read_submission,
    write_decision,
    write_ranks,
    write_start,
    write_submission_record,
)
from hpcddp.run.record import RecordError, read_record, write_record
from hpcddp.stop.reasons import Cause, StopReason

DECISION = Decision(attempt=0, step=3, reason=StopReason.WARNED, cause="preemption", saved=True, save_s=0.5, time=1.0)


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDirectory:
    made = RunDirectory(tmp_path).attempt(0)
    made.path.mkdir(parents=True)
    return made


def test_ranks_a_refusal_a_start_and_a_submission_are_read_as_they_were_written(attempt: AttemptDirectory) -> None:
    run = attempt.run
    ranks = (Rank(host="n1", gpu="GPU-1"), Rank(host="n2", launcher="torchrun"))
    write_ranks(attempt, ranks)
    assert read_ranks(attempt) == ranks
    refusal = Refusal(why="it belongs to another job 7")
    write_record(run.refusal("7"), refusal)
    assert read_record(run.refusal("7"), Refusal) == refusal
    start = Start(job_id=None, host="n1", time=1.5, is_local=True, pid=12)
    write_start(attempt, start)
    assert newest_start(run) == start
    submission = SubmissionRecord(
        cluster="slurm", job_id="7", directory="/", python="python", time=1.5, run_dir=str(run.path)
    )
    write_submission_record(run, submission)
    assert read_submission(run) == submission


@pytest.mark.parametrize("name", ["time", "run_dir"])
def test_a_submission_states_when_it_was_and_which_directory_it_is_of(attempt: AttemptDirectory, name: str) -> None:
    run = attempt.run
    submission = SubmissionRecord(
        cluster="slurm", job_id="7", directory="/", python="python", time=1.5, run_dir=str(run.path)
    )
    document = submission.as_document()
    del document[name]
    write_json(run.submission, document)
    with pytest.raises(RecordError, match=f"it has no {name}"):
        read_submission(run)


def test_a_start_states_whether_its_job_is_a_process(attempt: AttemptDirectory) -> None:
    write_json(attempt.start, {"format": 1, "job_id": "7", "host": "n1", "time": 1.5})
    with pytest.raises(RecordError, match="it has no is_local"):
        newest_start(attempt.run)


@pytest.mark.parametrize("reason", StopReason, ids=lambda reason: reason.word)
def test_every_reason_to_stop_is_written_as_its_word(attempt: AttemptDirectory, reason: StopReason) -> None:
    write_json(attempt.decision, {**DECISION.as_document(), "reason": reason.word})
    decision = read_decision(attempt)
    assert decision is not None
    assert (decision.reason, decision.known_cause) == (reason, Cause.PREEMPTION)
    write_decision(attempt, decision)
    assert read_json(attempt.decision)["reason"] == reason.word


def test_a_reason_to_stop_that_nobody_knows_is_damage(attempt: AttemptDirectory) -> None:
    write_json(attempt.decision, {**DECISION.as_document(), "reason": "bored"})
    with pytest.raises(RecordError, match='its reason is "bored"'):
        read_decision(attempt)
