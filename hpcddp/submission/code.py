"""The code of a submission: which files of the project are code, and what a job with a copy of them may not hold."""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
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
from hpcddp.submission.code_copy import remove_copies, write_copy
from hpcddp.submission.project import PROGRAMS, Project, ProjectFile, find_project, is_below, suffix_of
from hpcddp.submission.request import SubmissionError, SubmitRequest

# Only where git tracks them: programs write such files too.
_CONFIGURATIONS: Final = frozenset({".cfg", ".gin", ".ini", ".json", ".toml", ".yaml", ".yml"})
_YAML: Final = frozenset({".yaml", ".yml"})
# The job was read when it was submitted, so an edit of a job file changes nothing.
_JOB: Final = re.compile(rb"^(?:train|command|entrypoint|resources):", re.MULTILINE)
_NAME_OF_JOB: Final = re.compile(rb"^name:", re.MULTILINE)
_SETTINGS: Final = "hpcddp.toml"


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
    table = request.sweep_table
    if table is None:
        return
    for key, values in table.values.items():
        if field_of(key) == "command":
            yield from map(argument_text, values)


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
