"""The code of a submission: which files of the project are code, and what a job with a copy of them may not hold.

The copy of ``environment.code: snapshot`` is in the directory of the run or of the sweep. Files that git tracks or does
not ignore are copied. What git ignores is a link to the original, so that relative paths to data and outputs go on
working.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Final

from hpcddp.errors import HpcddpError
from hpcddp.jobfile.placeholders import argument_text
from hpcddp.jobfile.sweep import field_of
from hpcddp.run.code import (
    LARGEST_CODE_FILE,
    CodeRecord,
    SubmittedCode,
    changes_since,
    content_of,
    digest_of,
    read_code,
    write_code,
)
from hpcddp.run.directory import RunDirectory
from hpcddp.submission.project import PROGRAMS, Project, ProjectFile, find_project, is_below, suffix_of
from hpcddp.submission.request import SubmissionError, SubmitRequest

# Only where git tracks them: programs write such files too.
_CONFIGURATIONS: Final = frozenset({".cfg", ".gin", ".ini", ".json", ".toml", ".yaml", ".yml"})
_YAML: Final = frozenset({".yaml", ".yml"})
# The job was read when it was submitted, so an edit of a job file changes nothing.
_JOB: Final = re.compile(rb"^(?:train|command|entrypoint|resources):", re.MULTILINE)
_NAME_OF_JOB: Final = re.compile(rb"^name:", re.MULTILINE)
_SETTINGS: Final = "hpcddp.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmissionCode:
    """The code that a submission takes, before it is written.

    Args:
        is_copied: whether ``environment.code`` is ``snapshot``.
    """

    project: Project
    record: CodeRecord
    is_copied: bool

    def write(self, run: RunDirectory) -> tuple[str, ...]:
        """Write the record, and the copy if there is one, into the directory of a run or a sweep.

        Returns:
            What its user should know of it, a sentence each.

        Raises:
            SubmissionError: the copy cannot be made.
        """
        record = self.record
        notes: tuple[str, ...] = ()
        if record.unknown is not None and self.project.git is not None:
            notes = (f"later changes of the code will not be noticed: {record.unknown}",)
        if self.is_copied:
            record, notes = write_copy(self.project, record, run)
        write_code(run, record)
        return notes


def take_code(request: SubmitRequest) -> SubmissionCode:
    """Return the code with which a job is submitted.

    Raises:
        SubmissionError: the job asks for frozen or copied code, and that cannot be.
    """
    mode = request.job.spec.environment.code
    project = find_project(request)
    if mode != "live" and project.unknown is not None:
        instead = "write environment.code: live"
        if project.git is None:
            instead = f"run git init there, with a .gitignore for data and outputs, or {instead}"
        raise SubmissionError(f"environment.code is {mode}, and {project.unknown}; {instead}")
    if mode == "snapshot":
        _refuse_absolute_paths(project, request)
        _refuse_programs_outside(project, request)
    hashes = {}
    for file in project.files:
        content = _code_in(f"{project.root}/{file.name}", file)
        if content is not None:
            hashes[file.name] = digest_of(content)
    record = CodeRecord(
        time=time.time(), root=str(project.root), directory=project.directory, files=hashes, unknown=project.unknown
    )
    return SubmissionCode(project=project, record=record, is_copied=mode == "snapshot")


def _code_in(path: str, file: ProjectFile) -> bytes | None:
    """Return the content of a file that is code; None if it is data, too large, or cannot be read."""
    if not _may_be_code(path, file):
        return None
    try:
        content = content_of(path)
    except OSError:
        return None
    is_job = suffix_of(file.name) in _YAML and _NAME_OF_JOB.search(content) and _JOB.search(content)
    return None if is_job or len(content) > LARGEST_CODE_FILE else content


def _may_be_code(path: str, file: ProjectFile) -> bool:
    """Return whether a file is code by its name, or as an executable without a suffix."""
    try:
        file.name.encode()
    except UnicodeEncodeError:
        return False
    suffix = suffix_of(file.name)
    if suffix in PROGRAMS:
        return True
    if suffix in _CONFIGURATIONS:
        is_hidden = file.name.startswith(".") or "/." in file.name
        return file.is_tracked and not is_hidden and PurePath(path).name != _SETTINGS
    if suffix:
        return False
    try:
        status = Path(path).stat()
    except OSError:
        return False
    is_executable = stat.S_ISREG(status.st_mode) and status.st_mode & stat.S_IXUSR
    return bool(is_executable) and status.st_size <= LARGEST_CODE_FILE


def _refuse_absolute_paths(project: Project, request: SubmitRequest) -> None:
    """Refuse words with an absolute path into the project, but for what the copy has links to."""
    linked = (*project.ignored, *project.environments)
    for text in _texts_of_command(request):
        for name in _paths_into(project, request.directory, text):
            if not is_below(name, linked):
                raise SubmissionError(
                    f"environment.code is snapshot, and command holds {text!r}, an absolute path into the project "
                    f"{project.root}, where later edits are; write it relative to the directory of submission"
                )


def _texts_of_command(request: SubmitRequest) -> Iterator[str]:
    """Yield the words of the command, and what a sweep gives for it."""
    yield from request.job.spec.command or ()
    for element in request.elements:
        yield from (argument_text(value) for key, value in element.items() if field_of(key) == "command")


def _paths_into(project: Project, directory: Path, text: str) -> Iterator[str]:
    """Yield the absolute paths into the project that a text holds, relative to the project."""
    # The submitter may have another name for the directory, through a link.
    depth = len(PurePath(project.directory).parts)
    roots = {str(project.root), str([directory, *directory.parents][depth])}
    for root in roots:
        for match in re.finditer(re.escape(root) + r"(?:/(?P<name>[^\s'\"`;:,|&<>()]*)|(?![\w.-]))", text):
            yield os.path.normpath(match["name"] or ".")


def _refuse_programs_outside(project: Project, request: SubmitRequest) -> None:
    """Refuse words with a relative path to a program that the copy does not have."""
    for word in request.job.spec.command or ():
        if word.startswith("/"):
            continue
        name = os.path.normpath(PurePath(project.directory, word))
        environment = next((folder for folder in project.environments if is_below(name, (folder,))), None)
        if environment is not None:
            raise SubmissionError(
                f"environment.code is snapshot, and command holds {word!r}, which is in the virtual environment "
                f"{environment} and not in the copy; write environment.venv: {environment}, and "
                f"{PurePath(word).name} in the command"
            )
        if name.startswith("../") and suffix_of(word) in PROGRAMS:
            raise SubmissionError(
                f"environment.code is snapshot, and command holds {word!r}, which is outside of the project "
                f"{project.root} and not in the copy; submit from the repository that holds it"
            )


def code_of_resumption(run: RunDirectory, request: SubmitRequest) -> SubmissionCode | None:
    """Return the code with which a run, or a sweep, is resumed; None if it goes on with that of its submission.

    Raises:
        HpcddpError: the code has changed and the submitter has to choose, or the choice cannot be.
    """
    mode = request.job.spec.environment.code
    choice = request.code
    if choice == "now" or (choice is None and mode == "live"):
        return take_code(request)
    code = _code_to_go_on_with(run, mode)
    if code is None and choice == "submitted":
        raise SubmissionError(
            f"--code is submitted, and nothing was kept of the code that {run.run_id} was submitted with; write "
            "--code now"
        )
    if code is None:
        return take_code(request)
    if mode == "snapshot" and choice == "submitted":
        return None
    changes = changes_since(code.record)
    if not changes:
        return None
    if choice == "submitted":
        raise SubmissionError(
            f"--code is submitted, and {changes.sentence}, and environment.code: {mode} makes no copy; undo the "
            "change, or write --code now"
        )
    other_way_out = "undo the change"
    if mode == "snapshot":
        other_way_out = "--code submitted to run the copy of the submission"
    raise SubmissionError(
        f"environment.code is {mode}, and {changes.sentence}; add --code now to run the code as it is now, or "
        f"{other_way_out}"
    )


def _code_to_go_on_with(run: RunDirectory, mode: str) -> SubmittedCode | None:
    """Return the code with which a run was submitted; None if it is not known, or if its copy is gone.

    Args:
        mode: ``environment.code``; only ``snapshot`` needs the copy.
    """
    code = read_code(run)
    if code is None or mode != "snapshot":
        return code
    if code.copy is None or not code.copy.is_dir():
        return None
    return code


def remove_unused_copies(run: RunDirectory) -> None:
    """Remove the copies in the directory of a run or a sweep that its record does not name."""
    try:
        submitted = read_code(run)
    except HpcddpError:
        # Nobody can tell which one is in use.
        return
    in_use = None
    if submitted is not None and submitted.owner == run:
        in_use = submitted.record.copy
    remove_copies(run, keep=in_use)


def forget_code(run: RunDirectory) -> None:
    """Remove the record and the copies of an element, which goes on with those of its sweep."""
    run.code.unlink(missing_ok=True)
    remove_copies(run, keep=None)


_LARGEST_UNTRACKED: Final = 10 << 20
_ALL_UNTRACKED: Final = 100 << 20
_NEVER_LINKED: Final = frozenset({".git", "__pycache__"})
_AT_ONCE: Final = 1 << 30
_SHOWN: Final = 3


def write_copy(project: Project, record: CodeRecord, run: RunDirectory) -> tuple[CodeRecord, tuple[str, ...]]:
    """Copy a project into the directory of a run or of a sweep.

    Returns:
        The record of the code with its copy, and what is not as in the project, a sentence each.

    Raises:
        SubmissionError: a file cannot be copied; nothing is left behind.
    """
    run.code_copies.mkdir(mode=0o700, exist_ok=True)
    numbers = [int(path.name) for path in run.code_copies.iterdir() if path.name.isdecimal()]
    copy = run.code_copies / str(max(numbers, default=-1) + 1)
    writer = _CopyWriter(project, record, copy)
    try:
        writer.write()
    except OSError as error:
        shutil.rmtree(copy, ignore_errors=True)
        raise SubmissionError(
            f"environment.code is snapshot, and {error.filename2 or error.filename} cannot be copied to {copy} "
            f"({error.strerror}); correct that, or write environment.code: frozen or live"
        ) from error
    except BaseException:
        shutil.rmtree(copy, ignore_errors=True)
        raise
    record = replace(
        record,
        copy=copy.name,
        copied_files=writer.files,
        inodes=writer.inodes,
        copied_bytes=writer.bytes,
    )
    return record, tuple(writer.notes())


def remove_copies(run: RunDirectory, *, keep: str | None) -> None:
    """Remove the copies of a run's code that no attempt uses any more; ``keep`` is the name of the one in use."""
    if not run.code_copies.is_dir():
        return
    for path in run.code_copies.iterdir():
        if path.name != keep:
            shutil.rmtree(path, ignore_errors=True)


class _CopyWriter:
    """Writes the copy of a project: its files, and links for what git ignores.

    Args:
        record: the hashes of its code, taken before.
        copy: the directory of the copy, which does not exist.

    Attributes:
        files: how many files were copied.
        inodes: how many files, directories and links were made.
        bytes: what the copied files have in all.
    """

    def __init__(self, project: Project, record: CodeRecord, copy: Path) -> None:
        self._project = project
        self._hashes = record.files
        self._root = project.root
        self._copy = copy
        self._folders: set[str] = set()
        self.files = 0
        self.inodes = 0
        self.bytes = 0
        self._untracked_bytes = 0
        self._compiled: list[str] = []
        self._large: list[str] = []
        self._outside: list[str] = []

    def write(self) -> None:
        """Write the copy."""
        # The tasks work there: in a directory of the copy also where git ignores it, or knows no file in it.
        self._make_folder(self._project.directory)
        for file in self._project.files:
            self._add(file)
        for name in self._project.ignored:
            self._add_ignored(name)
        run_root = self._project.run_root
        if run_root is not None and run_root not in self._folders and not is_below(run_root, self._project.ignored):
            self._link(run_root, str(self._root / run_root))

    def notes(self) -> Iterator[str]:
        """Yield what of the copy is not as in the project, a sentence each."""
        if self._compiled:
            yield (
                f"the copy of the code has links to {_first(self._compiled)}, compiled modules that git ignores: "
                "compiling them again changes what runs"
            )
        if self._large:
            yield (
                f"the copy of the code has links in place of copies for {_first(self._large)}: large files that git "
                "does not track"
            )
        if self._outside:
            yield (
                f"the copy of the code has links that lead out of the project: {_first(self._outside)}; a change there "
                "changes what runs"
            )

    def _make_folder(self, name: str) -> None:
        if name in self._folders:
            return
        if name:
            self._make_folder(_folder_of(name))
        (self._copy / name).mkdir(mode=0o700)
        self.inodes += 1
        self._folders.add(name)

    def _add(self, file: ProjectFile) -> None:
        # By names and descriptors: there are thousands of files.
        try:
            source = os.open(f"{self._root}/{file.name}", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError as error:
            # git tracks it, and it was removed.
            if file.name in self._hashes:
                raise _changed_meanwhile(file.name) from error
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            self._add_link(file.name)
        else:
            try:
                self._add_opened(source, file)
            finally:
                os.close(source)

    def _add_opened(self, source: int, file: ProjectFile) -> None:
        """Copy a regular file; make a link to a large one that git does not track. Others are left out."""
        status = os.fstat(source)
        if not stat.S_ISREG(status.st_mode):
            return
        is_code = file.is_tracked or file.is_program
        if is_code or self._takes_room(status.st_size):
            self._copy_file(source, file.name, status)
        else:
            self._large.append(file.name)
            self._link(file.name, f"{self._root}/{file.name}")

    def _takes_room(self, size: int) -> bool:
        """Count untracked data of a size, in bytes, if there is room for a copy; return whether there is."""
        if size > _LARGEST_UNTRACKED or self._untracked_bytes + size > _ALL_UNTRACKED:
            return False
        self._untracked_bytes += size
        return True

    def _copy_file(self, source: int, name: str, status: os.stat_result) -> None:
        self._make_folder(_folder_of(name))
        mode = 0o700 if status.st_mode & stat.S_IXUSR else 0o600
        target = os.open(f"{self._copy}/{name}", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            self._copy_content(source, target, name, status.st_size)
        except OSError as error:
            # The disk is full, for example: an error of sendfile or close names no file.
            raise OSError(error.errno, error.strerror, f"{self._root}/{name}") from error
        self.files += 1
        self.inodes += 1
        self.bytes += status.st_size

    def _copy_content(self, source: int, target: int, name: str, size: int) -> None:
        """Copy a file, and close the copy; code has to be what was hashed before."""
        try:
            while os.sendfile(target, source, None, _AT_ONCE):
                pass
            digest = self._hashes.get(name)
            if digest is not None and digest_of(os.pread(target, size + 1, 0)) != digest:
                raise _changed_meanwhile(name)
        finally:
            os.close(target)

    def _add_link(self, name: str) -> None:
        """Copy a link of the project: one that leads to a place in the project leads to its place in the copy."""
        source = self._root / name
        target = os.path.normpath(source.parent / source.readlink())
        if Path(target).is_relative_to(self._root):
            self._link(name, os.path.relpath(target, source.parent))
            return
        self._outside.append(name)
        self._link(name, target)

    def _add_ignored(self, name: str) -> None:
        source = self._root / name
        is_never_linked = not _NEVER_LINKED.isdisjoint(PurePath(name).parts) or suffix_of(name) == ".pyc"
        if is_never_linked or name in self._project.environments:
            return
        if name in self._folders:
            for child in source.iterdir():
                self._add_ignored(f"{name}/{child.name}")
        elif os.path.lexists(self._copy / name):
            # git tracks it in a directory that it ignores.
            return
        elif source.is_symlink():
            self._add_link(name)
        elif suffix_of(name) in PROGRAMS and source.is_file():
            # A tool has written it, as _version.py: it is a module of the project.
            self._add(ProjectFile(name=name, is_tracked=False))
        else:
            if suffix_of(name) == ".so":
                self._compiled.append(name)
            self._link(name, str(source))

    def _link(self, name: str, target: str) -> None:
        self._make_folder(_folder_of(name))
        (self._copy / name).symlink_to(target)
        self.inodes += 1


def _changed_meanwhile(name: str) -> SubmissionError:
    return SubmissionError(
        f"environment.code is snapshot, and {name} changed while the project was copied; submit again when nothing "
        "writes to it"
    )


def _folder_of(name: str) -> str:
    """Return the directory of a path in the project, both relative to the project."""
    return name.rpartition("/")[0]


def _first(names: Sequence[str]) -> str:
    """Return the first of some names, and how many there are more."""
    more = len(names) - _SHOWN
    if more > 0:
        return f"{', '.join(names[:_SHOWN])} and {more} more"
    return ", ".join(names)
