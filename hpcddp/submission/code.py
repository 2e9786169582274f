"""The code of a submission: what is compared later, and the copy of ``environment.code: snapshot``.

The copy is in the directory of the run or of the sweep. Files that git tracks or does not ignore are copied. What git
ignores is a link to the original, so that relative paths to data and outputs go on working.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Final

from hpcddp.errors import HpcddpError
from hpcddp.jobfile.placeholders import argument_text
from hpcddp.jobfile.sweep import field_of
from hpcddp.run.code import (
    CodeRecord,
    changed_code,
    changes_sentence,
    changes_since,
    read_code,
    write_code,
)
from hpcddp.run.directory import RunDirectory
from hpcddp.run.git import Git, GitError, read_working_tree
from hpcddp.submission.request import SubmissionError, SubmitRequest

LARGEST_COPY: Final = 10 << 20
"""Bytes; a larger file is data, and a link in a copy."""
_NEVER_LINKED: Final = frozenset({".git", "__pycache__"})
_PROGRAMS: Final = (".py", ".sh")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectFiles:
    """What a copy of the project has, by paths relative to the project.

    Args:
        files: what is copied.
        links: what is a link to the original; a directory of the copy has such links for what is in it.
    """

    files: Sequence[str]
    links: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmissionCode:
    """The code that a submission takes, before it is written.

    Args:
        files: what is copied; None without a copy.
    """

    record: CodeRecord
    files: ProjectFiles | None

    def write(self, run: RunDirectory) -> tuple[str, ...]:
        """Write the record, and the copy if there is one, into the directory of a run or a sweep.

        Returns:
            What its user should know of it, a sentence each.

        Raises:
            SubmissionError: the copy cannot be made.
        """
        record = self.record
        if self.files is not None:
            record = _write_copy(record, self.files, run)
        write_code(run, record)
        if record.commit is None or record.unknown is None:
            return ()
        return (f"later changes of the code will not be noticed: {record.unknown}",)


def take_code(request: SubmitRequest) -> SubmissionCode:
    """Return the code with which a job is submitted.

    Raises:
        SubmissionError: the job asks for frozen or copied code, and that cannot be.
    """
    mode = request.job.spec.environment.code
    directory = request.directory.resolve()
    git = Git(directory, request.environment)
    tree = read_working_tree(git)
    why_unknown = tree.unknown
    files = None
    if mode == "snapshot" and why_unknown is None:
        try:
            git.directory = tree.root
            files = _list_files(git, (directory / request.job.spec.run_root).resolve())
        except (GitError, OSError) as error:
            why_unknown = str(error)
    if mode != "live" and why_unknown is not None:
        raise SubmissionError(
            f"environment.code is {mode}, and the code of {directory} is not known: {why_unknown}; commit it to a "
            "git repository, with a .gitignore for data and outputs, or write environment.code: live"
        )
    record = CodeRecord(
        root=str(tree.root),
        directory=tree.directory,
        commit=tree.commit,
        changes=changed_code(tree),
        unknown=tree.unknown,
    )
    if files is not None:
        _refuse_paths(record, files, request)
    return SubmissionCode(record=record, files=files)


def _list_files(git: Git, run_root: Path) -> ProjectFiles:
    """Return what a copy of the project has; git is called in the project.

    Raises:
        GitError: git did not list the files.
    """
    root = git.directory
    tracked = git.names("--cached", "--recurse-submodules")
    untracked = git.names("--others", "--exclude-standard")
    folders = git.names("--others", "--exclude-standard", "--directory")
    # Other repositories, virtual environments and empty directories.
    never_copied = [name.removesuffix("/") for name in untracked if name.endswith("/")]
    never_copied += [str(PurePath(name).parent) for name in untracked if name.endswith("/pyvenv.cfg")]
    if run_root != root and run_root.is_relative_to(root):
        never_copied.append(str(run_root.relative_to(root)))
    links = git.names("--others", "--exclude-standard", "--directory", "--ignored")
    links += [name for name in folders if name.endswith("/") and not any((root / name).iterdir())]
    files = tracked
    for name in untracked:
        if _is_below(name.removesuffix("/"), never_copied):
            continue
        if (root / name).lstat().st_size > LARGEST_COPY:
            links.append(name)
        else:
            files.append(name)
    # A directory is before what is in it.
    links = sorted([*never_copied, *(name.removesuffix("/") for name in links)])
    return ProjectFiles(files=files, links=links)


def _is_below(name: str, folders: Sequence[str]) -> bool:
    """Return whether a relative path is one of some folders, or in one."""
    return any(name == folder or name.startswith(f"{folder}/") for folder in folders)


def _refuse_paths(record: CodeRecord, files: ProjectFiles, request: SubmitRequest) -> None:
    """Refuse words with an absolute path into the project, but for what is a link, and programs outside of it."""
    for text in _texts_of_command(request):
        for name in _paths_into(record, request.directory, text):
            if not _is_below(name, files.links):
                raise SubmissionError(
                    f"environment.code is snapshot, and command holds {text!r}, an absolute path into the project "
                    f"{record.root}, where later edits are; write it relative to the directory of submission"
                )
        if text.endswith(_PROGRAMS) and os.path.normpath(PurePath(record.directory, text)).startswith("../"):
            raise SubmissionError(
                f"environment.code is snapshot, and command holds {text!r}, which is outside of the project "
                f"{record.root} and not in the copy; submit from the repository that holds it"
            )


def _texts_of_command(request: SubmitRequest) -> Iterator[str]:
    """Yield the words of the command, and what a sweep gives for it."""
    yield from request.job.spec.command or ()
    for element in request.elements:
        yield from (argument_text(value) for key, value in element.items() if field_of(key) == "command")


def _paths_into(record: CodeRecord, directory: Path, text: str) -> Iterator[str]:
    """Yield the absolute paths into the project that a text holds, relative to the project."""
    # The submitter may have another name for the directory, through a link.
    depth = len(PurePath(record.directory).parts)
    for root in {record.root, str([directory, *directory.parents][depth])}:
        for match in re.finditer(re.escape(root) + r"(?:/(?P<name>[^\s'\"`;:,|&<>()]*)|(?![\w.-]))", text):
            yield os.path.normpath(match["name"] or ".")


def code_of_resumption(run: RunDirectory, request: SubmitRequest) -> SubmissionCode | None:
    """Return the code with which a run, or a sweep, is resumed; None if it goes on with that of its submission.

    Raises:
        HpcddpError: the code has changed and the submitter has to choose, or the choice cannot be.
    """
    mode = request.job.spec.environment.code
    if request.code == "now" or (request.code is None and mode == "live"):
        return take_code(request)
    code = read_code(run)
    if code is None or (mode == "snapshot" and code.copy is None):
        if request.code is None:
            return take_code(request)
        raise SubmissionError(
            f"--code is submitted, and nothing was kept of the code that {run.run_id} was submitted with; write "
            "--code now"
        )
    other_way_out = "undo the change"
    if mode == "snapshot":
        if request.code == "submitted":
            return None
        other_way_out = "--code submitted to run the copy of the submission"
    changes = changes_since(code.record)
    if not changes:
        return None
    raise SubmissionError(
        f"environment.code is {mode}, and {changes_sentence(changes)}; add --code now to run the code as it is now, or "
        f"{other_way_out}"
    )


def remove_unused_copies(run: RunDirectory) -> None:
    """Remove the copies in the directory of a run or a sweep that its record does not name."""
    try:
        code = read_code(run)
    except HpcddpError:
        # Nobody can tell which one is in use.
        return
    for path in run.code_copies.glob("*"):
        if code is None or path != code.copy:
            shutil.rmtree(path, ignore_errors=True)


def forget_code(run: RunDirectory) -> None:
    """Remove the record and the copies of an element, which goes on with those of its sweep."""
    run.code.unlink(missing_ok=True)
    remove_unused_copies(run)


def _write_copy(record: CodeRecord, files: ProjectFiles, run: RunDirectory) -> CodeRecord:
    """Copy a project into the directory of a run or of a sweep, and return the record with the copy.

    Raises:
        SubmissionError: a file cannot be copied, or the code has changed meanwhile; nothing is left behind.
    """
    run.code_copies.mkdir(mode=0o700, exist_ok=True)
    numbers = [int(path.name) for path in run.code_copies.iterdir() if path.name.isdecimal()]
    copy = run.code_copies / str(max(numbers, default=-1) + 1)
    try:
        _fill_copy(copy, record, files)
    except BaseException:
        shutil.rmtree(copy, ignore_errors=True)
        raise
    return replace(record, copy=copy.name)


def _fill_copy(copy: Path, record: CodeRecord, files: ProjectFiles) -> None:
    root = Path(record.root)
    name = record.directory
    try:
        # The tasks work there: in a directory of the copy also where git ignores it, or knows no file in it.
        (copy / name).mkdir(parents=True)
        for name in files.files:
            copy_file(root, copy, name)
        for name in files.links:
            link_original(root, copy, name)
    except OSError as error:
        raise SubmissionError(
            f"environment.code is snapshot, and {root / name} cannot be copied to {copy} ({error.strerror}); correct "
            "that, or write environment.code: frozen or live"
        ) from error
    changes = changes_since(record)
    if changes:
        raise SubmissionError(
            f"environment.code is snapshot, and {changes[0]} changed while the project was copied; submit again when "
            "nothing writes to it"
        )


def copy_file(root: Path, copy: Path, name: str) -> None:
    """Copy a file or a link; a link to a place in the project leads to its place in the copy."""
    source = root / name
    target = copy / name
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_symlink():
        leads_to = os.path.normpath(source.parent / source.readlink())
        if Path(leads_to).is_relative_to(root):
            leads_to = os.path.relpath(leads_to, source.parent)
        target.symlink_to(leads_to)
    elif source.is_file():
        shutil.copy(source, target)


def link_original(root: Path, copy: Path, name: str) -> None:
    """Make a link to the original of what git ignores; what the copy has as a directory gets links in it."""
    source = root / name
    target = copy / name
    if source.name in _NEVER_LINKED or source.suffix == ".pyc":
        return
    if target.is_dir() and not target.is_symlink():
        for child in source.iterdir():
            link_original(root, copy, f"{name}/{child.name}")
    elif os.path.lexists(source) and not os.path.lexists(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(source)
