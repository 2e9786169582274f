"""The logs of all ranks in the order of time."""

from __future__ import annotations

import os
import resource
import tracemalloc
from pathlib import Path

import pytest

from hpcddp.manage.logs import LogFollower, NoLogError, chosen_attempt, line_text, merged, sources
from hpcddp.run.directory import times_of
from hpcddp.run.failure import beginning
from hpcddp.run.job_records import Rank, write_ranks
from tests.manage.runs import NOON, FakeRun, make
from tests.messages import GoldenMessages


def write(made: FakeRun, rank: int, *parts: tuple[float, str], last: float = 90) -> None:
    """Write a log whose parts were seen at these times, and its last change."""
    log = made.attempt().rank_log(rank)
    size, lines = 0, []
    for at, text in parts:
        size += len(text.encode())
        lines.append(f"{size} {NOON + at:.3f}\n")
    log.write_text("".join(text for _, text in parts))
    times_of(log).write_text("".join(lines))
    os.utime(log, (NOON + last, NOON + last))


@pytest.fixture
def made(tmp_path: Path) -> FakeRun:
    made = make(tmp_path).submitted().started()
    write(made, 0, (1, "a\nb\n"), (5, "e\n"))
    write(made, 1, (2, "c\n"), (3, "d\n"), (6, "f\n"))
    return made


def test_lines_come_in_the_order_of_time_with_rank_and_host(made: FakeRun) -> None:
    write_ranks(made.attempt(), [Rank(host="n1"), Rank(host="n2")])
    lines = list(merged(sources(made.attempt())))
    assert "".join(line.text for line in lines) == "abcdef"
    assert [line.time - NOON for line in lines] == [1, 1, 2, 3, 5, 6]
    assert lines[2].source.label == "rank 1 n2"
    assert lines[2].as_json() == {"time": NOON + 2, "rank": 1, "host": "n2", "text": "c"}


def test_what_was_written_last_has_the_time_of_the_logs_last_change(made: FakeRun) -> None:
    log = made.attempt().rank_log(0)
    with log.open("a") as stream:
        stream.write("killed in the middle of")
    os.utime(log, (NOON + 50, NOON + 50))
    last = list(merged(sources(made.attempt())))[-1]
    assert (last.text, last.time - NOON) == ("killed in the middle of", 50)


def test_a_pipe_in_the_place_of_a_log_has_the_time_of_its_last_change(made: FakeRun) -> None:
    log = made.attempt().rank_log(1)
    log.unlink()
    times_of(log).unlink()
    os.mkfifo(log)
    os.utime(log, (NOON + 4, NOON + 4))
    (line,) = [line for line in merged(sources(made.attempt())) if line.source.rank == 1]
    assert line.time - NOON == 4


def test_a_log_without_times_has_that_of_its_last_change(made: FakeRun) -> None:
    times_of(made.attempt().rank_log(1)).unlink()
    assert "".join(line.text for line in merged(sources(made.attempt()))) == "abecdf"


def test_hosts_are_known_from_failures_where_the_ranks_never_met(made: FakeRun) -> None:
    made.failed(1)
    assert [source.label for source in sources(made.attempt())] == ["rank 0", "rank 1 n1"]


def test_some_ranks_only(made: FakeRun, golden: GoldenMessages) -> None:
    assert "".join(line.text for line in merged(sources(made.attempt(), ranks=[1]))) == "cdf"
    with pytest.raises(NoLogError, match="rank 7 has no log") as caught:
        sources(made.attempt(), ranks=[7])
    assert "attempt 0; ranks 0 to 1 have" in golden.message(caught.value)


def test_one_rank_is_named_as_one(made: FakeRun) -> None:
    made.attempt().rank_log(1).unlink()
    with pytest.raises(NoLogError, match=r"; rank 0 has one$"):
        sources(made.attempt(), ranks=[7])


def test_the_batch_scripts_words_of_this_attempt_alone(made: FakeRun) -> None:
    texts = [f"{beginning(made.attempt(number))}word {number}\n" for number in range(2)]
    made.run.batch_log.write_text("".join(texts))
    lines = [line for line in merged(sources(made.attempt(), batch=True)) if line.source.rank is None]
    assert [line.text for line in lines] == texts[0].splitlines()
    assert lines[0].source.label == "batch n1"


NAMELESS = "[W1127 18:38:04.1 socket.cpp:207] [c10d] The hostname of the client socket cannot be retrieved. err=-3"


@pytest.mark.parametrize("prefix", ["", "[rank1]:"])
def test_torchs_warning_about_a_host_without_a_name_is_left_out(made: FakeRun, prefix: str) -> None:
    other = "[W1127 18:38:04.102167081 socket.cpp:767] [c10d] The client socket has failed to connect to [n1]:29500"
    write(made, 0, (1, f"a\n{prefix}{NAMELESS}\n{other}\n"))
    assert [line.text for line in merged(sources(made.attempt(), ranks=[0]))] == ["a", other]


def test_an_attempt_that_is_not_there_is_refused(made: FakeRun, tmp_path: Path, golden: GoldenMessages) -> None:
    assert chosen_attempt(made.run, None).number == 0
    with pytest.raises(NoLogError, match="--attempt is 3") as caught:
        chosen_attempt(made.run, 3)
    assert "run-1 has attempt 0 alone" in golden.message(caught.value)
    with pytest.raises(NoLogError, match="the run waits has begun no attempt") as caught:
        chosen_attempt(make(tmp_path, "waits").submitted().run, None)
    assert "hpcddp why waits" in golden.message(caught.value)


def test_a_follower_returns_each_line_once_and_whole(made: FakeRun) -> None:
    follower = LogFollower(made.attempt())
    assert "".join(line.text for line in follower.new_lines(NOON)) == "abcdef"
    log = made.attempt().rank_log(1)
    for text, expected in (("g", []), ("h\nij", ["gh"]), ("\n", ["ij"]), ("", [])):
        with log.open("a") as stream:
            stream.write(text)
        lines = follower.new_lines(NOON + 100)
        assert [line.text for line in lines] == expected
        assert {line.time - NOON for line in lines} <= {100}
    made.log(2, "a rank that comes later\n")
    assert [line.source.rank for line in follower.new_lines(NOON)] == [2]


def test_of_a_run_that_has_ended_half_a_line_is_a_line(made: FakeRun) -> None:
    follower = LogFollower(made.attempt())
    assert list(follower.new_lines(NOON))
    with made.attempt().rank_log(1).open("a") as stream:
        stream.write("its last words")
    assert list(follower.new_lines(NOON)) == []
    assert [line.text for line in follower.new_lines(NOON, ended=True)] == ["its last words"]


def test_a_progress_bar_is_shown_as_it_last_was() -> None:
    assert line_text(b"10%\r20%\r30%\n") == "30%"
    assert line_text(b"\xff torn\r\n") == "\N{REPLACEMENT CHARACTER} torn"


def test_a_script_that_ended_before_its_first_attempt_is_told(tmp_path: Path, golden: GoldenMessages) -> None:
    run = make(tmp_path).submitted().run
    run.batch_log.write_text("slurm prolog\nhpcddp: /no/python cannot run hpcddp on n1\n")
    with pytest.raises(NoLogError) as raised:
        chosen_attempt(run, None)
    message = golden.message(raised.value)
    assert f"run {run.run_id} has begun no attempt" in message
    assert f"{run.batch_log} is: hpcddp: /no/python cannot run" in message


def test_the_logs_of_a_thousand_ranks_need_few_descriptors_and_little_memory(tmp_path: Path) -> None:
    made = make(tmp_path).submitted().started()
    for rank in range(1201):
        made.log(rank, f"{rank}\n")
    # 10 GB without a line end, nearly all of it a hole.
    os.truncate(made.attempt().rank_log(7), 10 << 30)
    made.run.batch_log.write_text("batch\n")
    os.truncate(made.run.batch_log, 10 << 30)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, before[1]))
    tracemalloc.start()
    try:
        found = [line.source.rank for line in merged(sources(made.attempt(), batch=True))]
        followed = list(LogFollower(made.attempt(), batch=True).new_lines(NOON, ended=True))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert set(found) == {None, *range(1201)}
    assert len(followed) == len(found)
    assert peak < 100 << 20


def test_a_log_that_cannot_be_read_does_not_hide_the_others(made: FakeRun, golden: GoldenMessages) -> None:
    made.attempt().rank_log(5).mkdir()
    made.attempt().rank_log(7).symlink_to("nowhere")
    made.log(6, "here\n")
    found = {line.source.rank: line.text for line in merged(sources(made.attempt()))}
    assert "Is a directory" in golden.message(found[5])
    assert found[6] == "here"
    assert {line.source.rank for line in LogFollower(made.attempt()).new_lines(NOON)} >= {6}
