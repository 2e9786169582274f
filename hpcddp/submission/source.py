"""Find out what a submission would run: the git commit and its uncommitted changes, and the installed packages.

Nothing here fails a submission: what cannot be found out in time is recorded as unknown, with the reason.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from hpcddp.run.code import Source, add_source
from hpcddp.run.directory import RunDirectory
from hpcddp.submission.project import TIMEOUT_S, find_git
from hpcddp.submission.request import SubmitRequest

LARGEST_DIFF: Final = 256 * 1024
"""Bytes of the diff that are kept."""
_ANSWER_BYTES: Final = 64 * 1024
_HEAD: Final = ("rev-parse", "HEAD", "--abbrev-ref", "HEAD")
# Programs that a configuration names for other purposes are not started.
_DIFF: Final = ("diff", "--no-ext-diff", "--no-textconv", "--no-color", "--no-relative", "HEAD")
_REFUSALS: Final = (
    ("not a git repository", "the directory of submission is not in a git repository"),
    ("dubious ownership", "the repository belongs to another user (git config safe.directory)"),
    ("unknown revision", "the repository has no commit yet"),
)
_DISTRIBUTION: Final = re.compile(r"(?P<name>.+?)-(?P<version>[^-]+)(?:-py[0-9.]+)?\.(?:dist|egg)-info")


def record_source(run: RunDirectory, request: SubmitRequest) -> None:
    """Write what a submission would run into the directory of its run or sweep; an error of the disk is ignored."""
    newest = run.newest_attempt()
    git = ask_git(request.directory, request.environment)
    source = Source(
        time=time.time(),
        attempt=0 if newest is None else newest + 1,
        directory=str(request.directory),
        **git,
        **installed_packages(request),
    )
    with suppress(OSError):
        add_source(run, source)


def ask_git(directory: Path, environment: Mapping[str, str], *, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """Return the fields of ``Source`` that git knows.

    Args:
        directory: the directory of submission.
        timeout_s: the longest that git may take in all, in seconds.
    """
    git = find_git(directory, environment, timeout_s=timeout_s)
    if git is None:
        return {"git_unknown": "git was not found on the PATH"}
    code, answer = git.run(*_HEAD, limit=_ANSWER_BYTES)
    if code is None:
        return {"git_unknown": f"git did not answer within {timeout_s:g} s"}
    if code != 0:
        _, answer = git.run(*_HEAD, limit=_ANSWER_BYTES, errors=subprocess.STDOUT)
        text = answer.decode(errors="replace").strip()
        said = next((why for words, why in _REFUSALS if words in text), None)
        return {"git_unknown": said or f"git failed: {text.partition(chr(10))[0] or 'it said nothing'}"}
    commit, _, branch = answer.decode(errors="replace").strip().partition("\n")
    facts: dict[str, Any] = {"commit": commit, "branch": None if branch == "HEAD" else branch}
    code, diff = git.run(*_DIFF, limit=LARGEST_DIFF + 1)
    cut = len(diff) > LARGEST_DIFF
    if code != 0 and not cut:
        slow = f"git diff did not end within {timeout_s:g} s"
        return {**facts, "git_unknown": slow if code is None else "git diff failed"}
    if cut:
        # Whole lines only.
        diff = diff[:LARGEST_DIFF].rpartition(b"\n")[0] + b"\n"
    return {**facts, "dirty": bool(diff), "diff": diff.decode(errors="replace"), "is_diff_cut": cut}


def installed_packages(request: SubmitRequest) -> dict[str, Any]:
    """Return the fields of ``Source`` about the interpreter of a run, without starting it.

    The names and versions are those in the names of the directories that installers write next to the packages.
    """
    environment = request.job.spec.environment
    if environment.container is not None:
        return {"packages_unknown": f"the tasks run in the container {environment.container.image}"}
    if environment.conda is not None and "/" not in environment.conda:
        return {"packages_unknown": f"the conda environment {environment.conda} is activated when the job runs"}
    conda = None if environment.conda is None else f"{environment.conda}/bin/python"
    python = conda or environment.interpreter or request.python
    if python == sys.executable:
        folders = [Path(entry) for entry in sys.path if entry]
        return {"python": python, "python_version": platform.python_version(), "packages": _distributions(folders)}
    prefix = (request.directory / python).parent.parent
    folders = sorted(prefix.glob("lib/python3*/site-packages"))
    if "/" not in python or not folders:
        return {"python": python, "packages_unknown": f"no packages were found next to the interpreter {python}"}
    version = folders[-1].parent.name.removeprefix("python")
    return {"python": python, "python_version": version, "packages": _distributions(folders[-1:])}


def _distributions(folders: Iterable[Path]) -> dict[str, str]:
    """Return the version of each distribution, by its normalized name; the first folder that has one counts."""
    versions: dict[str, str] = {}
    for folder in folders:
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.endswith("-info") and (match := _DISTRIBUTION.fullmatch(entry.name)):
                    versions.setdefault(re.sub("[-_.]+", "-", match["name"]).lower(), match["version"])
    return dict(sorted(versions.items()))
