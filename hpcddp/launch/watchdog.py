"""What a rank does when it has not gone on for too long: every thread's stack, a record, and an end."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import PurePath
from types import FrameType
from typing import Final

from hpcddp.launch.attribution import leave_record
from hpcddp.launch.lifeline import LIFELINE, Lifeline
from hpcddp.launch.siblings import fail
from hpcddp.run.directory import AttemptDirectory
from hpcddp.run.failure import FailureRecord
from hpcddp.stop.exit_codes import ExitCode
from hpcddp.stop.heartbeat import Heartbeat, Silence

HANG: Final = "hang"
"""The kind of the record of a rank that has not gone on."""

# How long the first rank that ends waits for the others, whose watchdogs wake at about the same time.
_OTHERS_TURN_S: Final = 10.0
_POLL_S: Final = 0.2

# Where a rank stands that waits for its peers: in a collective, in a backward that reduces, or reading a sum.
_WAITING_IN: Final = ("torch/distributed/", "torch/autograd/", "torch/cuda/streams.py", "hpcddp/train/agreement.py")


def watch(
    attempt: AttemptDirectory, timeout: timedelta, *, world_size: int, lifeline: Lifeline = LIFELINE
) -> Heartbeat:
    """Start the watchdog of this process and return what takes its signs of life.

    Args:
        attempt: the attempt that it belongs to.
        timeout: ``launch.hang_timeout``.
        world_size: ranks in the job.
        lifeline: what is known of this process.
    """

    def end(silence: Silence) -> None:
        give_up(attempt, silence, world_size=world_size, lifeline=lifeline)

    lifeline.heartbeat = Heartbeat(timeout.total_seconds(), end)
    lifeline.heartbeat.start()
    return lifeline.heartbeat


def give_up(
    attempt: AttemptDirectory,
    silence: Silence,
    *,
    world_size: int = 1,
    lifeline: Lifeline = LIFELINE,
    end: Callable[[int, AttemptDirectory], object] = fail,
) -> None:
    """Dump all stacks, write the record, wait for the other ranks to do the same, and end this process.

    Args:
        attempt: the attempt that it belongs to.
        silence: how long the rank has not gone on.
        world_size: of how many ranks a record is waited for.
        lifeline: what is known of this process.
        end: ends the process.
    """
    frame = sys._current_frames()[threading.main_thread().ident or 0]  # noqa: SLF001  documented, and the only way
    record = hang_record(silence, frame, lifeline)
    os.write(2, f"hpcddp: {record.place} hangs: {record.message}; the stacks of all threads:\n".encode())
    faulthandler.dump_traceback(file=2, all_threads=True)
    leave_record(attempt, record)
    _wait_for_others(attempt, world_size)
    end(ExitCode.HANG, attempt)


def hang_record(silence: Silence, frame: FrameType, lifeline: Lifeline) -> FailureRecord:
    """Return the record of a rank that has not gone on.

    Args:
        silence: for how long.
        frame: where its main thread is.
        lifeline: what is known of this process.
    """
    waiting = waits_for_others(frame)
    code = frame.f_code
    place = f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
    doing = "waits for other ranks" if waiting else f"is at {place}"
    after = "before the first step" if silence.step is None else f"after step {silence.step}"
    return lifeline.record(
        kind=HANG,
        message=f"nothing happened for {silence.seconds:.0f} s {after}; this rank {doing}",
        traceback="".join(traceback.format_stack(frame)),
        exit_code=ExitCode.HANG,
        waiting=waiting,
    )


def waits_for_others(frame: FrameType) -> bool:
    """Return whether a thread whose innermost frame is ``frame`` waits for other ranks."""
    path = PurePath(frame.f_code.co_filename).as_posix()
    return any(part in path for part in _WAITING_IN)


def _wait_for_others(attempt: AttemptDirectory, world_size: int) -> None:
    deadline = time.monotonic() + _OTHERS_TURN_S
    while len(list(attempt.path.glob("error-rank-*.json"))) < world_size and time.monotonic() < deadline:
        time.sleep(_POLL_S)
