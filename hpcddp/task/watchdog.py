"""Watchdog of a rank: when the training makes no progress, keep all stacks and its collectives, and end the process."""

from __future__ import annotations

import faulthandler
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import PurePath
from types import FrameType
from typing import Final

from hpcddp.processes import wait_until
from hpcddp.run.collectives import write_trace
from hpcddp.run.directory import AttemptDirectory
from hpcddp.run.job_records import FailureRecord
from hpcddp.stop.heartbeat import Heartbeat, HeartbeatGap
from hpcddp.stop.listener import write_to_stderr
from hpcddp.stop.reasons import ExitCode
from hpcddp.task.attribution import save_failure
from hpcddp.task.local_peers import exit_after_failure
from hpcddp.task.process_state import PROCESS_STATE, ProcessState

HANG: Final = "hang"
"""The kind of the failure record of a rank that made no progress."""

# How long the first rank that exits waits for the records of its peers, whose watchdogs act at about the same time.
_PEER_RECORDS_TIMEOUT_S: Final = 10.0
_POLL_S: Final = 0.2
_TRACE_TIMEOUT_S: Final = 15.0
# torch 2.10 and later, and before (torch/csrc/distributed/c10d/FlightRecorder.cpp).
_TRACE_FILE_NAMES: Final = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")

# The files of a thread that waits for its peers: in a collective, in a backward that reduces, or for a sum.
_WAITING_IN: Final = (
    "torch/distributed/",
    "torch/autograd/",
    "torch/cuda/streams.py",
    "hpcddp/train/loop/agreement.py",
)


def start_watchdog(
    attempt: AttemptDirectory, timeout: timedelta, *, world_size: int, process_state: ProcessState = PROCESS_STATE
) -> Heartbeat:
    """Start the watchdog of this process and return the heartbeat that it watches.

    Args:
        attempt: the attempt that this process belongs to.
        timeout: ``launch.hang_timeout``.
        world_size: ranks in the job.
        process_state: the state of this process; it gets the heartbeat.
    """

    def end(gap: HeartbeatGap) -> None:
        end_hung_rank(attempt, gap, world_size=world_size, process_state=process_state)

    def mark() -> None:
        # The watchdog does not wait for a file system that does not answer, and goes on at a limit of threads.
        marking = threading.Thread(target=mark_wait, args=(attempt, process_state.rank, _main_frame()), daemon=True)
        with suppress(RuntimeError):
            marking.start()

    process_state.heartbeat = Heartbeat(timeout.total_seconds(), end, mark)
    process_state.heartbeat.start()
    return process_state.heartbeat


def end_hung_rank(
    attempt: AttemptDirectory,
    gap: HeartbeatGap,
    *,
    world_size: int = 1,
    process_state: ProcessState = PROCESS_STATE,
    end: Callable[[int, AttemptDirectory], object] = exit_after_failure,
) -> None:
    """Dump all stacks, write the failure record and the collectives, wait for the other records, and end this process.

    Args:
        attempt: the attempt that this process belongs to.
        gap: how long the rank made no progress.
        world_size: how many records to wait for, this rank's included.
        end: ends the process with an exit code.
    """
    record = hang_record(gap, _main_frame(), process_state)
    write_to_stderr(f"hpcddp: {record.place} hangs: {record.message}; the stacks of all threads:\n")
    faulthandler.dump_traceback(file=2, all_threads=True)
    save_failure(attempt, record)
    try:
        _keep_collectives(attempt, process_state)
    finally:
        _wait_for_peer_records(attempt, world_size)
        end(ExitCode.HANG, attempt)


def mark_wait(attempt: AttemptDirectory, rank: int, frame: FrameType) -> None:
    """Leave a mark, for hpcddp why, if a rank that has made no progress for a while waits for other ranks.

    Args:
        frame: the innermost frame of its main thread.
    """
    if waits_for_others(frame):
        # The mark only helps a person: a rank trains without it, too.
        with suppress(OSError):
            attempt.rank_wait(rank).touch(mode=0o600)


def _main_frame() -> FrameType:
    """Return the innermost frame of the main thread."""
    return sys._current_frames()[threading.main_thread().ident or 0]  # noqa: SLF001  documented, and the only way


def hang_record(gap: HeartbeatGap, frame: FrameType, process_state: ProcessState) -> FailureRecord:
    """Return the failure record of a rank that made no progress.

    Args:
        frame: the innermost frame of its main thread.
    """
    waiting = waits_for_others(frame)
    code = frame.f_code
    line = f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
    doing = "waits for other ranks" if waiting else f"is at {line}"
    after = "before the first step" if gap.step is None else f"after step {gap.step}"
    return process_state.record(
        kind=HANG,
        message=f"nothing happened for {gap.seconds:.0f} s {after}; this rank {doing}",
        traceback="".join(traceback.format_stack(frame)),
        exit_code=ExitCode.HANG,
        waiting=waiting,
    )


def waits_for_others(frame: FrameType) -> bool:
    """Return whether a thread whose innermost frame is ``frame`` waits for other ranks."""
    path = PurePath(frame.f_code.co_filename).as_posix()
    return any(part in path for part in _WAITING_IN)


def trace_variables(attempt: AttemptDirectory, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that let torch write its own trace, when a collective of NCCL times out, beside the logs.

    Args:
        environment: the environment so far; a name that the user chose stays.
    """
    chosen = any(name in environment for name in _TRACE_FILE_NAMES)
    return {} if chosen else {_TRACE_FILE_NAMES[0]: attempt.torch_traces}


def _keep_collectives(attempt: AttemptDirectory, process_state: ProcessState) -> None:
    """Write what this rank's collectives were doing."""
    if process_state.collective_trace is None:
        return
    # The recorder asks CUDA, which may never answer, and it holds the interpreter lock, which this timer does not need.
    faulthandler.dump_traceback_later(_TRACE_TIMEOUT_S, exit=True, file=2)
    try:
        trace = process_state.collective_trace()
        if trace is not None:
            write_trace(attempt, process_state.rank, trace)
    except OSError as error:
        path = attempt.rank_collectives(process_state.rank)
        write_to_stderr(f"hpcddp: {path} cannot be written ({error})\n")
    finally:
        faulthandler.cancel_dump_traceback_later()


def _wait_for_peer_records(attempt: AttemptDirectory, world_size: int) -> None:
    wait_until(
        lambda: len(list(attempt.path.glob("error-rank-*.json"))) >= world_size,
        timeout_s=_PEER_RECORDS_TIMEOUT_S,
        poll_s=_POLL_S,
    )
