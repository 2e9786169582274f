"""What ran: the git commit, the uncommitted changes and the package versions of each submission, ``source.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final

from hpcddp.errors import HpcddpError
from hpcddp.run.directory import RunDirectory
from hpcddp.run.record import Record, RecordError, read_record, write_record
from hpcddp.run.sweep import sweep_of

_SHOWN_DIGITS: Final = 12
# A run that is resumed again and again keeps a bounded file.
_KEPT: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What a submission would run, as it was at that moment.

    Args:
        time: seconds since the epoch.
        attempt: the first attempt of the submission.
        directory: the directory of submission, which git was asked about.
        commit: the commit that is checked out there; None if it is not known.
        branch: its branch; None if it is not known, or the commit is checked out without one.
        dirty: whether tracked files differ from the commit; None if git did not say so in time.
        diff: these differences, as ``git diff HEAD`` prints them; untracked files are not in it.
        is_diff_cut: whether only the beginning of the diff is kept.
        git_unknown: why git told nothing, or not all; None if it told all.
        python: the interpreter of the run; None if the job finds it only when it runs.
        python_version: its version; None if it is not known.
        packages: the version of each installed distribution, by name.
        packages_unknown: why they are not known; None if they are.
    """

    time: float
    attempt: int = 0
    directory: str = ""
    commit: str | None = None
    branch: str | None = None
    dirty: bool | None = None
    diff: str = ""
    is_diff_cut: bool = False
    git_unknown: str | None = None
    python: str | None = None
    python_version: str | None = None
    packages: Mapping[str, Any] = field(default_factory=dict)
    packages_unknown: str | None = None

    @property
    def sentence(self) -> str:
        """The commit, its branch and whether there were changes, or why that is not known."""
        if self.commit is None:
            return f"commit unknown: {self.git_unknown or 'it was not recorded'}"
        branch = "" if self.branch is None else f" of branch {self.branch}"
        changes = f"changes unknown: {self.git_unknown or 'they were not recorded'}"
        if self.dirty is not None:
            changes = "with uncommitted changes" if self.dirty else "without uncommitted changes"
        return f"commit {self.commit[:_SHOWN_DIGITS]}{branch}, {changes}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRecord(Record):
    """What each submission of a run would run; a submission that is like the one before it has no entry of its own.

    Args:
        submissions: the newest ten, in their order.
    """

    ADVICE: ClassVar[str] = "without it the commit and the packages of the run are not known; everything else works"

    submissions: tuple[Source, ...]


def read_sources(run: RunDirectory) -> tuple[Source, ...]:
    """Return what the submissions of a run would run; an element of a sweep has what its sweep has.

    Raises:
        RecordError: the record is damaged.
    """
    record = read_record(run.source, SourceRecord)
    if record is None:
        try:
            sweep = sweep_of(run)
        except HpcddpError:
            # The commands that show the sweep report its damage.
            sweep = None
        record = None if sweep is None else read_record(sweep.directory.source, SourceRecord)
    return () if record is None else record.submissions


def add_source(run: RunDirectory, source: Source) -> None:
    """Add what a submission would run, unless it is like the one before it; a damaged record is replaced.

    Raises:
        OSError: the record cannot be written.
    """
    try:
        sources = read_sources(run)
    except RecordError:
        sources = ()
    if sources and replace(sources[-1], time=source.time, attempt=source.attempt) == source:
        return
    write_record(run.source, SourceRecord(submissions=(*sources, source)[-_KEPT:]))
