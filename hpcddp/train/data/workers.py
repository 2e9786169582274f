"""Signals of loader processes, and errors for those that have ended unexpectedly."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import threading
from collections.abc import Mapping
from multiprocessing.process import BaseProcess, parent_process
from typing import ClassVar, Final

from hpcddp.processes import find, signal_name
from hpcddp.stop.reasons import ExitCode
from hpcddp.train.errors import TrainingError

# linux/prctl.h
_PR_SET_PDEATHSIG: Final = 1

# torch/csrc/DataLoader.cpp, and torch/utils/data/dataloader.py.
_WORKER_LOST: Final = re.compile(r"DataLoader worker \(pid(?:\(s\))? (?P<pids>[\d, ]+)\)")
_LIKELY_CAUSES: Final[Mapping[int, str]] = {
    signal.SIGKILL: "most likely because the memory of the job or its node ran out; ask for more with resources.mem, "
    "or set a smaller train.num_workers",
    **dict.fromkeys(
        (signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL),
        "which a crash in native code causes; look above for what it printed",
    ),
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


def register_workers(iterator: object) -> None:
    """Register the loader processes of a ``DataLoader``'s iterator, for the error if one of them ends."""
    # torch has no public name for them; without them the error names only the process id.
    processes = getattr(iterator, "_workers", [])
    for pid in [pid for pid, (_, process) in _workers.items() if not process.is_alive()]:
        del _workers[pid]
    _workers.update({process.pid: (number, process) for number, process in enumerate(processes)})


def lost_worker(error: BaseException | None) -> LostWorkerError | None:
    """Return the error for a lost loader process if ``error`` or one of its causes reports one, else None.

    After an error, further lost processes raise none.
    """
    while error is not None:
        if isinstance(error, RuntimeError):
            match = _WORKER_LOST.search(str(error))
            if match is not None:
                _ignore_further_losses()
                first_pid = match["pids"].split(",")[0]
                return _error_for(int(first_pid))
        error = error.__cause__ or error.__context__
    return None


def _ignore_further_losses() -> None:
    """Keep torch from raising an error for another process that ends: at any place, and in place of the first one."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _error_for(pid: int) -> LostWorkerError:
    number, process = _workers.get(pid, (None, None))
    who = f"loader worker (pid {pid})"
    if number is not None:
        who = f"loader worker {number} (pid {pid})"
    code = None
    if process is not None:
        process.join(1.0)
        code = process.exitcode
    if code is None:
        return LostWorkerError(f"{who} ended before its work was done; look above for what it printed")
    if code >= 0:
        return WorkerExitError(
            f"{who} ended with exit code {code}, so that samples are missing; take exit calls out of the data set"
        )
    signum = -code
    likely = _LIKELY_CAUSES.get(signum, "which another process has sent; look above for what it printed")
    return LostWorkerError(f"{who} was ended by {signal_name(signum)}, {likely}")


def start_worker(_worker: int) -> None:
    """Make a loader process ignore the signals that request a save; it ends only with its parent."""
    for number in (signal.SIGUSR2, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    # SIGTERM is blocked in this and all later threads, so that only the thread that waits for it receives it.
    signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGTERM})
    # Known from before the fork: the parent may have ended since then.
    parent = getattr(parent_process(), "pid", os.getppid())
    threading.Thread(target=_exit_on_sigterm_of, args=(parent,), daemon=True).start()
    # prctl(2): the kernel kills this process when the thread that forked it ends, however it ends.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if find(parent) is None:
        # The parent ended before prctl was called.
        os._exit(0)


def _exit_on_sigterm_of(parent: int) -> None:
    """Exit on a SIGTERM from the parent: multiprocessing sends one at exit, and then waits."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)
