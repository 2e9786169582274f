"""Leave nothing of a rehearsal behind, even of one that is killed: a process beside it waits for its end.

``python -P -m hpcddp.rehearse.guard DIRECTORY [--keep]`` does that. The end of the rehearsal closes its standard input.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_KEEP = "--keep"


@contextmanager
def guarded(root: Path, *, is_kept: bool) -> Iterator[None]:
    """Have everything cleaned up if this process is killed in the block; in any other case the caller does that.

    Args:
        root: the directory of the rehearsal.
    """
    words = [sys.executable, "-P", "-m", __name__, str(root), *([_KEEP] if is_kept else [])]
    # In a session of its own, so that what ends the rehearsal does not end it too.
    guard = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield
    finally:
        guard.kill()
        guard.communicate()


def clean_up(root: Path, *, is_kept: bool) -> None:
    """End what is left of a rehearsal, and remove its directory unless that is kept.

    Raises:
        HpcddpError: processes are still there ten seconds after SIGKILL.
    """
    # The guard mostly needs none of this.
    from hpcddp.rehearse.trial import end_jobs, end_processes
    from hpcddp.run.find import forget_missing_runs

    try:
        end_jobs(root)
        end_processes(root)
    finally:
        if not is_kept:
            shutil.rmtree(root, ignore_errors=True)
            forget_missing_runs(root)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    clean_up(Path(sys.argv[1]), is_kept=_KEEP in sys.argv[2:])
