"""Reactions of a task to signals, in threads of their own, while the main thread trains or waits."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final, NoReturn

from hpcddp.run.directory import AttemptDirectory
from hpcddp.run.events import append_event, newest_saved_step, read_events
from hpcddp.run.failure import read_failures
from hpcddp.run.job_records import Decision, FailureRecord, read_decision, read_start, write_decision
from hpcddp.slurm.job import ask_slurm, cause_of, slurm_job_id
from hpcddp.stop.listener import LISTENER, ReceivedSignal, write_to_stderr
from hpcddp.stop.reasons import Cause, ExitCode, StopReason
from hpcddp.task.attribution import peer_failure_record, save_failure
from hpcddp.task.process_state import PROCESS_STATE, exit_process
from hpcddp.task.watchdog import HANG, end_hung_rank

_POLL_S: Final = 0.25
# The main thread may be about to write a more detailed record of the same failure.
_MAIN_THREAD_GRACE_S: Final = 1.0
# A stop does not wait for a controller that does not answer.
_ANSWER_TIMEOUT_S: Final = 2.0
# With these causes the job ends, and no rank has failed.
_NOT_FAILURES: Final = frozenset({Cause.PREEMPTION, Cause.REQUEUED, Cause.CANCELLED})


class CauseQuery:
    """The question to Slurm why the job ends, asked once for each kind of signal, while the training goes on.

    Args:
        ask: asks Slurm; its argument says whether the signal was the one that comes before the time limit.
        on_answer: called with an answer that shows a cause.
    """

    def __init__(self, ask: Callable[[bool], Cause], on_answer: Callable[[Cause], object] = lambda _: None) -> None:
        self._ask = ask
        self._on_answer = on_answer
        self._asked = False
        self._answered = threading.Event()
        self._answer: Cause | None = None

    def ask(self, *, warned: bool) -> None:
        """Ask, and wait for the answer; a later answer replaces an earlier one unless it is ``unknown``."""
        self._asked = True
        answer = self._ask(warned)
        if self._answer is None or answer is not Cause.UNKNOWN:
            self._answer = answer
        self._answered.set()
        if answer is not Cause.UNKNOWN:
            self._on_answer(answer)

    def answer(self) -> Cause | None:
        """Return the cause, or None if there is no answer within two seconds; ask if no signal has."""
        if not self._asked:
            threading.Thread(target=self.ask, kwargs={"warned": False}, daemon=True).start()
        self._answered.wait(_ANSWER_TIMEOUT_S)
        return self._answer


STACKS_SIGNAL: Final = signal.SIGRTMAX - 1
"""Asks a task for its stacks. submitit's signal is SIGRTMAX here, and the C library uses the first ones."""
STACKS_FILE: Final = "hpcddp-stacks"
"""The file in memory of a task, with its stacks."""


def show_stacks_on_request() -> None:
    """Let a signal write the stacks of this process's threads into memory, from which ``hpcddp stacks`` reads them.

    The handler is C code, so a process that hangs in a collective answers too.
    """
    faulthandler.register(STACKS_SIGNAL, file=os.memfd_create(STACKS_FILE), all_threads=True)


def handle_signals(attempt: AttemptDirectory, environment: Mapping[str, str]) -> CauseQuery:
    """Start to react to signals, including those that came before.

    Args:
        attempt: the attempt that this process belongs to.

    Returns:
        The query for the cause. A signal starts it on rank 0; on other ranks only a call of ``answer`` does.
    """
    query = CauseQuery(
        lambda warned: ask_cause(attempt, environment, warned=warned), lambda cause: _record_cause(attempt, cause)
    )
    LISTENER.add_callback(lambda received: _record_signal(attempt, received))
    if PROCESS_STATE.rank == 0:
        LISTENER.add_callback(lambda received: query.ask(warned=received.signum == signal.SIGUSR2))
    LISTENER.add_callback(lambda received: _end_after_peer_failure(attempt, received, query))
    return query


def _record_signal(attempt: AttemptDirectory, received: ReceivedSignal) -> None:
    try:
        append_event(
            attempt.run.events,
            kind="signal",
            time=received.time,
            attempt=attempt.number,
            step=PROCESS_STATE.heartbeat.step,
            reason=received.reason.word,
            rank=PROCESS_STATE.rank,
            host=PROCESS_STATE.host,
            signal=received.signum.name,
        )
    except OSError as error:
        sys.stderr.write(f"hpcddp: {attempt.run.events} cannot be written ({error})\n")


def _record_cause(attempt: AttemptDirectory, cause: Cause) -> None:
    """Record why the job ends: Slurm may kill all tasks and the script before they write it with their end."""
    if PROCESS_STATE.rank != 0:
        return
    with suppress(OSError):
        append_event(attempt.run.events, kind="cause", time=time.time(), attempt=attempt.number, cause=str(cause))


def _end_after_peer_failure(attempt: AttemptDirectory, received: ReceivedSignal, query: CauseQuery) -> None:
    """After TERM, end this process when another rank has failed, whatever the main thread waits for.

    srun sends TERM when a task has failed, and a collective with a lost peer may never return. Ranks that have not made
    a step yet exit at once if the job ends: they have nothing to save, and KillWait may be over before they train.
    """
    if received.signum != signal.SIGTERM:
        return
    while (first := _peer_failure(attempt)) is None:
        if _must_exit_before_training(attempt, query) and PROCESS_STATE.prevent_training():
            _exit_before_training(attempt, query)
        time.sleep(_POLL_S)
    time.sleep(_MAIN_THREAD_GRACE_S)
    if first.kind == HANG:
        # The timeout of this rank's own watchdog may not be over; the stacks of this rank are needed too.
        end_hung_rank(attempt, PROCESS_STATE.heartbeat.gap())
    record = peer_failure_record(first)
    save_failure(attempt, record)
    write_to_stderr(f"hpcddp: {record.place} ends here: {record.message}\n")
    exit_process(record.exit_code)


def _must_exit_before_training(attempt: AttemptDirectory, query: CauseQuery) -> bool:
    """Return whether no step was made and the job ends: rank 0 asks Slurm, the others look for rank 0's decision."""
    if PROCESS_STATE.heartbeat.step is not None:
        return False
    if PROCESS_STATE.rank == 0:
        return query.answer() in _NOT_FAILURES
    return read_decision(attempt) is not None


def _exit_before_training(attempt: AttemptDirectory, query: CauseQuery) -> NoReturn:
    if PROCESS_STATE.rank == 0:
        step = newest_saved_step(read_events(attempt.run.events))
        decision = Decision(
            attempt=attempt.number,
            step=step,
            reason=StopReason.TERMINATED,
            cause=query.answer(),
            saved=step > 0,
            save_s=0.0,
            time=time.time(),
        )
        try:
            write_decision(attempt, decision)
        except OSError as error:
            # The exit code shows the supervisor that this rank has stopped.
            write_to_stderr(f"hpcddp: {attempt.decision} cannot be written ({error})\n")
    write_to_stderr("hpcddp: no step was made yet, so there is nothing to save\n")
    exit_process(ExitCode.STOPPED)


def _peer_failure(attempt: AttemptDirectory) -> FailureRecord | None:
    others = (record for record in read_failures(attempt) if record.rank != PROCESS_STATE.rank)
    return next((record for record in others if not (record.secondary and PROCESS_STATE.saves_alone)), None)


def ask_cause(attempt: AttemptDirectory, environment: Mapping[str, str], *, warned: bool) -> Cause:
    """Ask Slurm once and return why this job got a signal; ``unknown`` if Slurm does not show it.

    Args:
        attempt: the attempt that runs.
        environment: the environment of the batch script or of a task.
        warned: whether the signal was the one that comes before the time limit.
    """
    if warned and attempt.requeue_request.exists():
        # The user of the run sent the same signal.
        return Cause.REQUEUED
    job_id = slurm_job_id(environment)
    job = ask_slurm(job_id) if job_id else None
    start = read_start(attempt)
    return cause_of(
        job,
        restarts_at_start=0 if start is None else start.restart_count,
        warned=warned,
        error_seen=bool(read_failures(attempt)),
    )
