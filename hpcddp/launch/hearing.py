"""What a task does when it hears a signal, in threads of their own, while the main thread trains or waits."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final, NoReturn

from hpcddp.launch.attribution import follower, leave_record
from hpcddp.launch.cause import ask_cause
from hpcddp.launch.lifeline import LIFELINE, Lifeline, leave
from hpcddp.launch.paragraph import newest_saved_step
from hpcddp.launch.watchdog import HANG, give_up
from hpcddp.run.decision import Decision, read_decision, write_decision
from hpcddp.run.directory import AttemptDirectory
from hpcddp.run.events import append_event, read_events
from hpcddp.run.failure import FailureRecord, read_failures
from hpcddp.stop.cause import Cause
from hpcddp.stop.exit_codes import ExitCode
from hpcddp.stop.reasons import StopReason
from hpcddp.stop.signals import LISTENER, Seen

_POLL_S: Final = 0.25
# The main thread may be about to say more about the same failure.
_MAIN_THREADS_TURN_S: Final = 1.0
# A stop does not wait for a controller that does not answer.
_ANSWER_S: Final = 2.0
_GOES_ANYWAY: Final = frozenset({Cause.PREEMPTION, Cause.REQUEUED, Cause.CANCELLED})


class CauseQuestion:
    """Why the job must go: Slurm is asked once for each kind of signal, beside the training.

    Args:
        ask: asks; True = the signal was the one that comes before the time limit.
    """

    def __init__(self, ask: Callable[[bool], Cause]) -> None:
        self._ask = ask
        self._asked = False
        self._answered = threading.Event()
        self._answer: Cause | None = None

    def put(self, *, warned: bool) -> None:
        """Ask, and wait for the answer; a later answer replaces an earlier one unless it knows less."""
        self._asked = True
        answer = self._ask(warned)
        if self._answer is None or answer is not Cause.UNKNOWN:
            self._answer = answer
        self._answered.set()

    def answer(self) -> str | None:
        """Return the cause's word, or None if there is no answer within two seconds."""
        if not self._asked:
            threading.Thread(target=self.put, kwargs={"warned": False}, daemon=True).start()
        self._answered.wait(_ANSWER_S)
        return None if self._answer is None else self._answer.value


def attend(attempt: AttemptDirectory, environment: Mapping[str, str], lifeline: Lifeline = LIFELINE) -> CauseQuestion:
    """Begin to react to signals; those that came before count too.

    Args:
        attempt: the attempt that this process belongs to.
        environment: the task's environment.
        lifeline: what is known of this process.

    Returns:
        Who knows why the job must go; nobody is asked on other ranks than 0 until their question is put.
    """
    question = CauseQuestion(lambda warned: ask_cause(attempt, environment, warned=warned))
    LISTENER.call(lambda seen: _note(attempt, seen, lifeline))
    if lifeline.rank == 0:
        LISTENER.call(lambda seen: question.put(warned=seen.signum == signal.SIGUSR2))
    LISTENER.call(lambda seen: _end_with_the_others(attempt, seen, lifeline, question))
    return question


def _note(attempt: AttemptDirectory, seen: Seen, lifeline: Lifeline) -> None:
    facts = {"rank": lifeline.rank, "host": lifeline.host, "signal": seen.signum.name}
    try:
        append_event(
            attempt.run.events,
            kind="signal",
            time=seen.time,
            attempt=attempt.number,
            step=lifeline.heartbeat.step,
            reason=seen.reason.word,
            **facts,
        )
    except OSError as error:
        sys.stderr.write(f"hpcddp: {attempt.run.events} cannot be written ({error})\n")


def _end_with_the_others(attempt: AttemptDirectory, seen: Seen, lifeline: Lifeline, question: CauseQuestion) -> None:
    """After TERM: end this process when another rank has failed, whatever the main thread waits for.

    srun sends TERM when a task has failed, and a collective with a lost peer may never return. Ranks that have not yet
    made a step leave at once: they have nothing to save, and starting may take longer than Slurm's patience.
    """
    if seen.signum != signal.SIGTERM:
        return
    while (first := _failure_of_another(attempt, lifeline)) is None:
        if _is_taken_away(attempt, lifeline, question) and lifeline.give_up_training():
            _leave_before_the_first_step(attempt, lifeline, question)
        time.sleep(_POLL_S)
    time.sleep(_MAIN_THREADS_TURN_S)
    if first.kind == HANG:
        # Its own watchdog may have been more patient; its stacks are wanted too.
        give_up(attempt, lifeline.heartbeat.silence(), lifeline=lifeline)
    record = follower(first, lifeline)
    leave_record(attempt, record)
    os.write(2, f"hpcddp: {record.place} ends here: {record.message}\n".encode())
    leave(record.exit_code)


def _is_taken_away(attempt: AttemptDirectory, lifeline: Lifeline, question: CauseQuestion) -> bool:
    """Return whether the job must go: rank 0 asks Slurm, the others look whether rank 0 has left."""
    if lifeline.heartbeat.step is not None:
        return False
    return question.answer() in _GOES_ANYWAY if lifeline.rank == 0 else read_decision(attempt) is not None


def _leave_before_the_first_step(attempt: AttemptDirectory, lifeline: Lifeline, question: CauseQuestion) -> NoReturn:
    if lifeline.rank == 0:
        step = newest_saved_step(read_events(attempt.run.events))
        write_decision(
            attempt,
            Decision(
                attempt=attempt.number,
                step=step,
                reason=StopReason.TERMINATED.word,
                cause=question.answer(),
                saved=step > 0,
                save_s=0.0,
                time=time.time(),
            ),
        )
    os.write(2, b"hpcddp: no step was made yet, so there is nothing to save\n")
    leave(ExitCode.STOPPED)


def _failure_of_another(attempt: AttemptDirectory, lifeline: Lifeline) -> FailureRecord | None:
    others = (record for record in read_failures(attempt) if record.rank != lifeline.rank)
    return next((record for record in others if not (record.secondary and lifeline.saves_alone)), None)
