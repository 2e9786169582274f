"""From an exception to the record and to the last words in a rank's log."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcddp.launch.attribution import failure_of, follower, last_words, leave_record
from hpcddp.launch.lifeline import Lifeline, own_host, own_rank
from hpcddp.run.directory import RunDirectory
from hpcddp.stop.heartbeat import Heartbeat
from hpcddp.train.errors import DataError

PEER_LOSS = RuntimeError("Connection closed by peer [10.0.0.2]:4242")


@pytest.fixture
def now() -> list[float]:
    return [100.0]


@pytest.fixture
def lifeline(now: list[float]) -> Lifeline:
    known = Lifeline()
    known.rank, known.host, known.device = 3, "n2", "cuda:1"
    known.heartbeat = Heartbeat(300.0, monotonic=lambda: now[0])
    known.heartbeat.at_step(120)
    return known


def test_a_record_says_who_where_and_how_far(lifeline: Lifeline) -> None:
    record = failure_of(ValueError("boom"), lifeline=lifeline)
    assert (record.rank, record.host, record.device, record.step) == (3, "n2", "cuda:1", 120)
    assert (record.kind, record.message, record.exit_code, record.secondary) == ("ValueError", "boom", 70, False)
    assert "ValueError: boom" in record.traceback


def test_an_error_of_ours_keeps_its_kind_and_code(lifeline: Lifeline) -> None:
    record = failure_of(DataError("no data"), lifeline=lifeline)
    assert (record.kind, record.exit_code) == ("data", 70)


def test_a_rank_whose_peer_has_gone_is_secondary(lifeline: Lifeline) -> None:
    record = failure_of(PEER_LOSS, lifeline=lifeline)
    assert (record.secondary, record.exit_code) == (True, 71)


def test_a_rank_that_stood_still_is_the_first_although_it_noticed_last(lifeline: Lifeline, now: list[float]) -> None:
    now[0] += 62.0
    lifeline.heartbeat.look()
    for record in (failure_of(PEER_LOSS, lifeline=lifeline), follower(failure_of(PEER_LOSS), lifeline)):
        assert (record.kind, record.secondary, record.exit_code) == ("stood_still", False, 124)
        assert record.message == (
            "the process stood still for 62 s, and the other ranks gave it up; it was stopped, or its host was"
        )


def test_a_follower_names_the_rank_that_failed(lifeline: Lifeline) -> None:
    record = follower(failure_of(ValueError("boom"), lifeline=lifeline), lifeline)
    assert (record.kind, record.secondary, record.exit_code) == ("peer_failed", True, 71)
    assert record.message == "rank 3 on n2 (cuda:1) failed, and this rank was told to end: ValueError: boom"


@pytest.mark.parametrize(
    ("error", "sentences"),
    [
        (
            ValueError("boom"),
            [
                "hpcddp: rank 3 on n2 (cuda:1) failed after step 120: ValueError: boom",
                "hpcddp: an error of the job's own code or data would come again, so the job is not requeued",
            ],
        ),
        (
            PEER_LOSS,
            [
                f"hpcddp: rank 3 on n2 (cuda:1) failed after step 120: RuntimeError: {PEER_LOSS}",
                "hpcddp: this rank only followed; the end of the batch log names the one that failed first",
            ],
        ),
    ],
)
def test_the_last_words_say_what_happened_and_what_that_means(
    lifeline: Lifeline, error: Exception, sentences: list[str]
) -> None:
    assert last_words(failure_of(error, lifeline=lifeline)).splitlines()[-2:] == sentences


def test_infrastructure_has_its_advice(lifeline: Lifeline) -> None:
    record = failure_of(OSError("gone"), exit_code=71, lifeline=lifeline)
    assert last_words(record).endswith(
        "hpcddp: requeue.max_failures says how often a job is requeued after such a failure\n"
    )


@pytest.mark.parametrize(
    ("environment", "rank", "host"),
    [
        ({"SLURM_PROCID": "5", "SLURMD_NODENAME": "n7"}, 5, "n7"),
        ({"SUBMITIT_LOCAL_GLOBALID": "1", "SLURM_PROCID": "9", "SLURMD_NODENAME": "n1"}, 1, "n1"),
        ({"RANK": "not a number", "SLURMD_NODENAME": "n1"}, 0, "n1"),
    ],
)
def test_a_rank_knows_itself_even_where_its_environment_is_wrong(
    environment: dict[str, str], rank: int, host: str
) -> None:
    assert (own_rank(environment), own_host(environment)) == (rank, host)


def test_a_record_that_cannot_be_written_is_told(
    lifeline: Lifeline, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    attempt = RunDirectory(tmp_path / "gone").attempt(0)
    leave_record(attempt, failure_of(ValueError("boom"), lifeline=lifeline))
    assert f"hpcddp: {attempt.rank_error(3)} cannot be written (" in capfd.readouterr().err
