"""The files of a project that every trial of a rehearsal gets a copy of: what a program saves there harms no file."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hpcddp.errors import UserError

_GIT_TIMEOUT_S: Final = 60.0
_LARGEST_COPY: Final = 10 << 20
"""Bytes; a larger file is a link in the copies."""
_SUFFIXES: Final = frozenset({".cfg", ".ini", ".json", ".py", ".sh", ".toml", ".txt", ".yaml", ".yml"})
"""The files that are copied where git does not tell code from data."""


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
            source = self.directory / file
            copy = target / file
            copy.parent.mkdir(parents=True, exist_ok=True)
            if source.is_symlink() or source.stat().st_size > _LARGEST_COPY:
                copy.symlink_to(source)
            else:
                shutil.copy2(source, copy)
        for link in self.links:
            copy = target / link
            copy.parent.mkdir(parents=True, exist_ok=True)
            if not copy.exists():
                copy.symlink_to(self.directory / link)


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
    files_of_git = _files_of_git(directory)
    files = [
        file
        for file in (_files_like_code(directory) if files_of_git is None else files_of_git)
        if not any(file.is_relative_to(link) for link in links)
    ]
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


def _files_of_git(directory: Path) -> list[Path] | None:
    """Return the files that git tracks or does not ignore; None outside of a repository, or without git."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        done = subprocess.run(command, cwd=directory, capture_output=True, timeout=_GIT_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    names = [Path(os.fsdecode(name)) for name in done.stdout.split(b"\0") if name]
    # A tracked file may be deleted, and a submodule or another repository is a directory.
    return [name for name in dict.fromkeys(names) if (directory / name).is_file()]


def _files_like_code(directory: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(directory):
        is_environment = "pyvenv.cfg" in names
        folders[:] = [] if is_environment else [name for name in folders if not _is_hidden(name)]
        for name in [] if is_environment else names:
            path = Path(folder, name)
            if path.suffix in _SUFFIXES and not _is_hidden(name) and path.is_file():
                yield path.relative_to(directory)


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__pycache__"
