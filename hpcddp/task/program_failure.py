"""How the program of a ``command`` failed: its failure record, from its exit code and the end of its log."""

from __future__ import annotations

import itertools
import re
import shlex
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from hpcddp.processes import signal_name
from hpcddp.run.failure import KILLED_HINT
from hpcddp.run.files import TAIL_BYTES, read_tail
from hpcddp.run.job_records import FailureRecord
from hpcddp.run.node_faults import says_hardware_error
from hpcddp.stop.reasons import ExitCode
from hpcddp.task.attribution import log_says_peer_loss
from hpcddp.task.process_state import PROCESS_STATE

# What a shell returns for a program that was killed by signal n, plus n (bash(1), EXIT STATUS).
KILLED_IN_A_SHELL: Final = 128
_SENT_FROM_OUTSIDE: Final = frozenset({signal.SIGTERM, signal.SIGKILL, signal.SIGINT})
_TAIL_LINES: Final = 20
# More lines than these after a traceback: the program handled the exception and went on. A crash at exit writes fewer.
_MOST_LINES_AFTER: Final = 100
_TRACEBACK: Final = "Traceback (most recent call last):"
# Between the tracebacks of one chain (traceback.TracebackException.format).
_CHAINS: Final = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
# torch writes the rank at the beginning of each line (torch/distributed/__init__.py, _distributed_excepthook).
_RANK_PREFIX: Final = re.compile(r"^\[rank(\d+)\]: ?", re.ASCII)
# What torchrun says at its end (torch/distributed/elastic/multiprocessing/errors/__init__.py, ChildFailedError).
_CHILD_FAILED: Final = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:"
_ROOT_CAUSE: Final = re.compile(
    r"^Root Cause .*\n\[\d+\]:\n(?:  .*\n)*?  rank +: (?P<rank>\d+) .*\n  exitcode +: (?P<code>-?\d+) ",
    re.ASCII | re.MULTILINE,
)
# The line that the task writes for a signal can come between the lines of a traceback (stop/listener.py).
_SIGNAL_LINE: Final = re.compile(r"^hpcddp: \d\d:\d\d:\d\d SIG", re.ASCII)
_NOTICE_LINE: Final = re.compile(r"^hpcddp: (\d\d:\d\d:\d\d SIG|the time limit is near)", re.ASCII)
# Python writes this before the traceback of an exception that does not end the program.
_IGNORED_EXCEPTION: Final = ("Exception ignored in", "Exception in thread")
# A warning of torch's own log, or a line that is drawn.
_SAYS_NOTHING: Final = re.compile(r"\[[IW]\d{4} |[^\w]+$", re.ASCII)
# Written below the last line of an exception's message by Python, torch, the shell, srun, hpcddp, or a logger.
_NOT_OF_A_MESSAGE: Final = re.compile(
    r"\s*$|hpcddp: |srun: |slurmstepd|wandb: |\[rank\d+\]:|\[?[IWEF]\d{4} |\d{4}-\d\d-\d\d |Exception ignored in"
    r"|Exception in thread|Fatal Python error|terminate called|Aborted|Segmentation fault|Killed|\S+: line \d+: ",
    re.ASCII,
)
_LONGEST_MESSAGE: Final = 300
# Raised because another process has ended, and by torchrun after a signal.
_LAUNCHER_EXCEPTIONS: Final = frozenset({"CalledProcessError", "ProcessExitedException", "SignalException"})
# The exceptions of torch.multiprocessing.spawn and of subprocess for a process that a signal has killed.
_KILLED_CHILD: Final = re.compile(
    r"torch\.multiprocessing\.spawn\.ProcessExitedException: process \d+ terminated with signal (?P<by_spawn>SIG\w+)"
    r"|subprocess\.CalledProcessError: Command .* died with <Signals\.(?P<by_subprocess>SIG\w+): \d+>\.",
    re.ASCII,
)
_LONGEST_NAME: Final = 60
# os.environ raises KeyError.
_MISSING_VARIABLE: Final = re.compile(r"KeyError: '(HPCDDP_\w+)'", re.ASCII)
_OF_THE_BATCH: Final = re.compile("HPCDDP_(GLOBAL_BATCH_SIZE|PER_DEVICE_BATCH_SIZE|GRAD_ACCUM_STEPS|RANK_BATCH_SIZE)")


def program_failure(
    command: Sequence[str],
    code: int,
    log: Path,
    *,
    stop_requested: bool,
    another_rank_failed_first: bool,
    sigterm_forwarded: bool = False,
    master_port: int | None = None,
) -> FailureRecord | None:
    """Return the record of a program that failed; None if it succeeded, requests a requeue, or ended after a request.

    Args:
        command: the program and its arguments.
        code: its exit code; minus the signal that killed it.
        log: the file with its output.
        stop_requested: whether it was requested to stop before it ended.
        another_rank_failed_first: srun then ends the other ranks, which is not a request to stop.
        sigterm_forwarded: whether it got SIGTERM while it ran. If another rank failed first, it ended because of that
            rank, whatever its exit code is.
        master_port: the port that the task of rank 0 has released for its program.
    """
    if code in {ExitCode.FINISHED, ExitCode.STOPPED}:
        return None
    if stop_requested and not another_rank_failed_first:
        return None
    end = read_log_end(log)
    signal_of_child = _signal_of_child(end)
    if signal_of_child is not None:
        code = -signal_of_child
    elif end.code is not None:
        code = end.code
    signal_of_exit = _signal_of(code)

    killed_by = signal_of_exit
    if end.message and signal_of_exit == signal.SIGABRT:
        # After an exception, an object that is left behind can abort, such as a process group with pending work.
        killed_by = None
    if end.message and signal_of_exit == signal.SIGTERM and another_rank_failed_first:
        # The program was exiting when it was ended because another rank had failed.
        killed_by = None

    ended_with_the_others = another_rank_failed_first and sigterm_forwarded and not _failed_before_its_signal(log, end)
    ended_from_outside = stop_requested and signal_of_exit in _SENT_FROM_OUTSIDE
    lost_a_peer = log_says_peer_loss(end.traceback, end.tail)
    is_secondary = ended_with_the_others or ended_from_outside or lost_a_peer

    port_was_taken = master_port is not None and _says_port_taken(end, master_port)
    has_hardware_error = says_hardware_error(end.message or end.tail)
    was_killed = killed_by == signal.SIGKILL and code < 0
    exit_code = ExitCode.USER_CODE
    if is_secondary or port_was_taken or has_hardware_error or was_killed:
        exit_code = ExitCode.INFRASTRUCTURE

    if killed_by is None:
        kind = _exception_type(end) or "exit"
        message = _message_without_signal(command, code, end)
    else:
        kind = "killed"
        message = _message_with_signal(command, code, killed_by, is_child=signal_of_child is not None)
    return PROCESS_STATE.record(
        kind=kind,
        message=message,
        traceback=end.traceback or end.tail,
        exit_code=exit_code,
        secondary=is_secondary,
        who=None if end.rank is None else f"rank {end.rank}",
    )


def _failed_before_its_signal(log: Path, end: LogEnd) -> bool:
    """Return whether the exception that ended a program was in its log before the task passed a signal on to it."""
    if not end.message:
        return False
    lines = read_tail(log, TAIL_BYTES).splitlines()
    for number, line in enumerate(lines):
        if _NOTICE_LINE.match(line):
            return _end_of(lines[:number]).message == end.message
    # The log does not say when the signal was passed on.
    return False


def error_while_stopping(code: int, log: Path) -> str | None:
    """Return the exception that ended a program after it was told to stop; None if something else ended it.

    A program that fails in its save looks like one that has saved, but the work since the save before is lost.
    """
    if code in {ExitCode.FINISHED, ExitCode.STOPPED} or _signal_of(code) is not None:
        return None
    lines = read_tail(log, TAIL_BYTES).splitlines()
    # The task writes a line when it tells the program to stop. An earlier exception did not end the program.
    lines = list(itertools.dropwhile(lambda line: not _NOTICE_LINE.match(line), lines))
    # Nor did one that Python reports at its exit, or in a thread.
    lines = list(itertools.takewhile(lambda line: not line.startswith(_IGNORED_EXCEPTION), lines))
    end = _end_of([line for line in lines if not _SIGNAL_LINE.match(line)])
    kind = _exception_type(end)
    if kind is None or not kind.endswith(("Error", "Exception")):
        return None
    if kind in _LAUNCHER_EXCEPTIONS or log_says_peer_loss(end.traceback, end.tail):
        return None
    return end.message[:_LONGEST_MESSAGE]


def _says_port_taken(end: LogEnd, port: int) -> bool:
    """Return whether another process took the port before the program listened on it, by torch's own message."""
    return "EADDRINUSE" in end.message and re.search(rf"\bport: {port}\b", end.message) is not None


def _signal_of(code: int) -> int | None:
    """Return the signal that an exit code names: minus the signal, or what a shell returns; None if it names none."""
    if code < 0:
        return -code
    number = code - KILLED_IN_A_SHELL
    return number if number in list(signal.Signals) else None


def _signal_of_child(end: LogEnd) -> signal.Signals | None:
    """Return the signal that killed a process of the program, as the exception that ended the program says it."""
    match = _KILLED_CHILD.fullmatch(end.message)
    if match is None:
        return None
    name = match["by_spawn"] or match["by_subprocess"]
    return next((signum for signum in signal.Signals if signum.name == name), None)


def _message_with_signal(command: Sequence[str], code: int, killed_by: int, *, is_child: bool) -> str:
    """Return the sentence for a program that a signal has killed, or whose exit code names a signal.

    Args:
        is_child: whether the signal killed a process that the program has started.
    """
    program = _name_of(command)
    if is_child:
        program = f"a process that {program} started"
    how = KILLED_HINT if killed_by == signal.SIGKILL else f"by {signal_name(killed_by)}"
    if code > 0:
        # The program itself may have returned it.
        return f"{program} ended with exit code {code}, which a shell returns for a program that was killed {how}"
    return f"{program} was killed {how}"


def _message_without_signal(command: Sequence[str], code: int, end: LogEnd) -> str:
    """Return the message of the exception that ended a program, or a sentence with its exit code if there is none."""
    if end.message:
        return _message_of_exception(end)
    sentence = f"{_name_of(command)} ended with exit code {code}"
    if code == ExitCode.STOPPED:
        return (
            f"{sentence}, which its launcher does not pass on; to be run again, create $HPCDDP_REQUEUE_FILE and end "
            "with 0"
        )
    if end.rank is not None:
        # The last line of a launcher is its own.
        return sentence
    for line in reversed(end.tail.splitlines()):
        text = line.strip()
        if text and not _SAYS_NOTHING.match(text):
            return f"{sentence}; its last line: {text}"
    return sentence


def _message_of_exception(end: LogEnd) -> str:
    """Return the message of the exception, without its type, and what to do about it if that is known."""
    message = end.message.partition(": ")[2] or end.message
    missing = _MISSING_VARIABLE.fullmatch(end.message)
    if missing is not None:
        remedy = "see docs/any-script.md"
        if _OF_THE_BATCH.fullmatch(missing[1]):
            remedy = "add --global-batch-size N"
        return f"{message}; this job does not set the variable: {remedy}"
    # submitit/helpers.py: its variables are those of torchrun, which the task has set.
    if message.startswith("Cannot export environment variables as "):
        return f"{message}; write TorchDistributedEnvironment().export(overwrite=True)"
    return "\n".join([message, *end.more])


def _name_of(command: Sequence[str]) -> str:
    """Return a program and its script, module or first argument: ``python -m train``; a long one is cut."""
    words = next((count for count, word in enumerate(command[1:], 2) if not word.startswith("-")), len(command))
    name = " ".join(shlex.join(command[:words]).split())
    return name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]} ..."


def _exception_type(end: LogEnd) -> str | None:
    """Return the type of the exception that ended the program, from a line such as ``torch.OutOfMemoryError: ...``."""
    name = end.message.partition(":")[0]
    return name.rpartition(".")[2] if name.replace(".", "").isidentifier() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEnd:
    """The end of a program's log.

    Args:
        traceback: the last traceback with the exceptions that caused it; empty if there is none.
        message: the exception's type and the first line of its message; empty if there is none.
        more: the other lines of its message.
        tail: the last lines of the log, with or without a traceback.
        rank: the rank that torchrun names as the first to fail; None where no torchrun has ended.
        code: the exit code of that rank.
    """

    traceback: str = ""
    message: str = ""
    more: tuple[str, ...] = ()
    tail: str = ""
    rank: int | None = None
    code: int | None = None


def read_log_end(log: Path) -> LogEnd:
    """Return the end of a log; everything is empty if the log cannot be read.

    The log of a launcher has the output of all ranks of its node. Of these, the one that failed first counts.
    """
    lines = [line for line in read_tail(log, TAIL_BYTES).splitlines() if not _SIGNAL_LINE.match(line)]
    traceback_begins = [number for number, line in enumerate(lines) if line == _TRACEBACK]
    if not traceback_begins:
        return _end_of(lines)
    last_begin = traceback_begins[-1]
    last_traceback = "\n".join(lines[last_begin:])
    if f"\n{_CHILD_FAILED}" not in last_traceback:
        return _end_of(lines)
    root_cause = _ROOT_CAUSE.search(last_traceback)
    if root_cause is None:
        return _end_of(lines)
    return _end_of_ranks(lines[:last_begin], root=int(root_cause["rank"]), code=int(root_cause["code"]))


def _end_of_ranks(lines: Sequence[str], *, root: int, code: int) -> LogEnd:
    """Return the end of the rank that failed first.

    Args:
        lines: the output of the ranks of a launcher.
        root: the rank whose failure the launcher saw first.
        code: the exit code of that rank.
    """
    # Under None: the lines that do not begin with the rank that wrote them.
    lines_by_rank: dict[int | None, list[str]] = {root: [], None: []}
    for line in lines:
        prefix = _RANK_PREFIX.match(line)
        rank = None if prefix is None else int(prefix[1])
        lines_by_rank.setdefault(rank, []).append(line)
    ends = {rank: _end_of(lines_of_rank) for rank, lines_of_rank in lines_by_rank.items()}
    failed_by_themselves = [
        rank for rank, end in ends.items() if end.message and not log_says_peer_loss(end.traceback, "")
    ]
    first: int | None = root
    # A signal leaves no traceback of its own.
    if code >= 0 and failed_by_themselves:
        # Ranks that lost a peer end at nearly the same time: the root may be one of them.
        first = failed_by_themselves[0]
    return replace(ends[first], tail=ends[None].tail, rank=root if first is None else first, code=code)


def _end_of(lines_of_log: Sequence[str]) -> LogEnd:
    """Return the end of a program's output, in which each line may begin with the rank that wrote it."""
    lines = [_RANK_PREFIX.sub("", line) for line in lines_of_log]
    tail = "\n".join(lines[-_TAIL_LINES:])
    traceback_begins = [number for number, line in enumerate(lines) if line == _TRACEBACK]
    if not traceback_begins:
        return LogEnd(tail=tail)
    last_begin = traceback_begins.pop()
    exception = _line_of_exception(lines, last_begin)
    if exception is not None and len(lines) - exception > _MOST_LINES_AFTER:
        return LogEnd(tail=tail)
    first_begin = last_begin
    for begin in reversed(traceback_begins):
        if not any(line in _CHAINS for line in lines[begin:first_begin]):
            break
        first_begin = begin
    if exception is None:
        return LogEnd(traceback="\n".join(lines[first_begin:]), tail=tail)
    more = _more_of_message(lines_of_log[exception:])
    traceback = "\n".join([*lines[first_begin : exception + 1], *more])
    return LogEnd(traceback=traceback, message=lines[exception], more=tuple(more), tail=tail)


def _line_of_exception(lines: Sequence[str], begin: int) -> int | None:
    """Return the number of the line with the exception of the traceback that begins there; None if the log ends before.

    The frames are indented; the exception is not.
    """
    for number in range(begin + 1, len(lines)):
        is_indented_or_empty = not lines[number][:1].strip()
        if not is_indented_or_empty:
            return number
    return None


def _more_of_message(lines: Sequence[str]) -> list[str]:
    """Return the lines that continue the message of an exception.

    Args:
        lines: the log from the exception's own line on.
    """
    prefix = _RANK_PREFIX.match(lines[0])
    if prefix is not None:
        # Torch writes its prefix before each line of a message that is not empty.
        of_message = itertools.takewhile(lambda line: not line or line.startswith(prefix[0]), lines[1:])
        return "\n".join(_RANK_PREFIX.sub("", line) for line in of_message).rstrip().splitlines()
    return list(itertools.takewhile(lambda line: not _NOT_OF_A_MESSAGE.match(line), lines[1:]))
