"""The end of a failed attempt names who failed first."""

from pathlib import Path

from hpcddp.run.directory import AttemptDirectory, RunDirectory
from hpcddp.run.failure import (
    beginning,
    describe_failure,
    failure_sentence,
    read_failures,
    rest_of_message,
    write_failure,
)
from hpcddp.run.job_records import FailureRecord, Rank, write_ranks
from tests.messages import GoldenMessages


def record(
    rank: int, *, time: float, secondary: bool = False, message: str = "boom", kind: str = "ValueError"
) -> FailureRecord:
    return FailureRecord(
        rank=rank,
        host=f"n{rank}",
        time=time,
        kind=kind,
        message=message,
        traceback=f"Traceback\nValueError: {message}",
        exit_code=70,
        secondary=secondary,
    )


def attempt_in(tmp_path: Path) -> AttemptDirectory:
    attempt = RunDirectory(tmp_path).attempt(0)
    attempt.path.mkdir(parents=True)
    return attempt


def test_a_follower_never_takes_the_place_of_the_first_cause(tmp_path: Path, golden: GoldenMessages) -> None:
    attempt = attempt_in(tmp_path)
    write_failure(attempt, record(0, time=1.0, secondary=True, message="Connection closed by peer"))
    write_failure(attempt, record(3, time=2.0))
    text = describe_failure(attempt, read_failures(attempt))
    assert golden.message(text).startswith("rank 3 on n3 failed first: ValueError")
    assert "Connection closed by peer" not in text


def test_the_first_record_of_a_rank_stays(tmp_path: Path) -> None:
    attempt = attempt_in(tmp_path)
    write_failure(attempt, record(1, time=1.0, message="first"))
    write_failure(attempt, record(1, time=2.0, message="second"))
    assert [found.message for found in read_failures(attempt)] == ["first"]


def test_a_rank_that_was_killed_is_told_by_its_silence(tmp_path: Path, golden: GoldenMessages) -> None:
    attempt = attempt_in(tmp_path)
    for rank in range(2):
        attempt.rank_log(rank).touch()
    write_failure(attempt, record(0, time=1.0, secondary=True, message="Connection reset by peer"))
    silent, rest = golden.message(describe_failure(attempt, read_failures(attempt))).splitlines()
    assert silent.startswith("rank 1 ended without an error message")
    assert rest.endswith("--first-error tells how the other ranks ended")


def test_a_long_message_is_cut_to_a_headline() -> None:
    assert record(0, time=0.0, message="x" * 400 + "\nmore").headline == "x" * 300 + " ..."


def test_the_rest_of_a_message_is_shown_with_escapes_and_without_its_middle() -> None:
    few = record(0, time=0.0, message="first\n\tsecond \x1b[31m\n" + "y" * 400)
    assert few.below_headline == ["  second \\x1b[31m", "y" * 300 + " ..."]
    ten = record(0, time=0.0, message="\n".join(map(str, range(10))))
    assert ten.below_headline == [str(number) for number in range(1, 10)]
    many = record(0, time=0.0, message="\n".join(map(str, range(30))))
    assert many.below_headline == ["1", "2", "3", "4", "... (21 lines are left out)", "26", "27", "28", "29"]


def test_only_a_message_that_the_sentence_quotes_is_shown_whole(tmp_path: Path) -> None:
    attempt = attempt_in(tmp_path)
    write_failure(attempt, record(0, time=1.0, message="first\nsecond"))
    records = read_failures(attempt)
    assert rest_of_message(records, failure_sentence(attempt, records)) == ["second"]
    assert rest_of_message(records, "node n1 was lost") == []


def hang(rank: int, *, waiting: bool, step: int | None = 12) -> FailureRecord:
    return FailureRecord(
        rank=rank,
        host=f"n{rank}",
        time=float(rank),
        kind="hang",
        message="nothing happened for 300 s",
        traceback="Traceback\n  at the place",
        exit_code=124,
        secondary=False,
        waiting=waiting,
        device="cuda:0",
        step=step,
    )


def test_the_rank_that_others_waited_for_is_the_first_of_a_hang(tmp_path: Path, golden: GoldenMessages) -> None:
    attempt = attempt_in(tmp_path)
    for rank in (0, 2):
        write_failure(attempt, hang(rank, waiting=True))
    write_failure(attempt, hang(3, waiting=False))
    assert [found.rank for found in read_failures(attempt)] == [3, 0, 2]
    text = describe_failure(attempt, read_failures(attempt))
    assert golden.message(text).startswith("rank 3 on n3 (cuda:0) failed first")
    assert "step 12: nothing happened for 300 s" in text


def test_a_rank_that_stopped_answering_is_named_by_those_that_waited_with_its_host(
    tmp_path: Path, golden: GoldenMessages
) -> None:
    attempt = attempt_in(tmp_path)
    for rank in range(2):
        attempt.rank_log(rank).touch()
    write_ranks(attempt, [Rank(host="n1"), Rank(host="n2")])
    write_failure(attempt, hang(0, waiting=True))
    sentence = golden.message(failure_sentence(attempt, read_failures(attempt)))
    assert sentence.startswith("rank 1 on n2 stopped answering")
    assert "after step 12" in sentence
    assert "rank 0 on n0 (cuda:0) waited" in sentence


def test_a_hang_of_all_ranks_says_so(tmp_path: Path, golden: GoldenMessages) -> None:
    attempt = attempt_in(tmp_path)
    write_failure(attempt, hang(0, waiting=True, step=None))
    sentence = golden.message(failure_sentence(attempt, read_failures(attempt)))
    assert sentence.startswith("all ranks waited")
    assert "nothing happened for 300 s" in sentence


def test_clocks_of_hosts_put_no_follower_before_the_first_cause(tmp_path: Path) -> None:
    attempt = attempt_in(tmp_path)
    write_failure(attempt, record(0, time=1000.0))
    write_failure(attempt, record(1, time=1.0, secondary=True))
    assert [found.rank for found in read_failures(attempt)] == [0, 1]


def test_what_srun_says_is_the_cause_where_it_has_started_no_task(tmp_path: Path, golden: GoldenMessages) -> None:
    attempt = attempt_in(tmp_path)
    printed = (
        "srun: Job 7 step creation temporarily disabled, retrying (Requested nodes are busy)\n"
        'srun: error: unrecognized --cpu-bind argument "x"\nsrun: fatal: Failed to parse --cpu-bind= values.\n'
    )
    attempt.run.batch_log.write_text(beginning(attempt) + printed)
    assert golden.message(failure_sentence(attempt, [])).endswith(
        ': unrecognized --cpu-bind argument "x"; fatal: Failed to parse --cpu-bind= values.'
    )
    attempt.run.batch_log.write_text(beginning(attempt) + "srun: unrecognized option '--foo=bar'\n")
    assert failure_sentence(attempt, []).endswith(": unrecognized option '--foo=bar'")
    write_failure(attempt, record(0, time=1.0, secondary=True))
    attempt.rank_log(0).touch()
    assert "srun" not in failure_sentence(attempt, read_failures(attempt))


def test_a_launch_that_srun_refuses_is_told_and_not_the_tasks_that_it_then_kills(
    tmp_path: Path, golden: GoldenMessages
) -> None:
    attempt = attempt_in(tmp_path)
    attempt.rank_log(0).touch()
    attempt.run.batch_log.write_text(
        beginning(attempt)
        + "srun: error: Task launch for StepId=7.0 failed on node n2: Job credential expired\n"
        + "srun: error: Application launch failed: Job credential expired\n"
        + "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.\n"
        + "srun: error: n1: task 0: Killed\n"
    )
    sentence = golden.message(failure_sentence(attempt, read_failures(attempt)))
    assert sentence.endswith(" on n2: Job credential expired")
    assert "memory" not in sentence
    write_failure(attempt, record(0, time=1.0))
    assert failure_sentence(attempt, read_failures(attempt)).startswith("rank 0 on n0 failed first")
