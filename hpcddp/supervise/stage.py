"""Copy data to a disk of this node before the tasks start (``environment.stage``); srun starts it once on each node.

The data gets the name of the target when it is complete, with a mark that names its source. An attempt that
finds the mark copies nothing. A directory without a mark, or of another user, is not used.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import ClassVar, Final

from hpcddp.errors import HpcddpError, write_message
from hpcddp.jobfile.environment import Stage
from hpcddp.run.directory import AttemptDirectory
from hpcddp.run.failure import write_failure
from hpcddp.run.files import full_disk, why_unreadable
from hpcddp.run.job_records import FailureRecord
from hpcddp.run.record import Record, RecordError, read_record, write_record
from hpcddp.slurm.job_environment import submitters_umask
from hpcddp.slurm.rank_env import own_host, own_rank
from hpcddp.stop.reasons import ExitCode

MARK: Final = ".hpcddp-staged"
"""The file in the target that says what is there."""
_ARCHIVES: Final = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
_WRITABLE_BY_OTHERS: Final = 0o022


class StageError(HpcddpError):
    """The data cannot be copied, and another try would fail too."""

    kind = "stage"
    exit_code: ClassVar[int] = ExitCode.USER_CODE


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged(Record):
    """What a target holds.

    Args:
        source: the path of the source.
        size: its size in bytes; of a directory what stat(2) says.
        modified_ns: when it was last changed, in nanoseconds since the epoch.
    """

    ADVICE: ClassVar[str] = "remove the directory on that node, so that the data is copied again"

    source: str
    size: int
    modified_ns: int


def stage(wanted: Stage, environment: Mapping[str, str]) -> int:
    """Copy the data to this node, unless it is there.

    An error is printed, and written as the failure record of the attempt.

    Args:
        wanted: what to copy, and where to.
        environment: the environment of this process.

    Returns:
        The exit code.
    """
    # The warning before the time limit is for the tasks. TERM ends this process after it has removed what it wrote.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _exit)
    attempt = AttemptDirectory.from_text(environment["HPCDDP_ATTEMPT_DIR"])
    try:
        with submitters_umask(environment):
            write_message(f"environment.stage on {own_host(environment)}: {_stage(wanted, environment)}")
    except (HpcddpError, OSError) as error:
        record = _failure(error, environment)
        write_message(f"{record.place}: {record.message}")
        write_failure(attempt, record)
        return record.exit_code
    return ExitCode.FINISHED


def _exit(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


def _failure(error: HpcddpError | OSError, environment: Mapping[str, str]) -> FailureRecord:
    if isinstance(error, HpcddpError):
        message = error.message
        exit_code = ExitCode.USER_CODE
    else:
        # Another node, or the same one later, may have space, or see the file.
        message = why_unreadable(error)
        if error.filename is not None:
            message = f"{error.filename}: {message}"
        exit_code = ExitCode.INFRASTRUCTURE
    return FailureRecord(
        rank=own_rank(environment),
        host=own_host(environment),
        time=time.time(),
        kind="stage",
        message=message,
        traceback="",
        exit_code=int(exit_code),
        secondary=False,
        who="environment.stage",
    )


def _stage(wanted: Stage, environment: Mapping[str, str]) -> str:
    """Copy the data, and return what was done, as a sentence."""
    target_path = wanted.directory(environment)
    if target_path is None:
        raise StageError(
            f"environment.stage.target is {wanted.target!r}, and its variable is not set here to a path; write another "
            "directory of the node"
        )
    source = Path(wanted.source)
    target = Path(target_path)
    status = source.stat()
    mark = Staged(source=wanted.source, size=status.st_size, modified_ns=status.st_mtime_ns)
    if _is_there(target, mark):
        return f"{target} has the data from an earlier attempt or job"
    began = time.monotonic()
    target.parent.mkdir(parents=True, exist_ok=True)
    job_id = environment.get("SLURM_JOB_ID", "local")
    # The name is that of job and node, so that an attempt removes what the one before it has left.
    unfinished = target.with_name(f".{target.name}.{job_id}-{own_host(environment)}-{os.geteuid()}")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(mode=0o700)
        _copy(source, unfinished)
        write_record(unfinished / MARK, mark)
        _rename(unfinished, target, mark)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return f"{target} has the data after {time.monotonic() - began:.1f} s"


def _rename(unfinished: Path, target: Path, mark: Staged) -> None:
    """Give a complete copy its name, unless the target holds the data meanwhile."""
    try:
        unfinished.rename(target)
    except OSError:
        # Another job of the same user was faster, or another node, where the file system is shared.
        if not _is_there(target, mark):
            raise


def _is_there(target: Path, mark: Staged) -> bool:
    """Return whether the target holds the data of the source.

    Raises:
        StageError: the target is something else, or other users can change it.
    """
    if not os.path.lexists(target):
        return False
    status = target.lstat()
    is_own_directory = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    if not is_own_directory or status.st_mode & _WRITABLE_BY_OTHERS:
        raise StageError(
            f"{target} exists already, and is not a directory that only you can change; write another "
            "environment.stage.target"
        )
    try:
        mark_there = read_record(target / MARK, Staged)
    except RecordError as error:
        raise StageError(error.message) from error
    if mark_there is None:
        raise StageError(
            f"{target} exists already, but environment.stage did not make it; remove it on that node, or write "
            "another environment.stage.target"
        )
    if mark_there != mark:
        raise StageError(
            f"{target} holds a copy of {mark_there.source}, which has changed since or is not the source any more; "
            "remove it on that node, or write another environment.stage.target"
        )
    return True


def _copy(source: Path, directory: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, directory, symlinks=True, dirs_exist_ok=True)
    elif source.name.endswith(_ARCHIVES):
        _unpack(source, directory)
    else:
        shutil.copy2(source, directory / source.name)
    # A copy and an archive may have changed it.
    directory.chmod(0o700)


def _unpack(source: Path, directory: Path) -> None:
    """Unpack an archive with tar(1), which is several times as fast as tarfile and refuses paths that lead outside."""
    command = ["tar", "--extract", "--no-same-owner", "--force-local", f"--directory={directory}", f"--file={source}"]
    # Without a limit: it takes as long as the data is large, and the job has a time limit.
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env={**os.environ, "LC_ALL": "C"}
    ) as tar:
        try:
            _, errors = tar.communicate()
        except BaseException:
            tar.kill()
            raise
    if tar.returncode != 0:
        # tar does not say so after a write that was cut short.
        if full_disk(directory) is not None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory))
        first = next(iter(errors.splitlines()), f"tar exited with {tar.returncode}")
        raise StageError(f"environment.stage.source is {str(source)!r}, which cannot be unpacked ({first}); correct it")
