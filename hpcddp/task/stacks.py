"""Python stacks of the ranks on this host, without stopping them: a signal that faulthandler answers, or py-spy.

``python -m hpcddp.task.stacks ATTEMPT_DIRECTORY`` prints them; ``hpcddp stacks`` starts it on every node of the job.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hpcddp.errors import printable
from hpcddp.polling import wait_until
from hpcddp.processes import Process, command_line, environment_of, handled_signals, own_processes, program_of
from hpcddp.task.signals import STACKS_FILE, STACKS_SIGNAL

_TASK: Final = "hpcddp.task"
_ANSWER_TIMEOUT_S: Final = 5.0
_POLL_S: Final = 0.1
_PY_SPY_TIMEOUT_S: Final = 30.0
# A line of srun's output arrives whole up to 1024 bytes.
_LONGEST_LINE: Final = 800
SEPARATOR: Final = "\t"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStacks:
    """The stacks of one process.

    Args:
        rank: its rank; None for a process that is no rank, such as a launcher.
        host: its host.
        pid: its process id there.
        command: its command line, shortened.
        lines: its stacks, or a sentence why there are none.
    """

    rank: int | None
    host: str
    pid: int
    command: str
    lines: tuple[str, ...]

    @property
    def is_known(self) -> bool:
        """Whether there are stacks, and not a sentence why there are none, which is one line."""
        return len(self.lines) > 1


def stacks_of_host(attempt: str, *, node: str | None, programs: bool, host: str) -> Iterator[ProcessStacks]:
    """Yield the stacks of the ranks of an attempt on this host.

    Args:
        attempt: the attempt's directory, as the tasks have it in ``HPCDDP_ATTEMPT_DIR``.
        node: this node's name in Slurm, for hosts that share their processes; None for a run on this machine.
        programs: whether the tasks run programs of the user's own, whose stacks only py-spy can read.
        host: what to call this host.
    """
    every = {process.pid: process for process in own_processes()}
    tasks = [process for pid, process in every.items() if _is_task(pid, attempt, node)]
    tasks = [process for process in tasks if process.parent not in {task.pid for task in tasks}]
    for task in sorted(tasks, key=lambda process: (_rank_of(process.pid) or 0, process.pid)):
        for pid in _programs_below(task.pid, every.values()) if programs else [task.pid]:
            lines = _py_spy(pid) if programs else _ask(pid)
            command = printable(" ".join(command_line(pid)))[: _LONGEST_LINE // 2]
            yield ProcessStacks(rank=_rank_of(pid), host=host, pid=pid, command=command, lines=tuple(lines))


def _is_task(pid: int, attempt: str, node: str | None) -> bool:
    # srun, which has started the tasks, has the same words in its command line.
    if _TASK not in command_line(pid) or not _is_python(pid):
        return False
    environment = environment_of(pid)
    # A link may lead to the directory of runs.
    is_of_attempt = os.path.realpath(environment.get("HPCDDP_ATTEMPT_DIR", "")) == os.path.realpath(attempt)
    return is_of_attempt and (node is None or environment.get("SLURMD_NODENAME") == node)


def _rank_of(pid: int) -> int | None:
    """Return the rank that a process's environment names: that of its launcher, of Slurm, or of submitit."""
    environment = environment_of(pid)
    names = ("RANK", "SLURM_PROCID", "SUBMITIT_LOCAL_GLOBALID")
    text = next((environment[name] for name in names if name in environment), "")
    return int(text) if text.isascii() and text.isdecimal() else None


def _programs_below(task: int, every: Collection[Process]) -> Iterator[int]:
    """Yield the Python processes that a task has started, without the forks of one, such as workers of a DataLoader."""
    for child in sorted(process.pid for process in every if process.parent == task):
        if _is_python(child) and command_line(child) != command_line(task):
            yield child
        yield from _programs_below(child, every)


def _is_python(pid: int) -> bool:
    return program_of(pid).startswith("python")


def _ask(pid: int) -> list[str]:
    """Return the stacks that a task writes when it gets the signal; one that does not listen would be ended by it."""
    memory = _memory_file(pid)
    if memory is None or STACKS_SIGNAL not in handled_signals(pid):
        return ["this task has just started, and does not show its stacks yet"]
    try:
        before = memory.stat().st_size
        os.kill(pid, STACKS_SIGNAL)
        sizes = [before]

        def is_complete() -> bool:
            sizes.append(memory.stat().st_size)
            return sizes[-1] == sizes[-2] > before

        if not wait_until(is_complete, timeout_s=_ANSWER_TIMEOUT_S, poll_s=_POLL_S):
            return [f"this process does not answer within {_ANSWER_TIMEOUT_S:g} s: it may be stopped"]
        with memory.open("rb") as file:
            file.seek(before)
            return file.read().decode(errors="replace").splitlines()
    except OSError as error:
        return [f"this process has just ended ({error.strerror})"]


def _memory_file(pid: int) -> Path | None:
    with suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            if STACKS_FILE in str(descriptor.readlink()):
                return descriptor
    return None


def find_py_spy(path: str) -> str | None:
    """Return py-spy in the directories of a ``PATH``, or else beside this interpreter; None without one."""
    return shutil.which("py-spy", path=f"{path}:{Path(sys.executable).parent}")


def _py_spy(pid: int) -> list[str]:
    program = find_py_spy(environment_of(pid).get("PATH", os.defpath))
    if program is None:
        return ["the stacks of your own program need py-spy, which this node does not have; run: pip install py-spy"]
    try:
        done = subprocess.run(
            [program, "dump", "--full-filenames", "--pid", str(pid)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_PY_SPY_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"py-spy could not read this process: {error}"]
    if done.returncode == 0:
        return done.stdout.splitlines()
    reason, _, _ = done.stderr.partition("Stack backtrace:")
    said = " ".join(reason.split()) or f"it exited with {done.returncode}"
    return [f"py-spy could not read this process: {said}"]


def lines_of(stacks: ProcessStacks) -> Iterator[str]:
    """Yield stacks as lines that stay apart when nodes print at once: host, process, rank, then a line of text."""
    head = (stacks.host, str(stacks.pid), "" if stacks.rank is None else str(stacks.rank))
    for text in (stacks.command, *stacks.lines):
        yield SEPARATOR.join((*head, text[:_LONGEST_LINE].replace(SEPARATOR, " ")))


def parse_lines(lines: Sequence[str]) -> list[ProcessStacks]:
    """Return the stacks in lines that ``lines_of`` has made, in the order of their ranks; others are left out."""
    found: dict[tuple[str, int, int | None], list[str]] = {}
    for line in lines:
        with suppress(ValueError):
            host, pid, rank, text = line.split(SEPARATOR, 3)
            found.setdefault((host, int(pid), int(rank) if rank.isdecimal() else None), []).append(text)
    stacks = [
        ProcessStacks(rank=rank, host=host, pid=pid, command=texts[0], lines=tuple(texts[1:]))
        for (host, pid, rank), texts in found.items()
    ]
    return sorted(stacks, key=lambda each: (each.rank is None, each.rank or 0, each.host, each.pid))


def main(words: Sequence[str] | None = None) -> None:
    """Print the stacks of the ranks on this node."""
    parser = argparse.ArgumentParser(prog="python -m hpcddp.task.stacks")
    parser.add_argument("attempt")
    parser.add_argument("--programs", action="store_true")
    given = parser.parse_args(words)
    node = os.environ.get("SLURMD_NODENAME")
    for stacks in stacks_of_host(given.attempt, node=node, programs=given.programs, host=node or "this node"):
        sys.stdout.writelines(f"{line}\n" for line in lines_of(stacks))


if __name__ == "__main__":
    main()
