"""Stacks of many ranks, equal ones once."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hpcddp.manage.stack_groups import group_stacks, summary
from hpcddp.task.stacks import ProcessStacks
from tests.messages import GoldenMessages
from tests.waiting import wait_until


def faulthandler_lines(line: int) -> tuple[str, ...]:
    return (
        "Thread 0x00007f0001 (most recent call first):",
        '  File "/usr/lib/python3.11/threading.py", line 324 in wait',
        '  File "/venv/lib/python3.11/site-packages/hpcddp/stop/listener.py", line 80 in _listen',
        "",
        "Thread 0x00007f0003 (most recent call first):",
        '  File "/home/u/data.py", line 7 in read',
        "",
        "Current thread 0x00007f0002 (most recent call first):",
        '  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 2806 in all_reduce',
        f'  File "/home/u/train.py", line {line} in step',
        '  File "/home/u/train.py", line 60 in <module>',
        '  File "<frozen importlib._bootstrap>", line 241 in _call_with_frames_removed',
        '  File "<frozen runpy>", line 88 in _run_code',
    )


def py_spy_lines(line: int, pid: int) -> tuple[str, ...]:
    return (
        f"Process {pid}: python train.py",
        "Python v3.11.7 (/usr/bin/python3.11)",
        "",
        f'Thread {pid} (idle): "MainThread"',
        "    all_reduce (/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py:2806)",
        f"    step (/home/u/train.py:{line})",
        "    _call_with_frames_removed (<frozen importlib._bootstrap>:241)",
        "    <module> (/home/u/train.py:60)",
        f'Thread {pid + 9} (idle): "Thread-1"',
        "    read (/home/u/data.py:7)",
    )


def process(rank: int | None, lines: tuple[str, ...]) -> ProcessStacks:
    place = rank or 0
    return ProcessStacks(rank=rank, host=f"n{place // 4 + 1}", pid=100 + place, command="python train.py", lines=lines)


@pytest.mark.parametrize("form", ["faulthandler", "py-spy"])
def test_equal_stacks_are_one_group_and_the_rank_that_is_elsewhere_is_named(form: str) -> None:
    def lines(rank: int) -> tuple[str, ...]:
        line = 51 if rank == 5 else 54
        return faulthandler_lines(line) if form == "faulthandler" else py_spy_lines(line, 100 + rank)

    groups = group_stacks([process(rank, lines(rank)) for rank in range(64)])
    assert summary(groups) == "63 ranks at train.py:54, rank 5 on n2 at train.py:51"
    most, other = ("\n".join(group.lines()) for group in groups)
    assert most.startswith("ranks 0-4, 6-63, such as rank 0 on n1, process 100: python train.py\n")
    assert other.startswith("rank 5 on n2, process 105: python train.py\n")
    assert most.count("train.py:54") + most.count('train.py", line 54') == 1
    assert "data.py" in most
    assert "importlib" not in most
    assert "listener.py" not in most


def test_a_rank_that_does_not_answer_is_named() -> None:
    silent = process(5, ("this process does not answer within 5 s: it may be stopped",))
    groups = group_stacks([*(process(rank, faulthandler_lines(54)) for rank in range(5)), silent])
    assert summary(groups) == "5 ranks at train.py:54, no stack of rank 5 on n2"


def test_ranks_at_one_line_by_two_ways_are_told_together() -> None:
    deeper = (*py_spy_lines(54, 1)[:4], "    wait (/venv/lib/python3.11/threading.py:1)", *py_spy_lines(54, 1)[4:])
    groups = group_stacks([process(0, py_spy_lines(54, 1)), process(1, deeper)])
    assert len(groups) == 2
    assert summary(groups) == "2 ranks at train.py:54"


def test_processes_of_the_ranks_are_shown_after_the_ranks(golden: GoldenMessages) -> None:
    workers = [replace(process(rank, py_spy_lines(7, 200 + rank)), pid=200 + rank, is_child=True) for rank in range(3)]
    stuck = replace(process(1, py_spy_lines(9, 300)), pid=300, is_child=True)
    groups = group_stacks([*workers, stuck, *(process(rank, py_spy_lines(54, 1)) for rank in range(2))])
    assert summary(groups) == "2 ranks at train.py:54"
    _, first, second = (next(iter(group.lines())) for group in groups)
    assert "3 processes that ranks 0-2 started" in golden.message(first)
    assert "rank 1 " in golden.message(second)


def test_what_is_no_stack_and_no_rank_is_shown_after_the_ranks() -> None:
    sentence = ("the stacks of your own program need py-spy",)
    found = [process(None, py_spy_lines(3, 7)), *(process(rank, sentence) for rank in range(3))]
    groups = group_stacks(found)
    assert summary(groups) == ""
    first, last = ("\n".join(group.lines()) for group in groups)
    assert first == f"ranks 0-2, such as rank 0 on n1, process 100: python train.py\n  {sentence[0]}"
    assert last.startswith("no rank on n1, process 100: python train.py\n")


def test_a_stack_of_libraries_alone_names_the_innermost_frame() -> None:
    lines = (
        "Thread 0x01 (most recent call first):",
        '  File "/usr/lib/python3.11/selectors.py", line 415 in select',
        '  File "<frozen runpy>", line 88 in _run_code',
    )
    assert summary(group_stacks([process(0, lines)])) == "rank 0 on n1 at selectors.py:415"


def test_what_py_spy_prints_today_is_understood(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import time\ndef step():\n    print('ready', flush=True)\n    time.sleep(600)\nstep()\n")
    py_spy = Path(sys.executable).with_name("py-spy")
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as program:
        try:
            assert program.stdout is not None
            assert program.stdout.readline() == "ready\n"

            def shown() -> str:
                words = [str(py_spy), "dump", "--full-filenames", "--pid", str(program.pid)]
                text = subprocess.run(words, capture_output=True, text=True, check=False).stdout
                return summary(group_stacks([process(0, tuple(text.splitlines()))]))

            wait_until(lambda: shown() == "rank 0 on n1 at train.py:4", "the stack", 60)
        finally:
            program.kill()
