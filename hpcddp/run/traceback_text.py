"""The last traceback in a log: what a Python program said before it ended."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hpcddp.run.files import read_tail

_TAIL_BYTES: Final = 64 * 1024
# What still goes on after a traceback has handled its exception; a crash in the teardown writes some stacks.
_MOST_LINES_AFTER: Final = 100
_BEGIN: Final = "Traceback (most recent call last):"
# Between the tracebacks of one chain (traceback.TracebackException.format).
_CHAINS: Final = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
# torch puts the rank in front of each line (torch/distributed/__init__.py, _distributed_excepthook).
_RANK: Final = re.compile(r"^\[rank\d+\]: ?", re.ASCII)

# What the task says of a signal, which may come between the lines of a traceback (stop/signals.py).
_HEARD: Final = re.compile(r"^hpcddp: \d\d:\d\d:\d\d SIG", re.ASCII)


@dataclass(frozen=True, slots=True)
class LastWords:
    """What a program said last.

    Args:
        traceback: the last traceback with what caused it; empty if there is none.
        message: the exception's own line; empty if there is none.
        tail: the end of the log, with or without a traceback.
    """

    traceback: str = ""
    message: str = ""
    tail: str = ""


def last_words(log: Path) -> LastWords:
    """Return what stands at the end of a log.

    Args:
        log: the file; one that cannot be read says nothing.
    """
    lines = [_RANK.sub("", line) for line in read_tail(log, _TAIL_BYTES).splitlines() if not _HEARD.match(line)]
    tail = "\n".join(lines[-20:])
    begins = [number for number, line in enumerate(lines) if line == _BEGIN]
    if not begins:
        return LastWords(tail=tail)
    last = begins[-1]
    first = last
    for begin in reversed(begins[:-1]):
        if not any(line in _CHAINS for line in lines[begin:first]):
            break
        first = begin
    # The frames are indented; the exception is not.
    end = next((number for number in range(last + 1, len(lines)) if lines[number][:1].strip()), len(lines))
    if len(lines) - end > _MOST_LINES_AFTER:
        return LastWords(tail=tail)
    message = lines[end] if end < len(lines) else ""
    return LastWords(traceback="\n".join(lines[first : end + 1]), message=message, tail=tail)
