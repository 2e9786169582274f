"""One rank of a ``command``: it starts the program, passes signals on to it, and writes down how it ended."""

from __future__ import annotations

import ctypes
import errno
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final, NoReturn

from hpcddp.errors import UserError
from hpcddp.launch.attribution import leave_record
from hpcddp.launch.lifeline import LIFELINE
from hpcddp.launch.program_failure import failure_of_program
from hpcddp.launch.siblings import fail
from hpcddp.run.directory import AttemptDirectory
from hpcddp.run.events import append_event
from hpcddp.run.failure import FailureRecord, read_failures
from hpcddp.run.files import read_json
from hpcddp.run.programs import ProgramExit, Told, write_exit
from hpcddp.slurm.rank_env import RankEnv
from hpcddp.spec.job import JobSpec
from hpcddp.stop.exit_codes import ExitCode
from hpcddp.stop.signals import LISTENER, Seen

# linux/prctl.h
_PR_SET_PDEATHSIG: Final = 1
_ENDING: Final = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)
_ONLY_PASSED_ON: Final = (signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)
_PASSED_ON: Final = frozenset({*_ENDING, *_ONLY_PASSED_ON, signal.SIGKILL})
_TELLING: Final[Mapping[int, Told]] = MappingProxyType({signal.SIGTERM: "terminated", signal.SIGUSR2: "warned"})
_POLL_S: Final = 0.5
# As subprocess has it, and as a shell does (bash(1), EXIT STATUS).
_ENDED_BY_TERM: Final = frozenset({-signal.SIGTERM, 128 + signal.SIGTERM})
_HEARD_WITHIN_S: Final = 1.0
_HEARD_AT_ONCE_S: Final = 0.25
_HEARING_POLL_S: Final = 0.02
# A program that does not listen to the warning is told by SIGTERM: a part of the lead before the end, and so much at
# most. What is left then is for the requeue.
_LONGEST_NOTICE_S: Final = 60.0
_SHORTEST_NOTICE_S: Final = 5.0
_PART_OF_THE_LIMIT: Final = 0.1
_FOR_THE_REQUEUE_S: Final = 8.0


class CommandError(UserError):
    """The program of a command cannot be started."""

    kind = "command"


def run_program(
    spec: JobSpec, env: RankEnv, attempt: AttemptDirectory, *, variables: Mapping[str, str], end_time: float | None
) -> None:
    """Run the job's command as this rank; returns when it has ended well or as it was told to, else ends the task.

    Args:
        spec: the job.
        env: who this rank is.
        attempt: its attempt.
        variables: what the program finds in its environment beside this process's own.
        end_time: when the job's time is over, in seconds since the epoch; None without a limit.
    """
    command = spec.command or ()
    # Does not return in a process that is leaving already.
    LIFELINE.train()
    if env.rank == 0:
        reason = shlex.join(command[:2])
        append_event(attempt.run.events, kind="train", time=time.time(), attempt=attempt.number, reason=reason)
    try:
        program = Program(command, {**os.environ, **variables}, notice=_notice(spec, attempt, end_time))
    except CommandError as error:
        record = LIFELINE.record(kind=error.kind, message=error.message, traceback="", exit_code=ExitCode.USER_CODE)
        _fail(record, attempt)
    code = program.wait()
    told = program.told
    exit_ = ProgramExit(rank=env.rank, host=LIFELINE.host, time=time.time(), code=code, told=told)
    # Who only lost a peer may have said so before the one that this peer was: only an error of its own comes first.
    others = any(known.rank != env.rank and not known.secondary for known in read_failures(attempt))
    log, answers = attempt.rank_log(env.rank), program.answers and others
    failure = failure_of_program(command, code, log, told=told is not None, answers=answers, others=others)
    if failure is None or attempt.requeue_file.exists():
        write_exit(attempt, exit_)
        return
    write_exit(attempt, exit_)
    _fail(failure, attempt)


def _fail(failure: FailureRecord, attempt: AttemptDirectory) -> NoReturn:
    """Leave the record of a failure, say it, and end."""
    leave_record(attempt, failure)
    sys.stderr.write(f"hpcddp: {failure.place} failed: {failure.message}\n")
    fail(failure.exit_code, attempt)


class _Notice:
    """When a program is told that its time is over.

    Args:
        end_time: when the job's time is over, in seconds since the epoch; None without a limit.
        notice_s: how long before that it is told, in seconds.
    """

    def __init__(self, end_time: float | None, notice_s: float) -> None:
        self._end_time, self._notice_s = end_time, notice_s

    def is_due(self, now: float) -> bool:
        return self._end_time is not None and now >= self._end_time - self._notice_s

    def is_over(self, now: float) -> bool:
        return self._end_time is not None and now >= self._end_time - min(_FOR_THE_REQUEUE_S, self._notice_s / 2)


def _notice(spec: JobSpec, attempt: AttemptDirectory, end_time: float | None) -> _Notice:
    lead = spec.signal_lead
    if lead is not None:
        notice_s = lead.total_seconds() / 2
    else:
        start = float((read_json(attempt.start) or {}).get("time", 0.0))
        notice_s = 0.0 if end_time is None else (end_time - start) * _PART_OF_THE_LIMIT
    return _Notice(end_time, min(_LONGEST_NOTICE_S, max(_SHORTEST_NOTICE_S, notice_s)))


class Program:
    """A running program.

    Args:
        command: its words.
        environment: all of its environment.
        notice: when it is told that its time is over.

    Attributes:
        told: why it was told to end; None as long as it was not.
        answers: whether it ended after SIGTERM had come, and not a moment before.

    Raises:
        CommandError: there is no such program.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], *, notice: _Notice) -> None:
        self.told: Told | None = None
        self.answers = False
        self._notice = notice
        self._listened: frozenset[int] = frozenset()
        self._process = _start(command, environment)
        LISTENER.pass_on(self._send, more=_ONLY_PASSED_ON)
        # What came before there was a program; twice does no harm, Slurm does so too.
        for signum in _ENDING:
            if LISTENER.first(signum) is not None:
                self._send(signum)

    def wait(self) -> int:
        """Wait for its end; return its exit code, or minus the signal that killed it."""
        while True:
            try:
                code = self._process.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                self._listened |= _caught_by(self._process.pid)
                self._look_at_the_clock()
            else:
                self._look_for_a_shared_end(code)
                return code

    def _look_for_a_shared_end(self, code: int) -> None:
        """Notice that Slurm has told the program itself: it may signal a whole tree of processes at once.

        With proctrack/linuxproc it does; a program that dies of it, or whose handler ends it at once, then ends before
        this process has heard anything. What a handler leaves as exit code may be any, 0 too.
        """
        ended = time.monotonic()
        possible = self._listened & set(_TELLING) | ({signal.SIGTERM} if code in _ENDED_BY_TERM else set())
        # An error of the program's own is not to be taken for an answer to what its end has led to.
        within_s = _HEARD_WITHIN_S if code in _ENDED_BY_TERM or code == 0 else _HEARD_AT_ONCE_S
        while possible and self.told is None and time.monotonic() < ended + within_s:
            self.told = next((_TELLING[seen.signum] for seen in _seen_since(ended - _HEARD_WITHIN_S, possible)), None)
            time.sleep(_HEARING_POLL_S)

    def _look_at_the_clock(self) -> None:
        now = time.time()
        if self._notice.is_over(now):
            self._say("the time limit is here, and the program still runs: SIGKILL")
            self._send(signal.SIGKILL)
        elif self.told is None and self._notice.is_due(now):
            self._say("the time limit is near, and the program does not listen to SIGUSR2: SIGTERM")
            self.told = "deadline"
            self._send(signal.SIGTERM)

    def _send(self, signum: signal.Signals) -> None:
        process = self._process
        if process.poll() is not None or signum not in _PASSED_ON:
            # What ended by itself before was not told.
            return
        listens = signum in _caught_by(process.pid)
        if signum == signal.SIGTERM:
            self.told, self.answers = self.told or "terminated", True
        elif signum == signal.SIGUSR2 and (listens or signum in self._listened):
            self.told = self.told or "warned"
        if listens or signum not in self._listened:
            process.send_signal(signum)
        # Else Slurm has told it as well, and it is on its way out: Python has given its handlers back, and would die.

    @staticmethod
    def _say(text: str) -> None:
        os.write(2, f"hpcddp: {text}\n".encode())


def _start(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    libc, parent = ctypes.CDLL(None), os.getpid()

    def prepare() -> None:
        # The warning must not kill a program that has no handler for it, or not yet; exec keeps what is ignored.
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        # The kernel ends the program when this process ends, however it ends (prctl(2)).
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(ExitCode.INFRASTRUCTURE)

    shown = shlex.join(command)
    try:
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, preexec_fn=prepare)  # noqa: PLW1509
    except FileNotFoundError:
        raise CommandError(
            f"command is {shown}, and {LIFELINE.host} has no program {command[0]!r} (searched in PATH, and in "
            f"{Path.cwd()} for a path); write a program that is there"
        ) from None
    except OSError as error:
        repair = "begin it with a line like #!/bin/bash" if error.errno == errno.ENOEXEC else "correct it"
        raise CommandError(f"command is {shown}, which cannot be started: {error.strerror}; {repair}") from None


def _seen_since(moment: float, signals: Iterable[int]) -> Iterator[Seen]:
    """Yield the signals that have come since a moment, of those that are asked for; SIGTERM, which says more, first."""
    heard = (LISTENER.first(signal.Signals(signum)) for signum in _TELLING if signum in signals)
    return (seen for seen in heard if seen is not None and seen.monotonic >= moment)


def _caught_by(pid: int) -> frozenset[int]:
    """Return the signals that a process has handlers for (proc(5), SigCgt)."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return frozenset()
    mask = int(next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0"), 16)
    return frozenset(signum for signum in _PASSED_ON if mask >> (signum - 1) & 1)
