"""The first failing rank of an attempt, its error, and the ranks that failed because of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hpcddp.errors import counted
from hpcddp.manage.format import numbered_text
from hpcddp.manage.logs import says_nameless_host
from hpcddp.manage.run_files import recent_events
from hpcddp.run.directory import AttemptDirectory, RunDirectory
from hpcddp.run.failure import (
    damaged_failures,
    failure_sentence,
    first_ended_without_record,
    ranks_without_record,
    read_failures,
)
from hpcddp.run.files import TAIL_BYTES, read_tail
from hpcddp.run.job_records import FailureRecord, known_hosts, member_word
from hpcddp.task.attribution import PEER_LOSS
from hpcddp.task.rendezvous import PeerFailedError

_LAST_LINES: Final = 20
_LONGEST_TEXT: Final = 60
_FRAME: Final = '  File "'
_CRASHES: Final = frozenset({"crash", "node_failure"})


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstError:
    """How an attempt failed.

    Args:
        sentence: who failed first, where, at which step, and how.
        ranks: who failed first: one rank, unless several left no record and srun does not say which ended first.
        host: the first one's host; None if it is not known.
        step: optimizer steps that it had done; None before the first, or if it is not known.
        text: its traceback, or the last lines of its log if it left none.
        is_traceback: whether ``text`` is a traceback.
        others: other errors with a cause of their own, a line each.
        secondary: one line that names the ranks that failed as a consequence; empty if there are none.
        went_on: how the run went on after it, a sentence; empty if it ended.
    """

    attempt: AttemptDirectory
    sentence: str
    ranks: tuple[int, ...]
    host: str | None
    step: int | None
    text: tuple[str, ...]
    is_traceback: bool
    others: tuple[str, ...]
    secondary: str
    went_on: str

    def as_json(self) -> dict[str, Any]:
        """Return the document that ``--json`` prints."""
        return {
            "run_id": self.attempt.run.run_id,
            "attempt": self.attempt.number,
            "sentence": self.sentence,
            "ranks": list(self.ranks),
            "host": self.host,
            "step": self.step,
            "traceback" if self.is_traceback else "last_lines": list(self.text),
            "others": list(self.others),
            "secondary": self.secondary,
            "went_on": self.went_on,
        }

    def lines(self) -> Iterator[str]:
        """Yield what a person reads."""
        yield f"attempt {self.attempt.number}: {self.sentence}"
        if self.text and not self.is_traceback:
            yield f"the last lines of {member_word(self.attempt)} {self.ranks[0]}:"
        text = shortened(self.text)[-_LONGEST_TEXT:] if self.is_traceback else self.text
        yield from (f"  {line}".rstrip() for line in text)
        yield from (f"also {line}" for line in self.others)
        if self.secondary:
            yield self.secondary
        if self.went_on:
            yield self.went_on


def failed_attempt(run: RunDirectory, number: int | None = None) -> AttemptDirectory | None:
    """Return the newest attempt of a run in which something failed; None if nothing did.

    Args:
        number: that of the only attempt that is looked at; None looks at all.
    """
    events = recent_events(run)
    crashed = {event.attempt for event in events if event.kind == "failure" or event.cause in _CRASHES}
    numbers = sorted(run.attempt_numbers(), reverse=True) if number is None else [number]
    for attempt in map(run.attempt, numbers):
        if attempt.number in crashed or next(attempt.path.glob("error-rank-*.json"), None) is not None:
            return attempt
    return None


def first_error(attempt: AttemptDirectory) -> FirstError:
    """Return how an attempt failed.

    Args:
        attempt: one that has failed.
    """
    records = read_failures(attempt)
    independent = [record for record in records if not record.secondary and not record.waiting]
    first_ranks = [record.rank for record in independent[:1]]
    first_ranks = first_ranks or first_ended_without_record(attempt) or [record.rank for record in records[:1]]
    first_record = next((record for record in records if record.rank in first_ranks), None)
    if first_record is not None:
        host: str | None = first_record.host
        text = first_record.traceback.rstrip().splitlines()
    else:
        hosts = known_hosts(attempt)
        host = hosts[first_ranks[0]] if first_ranks and first_ranks[0] < len(hosts) else None
        text = []
    # The record of a program that was killed has the end of its log.
    is_traceback = any(line.startswith(_FRAME) for line in text)
    if not text and first_ranks:
        text = read_tail(attempt.rank_log(first_ranks[0]), TAIL_BYTES).splitlines()[-_LAST_LINES:]
    if not is_traceback:
        text = [line for line in text if not says_nameless_host(line)]
    kinds = {event.kind for event in recent_events(attempt.run) if event.attempt == attempt.number}
    went_on = ""
    if "restart" in kinds:
        went_on = f"the run went on: its tasks were started again in the same job, as attempt {attempt.number + 1}"
    elif "requeue" in kinds:
        went_on = f"the run went on: its job was requeued, for attempt {attempt.number + 1}"
    steps = [record.step for record in [*independent, *records] if record.step is not None]
    ranks_with_own_cause = {*first_ranks, *(record.rank for record in independent)}
    return FirstError(
        attempt=attempt,
        sentence=failure_sentence(attempt, records),
        ranks=tuple(first_ranks),
        host=host,
        step=steps[0] if steps else None,
        text=tuple(text),
        is_traceback=is_traceback,
        others=(*_others(attempt, independent[1:]), *damaged_failures(attempt)),
        secondary=_secondary(attempt, records, ranks_with_own_cause),
        went_on=went_on,
    )


def _others(attempt: AttemptDirectory, records: Sequence[FailureRecord]) -> Iterator[str]:
    """Yield a line for each error; ranks with the same error share one, or a missing module would fill the screen."""
    records_by_error: dict[str, list[FailureRecord]] = {}
    for record in records:
        records_by_error.setdefault(f"{record.label}{record.headline}", []).append(record)
    for error, same_records in records_by_error.items():
        where = same_records[0].place
        if len(same_records) > 1:
            where = _members(attempt, [record.rank for record in same_records])
        yield f"{where}: {error}"


def _secondary(attempt: AttemptDirectory, records: Sequence[FailureRecord], first_ranks: set[int]) -> str:
    """Return one line about the ranks that failed as a consequence; empty if none did."""
    endings = {record.rank: _short(record) for record in records}
    for rank in ranks_without_record(attempt):
        endings[rank] = "ended without an error message"
    for rank in first_ranks:
        endings.pop(rank, None)
    if not endings:
        return ""
    ((most_common, _),) = Counter(endings.values()).most_common(1)
    return f"{_members(attempt, list(endings))} failed as a consequence: {most_common}"


def _members(attempt: AttemptDirectory, ranks: list[int]) -> str:
    return numbered_text(member_word(attempt), ranks)


def _short(record: FailureRecord) -> str:
    """Return in a few words how a rank noticed the failure of another one."""
    if record.waiting:
        return "waited for other ranks"
    if record.kind == PeerFailedError.kind:
        return "ended after the failure of another rank"
    message = record.message.lower()
    return next((loss for loss in PEER_LOSS if loss in message), record.headline)


_INNER: Final = ("/hpcddp/", "/submitit/", "/torch/", "<frozen runpy>")


def shortened(traceback: Sequence[str]) -> list[str]:
    """Return a traceback with a line in place of frames of libraries that lead to the user's code.

    The innermost frame stays. A traceback without any frame of the user's stays as it is.

    Args:
        traceback: its lines, as Python prints them.
    """
    parts = list(_parts(traceback))
    if all(_is_inner(part) or not _is_frame(part) for part in parts):
        return list(traceback)
    shown: list[str] = []
    skipped = 0
    for part, following in zip(parts, [*parts[1:], []], strict=True):
        if _is_inner(part) and _is_frame(following):
            skipped += 1
            continue
        if skipped:
            shown.append(f"  ... {counted(skipped, 'frame')} of libraries")
            skipped = 0
        shown += part
    return shown


def _parts(lines: Sequence[str]) -> Iterator[list[str]]:
    """Yield the frames, each with the lines that belong to it, and what stands between them line by line."""
    part: list[str] = []
    for line in lines:
        belongs = bool(part) and _is_frame(part) and line.startswith("    ")
        if not belongs and part:
            yield part
            part = []
        part.append(line)
    if part:
        yield part


def _is_frame(part: Sequence[str]) -> bool:
    return bool(part) and part[0].startswith(_FRAME)


def _is_inner(part: Sequence[str]) -> bool:
    return _is_frame(part) and any(word in part[0] for word in _INNER)
