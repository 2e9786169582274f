"""Who failed, and who only followed: from an exception to the record and to the words in a rank's log."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

from hpcddp.errors import HpcddpError
from hpcddp.launch.lifeline import LIFELINE, Lifeline
from hpcddp.launch.rendezvous import PeerFailedError
from hpcddp.run.directory import AttemptDirectory
from hpcddp.run.failure import FailureRecord, write_failure
from hpcddp.stop.exit_codes import ExitCode

# As gloo, NCCL and the store say it. All of them raise RuntimeError or a subclass (torch/csrc/Exceptions.h).
PEER_LOSS: Final = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "connection was closed",
    "broken pipe",
    "remote process exit",
    "socket closed",
    "socket timeout",
    "timed out waiting",
    "communicator was aborted",
)

_ADVICE: Final[Mapping[int, str]] = MappingProxyType(
    {
        ExitCode.USER_CODE: "an error of the job's own code or data would come again, so the job is not requeued",
        ExitCode.INFRASTRUCTURE: "requeue.max_failures says how often a job is requeued after such a failure",
        ExitCode.HANG: "requeue.max_failures says how often a job is requeued after such a failure",
    }
)


def is_peer_loss(error: BaseException) -> bool:
    """Return whether ``error`` only says that another rank has gone."""
    if isinstance(error, HpcddpError) and not isinstance(error, PeerFailedError):
        # It names a cause of its own: a data set that cannot reach its server is no rank that has gone.
        return False
    return any(isinstance(link, PeerFailedError) or _says_peer_loss(link) for link in _chain(error))


def _says_peer_loss(error: BaseException) -> bool:
    # An OSError is one of Python's own sockets, and those are the user's.
    return isinstance(error, RuntimeError) and says_peer_loss(str(error))


def says_peer_loss(text: str) -> bool:
    """Return whether a text says what gloo, NCCL or the store say when another rank has gone."""
    return any(phrase in text.lower() for phrase in PEER_LOSS)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def failure_of(error: BaseException, *, exit_code: int | None = None, lifeline: Lifeline = LIFELINE) -> FailureRecord:
    """Return the record of an exception that ends this process.

    Args:
        error: the exception.
        exit_code: what the process exits with; None = as the exception says.
        lifeline: what is known of this process.
    """
    text = "".join(traceback.format_exception(error))
    secondary = is_peer_loss(error)
    if secondary and (still_s := lifeline.heartbeat.stood_still_s()):
        return stood_still(still_s, text, lifeline)
    if exit_code is None:
        declared = getattr(error, "exit_code", ExitCode.INFRASTRUCTURE if secondary else ExitCode.USER_CODE)
        # The command line's codes 1 and 2 mean nothing to a requeue decision.
        exit_code = declared if declared in tuple(ExitCode) else ExitCode.USER_CODE
    return lifeline.record(
        kind=getattr(error, "kind", None) or type(error).__name__,
        message=error.message if isinstance(error, HpcddpError) else str(error) or type(error).__name__,
        traceback=text,
        exit_code=exit_code,
        secondary=secondary,
    )


def stood_still(seconds: float, text: str, lifeline: Lifeline = LIFELINE) -> FailureRecord:
    """Return the record of a rank that the others gave up: it is the first cause, though it noticed last.

    Args:
        seconds: for how long its process did not run.
        text: what it noticed then.
        lifeline: what is known of this process.
    """
    return lifeline.record(
        kind="stood_still",
        message=f"the process stood still for {seconds:.0f} s, and the other ranks gave it up; it was stopped, or its "
        "host was",
        traceback=text,
        exit_code=ExitCode.HANG,
    )


def follower(first: FailureRecord, lifeline: Lifeline = LIFELINE) -> FailureRecord:
    """Return the record of a rank that ends because ``first`` has failed."""
    if still_s := lifeline.heartbeat.stood_still_s():
        return stood_still(still_s, "", lifeline)
    return lifeline.record(
        kind=PeerFailedError.kind,
        message=f"{first.place} failed, and this rank was told to end: {first.kind}: {first.headline}",
        traceback="",
        exit_code=ExitCode.INFRASTRUCTURE,
        secondary=True,
    )


def leave_record(attempt: AttemptDirectory, record: FailureRecord) -> None:
    """Write the record of this rank, as far as the disk lets it; the exit code tells the rest."""
    try:
        write_failure(attempt, record)
    except OSError as error:
        os.write(2, f"hpcddp: {attempt.rank_error(record.rank)} cannot be written ({error})\n".encode())


def last_words(record: FailureRecord) -> str:
    """Return what a failed rank says at the end of its log: who it is, what happened, and what that means."""
    lines = [record.traceback.rstrip(), f"hpcddp: {record.place} failed{record.when}: {record.kind}: {record.message}"]
    if record.secondary:
        lines.append("hpcddp: this rank only followed; the end of the batch log names the one that failed first")
    elif record.exit_code in _ADVICE:
        lines.append(f"hpcddp: {_ADVICE[record.exit_code]}")
    return "\n".join([line for line in lines if line]) + "\n"
