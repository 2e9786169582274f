"""The code that a submission had: the files in ``code.json``, the commit and the packages in ``source.json``.

``code.json`` has a hash of each code file of the project, and where its copy is. Every attempt compares the
files with their hashes. A file that was created later is no difference.
"""

from __future__ import annotations

import errno
import hashlib
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any, ClassVar, Final

from hpcddp.errors import HpcddpError, UserError, listed
from hpcddp.run.directory import RunDirectory
from hpcddp.run.record import Record, RecordError, read_record, write_record
from hpcddp.run.sweep import sweep_of

LARGEST_CODE_FILE: Final = 1 << 20
"""Bytes; a larger file is data."""
_NAMED: Final = 3
_SOURCE_FOLDER: Final = "src"
# The standard library and the packages of an environment that is in the project.
_INSTALLED: Final = re.compile(r"/lib(?:64)?/python3[^/]*/", re.ASCII)
_GONE: Final = frozenset({errno.ENOENT, errno.ENOTDIR})


class CodeError(UserError):
    """An attempt would run other code than that of the submission, and its job forbids it."""

    kind = "code"


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeRecord(Record):
    """The code of the project as it was when the run, or its sweep, was submitted.

    Args:
        time: seconds since the epoch.
        root: the project: the top directory of the git repository; without git the directory of the code.
        directory: the directory of submission, relative to ``root``.
        files: the sha256 of each code file, by its path relative to ``root``.
        unknown: why the files are not known; None if they are.
        copy: the name of the copy in ``code/`` beside this record; None if none was made.
        copied_files: files in the copy.
        inodes: files, directories and links in the copy.
        copied_bytes: what the files have in all.
    """

    ADVICE: ClassVar[str] = "resume the run with --code now, which writes it anew"

    time: float
    root: str
    directory: str
    files: Mapping[str, str]
    unknown: str | None = None
    copy: str | None = None
    copied_files: int = 0
    inodes: int = 0
    copied_bytes: int = 0

    def __post_init__(self) -> None:
        if not self.root.startswith("/"):
            raise ValueError("its root is no absolute path")
        if self.directory.startswith("/"):
            raise ValueError("its directory is not in the project")
        if self.copy is not None and ".." in PurePath(self.directory).parts:
            # Without a copy, the script may be in another directory than that of the submission.
            raise ValueError("its directory is not in the copy")
        if self.copy is not None and not self.copy.isdecimal():
            raise ValueError("its copy is no number")

    @property
    def sentence(self) -> str:
        """What was copied, with the number of inodes."""
        size = f"{math.ceil(self.copied_bytes / 1e3)} kB"
        return f"copied: {self.copied_files} files, {size}, {self.inodes} inodes"


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeChanges:
    """The files that differ from those of a submission, by their paths in the project."""

    edited: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return bool(self.edited or self.removed)

    @property
    def sentence(self) -> str:
        """What has changed since the submission, as the beginning of a sentence."""
        return f"{self.what} since the submission"

    @property
    def what(self) -> str:
        """What has changed, without since when."""
        parts = []
        if self.edited:
            parts.append(f"{_shortened_list(self.edited)} changed")
        if self.removed:
            verb = "was" if len(self.removed) == 1 else "were"
            parts.append(f"{_shortened_list(self.removed)} {verb} removed")
        return " and ".join(parts)


def _shortened_list(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    if more > 0:
        return listed([*names[:_NAMED], f"{more} more"])
    return listed(names)


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
        """The copy of the project; None if none was made."""
        return None if self.record.copy is None else self.owner.code_copies / self.record.copy


def read_code(run: RunDirectory) -> SubmittedCode | None:
    """Return the code of the newest submission of a run; None for a script that was submitted by hand.

    An element of a sweep has that of its sweep, until it is resumed with newer code.

    Raises:
        HpcddpError: the record, or the manifest of the sweep, is damaged.
    """
    record = read_record(run.code, CodeRecord)
    if record is not None:
        return SubmittedCode(owner=run, record=record)
    sweep = sweep_of(run)
    record = None if sweep is None else read_record(sweep.directory.code, CodeRecord)
    if sweep is None or record is None:
        return None
    return SubmittedCode(owner=sweep.directory, record=record)


def write_code(run: RunDirectory, record: CodeRecord) -> None:
    """Write the code of a submission into the directory of its run or sweep."""
    write_record(run.code, record)


def is_installed(file: str) -> bool:
    """Return whether a file of a project, with the path in it, is of an environment that is in the project."""
    return _INSTALLED.search(f"/{file}") is not None


def read_copy(run: RunDirectory) -> tuple[CodeRecord, Path]:
    """Return the record of the code of a run with ``environment.code: snapshot``, and the copy.

    Raises:
        HpcddpError: there is no copy.
    """
    code = read_code(run)
    copy = None if code is None else code.copy
    if code is None or copy is None or not copy.is_dir():
        raise CodeError(
            f"environment.code is snapshot, and the run {run.run_id} has no copy of its code; submit the job with "
            f"hpcddp submit, which makes it, or resume the run with --code now"
        )
    return code.record, copy


def content_of(path: str) -> bytes:
    """Return the content of a code file, and of a larger file the beginning; the writer of a pipe is not waited for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb", buffering=0) as stream:
        size = min(os.fstat(descriptor).st_size, LARGEST_CODE_FILE + 1)
        return stream.read(size)


def digest_of(content: bytes) -> str:
    """Return the sha256 of the content of a code file."""
    return hashlib.sha256(content).hexdigest()


def changes_since(record: CodeRecord) -> CodeChanges:
    """Compare the files of the project with those of a submission; what cannot be read is no difference."""
    edited = []
    removed = []
    if not Path(record.root).is_dir():
        return CodeChanges()
    for name, digest in record.files.items():
        try:
            content = content_of(f"{record.root}/{name}")
        except OSError as error:
            if error.errno in _GONE:
                removed.append(name)
            continue
        if digest_of(content) != digest:
            edited.append(name)
    return CodeChanges(edited=tuple(sorted(edited)), removed=tuple(sorted(removed)))


def import_roots(copy: Path, directory: str) -> list[str]:
    """Return the directories of a copy that come first on the import path: the working directory, ``.`` and ``src``."""
    roots = [copy / directory, copy]
    if (copy / _SOURCE_FOLDER).is_dir():
        roots.append(copy / _SOURCE_FOLDER)
    return list(dict.fromkeys(str(root) for root in roots))


def in_copy(path: str, root: str, copy: Path) -> str:
    """Return the path in the copy for an absolute path in the project; any other path as it is."""
    real = Path(os.path.realpath(path))
    if real.is_absolute() and real.is_relative_to(root):
        return str(copy / real.relative_to(root))
    return path


def outside_copy(root: str, copy: Path) -> Callable[[str], bool]:
    """Return a function that tells of the file of a module whether it is the project's own and not in the copy.

    Compiled modules, which are links on purpose, are not such files.
    """
    real_root = os.path.realpath(root)
    real_copy = os.path.realpath(copy)

    def is_outside(file: str) -> bool:
        if file.endswith(".so"):
            return False
        real = os.path.realpath(file)
        if not real.startswith(f"{real_root}/") or real.startswith(f"{real_copy}/"):
            return False
        return not is_installed(real.removeprefix(f"{real_root}/"))

    return is_outside


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
