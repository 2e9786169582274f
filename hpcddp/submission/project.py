"""The project that a job is submitted from: its files, what git ignores in it, and its virtual environments.

A project is a git repository; its files are what git tracks or does not ignore. Without git nothing is known of them.
Calls of git end in time, prompt for nothing, and start no program that a configuration names.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path, PurePath
from typing import Final

from hpcddp.submission.request import SubmissionError, SubmitRequest

PROGRAMS: Final = frozenset(
    {
        ".bash", ".c", ".cc", ".cpp", ".cu", ".cuh", ".cxx", ".f90", ".go", ".h", ".hip", ".hpp", ".j2", ".java", ".jl",
        ".js", ".lua", ".m", ".pl", ".pxd", ".py", ".pyx", ".r", ".rb", ".rs", ".sh", ".ts", ".zsh",
    }
)  # fmt: skip
"""The suffixes of files that are programs, or parts of one."""

_SLOW: Final = "git did not list the files of the project in time"
_LARGEST_LIST: Final = 64 << 20
_LONGEST_PATH: Final = 1 << 16
_ENVIRONMENT_MARK: Final = "pyvenv.cfg"
_CONDA_MARK: Final = "conda-meta"
# ls-files -t: the tags of files that git does not track, and of those that a sparse checkout leaves out.
_UNTRACKED: Final = "?"
_SKIPPED: Final = "S"
_SUBMODULE: Final = "160000"
_LIST: Final = ("ls-files", "-z", "-t", "--stage", "--cached", "--others", "--exclude-standard")
_LIST_FOLDERS: Final = ("ls-files", "-z", "--others", "--exclude-standard", "--directory")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectFile:
    """A file or a link of the project.

    Args:
        name: its path relative to the project.
        is_tracked: whether git tracks it.
    """

    name: str
    is_tracked: bool

    @property
    def is_program(self) -> bool:
        """Whether it is a program by its suffix."""
        return suffix_of(self.name) in PROGRAMS


@dataclass(frozen=True, kw_only=True)
class Project:
    """The project that a job is submitted from.

    Args:
        directory: the directory of submission, relative to ``root``.
        files: its files, without those of virtual environments and of the directory of runs.
        run_root: the directory of all runs, relative to ``root``; None if it is elsewhere.
        git: git in ``root``; None without git.
        unknown: why the files are not known; None if they are.
        visible_environments: the virtual environments that git does not ignore, relative to ``root``.
    """

    root: Path
    directory: str
    files: tuple[ProjectFile, ...] = ()
    run_root: str | None = None
    git: Git | None = None
    unknown: str | None = None
    visible_environments: tuple[str, ...] = ()

    @cached_property
    def ignored(self) -> tuple[str, ...]:
        """What git ignores, and the empty directories.

        Raises:
            SubmissionError: git did not answer in time.
        """
        if self.git is None:
            return ()
        ignored = _list_names(self.git, *_LIST_FOLDERS, "--ignored")
        untracked = _list_names(self.git, *_LIST_FOLDERS)
        if ignored is None or untracked is None:
            raise SubmissionError(f"environment.code is snapshot, and {_SLOW}; write environment.code: live")
        empty = [name for name in untracked if name.endswith("/") and _is_empty(self.root / name)]
        return tuple(dict.fromkeys(name.removesuffix("/") for name in [*ignored, *empty]))

    @cached_property
    def environments(self) -> tuple[str, ...]:
        """The virtual environments and conda environments in the project, relative to it."""
        ignored = [name for name in self.ignored if _is_environment(self.root / name)]
        return (*self.visible_environments, *ignored)


def suffix_of(name: str) -> str:
    """Return the suffix of a file's name in lower case; without ``PurePath``, because there are thousands of files."""
    stem, dot, suffix = name.rpartition("/")[2].rpartition(".")
    return f".{suffix.lower()}" if stem and dot else ""


def is_below(name: str, folders: tuple[str, ...]) -> bool:
    """Return whether a relative path is one of some folders, or in one."""
    return any(name == folder or name.startswith(f"{folder}/") for folder in folders)


def find_project(request: SubmitRequest) -> Project:
    """Return the project of a job, with its files as they are now."""
    directory = request.directory.resolve()
    run_root = (directory / request.job.spec.run_root).resolve()
    git = find_git(directory, request.environment)
    top = None if git is None else _top_of(git)
    if git is None or top is None:
        return Project(root=directory, directory="", unknown=f"{directory} is in no git repository")
    git = replace(git, directory=top)
    below_top = "" if directory == top else directory.relative_to(top).as_posix()
    project = Project(root=top, directory=below_top, git=git)
    if run_root != top and run_root.is_relative_to(top):
        project = replace(project, run_root=run_root.relative_to(top).as_posix())
    files = _files_of(git, "")
    if files is None:
        return replace(project, unknown=_SLOW)
    untracked = [file.name for file in files if not file.is_tracked]
    marks = [name for name in untracked if name.endswith(f"/{_ENVIRONMENT_MARK}")]
    environments = tuple(str(PurePath(mark).parent) for mark in marks)
    left_out = environments
    if project.run_root is not None:
        left_out = (*environments, project.run_root)
    if left_out:
        files = [file for file in files if not is_below(file.name, left_out)]
    return replace(project, files=tuple(files), visible_environments=environments)


def _top_of(git: Git) -> Path | None:
    """Return the top directory of the repository; None where git shows none."""
    code, answer = git.run("rev-parse", "--show-toplevel", limit=_LONGEST_PATH)
    if code != 0:
        return None
    top = Path(os.fsdecode(answer.removesuffix(b"\n"))).resolve()
    return top if top.is_dir() and git.directory.is_relative_to(top) else None


def _list_names(git: Git, *words: str) -> list[str] | None:
    """Return the names that a command of git prints with ``-z``; None if it failed, or not in time."""
    code, answer = git.run(*words, limit=_LARGEST_LIST)
    if code != 0:
        return None
    return [os.fsdecode(name) for name in answer.split(b"\0") if name]


def _files_of(git: Git, folder: str) -> list[ProjectFile] | None:
    """Return what git tracks or does not ignore, in submodules and other repositories too; None if git failed.

    Args:
        git: git in the repository.
        folder: the repository, relative to the project, with a slash at its end; empty for the project itself.
    """
    names = _list_names(git, *_LIST)
    if names is None:
        return None
    files: list[ProjectFile] = []
    seen: set[str] = set()
    for tagged_name in names:
        # "? name", or "H mode object stage<tab>name".
        tag, _, name = tagged_name.partition(" ")
        is_tracked = tag != _UNTRACKED
        is_repository = name.endswith("/")
        if is_tracked:
            mode, _, name = name.partition("\t")
            is_repository = mode.startswith(_SUBMODULE)
        # A file with a conflict has several stages.
        if tag == _SKIPPED or name in seen:
            continue
        seen.add(name)
        if is_repository:
            files += _files_of_repository(git, name.removesuffix("/"), folder)
        else:
            files.append(ProjectFile(name=f"{folder}{name}", is_tracked=is_tracked))
    return files


def _files_of_repository(git: Git, name: str, folder: str) -> list[ProjectFile]:
    """Return the files of a repository in another one; none of a submodule that was not fetched."""
    directory = git.directory / name
    if not (directory / ".git").exists():
        return []
    return _files_of(replace(git, directory=directory), f"{folder}{name}/") or []


def _is_environment(folder: Path) -> bool:
    return (folder / _ENVIRONMENT_MARK).exists() or (folder / _CONDA_MARK).exists()


def _is_empty(folder: Path) -> bool:
    try:
        return next(folder.iterdir(), None) is None
    except OSError:
        return False


TIMEOUT_S: Final = 2.0
"""The longest that the calls for one purpose may take together, in seconds."""
# No prompt, no lock, no fetch of what a partial clone lacks; messages in English.
_ENVIRONMENT: Final = {
    "LC_ALL": "C",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_NO_LAZY_FETCH": "1",
}


def find_git(directory: Path, environment: Mapping[str, str], *, timeout_s: float = TIMEOUT_S) -> Git | None:
    """Return git for calls in a directory, which have some seconds in all; None if it is not on the PATH."""
    program = shutil.which("git", path=environment.get("PATH"))
    if program is None:
        return None
    return Git(program=program, directory=directory, environment=environment, deadline=time.monotonic() + timeout_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Git:
    """Calls of git that end in time.

    Args:
        program: the path of git.
        deadline: when the last one must have ended, on the monotonic clock.
    """

    program: str
    directory: Path
    environment: Mapping[str, str]
    deadline: float

    def run(self, *words: str, limit: int, errors: int = subprocess.DEVNULL) -> tuple[int | None, bytes]:
        """Return the exit code of a command, None if it had to be ended, and the beginning of what it printed.

        Args:
            limit: bytes of its output that are read at most.
            errors: where its standard error goes.
        """
        try:
            process = subprocess.Popen(
                [self.program, "--no-pager", "-c", "core.fsmonitor=false", *words],
                cwd=self.directory,
                env={**self.environment, **_ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                # Its filters may have processes of their own, which would keep the pipe open.
                start_new_session=True,
            )
        except OSError as error:
            return 1, str(error.strerror).encode()
        timer = threading.Timer(max(0.0, self.deadline - time.monotonic()), _end, [process])
        timer.start()
        try:
            output = b"" if process.stdout is None else process.stdout.read(limit)
            if len(output) == limit:
                _end(process)
            code = process.wait()
        finally:
            timer.cancel()
            _end(process)
            if process.stdout is not None:
                process.stdout.close()
        if code == -signal.SIGKILL:
            return None, output
        return code, output


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
