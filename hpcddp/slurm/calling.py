"""Running one of Slurm's commands, and what can go wrong with that. ``slurm/commands.py`` says which."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

from hpcddp.errors import HpcddpError

# A call waits 9 to 18 s for a controller that is away (measured); a busy one may take longer.
TIMEOUT_S = 60.0

# What a command says when nobody answered it, or too late; a request that is answered too late may have been done.
_AWAY = (
    "Unable to contact",
    "timed out",
    "Connection refused",
    "Zero Bytes were transmitted",
    "Unexpected message received",
    "in standby mode",
)


class SlurmCommandError(HpcddpError):
    """One of Slurm's commands refused, and said why."""

    kind = "slurm"


class SlurmUnavailableError(SlurmCommandError):
    """A command of Slurm is not here, or its controller does not answer: asking again later may help."""

    kind = "slurm_unavailable"


class SlurmMissingError(SlurmUnavailableError):
    """A command of Slurm is not on this machine."""


def answer(words: Sequence[str], environment: Mapping[str, str]) -> str:
    """Run a command and return what it printed."""
    done = run(words, environment)
    if done.returncode == 0:
        return done.stdout
    raise failure(words[:1], done)


def run(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and return what it printed."""
    try:
        # Names written by others need not be UTF-8; they must not stop us from reading the rest.
        return subprocess.run(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
            timeout=TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        raise SlurmMissingError(f"{command[0]} was not found; Slurm's commands must be on PATH here") from None
    except subprocess.TimeoutExpired:
        raise SlurmUnavailableError(f"{command[0]} did not answer within {TIMEOUT_S:g} s; try again later") from None


def is_away(done: subprocess.CompletedProcess[str]) -> bool:
    """Return whether a command failed only because no controller answered."""
    return any(words in done.stderr for words in _AWAY)


def reason(done: subprocess.CompletedProcess[str]) -> str:
    """Return the command's own words, on one line."""
    lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    return "; ".join(lines) or f"it exited with {done.returncode} and said nothing"


def failure(words: Sequence[str], done: subprocess.CompletedProcess[str]) -> SlurmCommandError:
    """Return the error for a command that has failed.

    Args:
        words: what to call it.
        done: how it ended.
    """
    error = SlurmUnavailableError if is_away(done) else SlurmCommandError
    return error(f"{' '.join(words)} failed: {reason(done)}", returncode=done.returncode)
