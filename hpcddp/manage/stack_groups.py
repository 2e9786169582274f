"""Stacks of many processes as a person reads them: equal stacks once, with the line of the user's own code."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Final

from hpcddp.manage.format import numbered_text, ranks_text
from hpcddp.run.lost_peers import is_library
from hpcddp.task.stacks import ProcessStacks

# A frame as faulthandler prints it, and as py-spy does.
_FRAMES: Final = (
    re.compile(r'  File "(?P<file>[^"]*)", line (?P<line>[0-9]+) in (?P<function>.*)'),
    re.compile(r"    (?P<function>.+) \((?P<file>.+):(?P<line>[0-9]+)\)"),
)
_MAIN_IN_PY_SPY: Final = '"MainThread"'
_IMPORT: Final = re.compile("<frozen importlib|/importlib/")
# The threads that hpcddp has in every task, such as the one that listens to signals.
_OWN_FILE: Final = re.compile(r"/threading\.py$|/hpcddp/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A frame of a Python stack.

    Args:
        text: the line that shows it.
        file: the path of its source.
        line: the number of the line.
    """

    text: str
    file: str
    line: str

    @property
    def place(self) -> str:
        """The line of its source: ``train.py:54``."""
        return f"{PurePath(self.file).name}:{self.line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StackGroup:
    """Processes whose main threads have the same stack.

    Args:
        main: the frames of the main thread, the innermost first; empty if they are not known.
        others: the lines of each other thread of the first process, without threads of hpcddp's own.
    """

    processes: tuple[ProcessStacks, ...]
    main: tuple[Frame, ...]
    others: tuple[tuple[str, ...], ...]

    @property
    def who(self) -> str:
        """The processes in a few words: ``63 ranks``, ``rank 1 on n2``."""
        first = self.processes[0]
        if first.rank is None:
            return f"{len(self.processes)} processes without a rank"
        if len(self.processes) == 1:
            return f"rank {first.rank} on {first.host}"
        return f"{len(self.processes)} ranks"

    @property
    def place(self) -> str | None:
        """The line of the user's own code in which the processes are, or that of a library; None if it is not known."""
        frames = [frame for frame in self.main if not is_library(frame.file)] or self.main
        return frames[0].place if frames else None

    def lines(self) -> Iterator[str]:
        """Yield what a person reads: which processes, and the stacks of the first."""
        first = self.processes[0]
        shown = f"on {first.host}, process {first.pid}: {first.command}"
        if first.rank is None:
            yield f"{self.who}, such as that {shown}" if len(self.processes) > 1 else f"no rank {shown}"
        elif first.is_child:
            who = f"a process that rank {first.rank} has started"
            if len(self.processes) > 1:
                parents = numbered_text("rank", sorted({process.rank or 0 for process in self.processes}))
                who = f"{len(self.processes)} processes that {parents} started, such as one of rank {first.rank}"
            yield f"{who} {shown}"
        elif len(self.processes) == 1:
            yield f"rank {first.rank} {shown}"
        else:
            ranks = ranks_text(process.rank or 0 for process in self.processes)
            yield f"ranks {ranks}, such as rank {first.rank} {shown}"
        yield from (f"  {line}".rstrip() for line in self._stacks())

    def _stacks(self) -> Iterator[str]:
        if not self.main:
            yield from self.processes[0].lines
            return
        yield "main thread (most recent call first):"
        yield from (frame.text for frame in self.main)
        for thread in self.others:
            yield from ("", *thread)


def group_stacks(processes: Sequence[ProcessStacks]) -> list[StackGroup]:
    """Return processes in groups of equal stacks, the largest group first.

    Processes that the ranks have started come after the ranks, and processes without a rank are the last.
    """
    groups: dict[tuple[bool, bool, tuple[str, ...]], list[ProcessStacks]] = {}
    for process in processes:
        main, _ = _threads(process.lines)
        stack = tuple(frame.text for frame in main) or process.lines
        groups.setdefault((process.rank is None, process.is_child, stack), []).append(process)
    stack_groups = []
    for members in groups.values():
        main, others = _threads(members[0].lines)
        stack_groups.append(StackGroup(processes=tuple(members), main=tuple(main), others=tuple(others)))
    return sorted(stack_groups, key=_position)


def _position(group: StackGroup) -> tuple[bool, bool, int]:
    first = group.processes[0]
    return first.rank is None, first.is_child, -len(group.processes)


def summary(groups: Sequence[StackGroup]) -> str:
    """Return where the ranks are: ``62 ranks at train.py:54, no stack of rank 1 on n2``; empty without any stack."""
    processes_by_place: dict[str | None, list[ProcessStacks]] = {}
    for group in groups:
        first = group.processes[0]
        if first.rank is not None and not first.is_child:
            processes_by_place.setdefault(group.place, []).extend(group.processes)
    if processes_by_place.keys() <= {None}:
        return ""
    texts = []
    for place, processes in processes_by_place.items():
        group = StackGroup(processes=tuple(processes), main=(), others=())
        texts.append(f"no stack of {group.who}" if place is None else f"{group.who} at {place}")
    return ", ".join(texts)


def _threads(lines: Sequence[str]) -> tuple[list[Frame], list[tuple[str, ...]]]:
    """Return the frames of the main thread, and the lines of each other thread that is not hpcddp's own."""
    threads = [thread for thread in _blocks(lines) if any(map(_frame, thread))]
    if not threads:
        return [], []
    # faulthandler prints the main thread last.
    main = next((thread for thread in threads if thread[0].endswith(_MAIN_IN_PY_SPY)), threads[-1])
    others = []
    for thread in threads:
        is_of_hpcddp = all(_OWN_FILE.search(frame.file) for frame in _frames(thread))
        if thread is not main and not is_of_hpcddp:
            others.append(tuple(thread))
    return _frames(main), others


def _blocks(lines: Sequence[str]) -> Iterator[list[str]]:
    """Yield the lines of each thread: a line that is no frame begins another one."""
    block: list[str] = []
    for line in lines:
        if _frame(line) is None and any(map(_frame, block)):
            yield block
            block = []
        # Without what py-spy says about the process.
        block = [*block, line] if _frame(line) else [line]
    yield block


def _frames(lines: Sequence[str]) -> list[Frame]:
    frames = [frame for frame in map(_frame, lines) if frame is not None]
    return [frame for frame in frames if not _IMPORT.search(frame.file)] or frames


def _frame(line: str) -> Frame | None:
    for pattern in _FRAMES:
        match = pattern.fullmatch(line)
        if match is not None:
            return Frame(text=line, file=match["file"], line=match["line"])
    return None
