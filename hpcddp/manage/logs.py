"""The logs of the ranks of an attempt: read and merged in the order of time, or followed while they grow."""

from __future__ import annotations

import errno
import heapq
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from hpcddp.errors import UserError
from hpcddp.manage.run_files import record_or_damage
from hpcddp.run.directory import AttemptDirectory, RunDirectory
from hpcddp.run.failure import beginning, read_failures
from hpcddp.run.files import (
    GrowingFile,
    NotRegularError,
    begin_of_last_lines,
    lines_from,
    read_tail,
    why_unreadable,
)
from hpcddp.run.job_records import known_hosts, member_word, read_start
from hpcddp.run.log_timestamps import Times, read_times

BATCH = "batch"
"""Shown for the batch script, where a rank has its number."""
_LAST_LINE_BYTES: Final = 4096
# torch (c10d/socket.cpp) writes it where the address of a host has no name in DNS; the ranks are connected.
_NAMELESS_HOST: Final = re.compile(
    r"(?:\[rank[0-9]+\]:)?\[W[0-9]{4} \S+ socket\.cpp:[0-9]+\] \[c10d\] The hostname of the client socket cannot be "
)


class NoLogError(UserError):
    """There is no such log."""

    kind = "no_log"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSource:
    """A log of an attempt.

    Args:
        rank: whose it is; None for the batch script.
        member: what the number counts, as ``member_word`` returns it; without a number, whose it is.
        host: where; None if that is not known yet.
        begin: the first byte that belongs to this attempt.
        end: the byte behind the last one; None for the end of the file.
    """

    path: Path
    rank: int | None
    host: str | None
    member: str = "rank"
    begin: int = 0
    end: int | None = None

    @property
    def label(self) -> str:
        """Whose lines they are, in words."""
        who = self.member if self.rank is None else f"{self.member} {self.rank}"
        return f"{who} {self.host}" if self.host else who


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """A line of a log.

    Args:
        time: when it was written, in seconds since the epoch, to half a second.
        text: the line without its end.
    """

    time: float
    source: LogSource
    text: str

    def as_json(self) -> dict[str, Any]:
        """Return the document that ``--json`` prints."""
        return {"time": self.time, "rank": self.source.rank, "host": self.source.host, "text": self.text}


def chosen_attempt(run: RunDirectory, number: int | None) -> AttemptDirectory:
    """Return an attempt of a run, the newest one without a number.

    Raises:
        NoLogError: there is no such attempt.
    """
    newest = run.newest_attempt()
    if newest is None:
        printed = read_tail(run.batch_log, _LAST_LINE_BYTES).rstrip().splitlines()
        if printed:
            raise NoLogError(
                f"the script of run {run.run_id} has begun no attempt, so no rank has a log; the last line of "
                f"{run.batch_log} is: {printed[-1]}"
            )
        raise NoLogError(
            f"the run {run.run_id} has begun no attempt, so it has no logs; see why: hpcddp why {run.run_id}"
        )
    attempt = run.attempt(newest if number is None else number)
    if not attempt.path.is_dir():
        attempts = f"attempts 0 to {newest}; write one of them" if newest else "attempt 0 alone; write that"
        raise NoLogError(f"--attempt is {number}, and the run {run.run_id} has {attempts}")
    return attempt


def sources(attempt: AttemptDirectory, *, ranks: Sequence[int] = (), batch: bool = False) -> list[LogSource]:
    """Return the logs of an attempt that exist by now, in the order of the ranks.

    Args:
        ranks: only those of these ranks; empty = of all.
        batch: whether the batch script's own log is one of them; it comes first.

    Raises:
        NoLogError: a rank that was asked for has no log.
    """
    paths = attempt.rank_logs()
    member = member_word(attempt)
    for rank in ranks:
        if rank not in paths:
            others = f"no {member} has one yet"
            if paths:
                last = max(paths)
                others = f"{member}s 0 to {last} have one" if last else f"{member} 0 has one"
            raise NoLogError(f"{member} {rank} has no log in attempt {attempt.number}; {others}")
    hosts = dict(enumerate(known_hosts(attempt)))
    if not hosts:
        hosts = {record.rank: record.host for record in read_failures(attempt)}
    chosen = sorted(rank for rank in paths if not ranks or rank in ranks)
    logs = [LogSource(path=paths[rank], rank=rank, host=hosts.get(rank), member=member) for rank in chosen]
    return [*_batch(attempt), *logs] if batch else logs


def _batch(attempt: AttemptDirectory) -> Iterator[LogSource]:
    """Yield the part of the batch script's log that belongs to the attempt."""
    log = attempt.run.batch_log
    if not log.is_file():
        return
    begin = _find(log, beginning(attempt)) or 0
    end = _find(log, beginning(attempt.run.attempt(attempt.number + 1)), begin)
    start, _ = record_or_damage(lambda: read_start(attempt))
    host = None if start is None else start.host
    yield LogSource(path=log, rank=None, host=host, member=BATCH, begin=begin, end=end)


def _find(log: Path, line: str, begin: int = 0) -> int | None:
    """Return the offset of a line that a log holds, or None."""
    wanted = os.fsencode(line)
    # Where its lines belong, a log that cannot be read has one that says why.
    with suppress(OSError):
        for line_of_log, end in lines_from(log, begin, with_last=False):
            if line_of_log.endswith(wanted):
                return end - len(wanted)
    return None


def merged(logs: Sequence[LogSource]) -> Iterator[LogLine]:
    """Yield the lines of logs in the order of time; those of one moment in the given order.

    Args:
        logs: the logs; what is added to them meanwhile may be missing.
    """
    return heapq.merge(*map(lines_of, logs), key=lambda line: line.time)


def last_of(log: LogSource, count: int) -> LogSource:
    """Return the part of a log that holds its last ``count`` lines; the whole may be many gigabytes."""
    with suppress(OSError):
        return replace(log, begin=begin_of_last_lines(log.path, count, begin=log.begin, end=log.end))
    return log


def lines_of(source: LogSource) -> Iterator[LogLine]:
    """Yield the lines of one log, a last one without its end too; of one that cannot be read, a line that says so."""
    end = sys.maxsize if source.end is None else source.end
    times = Times(sizes=(), times=(0.0,))
    try:
        times = read_times(source.path)
        if source.path.is_fifo():
            raise NotRegularError(errno.EINVAL, "it is a named pipe", str(source.path))
        yield from _timed(source, lines_from(source.path, source.begin, end=end, with_last=True), times)
    except OSError as error:
        yield LogLine(time=times.times[-1], source=source, text=f"(this log cannot be read: {why_unreadable(error)})")


def _timed(source: LogSource, lines: Iterable[tuple[bytes, int]], times: Times) -> Iterator[LogLine]:
    """Yield lines, each with the time at which its last byte was written; not torch's about a host without a name."""
    for line, behind in lines:
        text = line_text(line)
        if not says_nameless_host(text):
            yield LogLine(time=times.at(behind - 1), source=source, text=text)


def says_nameless_host(line: str) -> bool:
    """Return whether torch has written a line because the address of a host has no name, which does no harm."""
    return _NAMELESS_HOST.match(line) is not None


def line_text(line: bytes) -> str:
    """Return a line as it would look on a terminal: of a progress bar that redraws itself, the last state."""
    return line.decode("utf-8", errors="replace").rstrip("\r\n").rpartition("\r")[2]


class LogFollower:
    """Returns what is added to the logs of an attempt, in the order of arrival.

    Args:
        ranks: only those of these ranks; empty = of all.
        batch: whether the batch script's log is followed too.
        last: how many lines of each log are of interest at first; None = all.
    """

    def __init__(
        self, attempt: AttemptDirectory, *, ranks: Sequence[int] = (), batch: bool = False, last: int | None = None
    ) -> None:
        self._attempt = attempt
        self._ranks = ranks
        self._batch = batch
        self._last = last
        self._files: dict[Path, GrowingFile] = {}

    def new_lines(self, now: float, *, ended: bool = False) -> Iterator[LogLine]:
        """Return the lines that were completed since the last call; the first call returns all of them.

        They are read while they are iterated.

        Args:
            now: seconds since the epoch.
            ended: whether nothing more is written; then a last line without its end is a line too.
        """
        is_first = not self._files
        logs = sources(self._attempt, batch=self._batch)
        logs = [log for log in logs if not self._ranks or log.rank is None or log.rank in self._ranks]
        if is_first and self._last is not None:
            logs = [last_of(log, self._last) for log in logs]
        added = [self._added(log, None if is_first else now, ended=ended) for log in logs]
        return heapq.merge(*added, key=lambda line: line.time)

    def _added(self, log: LogSource, now: float | None, *, ended: bool) -> Iterator[LogLine]:
        """Yield the new lines of one log.

        Args:
            now: the time of all of them; None reads when each was written.
            ended: as ``new_lines`` has it.
        """
        file = self._files.setdefault(log.path, GrowingFile(log.path, begin=log.begin))
        # Of a log that cannot be read, the others are shown.
        with suppress(OSError):
            times = read_times(log.path) if now is None else Times(sizes=(), times=(now,))
            yield from _timed(log, ((line, file.offset) for line in file.new_lines(ended=ended)), times)


class OutputFollower:
    """Returns what rank 0 of a run prints, through the run's attempts, as it comes.

    Args:
        first_attempt: the first attempt that is of interest.
    """

    def __init__(self, run: RunDirectory, *, first_attempt: int) -> None:
        self._run = run
        self._next = first_attempt
        self._follower: LogFollower | None = None

    def new_lines(self, now: float, *, ended: bool) -> Iterator[LogLine]:
        """Yield the lines that came since the last look.

        Args:
            now: seconds since the epoch.
            ended: whether the run has ended.
        """
        newest = self._run.newest_attempt()
        while newest is not None and self._next <= newest:
            yield from self._added(now, ended=True)
            self._follower = LogFollower(self._run.attempt(self._next), ranks=(0,))
            self._next += 1
        yield from self._added(now, ended=ended)

    def _added(self, now: float, *, ended: bool) -> Iterator[LogLine]:
        return iter(()) if self._follower is None else self._follower.new_lines(now, ended=ended)
