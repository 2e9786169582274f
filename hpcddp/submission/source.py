"""Find out what a submission would run: the git commit and its uncommitted changes, and the installed packages.

Nothing here fails a submission: what cannot be found out in time is recorded as unknown, with the reason.
"""

from __future__ import annotations

import os
import platform
import re
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from hpcddp.run.code import Source, add_source
from hpcddp.run.directory import RunDirectory
from hpcddp.run.git import Git, read_working_tree
from hpcddp.submission.request import SubmitRequest

LARGEST_DIFF: Final = 256 * 1024
"""Bytes of the diff that are kept."""
_DISTRIBUTION: Final = re.compile(r"(?P<name>.+?)-(?P<version>[^-]+)(?:-py[0-9.]+)?\.(?:dist|egg)-info")


def record_source(run: RunDirectory, request: SubmitRequest) -> None:
    """Write what a submission would run into the directory of its run or sweep; an error of the disk is ignored."""
    newest = run.newest_attempt()
    source = Source(
        time=time.time(),
        attempt=0 if newest is None else newest + 1,
        directory=str(request.directory),
        **ask_git(Git(request.directory, request.environment)),
        **installed_packages(request),
    )
    with suppress(OSError):
        add_source(run, source)


def ask_git(git: Git) -> dict[str, Any]:
    """Return the fields of ``Source`` that git knows."""
    tree = read_working_tree(git)
    facts: dict[str, Any] = {"commit": tree.commit, "branch": tree.branch, "git_unknown": tree.unknown}
    diff = tree.diff
    if diff is None:
        return facts
    cut = len(diff) > LARGEST_DIFF
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
