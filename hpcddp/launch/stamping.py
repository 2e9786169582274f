"""Writing down when the lines of this task's log were written."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Final

from hpcddp.run.times import Stamper

_LOOK_EVERY_S: Final = 0.5


def stamp(log: Path) -> threading.Thread:
    """Begin to look at a log, in a thread that ends with the process or with the disk.

    Args:
        log: the log that this process writes to.

    Returns:
        The thread.
    """
    thread = threading.Thread(target=_look, args=(Stamper(log),), name="hpcddp-times", daemon=True)
    thread.start()
    return thread


def _look(stamper: Stamper) -> None:
    while True:
        try:
            stamper.look()
        except OSError:
            # A disk that is full or gone is told of elsewhere; without times the log is still a log.
            return
        time.sleep(_LOOK_EVERY_S)
