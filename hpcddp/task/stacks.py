"""Python stacks of the ranks on this host, without stopping them: a signal that faulthandler answers, or py-spy.

``python -m hpcddp.task.stacks ATTEMPT_DIRECTORY`` prints them; ``hpcddp stacks`` starts it on every node of the job.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hpcddp.errors import printable
from hpcddp.processes import (
    Process,
    command_line,
    environment_of,
    handled_signals,
    own_processes,
    program_of,
    wait_until,
)
from hpcddp.task.signals import STACKS_FILE, STACKS_SIGNAL

_TASK: Final = "hpcddp.task"
_SUPERVISOR: Final = "hpcddp.supervise"
# Of multiprocessing's own: a process that another one has started by spawn, and helpers that run nobody's code.
_SPAWNED: Final = "--multiprocessing-fork"
_HELPERS: Final = ("from multiprocessing.resource_tracker import", "from multiprocessing.forkserver import")
_NEW_S: Final = 1.0
# py-spy takes most of a second for a process; a node has several ranks, each with its loader processes.
_TASKS_AT_ONCE: Final = 8
_ANSWER_TIMEOUT_S: Final = 5.0
_POLL_S: Final = 0.1
_PY_SPY_TIMEOUT_S: Final = 30.0
# A line of srun's output arrives whole up to 1024 bytes.
_LONGEST_LINE: Final = 800
SEPARATOR: Final = "\t"
_CHILD: Final = "child"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStacks:
    """The stacks of one process.

    Args:
        rank: its rank; None for a process that is no rank, such as a launcher.
        pid: its process id there.
        is_child: whether the rank has started it for a part of its work, as a DataLoader starts its workers.
        command: its command line, shortened.
        lines: its stacks, or a sentence why there are none.
    """

    rank: int | None
    host: str
    pid: int
    is_child: bool = False
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
    processes = {process.pid: process for process in own_processes()}
    children: dict[int, list[Process]] = {}
    for pid in sorted(processes):
        children.setdefault(processes[pid].parent, []).append(processes[pid])
    tasks = [process for pid, process in processes.items() if _is_task(pid, attempt, node)]
    # The forks of a task have its command line.
    task_ids = {task.pid for task in tasks}
    pids = [task.pid for task in tasks if task.parent not in task_ids]
    in_order = sorted(pids, key=lambda pid: (_rank_of(pid) or 0, pid))

    def stacks_of_task(task: int) -> list[ProcessStacks]:
        read = _stacks_of_program if programs else _stacks_of_training
        return list(read(task, children, host))

    with ThreadPoolExecutor(_TASKS_AT_ONCE) as threads:
        yield from itertools.chain.from_iterable(threads.map(stacks_of_task, in_order))


_Children = Mapping[int, Sequence[Process]]


def _stacks_of_training(task: int, children: _Children, host: str) -> Iterator[ProcessStacks]:
    """Yield the stacks of a task that runs the training itself, and of the processes that do a part of its work."""
    yield _process_stacks(task, _rank_of(task), host, _ask(task))
    for pid, is_child in _python_processes_below(task, children):
        if is_child:
            # A fork has the handler of its task. For any other process the signal would be the end.
            lines = _ask(pid) if _can_answer(pid) else _py_spy(pid)
            yield _process_stacks(pid, _rank_of(task), host, lines, is_child=True)


def _stacks_of_program(task: int, children: _Children, host: str) -> Iterator[ProcessStacks]:
    """Yield the stacks of the Python processes of a command; what it runs instead if there is none."""
    processes = list(_python_processes_below(task, children))
    for pid, is_child in processes:
        yield _process_stacks(pid, _rank_of(pid), host, _py_spy(pid), is_child=is_child)
    if not processes:
        yield from _without_python(task, children, host)


def _without_python(task: int, children: _Children, host: str) -> Iterator[ProcessStacks]:
    last = task
    while children.get(last):
        last = children[last][-1].pid
    if last == task:
        why = "its program has not started yet, or has just ended"
    else:
        why = f"no Python process of this task runs here; its program runs {_command_of(last)}"
    yield _process_stacks(last, _rank_of(task), host, [why])


def _process_stacks(
    pid: int, rank: int | None, host: str, lines: Sequence[str], *, is_child: bool = False
) -> ProcessStacks:
    return ProcessStacks(rank=rank, host=host, pid=pid, is_child=is_child, command=_command_of(pid), lines=tuple(lines))


def _command_of(pid: int) -> str:
    return printable(" ".join(command_line(pid)))[: _LONGEST_LINE // 2]


def _is_task(pid: int, attempt: str, node: str | None) -> bool:
    words = command_line(pid)
    # srun, which has started the tasks, has the same words in its command line; so has the service that starts others.
    if _TASK not in words or _SUPERVISOR in words or not _is_python(pid):
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


def _python_processes_below(parent: int, children: _Children) -> Iterator[tuple[int, bool]]:
    """Yield the Python processes that a process has started, and whether they do a part of its work."""
    for process in children.get(parent, ()):
        words = command_line(process.pid)
        # A fork has the command line of its parent: a process that will run another program has it for a moment only.
        is_fork = words == command_line(parent)
        is_helper = any(word.startswith(_HELPERS) for word in words) and not is_fork
        is_new_fork = is_fork and _age_s(process) < _NEW_S
        if _is_python(process.pid) and not is_helper and not is_new_fork:
            yield process.pid, is_fork or _SPAWNED in words
        yield from _python_processes_below(process.pid, children)


def _age_s(process: Process) -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME) - process.start / os.sysconf("SC_CLK_TCK")


def _is_python(pid: int) -> bool:
    return program_of(pid).startswith("python")


def _ask(pid: int) -> list[str]:
    """Return the stacks that a task writes when it gets the signal; one that does not listen would be ended by it."""
    memory = _memory_file(pid)
    if memory is None or STACKS_SIGNAL not in handled_signals(pid):
        return ["this task has just started, and does not show its stacks yet"]
    try:
        size_before = memory.stat().st_size
        os.kill(pid, STACKS_SIGNAL)
        sizes = [size_before]

        def is_complete() -> bool:
            sizes.append(memory.stat().st_size)
            return sizes[-1] == sizes[-2] > size_before

        if not wait_until(is_complete, timeout_s=_ANSWER_TIMEOUT_S, poll_s=_POLL_S):
            return [f"this process does not answer within {_ANSWER_TIMEOUT_S:g} s: it may be stopped"]
        with memory.open("rb") as file:
            file.seek(size_before)
            return file.read().decode(errors="replace").splitlines()
    except OSError as error:
        return [f"this process has just ended ({error.strerror})"]


def _can_answer(pid: int) -> bool:
    return STACKS_SIGNAL in handled_signals(pid) and _memory_file(pid) is not None


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
    """Yield stacks as lines that stay apart when nodes print at once: host, process, rank, kind, a line of text."""
    rank = "" if stacks.rank is None else str(stacks.rank)
    head = (stacks.host, str(stacks.pid), rank, _CHILD if stacks.is_child else "")
    for text in (stacks.command, *stacks.lines):
        yield SEPARATOR.join((*head, text[:_LONGEST_LINE].replace(SEPARATOR, " ")))


def parse_lines(lines: Sequence[str]) -> list[ProcessStacks]:
    """Return the stacks in lines that ``lines_of`` has made, in the order of their ranks; others are left out."""
    texts: dict[tuple[str, int, int | None, bool], list[str]] = {}
    for line in lines:
        # What else a node prints may hold separators too.
        with suppress(ValueError):
            host, pid, rank, child, text = line.split(SEPARATOR, 4)
            process = (host, int(pid), int(rank) if rank else None, child == _CHILD)
            texts.setdefault(process, []).append(text)
    stacks = [
        ProcessStacks(rank=rank, host=host, pid=pid, is_child=is_child, command=command, lines=tuple(stack))
        for (host, pid, rank, is_child), (command, *stack) in texts.items()
    ]
    return sorted(stacks, key=lambda each: (each.rank is None, each.rank or 0, each.host, each.is_child, each.pid))


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
