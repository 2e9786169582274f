"""What git says of the project: its commit, its uncommitted changes, and its files.

The calls end in time, prompt for nothing, and start no program that a configuration names for another purpose.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

TIMEOUT_S: Final = 2.0
"""The longest that the calls for one purpose may take together, in seconds."""
# No prompt, no lock, no fetch of what a partial clone lacks; messages in English.
_ENVIRONMENT: Final = {
    "LC_ALL": "C",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_NO_LAZY_FETCH": "1",
}
_OPTIONS: Final = ("--no-pager", "-c", "core.fsmonitor=false", "-c", "core.quotePath=false")
_HEAD: Final = ("rev-parse", "--show-toplevel", "--show-prefix", "HEAD", "--abbrev-ref", "HEAD")
# The same text for the same changes, whatever a configuration says.
_DIFF: Final = (
    "diff", "--no-ext-diff", "--no-textconv", "--no-color", "--no-relative", "--no-renames", "--full-index",
    "--src-prefix=a/", "--dst-prefix=b/", "--submodule=diff", "--ignore-submodules=untracked",
)  # fmt: skip
_REFUSALS: Final = (
    ("not a git repository", "the directory of submission is not in a git repository"),
    ("dubious ownership", "the repository belongs to another user (git config safe.directory)"),
    ("unknown revision", "the repository has no commit yet"),
)


class GitError(Exception):
    """git did not say what it was asked; the text says why."""


class Git:
    """Calls of git in a directory.

    Args:
        timeout_s: the seconds that they may take together.
    """

    def __init__(self, directory: Path, environment: Mapping[str, str], *, timeout_s: float = TIMEOUT_S) -> None:
        self.directory = directory
        self._environment = environment
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s

    def run(self, *words: str) -> bytes:
        """Return what a command of git prints.

        Raises:
            GitError: it could not be started, failed, or had to be ended.
        """
        command = ["git", *_OPTIONS, *words]
        try:
            process = subprocess.Popen(
                command,
                cwd=self.directory,
                env={**self._environment, **_ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                # Its filters may have processes of their own, which would keep the pipes open.
                start_new_session=True,
            )
        except OSError as error:
            raise GitError("git was not found on the PATH") from error
        with process:
            try:
                output, errors = process.communicate(timeout=max(0.0, self._deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise GitError(f"git {words[0]} did not end within {self._timeout_s:g} s") from None
            finally:
                if process.returncode is None:
                    with suppress(ProcessLookupError, PermissionError):
                        os.killpg(process.pid, signal.SIGKILL)
        if process.returncode != 0:
            text = errors.decode(errors="replace").strip()
            why = next((why for sign, why in _REFUSALS if sign in text), None)
            raise GitError(why or f"git {words[0]} failed: {text.partition(chr(10))[0] or 'it said nothing'}")
        return output

    def names(self, *words: str) -> list[str]:
        """Return the files and directories that ``git ls-files`` lists, each once."""
        return [os.fsdecode(name) for name in dict.fromkeys(self.run("ls-files", "-z", *words).split(b"\0")) if name]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkingTree:
    """The files that git tracks, as they are now.

    Args:
        root: the top directory of the repository; where git shows none, the directory that git was asked about.
        directory: that directory, relative to ``root``.
        commit: the commit that is checked out; None if it is not known.
        branch: its branch; None if it is not known, or the commit is checked out without one.
        diff: what differs from a commit, as ``git diff`` prints it; None if it is not known.
        unknown: why git told nothing, or not all; None if it told all.
    """

    root: Path
    directory: str = ""
    commit: str | None = None
    branch: str | None = None
    diff: bytes | None = None
    unknown: str | None = None


def read_working_tree(git: Git, base: str = "HEAD") -> WorkingTree:
    """Return the files that git tracks, with what differs from the commit ``base``."""
    tree = WorkingTree(root=git.directory)
    try:
        root, prefix, commit, branch = os.fsdecode(git.run(*_HEAD)).removesuffix("\n").rsplit("\n", 3)
        tree = replace(tree, root=Path(root), directory=prefix.removesuffix("/"), commit=commit)
        if branch != "HEAD":
            tree = replace(tree, branch=branch)
        return replace(tree, diff=git.run(*_DIFF, base))
    except GitError as error:
        return replace(tree, unknown=str(error))
