"""Loader processes: what they answer to, and what their death means."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import threading
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from typing import Any, ClassVar, Final

from hpcddp.stop.exit_codes import ExitCode
from hpcddp.train.errors import TrainingError

# linux/prctl.h
_PR_SET_PDEATHSIG: Final = 1

_HELD: Final = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)
# torch/csrc/DataLoader.cpp, and torch/utils/data/dataloader.py.
_LOST: Final = re.compile(r"DataLoader worker \(pid(?:\(s\))? (?P<pids>[\d, ]+)\)")
_LIKELY: Final = {
    signal.SIGKILL: "most likely because the memory of the job or its node ran out; ask for more with resources.mem, "
    "or set a smaller train.num_workers",
    signal.SIGBUS: "most likely because /dev/shm is full; make it larger, or set a smaller train.num_workers",
}


class LostWorkerError(TrainingError):
    """A loader process ended before its work was done."""

    kind = "loader_worker"
    exit_code: ClassVar[int] = ExitCode.INFRASTRUCTURE


class WorkerExitError(LostWorkerError):
    """The data set's own code ended a loader process."""

    exit_code: ClassVar[int] = ExitCode.USER_CODE


_workers: dict[int, tuple[int, BaseProcess]] = {}


def remember(iterator: Any) -> None:  # noqa: ANN401
    """Remember which processes load for an iterator of a ``DataLoader``, so that they can be named if they die."""
    # They are named nowhere else; without them an error names the process id alone.
    processes = getattr(iterator, "_workers", [])
    for pid in [pid for pid, (_, process) in _workers.items() if not process.is_alive()]:
        del _workers[pid]
    _workers.update({process.pid: (number, process) for number, process in enumerate(processes)})


def lost_worker(error: BaseException | None) -> LostWorkerError | None:
    """Return what an error means if it says, or came from, the death of a loader process; else None."""
    while error is not None:
        match = _LOST.search(str(error)) if isinstance(error, RuntimeError) else None
        if match is not None:
            return _error_for(int(match["pids"].split(",")[0]))
        error = error.__cause__ or error.__context__
    return None


def _error_for(pid: int) -> LostWorkerError:
    number, process = _workers.get(pid, (None, None))
    who = f"loader worker (pid {pid})" if number is None else f"loader worker {number} (pid {pid})"
    if process is not None:
        process.join(1.0)
    code = None if process is None else process.exitcode
    if code is None:
        return LostWorkerError(f"{who} ended before its work was done; look above for what it printed")
    if code >= 0:
        return WorkerExitError(
            f"{who} left with exit code {code}, so that samples are missing; take exit calls out of the data set"
        )
    signum = signal.Signals(-code)
    likely = _LIKELY.get(signum, "which a crash in a library below Python does; look above for what it printed")
    return LostWorkerError(f"{who} was ended by {signum.name}, {likely}")


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Hold signals back in this thread while it forks workers: a worker inherits that, until it says what it wants.

    The process itself hears them all the while, in its other threads.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_worker(worker: int) -> None:  # noqa: ARG001  torch passes it
    """Let the main process alone decide when this one ends: signals that ask the job for a save kill no worker."""
    for number in (signal.SIGUSR2, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    # SIGTERM is blocked here and in every thread to come, so that only the one that waits for it gets it.
    signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGTERM})
    parent = os.getppid()
    threading.Thread(target=_end_at_the_parents_word, args=(parent,), daemon=True).start()
    # prctl(2): the kernel kills this process when the thread that forked it ends, however it ends.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        # It ended before that.
        os._exit(0)


def _end_at_the_parents_word(parent: int) -> None:
    """End this process at a SIGTERM that its parent sent: multiprocessing does so at its exit, and then waits."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)
