"""The files of a project that every trial of a rehearsal gets a copy of: what a program saves there harms no file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hpcddp.errors import UserError
from hpcddp.run.code import CODE
from hpcddp.run.git import Git, GitError
from hpcddp.submission.code import LARGEST_COPY, copy_file, link_original

_GIT_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """The directory in which a job is rehearsed.

    Args:
        directory: the directory, an absolute path.
        files: its files that are copied, relative to it.
        links: its entries that every copy has as links, relative to it.
        left_out: the entries of its first level that a copy lacks.
    """

    directory: Path
    files: tuple[Path, ...]
    links: tuple[Path, ...]
    left_out: tuple[str, ...]

    def copy_to(self, target: Path) -> None:
        """Make a copy in a directory that does not exist yet."""
        target.mkdir(mode=0o700)
        for file in self.files:
            copy_file(self.directory, target, str(file))
        for link in self.links:
            link_original(self.directory, target, str(link))


def read_project(directory: Path, *, linked: Sequence[Path]) -> Project:
    """Return the project in a directory.

    In a git repository the copied files are those that git tracks or does not ignore, else those that look like code
    and settings.

    Args:
        directory: the directory, an absolute path.
        linked: entries of it that the program needs and that are not copied, such as its data.

    Raises:
        UserError: an entry to link does not exist or is outside of the directory.
    """
    links = tuple(_relative(link, directory) for link in linked)
    try:
        names = Git(directory, os.environ, timeout_s=_GIT_TIMEOUT_S).names("-co", "--exclude-standard")
        # A tracked file may be deleted, and a submodule or another repository is a directory.
        found = [Path(name) for name in names if (directory / name).is_file()]
    except GitError:
        found = list(_files_like_code(directory))
    files = []
    large = []
    for file in found:
        if any(file.is_relative_to(link) for link in links):
            continue
        if (directory / file).stat().st_size > LARGEST_COPY:
            large.append(file)
        else:
            files.append(file)
    links = (*links, *large)
    kept = {path.parts[0] for path in (*files, *links)}
    left_out = sorted(entry.name for entry in directory.iterdir() if entry.name not in kept and entry.name != ".git")
    return Project(directory=directory, files=tuple(files), links=links, left_out=tuple(left_out))


def _relative(link: Path, directory: Path) -> Path:
    path = Path(os.path.normpath(directory / link))
    if not path.exists():
        raise UserError(f"--link is {link}, and there is no {path}; name a file or directory that exists")
    if path == directory or not path.is_relative_to(directory):
        raise UserError(
            f"--link is {link}, which is not below {directory}; a program finds it by its absolute path without --link"
        )
    return path.relative_to(directory)


def _files_like_code(directory: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(directory):
        is_environment = "pyvenv.cfg" in names
        folders[:] = [] if is_environment else [name for name in folders if not _is_hidden(name)]
        for name in [] if is_environment else names:
            path = Path(folder, name)
            if CODE.search(name) and path.is_file():
                yield path.relative_to(directory)


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__pycache__"
