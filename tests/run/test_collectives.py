"""The traces of collectives that hung ranks leave."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hpcddp.run.collectives import Collective, read_collectives, write_trace
from hpcddp.run.directory import AttemptDirectory, RunDirectory
from tests.run.traces import entry, trace


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDirectory:
    made = RunDirectory(tmp_path / "run").attempt(0)
    made.path.mkdir(parents=True)
    return made


def test_a_trace_is_read_as_it_was_written(attempt: AttemptDirectory) -> None:
    write_trace(attempt, 3, trace(entry(1), entry(2, retired=False, input_dtypes=[], input_sizes=[])))
    assert read_collectives(attempt) == {
        3: (
            Collective(group="0 (default_pg)", number=1, call="all_reduce Float[3]", is_finished=True),
            Collective(group="0 (default_pg)", number=2, call="all_reduce", is_finished=False),
        )
    }
    assert attempt.rank_collectives(3).stat().st_mode & 0o777 == 0o600


def test_what_nccl_has_completed_and_not_retired_yet_is_finished(attempt: AttemptDirectory) -> None:
    write_trace(attempt, 0, trace(entry(1, retired=False, state="completed"), entry(2, retired=False, state="started")))
    assert [one.is_finished for one in read_collectives(attempt)[0]] == [True, False]


def test_the_newest_finished_and_the_oldest_unfinished_collectives_of_each_group_are_kept(
    attempt: AttemptDirectory,
) -> None:
    own = {"pg_id": 1, "process_group": ["1", "own"]}
    entries = [entry(number) for number in range(1, 1001)]
    entries += [entry(number, retired=False) for number in range(1001, 1501)]
    write_trace(attempt, 0, trace(entry(1, **own), *entries))
    numbers = [(one.group, one.number) for one in read_collectives(attempt)[0]]
    assert ("1 (own)", 1) in numbers
    assert [number for group, number in numbers if group == "0 (default_pg)"] == list(range(981, 1101))


def test_a_message_between_two_ranks_is_no_collective(attempt: AttemptDirectory) -> None:
    write_trace(attempt, 0, trace(entry(1, is_p2p=True, profiling_name="nccl:send 0->1")))
    assert read_collectives(attempt) == {0: ()}


def test_a_trace_without_collectives_is_one(attempt: AttemptDirectory) -> None:
    write_trace(attempt, 0, json.dumps({"version": "2.10", "pg_status": {}}))
    assert read_collectives(attempt) == {0: ()}


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"null", b"7", b"[]", b"\xff", b'{"entries": 1}', b"[" * 100_000, b"cos\nsystem\n(S'true'\ntR."],
    ids=["empty", "truncated", "null", "number", "list", "not UTF-8", "no list", "deep", "a pickle"],
)
def test_a_damaged_trace_is_left_out(content: bytes, attempt: AttemptDirectory) -> None:
    attempt.rank_collectives(0).write_bytes(content)
    write_trace(attempt, 1, trace(entry(1)))
    assert list(read_collectives(attempt)) == [1]


@pytest.mark.parametrize("bad", [None, 7, [], {}, {"collective_seq_id": "1"}, entry(1, process_group="0")])
def test_an_entry_of_another_shape_is_left_out(bad: object, attempt: AttemptDirectory) -> None:
    attempt.rank_collectives(0).write_text(json.dumps({"entries": [bad, entry(2)]}))
    assert [one.number for one in read_collectives(attempt)[0]] == [2]


def test_a_pipe_and_a_link_are_not_read(attempt: AttemptDirectory) -> None:
    os.mkfifo(attempt.rank_collectives(0))
    attempt.rank_collectives(1).symlink_to("/dev/zero")
    (attempt.path / "collectives-rank-x.json").touch()
    assert read_collectives(attempt) == {}
