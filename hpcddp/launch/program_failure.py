"""What the end of a user's program means: whether it failed, by whose fault, and who only followed."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Sequence
from pathlib import Path

from hpcddp.launch.attribution import says_peer_loss
from hpcddp.launch.lifeline import LIFELINE, Lifeline
from hpcddp.run.failure import FailureRecord
from hpcddp.run.traceback_text import LastWords, last_words
from hpcddp.stop.exit_codes import ExitCode

# What a shell says for a program that was killed by signal n (bash(1), EXIT STATUS).
_KILLED_IN_A_SHELL = 128
_ENDED_FROM_OUTSIDE = frozenset({signal.SIGTERM, signal.SIGKILL, signal.SIGINT})


def failure_of_program(
    command: Sequence[str],
    code: int,
    log: Path,
    *,
    told: bool,
    others: bool,
    answers: bool = False,
    lifeline: Lifeline = LIFELINE,
) -> FailureRecord | None:
    """Return the record of a program that failed; None if it ended well, wants to go on, or ended as it was told.

    Args:
        command: its words.
        code: its exit code; minus the signal that killed it.
        log: where its output went.
        told: whether it was told to end before it did.
        others: whether another rank has failed by its own fault: srun tells the rest to end then, and that is no stop.
        answers: whether it ended after SIGTERM, which came because another rank has failed by itself: whatever it
            ended with is its answer.
        lifeline: what is known of this process.
    """
    if code in {ExitCode.FINISHED, ExitCode.STOPPED} or (told and not others):
        return None
    words = last_words(log)
    killed = _signal_of(code)
    if killed is signal.SIGABRT and words.message:
        # An exception has ended it, and what it left behind aborts: a process group with work under way, for one.
        killed = None
    followed = answers or (told and killed in _ENDED_FROM_OUTSIDE) or says_peer_loss(words.traceback or words.tail)
    infrastructure = followed or (killed is signal.SIGKILL and code < 0)
    return lifeline.record(
        kind="killed" if killed is not None else _exception_of(words) or "exit",
        message=_message(command, code, killed, words),
        traceback=words.traceback or words.tail,
        exit_code=ExitCode.INFRASTRUCTURE if infrastructure else ExitCode.USER_CODE,
        secondary=followed,
    )


def _signal_of(code: int) -> signal.Signals | None:
    number = -code if code < 0 else code - _KILLED_IN_A_SHELL
    return signal.Signals(number) if number in list(signal.Signals) else None


def _exception_of(words: LastWords) -> str | None:
    """Return the type of the exception that the program ended with: ``torch.OutOfMemoryError: ...`` names one."""
    name = words.message.partition(":")[0]
    return name.rpartition(".")[2] if name.replace(".", "").isidentifier() else None


def _message(command: Sequence[str], code: int, killed: signal.Signals | None, words: LastWords) -> str:
    program = shlex.join(command[:2])
    if killed is signal.SIGKILL:
        return f"{program} was killed by SIGKILL, most often because memory ran out"
    if killed is not None:
        return f"{program} was killed by {killed.name}"
    if words.message:
        return words.message.partition(": ")[2] or words.message
    return f"{program} ended with exit code {code}"
