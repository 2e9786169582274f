"""Find out whether the program of a command starts over in each attempt, by the losses that it prints."""

from __future__ import annotations

import re
from contextlib import suppress
from itertools import islice
from typing import Final

from hpcddp.run.directory import AttemptDirectory, RunDirectory
from hpcddp.run.files import exists, open_regular

_ATTEMPTS_COMPARED: Final = 3
_LOSSES_COMPARED: Final = 3
_HEAD_BYTES: Final = 64 * 1024
# "loss 2.3010", "Loss: 6.9078e+00", "{'train_loss': 2.3010}"; fewer digits could be equal by chance.
_LOSS: Final = re.compile(r"loss\b['\"]?\s*[:=]?\s*([0-9]+\.[0-9]{3,}(?:e[-+]?[0-9]+)?)", re.ASCII | re.IGNORECASE)


def starts_over(run: RunDirectory, newest: int) -> str | None:
    """Return a sentence if the program of a command printed the same first losses in each of its last three attempts.

    A program that had resumed would have another loss. Nothing shows that a program began again if it prints no loss,
    or if its first losses differ from one start to the next because it sets no seed.

    Args:
        newest: the number of its newest attempt.
    """
    oldest = newest + 1 - _ATTEMPTS_COMPARED
    if oldest < 0:
        return None
    losses = first_losses(run.attempt(newest))
    if len(set(losses)) < _LOSSES_COMPARED:
        return None
    if any(first_losses(run.attempt(number)) != losses for number in range(oldest, newest)):
        return None
    return (
        f"run {run.run_id} probably starts over in each attempt: attempts {oldest} to {newest} printed the same "
        f"first losses ({', '.join(losses)}); how to resume: docs/any-script.md"
    )


def first_losses(attempt: AttemptDirectory) -> list[str]:
    """Return the first losses in the log of rank 0 of a command."""
    if not (exists(attempt.rank_exit_reserve(0)) or exists(attempt.rank_exit(0))):
        return []
    with suppress(OSError), open_regular(attempt.rank_log(0)) as (stream, _):
        text = stream.read(_HEAD_BYTES).decode("utf-8", errors="replace")
        return [match[1] for match in islice(_LOSS.finditer(text), _LOSSES_COMPARED)]
    return []
