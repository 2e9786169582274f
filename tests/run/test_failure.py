"""The end of a failed attempt names who failed first."""

from pathlib import Path

from hpcddp.run.directory import AttemptDirectory, RunDirectory
from hpcddp.run.failure import FailureRecord, describe_failure, read_failures, write_failure


def record(rank: int, *, time: float, secondary: bool = False, message: str = "boom") -> FailureRecord:
    return FailureRecord(
        rank=rank,
        host=f"n{rank}",
        time=time,
        kind="ValueError",
        message=message,
        traceback=f"Traceback\nValueError: {message}",
        exit_code=70,
        secondary=secondary,
    )


def attempt_in(tmp_path: Path) -> AttemptDirectory:
    attempt = RunDirectory(tmp_path).attempt(0)
    attempt.path.mkdir(parents=True)
    return attempt


def test_a_follower_never_takes_the_place_of_the_first_cause(tmp_path: Path) -> None:
    attempt = attempt_in(tmp_path)
    write_failure(attempt, record(0, time=1.0, secondary=True, message="Connection closed by peer"))
    write_failure(attempt, record(3, time=2.0))
    text = describe_failure(attempt, read_failures(attempt))
    assert text.startswith("rank 3 on n3 failed first: ValueError: boom")
    assert "rank 0 only followed: Connection closed by peer" in text


def test_a_failure_of_all_ranks_is_told_once(tmp_path: Path) -> None:
    attempt = attempt_in(tmp_path)
    for rank in range(3):
        write_failure(attempt, record(rank, time=float(rank)))
    assert describe_failure(attempt, read_failures(attempt)).splitlines()[-2] == "the same on ranks 1, 2"


def test_the_first_record_of_a_rank_stays(tmp_path: Path) -> None:
    attempt = attempt_in(tmp_path)
    write_failure(attempt, record(1, time=1.0, message="first"))
    write_failure(attempt, record(1, time=2.0, message="second"))
    assert [found.message for found in read_failures(attempt)] == ["first"]


def test_a_rank_that_was_killed_is_told_by_its_silence(tmp_path: Path) -> None:
    attempt = attempt_in(tmp_path)
    for rank in range(2):
        attempt.rank_log(rank).touch()
    write_failure(attempt, record(0, time=1.0, secondary=True, message="Connection reset by peer"))
    assert describe_failure(attempt, read_failures(attempt)).splitlines()[:2] == [
        "rank 1 ended without a word: killed, out of memory, or a crash below Python",
        "rank 0 only followed: Connection reset by peer",
    ]


def test_a_long_message_is_cut_to_a_headline() -> None:
    assert record(0, time=0.0, message="x" * 400 + "\nmore").headline == "x" * 300 + " ..."
