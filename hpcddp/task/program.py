"""One rank of a ``command``: start the program, pass signals on to it, and record how it ended."""

from __future__ import annotations

import ctypes
import errno
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Final, Literal, NoReturn

from hpcddp.batch.job import batch_variables, plan_job
from hpcddp.errors import HpcddpError, UserError
from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.sections import CommandSignal
from hpcddp.processes import children_of, handled_signals, wait_until
from hpcddp.run.directory import AttemptDirectory
from hpcddp.run.events import append_event
from hpcddp.run.failure import read_failures
from hpcddp.run.files import full_disk_sentence, is_full
from hpcddp.run.job_records import (
    AskedEnd,
    FailureRecord,
    ProgramExit,
    StopNotice,
    reserve_exit,
    write_exit,
)
from hpcddp.run.metrics_log import METRICS_FILE
from hpcddp.run.ownership import FencedError, raise_if_fenced
from hpcddp.run.record import RecordError, read_record, write_record
from hpcddp.slurm.job import ask_end, slurm_job_id
from hpcddp.slurm.rank_env import RankEnv
from hpcddp.stop.deadline import ASK_EVERY_S, Deadline, EndTime, KnownEnd, moved_sentence
from hpcddp.stop.listener import LISTENER, write_to_stderr
from hpcddp.stop.reasons import Cause, ExitCode
from hpcddp.task.attribution import save_failure
from hpcddp.task.local_peers import exit_after_failure
from hpcddp.task.process_state import PROCESS_STATE
from hpcddp.task.program_failure import KILLED_IN_A_SHELL, error_while_stopping, program_failure
from hpcddp.task.watchdog import trace_variables
from hpcddp.task.world_check import SeparateWorldsError, WorldMonitor

# linux/prctl.h
_PR_SET_PDEATHSIG: Final = 1
_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)
_OTHER_SIGNALS: Final = (signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)
_SAVE_SIGNALS: Final = frozenset({signal.SIGUSR1, signal.SIGUSR2})
_FORWARDED: Final = frozenset({*_STOP_SIGNALS, *_OTHER_SIGNALS, signal.SIGKILL})
_NOTICE_BY_SIGNAL: Final[Mapping[int, StopNotice]] = MappingProxyType(
    {signal.SIGTERM: "terminated", signal.SIGUSR2: "warned"}
)
_POLL_S: Final = 0.5
# A program may end at a signal soon after it has installed the handler, which has to be seen before.
_HANDLERS_POLL_S: Final = 0.1
# From subprocess, and from a shell.
_ENDED_BY_TERM: Final = frozenset({-signal.SIGTERM, KILLED_IN_A_SHELL + signal.SIGTERM})
_SIGNAL_TIMEOUT_S: Final = 1.0
_SIGNAL_TIMEOUT_AFTER_ERROR_S: Final = 0.25
_SIGNAL_POLL_S: Final = 0.02
_HALT_EVERY_S: Final = 0.005
# A program that ends later than that after SIGUSR1 has done something else at the signal, such as print its state.
_LONGEST_SAVE_S: Final = 60.0
# A program that handles no signal is ended by SIGTERM half of the signal lead before the end of the job, within these
# limits. The last seconds are for the requeue.
_LONGEST_NOTICE_S: Final = 60.0
_SHORTEST_NOTICE_S: Final = 5.0
_NOTICE_FRACTION: Final = 0.1
_REQUEUE_S: Final = 8.0
# How often the other ranks read what Slurm has answered to rank 0.
_READ_END_EVERY_S: Final = 30.0
# torchrun gives its workers 30 s after SIGTERM (torch/distributed/elastic/multiprocessing/api.py).
_LAUNCHER_END_TIMEOUT_S: Final = 35.0
_LOOK_FOR_NEWER_ATTEMPT_EVERY_S: Final = 30.0
# As long as the start of an attempt waits for space on a full disk.
_SPACE_PATIENCE_S: Final = 600.0
_SPACE_POLL_S: Final = 5.0


ProgramEnding = Literal["finished", "failed", "stopped", "cancelled"]


class CommandError(UserError):
    """The program of a command cannot be started."""

    kind = "command"


class NoSpaceError(HpcddpError):
    """The program of a command is not started, because the disk of the run is full."""

    kind = "disk_full"
    exit_code: ClassVar[int] = ExitCode.INFRASTRUCTURE


def run_program(
    spec: JobSpec,
    env: RankEnv,
    attempt: AttemptDirectory,
    *,
    command: Sequence[str],
    environment: Mapping[str, str],
    port: int,
    deadline: Deadline,
    on_end: Callable[[ProgramEnding], None] = lambda _: None,
) -> None:
    """Run the job's command as this task.

    Return when the program succeeded, ended after a stop request, or failed and left the requeue file; otherwise end
    the task.

    Args:
        command: the job's command, with the options of its launcher.
        environment: the whole environment of the program.
        port: MASTER_PORT of the run.
        deadline: the end of the job as the attempt began.
        on_end: called with the ending of the program when it is recorded.
    """
    written = spec.command or ()
    _wait_for_space(attempt, env.rank)
    # Does not return in a process that is about to exit.
    PROCESS_STATE.start_training()
    if env.rank == 0:
        reason = shlex.join(written[:2])
        with suppress(OSError):
            append_event(attempt.run.events, kind="train", time=time.time(), attempt=attempt.number, reason=reason)
    monitor = WorldMonitor(written, env, attempt, port=port)
    fence = _Fence(attempt)

    def look(pid: int) -> None:
        fence.check()
        monitor.look(pid)

    end = _end_time(env, attempt, environment, deadline)
    try:
        program = _start_program(
            spec, env, command, environment, end=end, notice_s=_notice_s(spec, deadline), on_poll=look
        )
        code = program.wait()
        if code == ExitCode.FINISHED:
            monitor.check()
            monitor.note_separate_ranks()
    except (CommandError, SeparateWorldsError) as error:
        record = PROCESS_STATE.record(
            kind=error.kind, message=error.message, traceback="", exit_code=ExitCode.USER_CODE
        )
        _exit_with_failure(record, attempt, on_end)

    # A rank that lost this one as its peer may have written its record first: only a first cause counts.
    earlier_failures = [other for other in read_failures(attempt) if other.rank != env.rank and not other.secondary]
    another_rank_failed_first = bool(earlier_failures)
    program_exit = _program_exit(spec, env, attempt, program, code, another_rank_failed_first=another_rank_failed_first)
    failure = program_failure(
        written,
        code,
        attempt.rank_log(env.rank),
        stop_requested=program.notice is not None,
        another_rank_failed_first=another_rank_failed_first,
        sigterm_forwarded=program.sigterm_forwarded,
        master_port=port,
    )
    earlier_messages = {other.message for other in earlier_failures}
    if failure is not None and failure.traceback and failure.message in earlier_messages:
        # The same mistake on several ranks; SIGTERM came because one of them was the first.
        failure = replace(failure, secondary=False, exit_code=earlier_failures[0].exit_code)
    try:
        write_exit(attempt, program_exit)
    except OSError as error:
        write_to_stderr(f"hpcddp: {attempt.rank_exit(env.rank)} cannot be written ({error})\n")

    asks_to_run_again = attempt.requeue_file.exists()
    if failure is not None and not asks_to_run_again:
        _exit_with_failure(failure, attempt, on_end)
    ending = _ending(
        program_exit, another_rank_failed_first=another_rank_failed_first, asks_to_run_again=asks_to_run_again
    )
    on_end(ending)


def _program_exit(
    spec: JobSpec,
    env: RankEnv,
    attempt: AttemptDirectory,
    program: Program,
    code: int,
    *,
    another_rank_failed_first: bool,
) -> ProgramExit:
    """Return the record of a program that has ended; rank 0 asks for it why the job ends."""
    ended_at = time.time()
    cause = None
    if env.rank == 0 and program.notice is not None:
        cause = PROCESS_STATE.cause()
    error = None
    if not another_rank_failed_first and not spec.launcher_command:
        error = error_while_stopping(code, attempt.rank_log(env.rank))
    return ProgramExit(
        rank=env.rank,
        host=PROCESS_STATE.host,
        time=ended_at,
        code=code,
        notice=program.notice,
        cause=cause,
        error=error,
    )


def _ending(program_exit: ProgramExit, *, another_rank_failed_first: bool, asks_to_run_again: bool) -> ProgramEnding:
    """Return how a program ended that has no failure, or asks to run again after one."""
    if another_rank_failed_first:
        return "failed"
    if program_exit.cause == Cause.CANCELLED:
        return "cancelled"
    if asks_to_run_again or program_exit.notice is not None or program_exit.code == ExitCode.STOPPED:
        return "stopped"
    return "finished"


def _start_program(
    spec: JobSpec,
    env: RankEnv,
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    end: EndTime,
    notice_s: float,
    on_poll: Callable[[int], object],
) -> Program:
    """Start the program of a rank; its job file says how it is told to stop. The rest are arguments of ``Program``."""
    lead_s = None
    if spec.signal_lead is not None:
        lead_s = spec.signal_lead.total_seconds()
    ask_cause = None
    if env.rank == 0 and not spec.launcher_command:
        ask_cause = PROCESS_STATE.cause
    return Program(
        command,
        environment,
        end=end,
        notice_s=notice_s,
        lead_s=lead_s,
        save_signal=spec.requeue.command_signal,
        is_launcher=spec.launcher_command is not None or passes_signals_on(command),
        ask_cause=ask_cause,
        on_poll=on_poll,
    )


def passes_signals_on(command: Sequence[str]) -> bool:
    """Return whether a command starts a container, whose starter handles every signal, and passes it on."""
    pattern = r"(?:.*\bexec |env -C \S+ )?(?:\S*/)?(?:apptainer|singularity) (?:run|exec) "
    return re.match(pattern, " ".join(command), re.DOTALL) is not None


class _Fence:
    """Looks now and then whether a newer attempt of the run has begun, on other nodes, while this one still runs.

    Args:
        attempt: the attempt of this task.
    """

    def __init__(self, attempt: AttemptDirectory) -> None:
        self._attempt = attempt
        self._look_at = time.monotonic() + _LOOK_FOR_NEWER_ATTEMPT_EVERY_S

    def check(self) -> None:
        """Look, if it is time.

        Raises:
            FencedError: a newer attempt has begun.
        """
        if time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + _LOOK_FOR_NEWER_ATTEMPT_EVERY_S
        # The directory may be away for a while.
        with suppress(OSError):
            raise_if_fenced(self._attempt.run, self._attempt.number)


def _wait_for_space(attempt: AttemptDirectory, rank: int) -> None:
    """Make the reserve file for the record of a rank, and wait for space if the disk is full.

    Raises:
        NoSpaceError: the disk is still full after ten minutes.
    """
    deadline = time.monotonic() + _SPACE_PATIENCE_S
    is_first = True
    while (full := _full_disk_at_reserve(attempt, rank)) is not None:
        if time.monotonic() >= deadline:
            raise NoSpaceError(
                f"the command is not started: {full}, and no space became free in {_SPACE_PATIENCE_S / 60:g} minutes"
            )
        if is_first:
            _print(f"{full}; waiting up to {_SPACE_PATIENCE_S / 60:g} minutes for space")
        is_first = False
        time.sleep(_SPACE_POLL_S)


def _full_disk_at_reserve(attempt: AttemptDirectory, rank: int) -> str | None:
    """Make the reserve file for the record of a rank; return a sentence if the disk is full for it, else None."""
    try:
        reserve_exit(attempt, rank)
    except OSError as error:
        # Whatever else is wrong: the program does not need the file.
        return full_disk_sentence(attempt.run.path, error) if is_full(error) else None
    return None


def _exit_with_failure(
    failure: FailureRecord, attempt: AttemptDirectory, on_end: Callable[[ProgramEnding], None]
) -> NoReturn:
    """Write the failure record, print the failure, and end the task."""
    save_failure(attempt, failure)
    sys.stderr.write(f"hpcddp: {failure.place} failed: {failure.label}{failure.message}\n")
    on_end("failed")
    exit_after_failure(failure.exit_code, attempt)


def program_environment(
    spec: JobSpec,
    env: RankEnv,
    attempt: AttemptDirectory,
    *,
    address: str,
    port: int,
    end_time: float | None,
    inherited: Mapping[str, str],
    python: Path,
) -> dict[str, str]:
    """Return the variables that are added to the environment of one rank's program.

    Args:
        address: rank 0's host, as this rank reaches it.
        port: a port that is free there.
        end_time: the end of the job in seconds since the epoch; None without a limit.
        inherited: the task's own environment.
        python: the interpreter of the job.

    Raises:
        PlanError: the global batch is not a whole number of equal micro-batches.
    """
    run = attempt.run
    variables = {
        **env.exports(address, port),
        "GROUP_WORLD_SIZE": str(env.nodes),
        "HPCDDP_RUN_ID": run.run_id,
        "HPCDDP_RUN_DIR": str(run.path),
        "HPCDDP_ATTEMPT": str(attempt.number),
        "HPCDDP_REQUEUE_FILE": str(attempt.requeue_file),
        "HPCDDP_PROGRESS_FILE": str(run.progress),
        METRICS_FILE: str(run.metrics),
        # The output of a program that is killed is complete, and a crash in native code prints stacks.
        "PYTHONUNBUFFERED": inherited.get("PYTHONUNBUFFERED", "1"),
        "PYTHONFAULTHANDLER": inherited.get("PYTHONFAULTHANDLER", "1"),
        **trace_variables(attempt, inherited),
        "PATH": _path(spec, inherited, python),
    }
    if end_time is not None:
        variables["HPCDDP_END_TIME"] = f"{end_time:.0f}"
    if spec.batch.global_batch_size is not None:
        plan = plan_job(spec, samples=None)
        variables |= batch_variables(plan.batch, learning_rate=plan.learning_rate)
    return variables


def _path(spec: JobSpec, inherited: Mapping[str, str], python: Path) -> str:
    """Return PATH, in which `python` is the job's interpreter unless the user chose another one.

    The virtual environment that hpcddp was called from need not be activated. An activated one, or one that the job
    file sets up, comes first.
    """
    path = inherited.get("PATH", "/usr/local/bin:/usr/bin:/bin")
    asked = spec.environment
    # A plugin of CSCS starts the tasks in a container.
    has_container = asked.container or "environment" in spec.resources.srun
    is_prepared = asked.modules or asked.setup or has_container or "PATH" in asked.env
    is_activated = inherited.get("VIRTUAL_ENV") or inherited.get("CONDA_PREFIX")
    if is_prepared or is_activated:
        return f"{path}:{python.parent}"
    return f"{python.parent}:{path}"


def _notice_s(spec: JobSpec, deadline: Deadline) -> float:
    """Return how long before the end of the job a program gets SIGTERM, in seconds."""
    if spec.signal_lead is not None:
        notice_s = spec.signal_lead.total_seconds() / 2
    elif deadline.end_time is not None:
        notice_s = _NOTICE_FRACTION * (deadline.end_time - deadline.start_time)
    else:
        notice_s = 0.0
    return min(_LONGEST_NOTICE_S, max(_SHORTEST_NOTICE_S, notice_s))


def _end_time(env: RankEnv, attempt: AttemptDirectory, environment: Mapping[str, str], deadline: Deadline) -> EndTime:
    """Return the end of the job, for which rank 0 asks Slurm, and the other ranks rank 0's record."""
    known = KnownEnd(end_time=deadline.end_time, time=deadline.start_time)
    job_id = slurm_job_id(environment)
    if job_id is None:
        return EndTime(known)

    def print_end(end_time: float | None) -> None:
        _print(moved_sentence(end_time))

    def ask_for_all_ranks() -> KnownEnd | None:
        answer = ask_end(job_id)
        if answer is not None and env.world_size > 1:
            with suppress(OSError):
                write_record(attempt.end_time, AskedEnd(end_time=answer.end_time, time=answer.time))
        return answer

    if env.rank == 0:
        return EndTime(known, ask_for_all_ranks, every_s=ASK_EVERY_S, on_move=print_end)
    return EndTime(known, partial(_recorded_end, attempt), every_s=_READ_END_EVERY_S, on_move=print_end)


def _recorded_end(attempt: AttemptDirectory) -> KnownEnd | None:
    try:
        asked = read_record(attempt.end_time, AskedEnd)
    except RecordError:
        return None
    return None if asked is None else KnownEnd(end_time=asked.end_time, time=asked.time)


def _print(text: str) -> None:
    write_to_stderr(f"hpcddp: {text}\n")


class Program:
    """A running program.

    Args:
        command: the program and its arguments.
        end: the end of the job.
        notice_s: how long before the end it gets SIGTERM, in seconds; SIGKILL comes after half of it, or later.
        lead_s: the same for a program that saves at SIGTERM; None = ``notice_s``.
        save_signal: the signal after which it saves; None = SIGUSR2, or SIGUSR1 or SIGTERM if it handles only that.
        is_launcher: whether what it starts, ranks or a program in a container, gets the signals to save in its place.
        ask_cause: asks Slurm why the job ends. The program is halted meanwhile if SIGTERM makes it save: a program that
            then requeues its job, as Lightning does, makes Slurm clear PreemptTime. None does not halt it.
        on_poll: called with its process id about twice a second while it runs; an exception of it ends the wait.

    Attributes:
        notice: the request to stop that it got; None before that.
        sigterm_forwarded: whether SIGTERM was passed on to it while it ran.

    Raises:
        CommandError: there is no such program.
        FencedError: from ``wait``: ``on_poll`` has raised it, and the program was killed.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        end: EndTime,
        notice_s: float,
        lead_s: float | None = None,
        save_signal: CommandSignal | None = None,
        is_launcher: bool = False,
        ask_cause: Callable[[], object] | None = None,
        on_poll: Callable[[int], object] = lambda _: None,
    ) -> None:
        self.notice: StopNotice | None = None
        self.sigterm_forwarded = False
        self._killed = False
        self._ends_by_itself = False
        self._asked_to_save_at = -math.inf
        self._end = end
        self._notice_s = notice_s
        self._lead_s = notice_s if lead_s is None else lead_s
        self._is_launcher = is_launcher
        self._ask_cause = ask_cause
        self._on_poll = on_poll
        self._given_save_signal: signal.Signals | None = None
        if save_signal is not None:
            self._given_save_signal = signal.Signals[f"SIG{save_signal}"]
        self._sent_to_ranks: frozenset[int] = frozenset()
        if is_launcher:
            self._sent_to_ranks = _SAVE_SIGNALS
        # A launcher passes SIGTERM on by itself.
        if is_launcher and self._given_save_signal is not None and self._given_save_signal != signal.SIGTERM:
            self._sent_to_ranks |= {self._given_save_signal}
        self._handled: frozenset[int] = frozenset()
        self._process = _start(command, environment)
        LISTENER.forward(self._send, more=_OTHER_SIGNALS)
        # Signals that came before the program ran. A signal that is sent twice does no harm: Slurm does so too.
        for signum in _STOP_SIGNALS:
            if LISTENER.first(signum) is not None:
                self._send(signum)

    def wait(self) -> int:
        """Wait until the program ends; return its exit code, or minus the signal that killed it."""
        next_check = time.monotonic() + _POLL_S
        while True:
            try:
                code = self._process.wait(_HANDLERS_POLL_S)
            except subprocess.TimeoutExpired:
                self._handled |= self._handled_now()
                now = time.monotonic()
                if now >= next_check:
                    next_check = now + _POLL_S
                    self._check_end_time()
                    self._check_processes()
            else:
                self._wait_for_own_signal(code)
                return code

    def _check_end_time(self) -> None:
        left_s = self._end.left_s(time.time(), lead_s=max(self._notice_s, self._lead_s))
        if left_s <= min(_REQUEUE_S, self._notice_s / 2):
            self._kill_at_time_limit()
            return
        if left_s <= self._lead_s and self._save_signal == signal.SIGTERM:
            self._save_at_sigterm("deadline")
            return
        if left_s > self._notice_s or self._ends_by_itself:
            return
        reason = "the time limit is near"
        was_warned = LISTENER.first(signal.SIGUSR2) is not None and self.notice is None
        if was_warned and self._save_signal not in self._handled_now():
            reason = f"the time limit is near, and the program does not handle {self._save_signal.name}"
        _print(f"{reason}: SIGTERM")
        self.notice = self.notice or "deadline"
        self._send(signal.SIGTERM)

    def _kill_at_time_limit(self) -> None:
        # Once: a process in uninterruptible sleep ends later.
        if self._killed:
            return
        self._killed = True
        self.notice = self.notice or "deadline"
        _print("the time limit is reached, and the program still runs: SIGKILL")
        self._send(signal.SIGKILL)

    def _check_processes(self) -> None:
        try:
            self._on_poll(self._process.pid)
        except FencedError:
            # At once: what it would save at SIGTERM could replace what the newer attempt has saved.
            _kill_with_descendants(self._process.pid)
            raise
        except SeparateWorldsError:
            # Its launcher got SIGTERM. Workers that are left when this process ends could stay behind.
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_LAUNCHER_END_TIMEOUT_S)
            raise

    def _wait_for_own_signal(self, code: int) -> None:
        """Set ``notice`` if Slurm signalled the program directly: it can signal a whole process tree at once.

        proctrack/linuxproc does so. A program that ends at once then ends before this process has received its own
        signal. Its handler can exit with any code, 0 included.
        """
        ended_at = time.monotonic()
        if self.notice is not None:
            return
        if code == 0 and ended_at - self._asked_to_save_at <= _LONGEST_SAVE_S:
            self.notice = "warned"
            return
        possible_signals = self._handled & set(_NOTICE_BY_SIGNAL)
        if code in _ENDED_BY_TERM:
            possible_signals |= {signal.SIGTERM}
        if not possible_signals:
            return
        timeout_s = _SIGNAL_TIMEOUT_S
        if code != 0 and code not in _ENDED_BY_TERM:
            # After a failure of a program Slurm signals the job a moment later; that signal did not cause the failure.
            timeout_s = _SIGNAL_TIMEOUT_AFTER_ERROR_S

        def notice() -> StopNotice | None:
            return self.notice or _notice_received_since(ended_at - _SIGNAL_TIMEOUT_S, possible_signals)

        self.notice = wait_until(notice, timeout_s=timeout_s, poll_s=_SIGNAL_POLL_S)

    def _send(self, signum: signal.Signals) -> None:
        """Pass a signal on to the program, or the signal at which it saves: in place of SIGUSR2, and before SIGTERM."""
        if self._process.poll() is not None or signum not in _FORWARDED:
            # A program that has already ended got no request to stop.
            return
        handled_now = self._handled_now()
        self._handled |= handled_now
        if signum == signal.SIGTERM:
            self._send_sigterm(handled_now)
            return
        if signum == signal.SIGUSR2:
            self._send_warning()
            return
        if signum == self._save_signal and signum in handled_now:
            self._asked_to_save_at = time.monotonic()
        self._deliver(signum)

    def _send_sigterm(self, handled_now: frozenset[int]) -> None:
        """Pass SIGTERM on; a program that saves at another signal gets that one before.

        Args:
            handled_now: the signals that the program handles.
        """
        # Slurm sends SIGTERM again while the program saves.
        is_first = not self.sigterm_forwarded
        self.notice = self.notice or "terminated"
        self.sigterm_forwarded = True
        self._ends_by_itself = True
        saves_first = is_first and self._needs_save_signal and self._save_signal in handled_now
        if not saves_first:
            self._deliver(signal.SIGTERM)
            return
        if self._ask_cause is not None:
            # Halted first: Lightning requeues the job in the handler of the signal to save.
            self._process.send_signal(signal.SIGSTOP)
        # At once: Slurm may have sent SIGTERM to the program too, and Lightning ends after the step in which it came. A
        # halted program gets the signal when it continues.
        self._deliver(self._save_signal)
        _print(f"{self._save_signal.name} before SIGTERM, for the program to save")
        if self._ask_cause is None:
            self._deliver(signal.SIGTERM)
        else:
            threading.Thread(target=self._terminate_when_answered, args=(self._ask_cause,), daemon=True).start()

    def _send_warning(self) -> None:
        """Send the signal at which the program saves, as SIGUSR2 warns that the time limit is near."""
        if self._save_signal == signal.SIGTERM:
            self._save_at_sigterm("warned")
            return
        if self._save_signal not in self._handled:
            self._deliver(signal.SIGUSR2)
            return
        self.notice = self.notice or "warned"
        # A program that saves after another signal may go on.
        self._ends_by_itself = self._save_signal == signal.SIGUSR2
        self._deliver(self._save_signal)

    def _save_at_sigterm(self, notice: StopNotice) -> None:
        """Send SIGTERM once, before Slurm does, to a program that saves at it."""
        if self.sigterm_forwarded:
            return
        self.notice = self.notice or notice
        self.sigterm_forwarded = True
        self._ends_by_itself = True
        _print("the time limit is near: SIGTERM, for the program to save")
        if not self._is_launcher:
            self._deliver(signal.SIGTERM)
            return
        # torchrun would kill its ranks 30 s later.
        self._signal_ranks(signal.SIGTERM)

    def _deliver(self, signum: signal.Signals) -> None:
        # If the program handled this signal before and no longer does, Python is exiting. Slurm has sent it the signal
        # too; another one would kill it.
        if signum in self._handled and signum not in self._handled_now():
            return
        if signum in self._sent_to_ranks:
            self._signal_ranks(signum)
        else:
            self._process.send_signal(signum)

    def _signal_ranks(self, signum: signal.Signals) -> None:
        """Send a signal to the ranks of a launcher that handle it."""
        for pid in list(_handlers_below(self._process.pid, signum)):
            with suppress(ProcessLookupError):
                os.kill(pid, signum)

    def _handled_now(self) -> frozenset[int]:
        """Return the signals that the program handles; of those for the ranks of a launcher, what the ranks handle."""
        pid = self._process.pid
        handled_by_program = (handled_signals(pid) & _FORWARDED) - self._sent_to_ranks
        handled_by_ranks = {signum for signum in self._sent_to_ranks if any(_handlers_below(pid, signum))}
        return handled_by_program | handled_by_ranks

    def _terminate_when_answered(self, ask_cause: Callable[[], object]) -> None:
        """Keep the program halted while Slurm is asked, although Slurm and srun send SIGCONT with each SIGTERM."""
        question = threading.Thread(target=ask_cause, daemon=True)
        try:
            question.start()
            while question.is_alive():
                self._process.send_signal(signal.SIGSTOP)
                question.join(_HALT_EVERY_S)
        finally:
            self._deliver(signal.SIGTERM)
            self._process.send_signal(signal.SIGCONT)

    @property
    def _save_signal(self) -> signal.Signals:
        """The signal that tells the program to save."""
        if self._given_save_signal is not None:
            return self._given_save_signal
        if signal.SIGUSR2 in self._handled:
            return signal.SIGUSR2
        if signal.SIGUSR1 in self._handled:
            return signal.SIGUSR1
        if self._handles_sigterm:
            return signal.SIGTERM
        return signal.SIGUSR2

    @property
    def _handles_sigterm(self) -> bool:
        """Whether the program has a handler for SIGTERM; of a launcher, which always has one, whether a rank has."""
        if self._is_launcher:
            return any(_handlers_below(self._process.pid, signal.SIGTERM))
        return signal.SIGTERM in self._handled

    @property
    def _needs_save_signal(self) -> bool:
        """Whether SIGTERM alone does not make the program save."""
        if self._save_signal == signal.SIGTERM:
            return False
        return self._given_save_signal is not None or self._save_signal == signal.SIGUSR1


def _start(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    libc = ctypes.CDLL(None)
    parent = os.getpid()

    def prepare() -> None:
        # The warning must not kill a program that has no handler for it, or not yet; exec keeps ignored signals.
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        # The kernel kills the program when this process ends, however it ends (prctl(2)).
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(ExitCode.INFRASTRUCTURE)

    shown = shlex.join(command)
    try:
        # Popen has no argument of its own for the two settings.
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, preexec_fn=prepare)  # noqa: PLW1509
    except FileNotFoundError:
        raise CommandError(
            f"command is {shown}, and {PROCESS_STATE.host} has no program {command[0]!r} (searched in PATH, and in "
            f"{Path.cwd()} for a path); write a program that is there"
        ) from None
    except OSError as error:
        repair = "begin it with a line like #!/bin/bash" if error.errno == errno.ENOEXEC else "correct it"
        raise CommandError(f"command is {shown}, which cannot be started: {error.strerror}; {repair}") from None


def _notice_received_since(moment: float, signals: Collection[int]) -> StopNotice | None:
    """Return the notice of those of ``signals`` that arrived since ``moment``; that of SIGTERM takes precedence."""
    for signum, notice in _NOTICE_BY_SIGNAL.items():
        received = LISTENER.first(signal.Signals(signum))
        if signum in signals and received is not None and received.monotonic >= moment:
            return notice
    return None


def _kill_with_descendants(pid: int) -> None:
    """Kill a process and all that it has started."""
    for each in [pid, *_descendants(pid)]:
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
    children = children_of(pid)
    return [*children, *(descendant for child in children for descendant in _descendants(child))]


def _handlers_below(pid: int, signum: int) -> Iterator[int]:
    """Yield the processes below a launcher that handle a signal, without their own: a data loader has the same."""
    for child in children_of(pid):
        if signum in handled_signals(child):
            yield child
        else:
            yield from _handlers_below(child, signum)
