"""The code that a submission had: what differs from its commit in ``code.json``, the packages in ``source.json``.

Every attempt compares the files that git tracks with those of the submission. A file that git does not track is no
difference.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any, ClassVar, Final

from hpcddp.errors import HpcddpError, UserError, listed
from hpcddp.run.directory import RunDirectory
from hpcddp.run.git import Git, WorkingTree, read_working_tree
from hpcddp.run.record import Record, RecordError, read_record, write_record
from hpcddp.run.sweep import sweep_of

_NAMED: Final = 3
# Programs, configurations, and files without a suffix; what is hidden is neither.
CODE: Final = re.compile(
    r"^(?!.*(?:^|/)(?:\.|hpcddp\.yaml$)).*(?:(?:^|/)[^./]+|\.(?:bash|c|cc|cfg|cpp|cu|cuh|cxx|f90|gin|go|h|hip|hpp|ini|"
    r"j2|java|jl|js|json|lua|m|pl|pxd|py|pyx|r|rb|rs|sh|toml|ts|yaml|yml|zsh))$",
    re.IGNORECASE,
)
_JOB: Final = re.compile(rb"\A(?=.*^name:)(?=.*^(?:train|command|entrypoint|resources):)", re.MULTILINE | re.DOTALL)
_FILE_OF_DIFF: Final = re.compile(rb"^(?=diff --git |Submodule )", re.MULTILINE)
# The comparison of a large project on a slow file system; a job can wait longer than a person who submits.
_TIMEOUT_S: Final = 60.0


class CodeError(UserError):
    """An attempt would run other code than that of the submission, and its job forbids it."""

    kind = "code"


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeRecord(Record):
    """The code of the project as it was when the run, or its sweep, was submitted.

    Args:
        root: the project: the top directory of the git repository; without git the directory of the code.
        directory: the directory of submission, relative to ``root``.
        commit: the commit that was checked out; None if it is not known.
        changes: the sha256 of what differs from it, by the path of each code file.
        unknown: why they are not known; None if they are.
        copy: the name of the copy in ``code/`` beside this record; None if none was made.
    """

    ADVICE: ClassVar[str] = "resume the run with --code now, which writes it anew"

    root: str
    directory: str
    commit: str | None
    changes: Mapping[str, str]
    unknown: str | None = None
    copy: str | None = None

    def __post_init__(self) -> None:
        if not self.root.startswith("/"):
            raise ValueError("its root is no absolute path")
        if self.directory.startswith("/") or ".." in PurePath(self.directory).parts:
            raise ValueError("its directory is not in the project")
        if self.copy is not None and not self.copy.isdecimal():
            raise ValueError("its copy is no number")


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedCode:
    """The record of the code of a run, and where it is.

    Args:
        owner: the run, or the sweep that it is an element of.
    """

    owner: RunDirectory
    record: CodeRecord

    @property
    def copy(self) -> Path | None:
        """The copy of the project; None if none was made, or if it was removed."""
        copy = None if self.record.copy is None else self.owner.code_copies / self.record.copy
        return copy if copy is not None and copy.is_dir() else None


def read_code(run: RunDirectory) -> SubmittedCode | None:
    """Return the code of the newest submission of a run; None for a script that was submitted by hand.

    An element of a sweep has that of its sweep, until it is resumed with newer code.

    Raises:
        HpcddpError: the record, or the manifest of the sweep, is damaged.
    """
    owner = run
    record = read_record(run.code, CodeRecord)
    if record is None:
        sweep = sweep_of(run)
        if sweep is None:
            return None
        owner = sweep.directory
        record = read_record(owner.code, CodeRecord)
    return None if record is None else SubmittedCode(owner=owner, record=record)


def write_code(run: RunDirectory, record: CodeRecord) -> None:
    """Write the code of a submission into the directory of its run or sweep."""
    write_record(run.code, record)


def read_copy(run: RunDirectory) -> tuple[CodeRecord, Path]:
    """Return the record of the code of a run with ``environment.code: snapshot``, and the copy.

    Raises:
        HpcddpError: there is no copy.
    """
    code = read_code(run)
    if code is None or code.copy is None:
        raise CodeError(
            f"environment.code is snapshot, and the run {run.run_id} has no copy of its code; submit the job with "
            f"hpcddp submit, which makes it, or resume the run with --code now"
        )
    return code.record, code.copy


def changed_code(tree: WorkingTree) -> dict[str, str]:
    """Return the sha256 of each part of a diff that is about code, by the path of its file."""
    digests = {}
    for part in _FILE_OF_DIFF.split(tree.diff or b"")[1:]:
        # "diff --git a/NAME b/NAME"
        name = part.partition(b"\n")[0].rpartition(b" b/")[2].decode(errors="replace").removesuffix('"')
        if CODE.search(name) and not _is_job(tree.root / name):
            digests[name] = hashlib.sha256(part).hexdigest()
    return digests


def _is_job(path: Path) -> bool:
    """Return whether a file is a job file: the job was read when it was submitted, so an edit of it changes nothing."""
    try:
        return path.suffix in {".yaml", ".yml"} and _JOB.search(path.read_bytes()) is not None
    except OSError:
        return False


def changes_since(record: CodeRecord) -> list[str]:
    """Return which code files that git tracks differ from those of a submission; none where the submission had no git.

    Raises:
        CodeError: git did not say it.
    """
    if record.commit is None or record.unknown is not None or not Path(record.root).is_dir():
        return []
    tree = read_working_tree(Git(Path(record.root), os.environ, timeout_s=_TIMEOUT_S), record.commit)
    if tree.diff is None:
        raise CodeError(
            f"the code cannot be compared with that of the submission: {tree.unknown}",
            hint="Resume the run with --code now, or with --set environment.code=live.",
        )
    now = changed_code(tree)
    return sorted(name for name in {**record.changes, **now} if record.changes.get(name) != now.get(name))


def changes_sentence(names: Sequence[str]) -> str:
    """Return which files have changed since the submission, as the beginning of a sentence."""
    more = len(names) - _NAMED
    shown = [*names[:_NAMED], f"{more} more"] if more > 0 else names
    return f"{listed(shown)} changed since the submission"


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
