"""The last traceback of a log."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from hpcddp.task.program_failure import LogEnd, read_log_end

CHAINED = """
def inner():
    raise KeyError("first")
def outer():
    try:
        inner()
    except KeyError as error:
        raise RuntimeError("second: with a colon") from error
outer()
"""


def log_of(path: Path, program: str) -> Path:
    log = path / "log"
    with log.open("wb") as stream:
        subprocess.run([sys.executable, "-c", program], stdout=stream, stderr=stream, timeout=60, check=False)
    return log


def test_the_whole_chain_is_the_traceback_and_its_last_exception_the_message(tmp_path: Path) -> None:
    words = read_log_end(log_of(tmp_path, CHAINED))
    assert words.message == "RuntimeError: second: with a colon"
    assert words.traceback.startswith("Traceback (most recent call last):")
    assert "KeyError: 'first'" in words.traceback
    assert words.traceback.endswith(words.message)


def test_an_earlier_traceback_that_was_caught_is_not_the_last(tmp_path: Path) -> None:
    program = (
        "import traceback\ntry:\n  1/0\nexcept ZeroDivisionError:\n  traceback.print_exc()\nraise ValueError('end')"
    )
    words = read_log_end(log_of(tmp_path, program))
    assert words.message == "ValueError: end"
    assert "ZeroDivisionError" not in words.traceback


def test_a_traceback_far_above_the_end_is_ignored(tmp_path: Path) -> None:
    program = "import traceback\ntry:\n  1/0\nexcept ZeroDivisionError:\n  traceback.print_exc()\n"
    words = read_log_end(log_of(tmp_path, f"{program}for step in range(200): print(step)\n"))
    assert (words.traceback, words.message) == ("", "")


def test_the_rank_prefix_of_torch_is_removed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text('[rank3]: Traceback (most recent call last):\n[rank3]:   File "x"\n[rank3]: ValueError: boom\n')
    assert read_log_end(log).message == "ValueError: boom"


def test_a_log_without_a_traceback_gives_its_end(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"line {number}\n" for number in range(30)))
    words = read_log_end(log)
    assert (words.traceback, words.message) == ("", "")
    assert words.tail.splitlines()[-1] == "line 29"


def test_the_end_of_a_missing_log_is_empty(tmp_path: Path) -> None:
    assert read_log_end(tmp_path / "log") == LogEnd()


def test_the_line_of_the_task_about_a_signal_is_not_part_of_a_traceback(tmp_path: Path) -> None:
    log = tmp_path / "log"
    frames = 'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\n'
    log.write_text(f"{frames}hpcddp: 12:00:01 SIGTERM: it is passed on to the program\nValueError: no\n")
    assert read_log_end(log).message == "ValueError: no"
