"""Let at most N elements of a sweep run at once on this machine: the process of each waits for one of N locks.

A lock belongs to an element from its start until its batch script and the controller of its tasks have ended, however
they end. No other process is needed.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hpcddp.run.directory import RunDirectory

# The process that has the lock of the queue takes the first turn that is free; all others wait behind it. Its words
# are the script, the directory of the locks and their number. The locks are those of flock(2): the kernel frees them.
_WAIT: Final = """\
exec {queue}>>"$1/queue" && flock "$queue" || exit
while :; do
  for ((number = 0; number < $2; number++)); do
    exec {turn}>>"$1/$number" || exit
    flock --nonblock "$turn" && { exec {queue}>&-; exec /bin/bash "$0"; }
    exec {turn}>&-
  done
  sleep 1
done
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """The turns of a sweep.

    Args:
        directory: the directory of the sweep.
        count: how many elements run at the same time.
    """

    directory: Path
    count: int

    @property
    def _locks(self) -> Path:
        return RunDirectory(self.directory).sweep_turns

    def command(self, script: Path) -> list[str]:
        """Return the command that waits for a turn and then becomes the batch script, with the same process id."""
        self._locks.mkdir(mode=0o700, exist_ok=True)
        return ["/bin/bash", "-c", _WAIT, str(script), str(self._locks), str(self.count)]

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keep every element from starting in the block; the end of this process would let them start too."""
        self._locks.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(self._locks / "queue", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def waits_for_turn(words: Sequence[str]) -> bool:
    """Return whether a process with these words as its command line waits for a turn."""
    return _WAIT in words
