"""The failure record of a rank, whether its error is only the loss of another rank, and its text in the log."""

from __future__ import annotations

import dis
import traceback
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

from hpcddp.errors import HpcddpError
from hpcddp.run.directory import AttemptDirectory
from hpcddp.run.failure import write_failure
from hpcddp.run.files import is_full
from hpcddp.run.job_records import FailureRecord
from hpcddp.run.node_faults import says_hardware_error
from hpcddp.stop.listener import write_to_stderr
from hpcddp.stop.reasons import ExitCode
from hpcddp.task.process_state import PROCESS_STATE, ProcessState
from hpcddp.task.rendezvous import PeerFailedError

# Messages of gloo, NCCL and the store. All of them raise RuntimeError or a subclass (torch/csrc/Exceptions.h).
PEER_LOSS: Final = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "connection was closed",
    "connection was likely closed",
    "broken pipe",
    "remote process exit",
    "socket closed",
    "socket timeout",
    "timed out waiting",
    "communicator was aborted",
)

# Raises some of these errors in Python.
_DISTRIBUTED: Final = "/torch/distributed/"
# How a traceback names them: ``RuntimeError: ...``, ``torch.distributed.DistBackendError: ...``.
_RAISED_BY_TORCH: Final = ("RuntimeError: ", "torch.distributed.")
# torch puts this before the error of a callback, and Python's frames after it.
_IN_CALLBACK: Final = "Got the following error when running the callback: RuntimeError: "

_ADVICE: Final[Mapping[int, str]] = MappingProxyType(
    {
        ExitCode.USER_CODE: "an error of the job's own code or data would occur again, so the job is not requeued",
        ExitCode.INFRASTRUCTURE: "requeue.max_failures says how often a run goes on after such a failure",
        ExitCode.HANG: "requeue.max_failures says how often a run goes on after such a failure",
    }
)


def is_peer_loss(error: BaseException) -> bool:
    """Return whether ``error`` only means that the connection to another rank was lost."""
    if isinstance(error, HpcddpError) and not isinstance(error, PeerFailedError):
        # The error has its own cause: for example, a data set cannot reach its server.
        return False
    return any(isinstance(link, PeerFailedError) or _says_peer_loss(link) for link in _chain(error))


def _says_peer_loss(error: BaseException) -> bool:
    # An OSError comes from a socket that Python itself opened, and only the user's code opens those.
    return isinstance(error, RuntimeError) and says_peer_loss(str(error)) and not _is_raised_by_other_code(error)


def _is_raised_by_other_code(error: BaseException) -> bool:
    """Return whether Python code outside torch.distributed has raised an error; a collective raises it below Python."""
    link = error.__traceback__
    if link is None:
        return False
    while link.tb_next is not None:
        link = link.tb_next
    code = link.tb_frame.f_code
    raises = dis.opname[code.co_code[link.tb_lasti]] == "RAISE_VARARGS"
    return raises and _DISTRIBUTED not in code.co_filename


def says_peer_loss(text: str) -> bool:
    """Return whether a text has a message of gloo, NCCL or the store about a lost connection."""
    return any(phrase in text.lower() for phrase in PEER_LOSS)


def log_says_peer_loss(traceback_text: str, tail: str) -> bool:
    """Return whether the end of a program's log shows that it has lost another rank.

    Args:
        traceback_text: its last traceback; empty without one.
        tail: its last lines, which count without a traceback.
    """
    if not traceback_text:
        return says_peer_loss(tail)
    return any(says_peer_loss(line) for line in traceback_text.splitlines() if line.startswith(_RAISED_BY_TORCH))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def failure_record(
    error: BaseException, *, exit_code: int | None = None, process_state: ProcessState = PROCESS_STATE
) -> FailureRecord:
    """Return the failure record of an exception that ends this process.

    Args:
        exit_code: the exit code of the process; None = that of the exception.
    """
    text = "".join(traceback.format_exception(error))
    secondary = is_peer_loss(error)
    if secondary:
        still_s = process_state.heartbeat.stood_still_s()
        if still_s:
            return standstill_record(still_s, text, process_state)
    if exit_code is None:
        exit_code = _exit_code_of(error, lost_a_peer=secondary)
    return process_state.record(
        kind=getattr(error, "kind", None) or type(error).__name__,
        message=_message(error),
        traceback=text,
        exit_code=exit_code,
        secondary=secondary,
    )


def _message(error: BaseException) -> str:
    if isinstance(error, HpcddpError):
        return error.message
    text = str(error)
    if text.startswith(_IN_CALLBACK):
        text = text.removeprefix(_IN_CALLBACK).partition("\n\nAt:\n")[0]
    return text or type(error).__name__


def _exit_code_of(error: BaseException, *, lost_a_peer: bool) -> int:
    """Return the exit code that an exception declares; without one it depends on whether it came from outside."""
    is_disk_full = isinstance(error, OSError) and is_full(error)
    came_from_outside = lost_a_peer or is_disk_full or says_hardware_error(str(error))
    default = ExitCode.INFRASTRUCTURE if came_from_outside else ExitCode.USER_CODE
    declared: int = getattr(error, "exit_code", default)
    # The exit codes 1 and 2 of the command line have no meaning for a requeue decision.
    return declared if declared in tuple(ExitCode) else ExitCode.USER_CODE


def standstill_record(seconds: float, text: str, process_state: ProcessState = PROCESS_STATE) -> FailureRecord:
    """Return the failure record of a rank whose process did not run: it is the first cause, though it fails last.

    Args:
        seconds: how long the process did not run.
        text: the traceback of the error that it met then.
    """
    return process_state.record(
        kind="stood_still",
        message=f"the process did not run for {seconds:.0f} s, and the other ranks ended meanwhile; it was stopped, or "
        "its host was",
        traceback=text,
        exit_code=ExitCode.HANG,
    )


def peer_failure_record(first: FailureRecord, process_state: ProcessState = PROCESS_STATE) -> FailureRecord:
    """Return the failure record of a rank that ends because the rank of ``first`` failed."""
    still_s = process_state.heartbeat.stood_still_s()
    if still_s:
        return standstill_record(still_s, "", process_state)
    return process_state.record(
        kind=PeerFailedError.kind,
        message=f"{first.place} failed, and this rank was told to end: {first.label}{first.headline}",
        traceback="",
        exit_code=ExitCode.INFRASTRUCTURE,
        secondary=True,
    )


def save_failure(attempt: AttemptDirectory, record: FailureRecord) -> None:
    """Write the failure record of this rank; if that is impossible, print why."""
    try:
        write_failure(attempt, record)
    except OSError as error:
        write_to_stderr(f"hpcddp: {attempt.rank_error(record.rank)} cannot be written ({error})\n")


def failure_text(record: FailureRecord) -> str:
    """Return the last lines of a failed rank's log: the traceback, the rank, the error, and what follows from it."""
    lines = [record.traceback.rstrip(), f"hpcddp: {record.place} failed{record.when}: {record.label}{record.message}"]
    if record.secondary:
        lines.append(
            "hpcddp: this rank failed as a consequence; the end of the batch log names the one that failed first"
        )
    elif record.exit_code in _ADVICE:
        lines.append(f"hpcddp: {_ADVICE[record.exit_code]}")
    return "\n".join([line for line in lines if line]) + "\n"
