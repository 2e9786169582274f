"""Files that other processes read are whole or absent."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hpcddp.run import files
from tests.messages import GoldenMessages
from tests.small_disk import FILLS, make_room, small_disk


def test_a_replaced_file_leaves_no_temporary_one(tmp_path: Path) -> None:
    files.write_json(tmp_path / "a.json", {"x": 1})
    files.write_json(tmp_path / "a.json", {"x": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert files.read_json(tmp_path / "a.json") == {"x": 2}


def test_a_lock_keeps_others_out_until_it_is_given_back(tmp_path: Path) -> None:
    order: list[str] = []

    def enter_later() -> None:
        with files.locked(tmp_path / "log"):
            order.append("second")

    with ThreadPoolExecutor(1) as executor:
        with files.locked(tmp_path / "log"):
            waiting = executor.submit(enter_later)
            with pytest.raises(TimeoutError):
                waiting.result(timeout=0.3)
            order.append("first")
        waiting.result(timeout=30)
    assert order == ["first", "second"]


def test_where_no_lock_can_be_made_nobody_is_kept_out(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with files.locked(tmp_path / "link"), files.locked(tmp_path / "link"):
        pass
    assert not (tmp_path / "nowhere").exists()


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with files.locked(tmp_path / "pipe"), pytest.raises(OSError, match="No such device"):
        files.open_to_append(tmp_path / "pipe")


def test_what_is_written_is_its_owners_alone(tmp_path: Path) -> None:
    files.write_text(tmp_path / "a", "x")
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600


def test_a_failed_write_keeps_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files.write_text(tmp_path / "a", "old")

    def no_space(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", no_space)
    with pytest.raises(OSError, match="No space left"):
        files.write_text(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_the_first_of_many_creators_wins_and_its_document_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "first.json"
    with ThreadPoolExecutor(8) as pool:
        created = list(pool.map(lambda number: files.create_json(path, {"number": number}), range(32)))
    assert sum(created) == 1
    assert files.read_json(path) == {"number": created.index(True)}


def test_a_missing_document_is_none(tmp_path: Path) -> None:
    assert files.read_json(tmp_path / "nothing.json") is None


def test_appended_lines_of_many_writers_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: files.append_line(path, json.dumps({"n": number, "pad": "x" * 500})), range(200)))
    # A writer that sees a part of another one's line begins a new line: an empty one is no record.
    numbers = [json.loads(line)["n"] for line in path.read_text().splitlines() if line]
    assert sorted(numbers) == list(range(200))


def test_a_line_that_a_full_disk_cuts_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lines"
    files.append_line(path, "first")
    real_write = os.write

    def write_on_a_full_disk(descriptor: int, content: bytes) -> int:
        if len(content) <= 10:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_write(descriptor, content[:10])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write_on_a_full_disk)
        with pytest.raises(OSError, match="No space left"):
            files.append_line(path, "a line of some length")
    files.append_line(path, "last")
    assert path.read_text() == "first\nlast\n"


def test_a_link_in_place_of_a_file_is_never_written_through(tmp_path: Path) -> None:
    precious, link = tmp_path / "precious", tmp_path / "events.jsonl"
    precious.write_text("mine")
    link.symlink_to(precious)
    with pytest.raises(OSError, match="symbolic links"):
        files.append_line(link, "{}")
    files.write_text(link, "{}")
    assert (precious.read_text(), link.read_text(), link.is_symlink()) == ("mine", "{}", False)


def test_a_torn_line_never_swallows_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text("first\nto")
    files.append_line(path, "second")
    files.append_line(path, "third")
    assert path.read_text() == "first\nto\nsecond\nthird\n"


@pytest.mark.parametrize("fill", FILLS.values(), ids=FILLS)
@pytest.mark.parametrize("write", [files.write_json, files.create_json])
def test_a_full_disk_takes_as_many_records_as_there_are_reserves(
    tmp_path: Path, fill: Callable[[Path], None], write: Callable[..., object]
) -> None:
    with small_disk(tmp_path / "disk") as disk:
        reserves = [disk / "reserve" / name for name in ("a", "b")]
        files.make_reserves(reserves)
        (disk / "records").mkdir()
        fill(disk)
        for name in ("1.json", "2.json"):
            write(disk / "records" / name, {"x": "y" * 15000}, reserves=reserves)
            assert files.read_json(disk / "records" / name) == {"x": "y" * 15000}
        with pytest.raises(OSError, match="No space left"):
            write(disk / "records" / "3.json", {"x": 1}, reserves=reserves)
        assert sorted(path.name for path in (disk / "records").iterdir()) == ["1.json", "2.json"]
        make_room(disk)
        files.make_reserves(reserves)
        assert all(reserve.exists() for reserve in reserves)


@pytest.mark.parametrize("fill", FILLS.values(), ids=FILLS)
def test_a_full_disk_is_named(tmp_path: Path, fill: Callable[[Path], None], golden: GoldenMessages) -> None:
    with small_disk(tmp_path / "disk") as disk:
        assert files.full_disk(disk) is None
        fill(disk)
        assert f"the disk of {disk} is full" in golden.message(files.full_disk(disk))
        make_room(disk)
        assert list(disk.iterdir()) == []


def test_an_attempt_without_reserves_meets_a_full_disk_as_before(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size="64k") as disk:
        files.write_text(disk / "a", "old")
        FILLS["bytes"](disk)
        with pytest.raises(OSError, match="No space left"):
            files.write_bytes(disk / "a", b"new", reserves=[disk / "reserve" / "a"])
        assert (disk / "a").read_text() == "old"


def test_output_that_cannot_be_written_is_lost() -> None:
    program = """
import os, sys
from hpcddp.run.files import ignore_output_errors
ignore_output_errors()
print("out")
sys.stderr.write("error\\n")
os.write(3, b"done")
"""
    read_end, write_end = os.pipe()
    with Path("/dev/full").open("w") as full, os.fdopen(read_end) as answer:
        code = f"import os; os.dup2({write_end}, 3)\n{program}"
        done = subprocess.run(
            [sys.executable, "-u", "-c", code], stdout=full, stderr=full, pass_fds=[write_end], check=False
        )
        os.close(write_end)
        assert (done.returncode, answer.read()) == (0, "done")


def read_whole(path: Path, begin: int = 0, **options: bool) -> list[tuple[bytes, int]]:
    return list(files.lines_from(path, begin, **{"with_last": True, **options}))


def test_lines_come_with_the_offset_behind_them(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"one\ntwo\nthr")
    assert read_whole(log, 4) == [(b"two\n", 8), (b"thr", 11)]
    assert read_whole(log, with_last=False) == [(b"one\n", 4), (b"two\n", 8)]
    assert list(files.lines_from(log, 0, end=5, with_last=False)) == [(b"one\n", 4)]
    assert read_whole(tmp_path / "missing") == []


def test_lines_are_whole_across_the_parts_in_which_they_are_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    lines = [b"x" * length + b"\n" for length in (1, 16383, 16384, 16385, 40_000, 0, 5)]
    log.write_bytes(b"".join(lines))
    found = read_whole(log)
    assert [line for line, _ in found] == lines
    assert found[-1][1] == log.stat().st_size


def test_a_line_that_is_too_long_comes_in_parts_and_a_hole_takes_no_time(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"x" * 200_000)
    os.truncate(log, 10 << 30)
    with log.open("ab") as stream:
        stream.write(b"end\n")
    found = read_whole(log)
    assert max(len(line) for line, _ in found) < 2 * files.LONGEST_LINE
    assert b"".join(line for line, _ in found).replace(b"\0", b"") == b"x" * 200_000 + b"end\n"
    assert found[-1][1] == log.stat().st_size


@pytest.mark.parametrize("kind", ["pipe", "zero", "directory"])
def test_what_is_no_regular_file_is_neither_waited_for_nor_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "log"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "zero":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    assert files.read_tail(path, 100) == ""
    if kind != "directory":
        assert read_whole(path) == []
        assert list(files.GrowingFile(path).new_lines(ended=True)) == []


@pytest.mark.skipif(os.getuid() != 0, reason="giving a file away needs root")
def test_a_file_that_somebody_else_has_put_there_is_not_read(tmp_path: Path, golden: GoldenMessages) -> None:
    user, stranger = 64_001, 64_002
    path, link = tmp_path / "run" / "a.json", tmp_path / "link"
    path.parent.mkdir()
    path.write_text("{}")
    link.symlink_to(path)

    def read(owner: int, directory: int) -> set[bytes]:
        os.chown(path, owner, owner)
        os.chown(path.parent, directory, directory)
        found = set()
        for name, follow in ((path, False), (link, True)):
            with files.open_regular(name, follow_links=follow) as (stream, _):
                found.add(stream.read())
        return found

    assert read(user, user) == read(0, user) == {b"{}"}
    for directory in (user, 0):
        with pytest.raises(PermissionError) as caught:
            read(stranger, directory)
        assert "belongs to user 64002" in golden.message(files.why_unreadable(caught.value))


def test_a_name_that_is_not_utf8_is_in_a_document_as_it_is(tmp_path: Path) -> None:
    files.write_json(tmp_path / "a.json", {"directory": "/\udcff\u00e9"})
    assert files.read_json(tmp_path / "a.json") == {"directory": "/\udcff\u00e9"}
    files.append_line(tmp_path / "a.jsonl", json.dumps("\udcff", ensure_ascii=False))
    assert json.loads((tmp_path / "a.jsonl").read_text()) == "\udcff"
