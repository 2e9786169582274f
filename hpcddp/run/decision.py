"""What rank 0 writes after a stop, for the supervisor: where the ranks stopped, why, and whether it is saved."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from hpcddp.run.directory import AttemptDirectory
from hpcddp.run.files import read_json, write_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """All ranks of an attempt stopped after the same step.

    Args:
        attempt: the attempt's number.
        step: optimizer steps done.
        reason: the ``StopReason``'s word.
        cause: the ``Cause``'s word, None if it was not asked or not known in time.
        saved: whether a checkpoint of that very step is there.
        save_s: how long the save took, in seconds; 0 if there was nothing to save.
        time: seconds since the epoch.
    """

    attempt: int
    step: int
    reason: str
    cause: str | None
    saved: bool
    save_s: float
    time: float


def write_decision(attempt: AttemptDirectory, decision: Decision) -> None:
    """Write the decision into the attempt's directory."""
    write_json(attempt.decision, asdict(decision))


def read_decision(attempt: AttemptDirectory) -> Decision | None:
    """Return the attempt's decision, or None if its ranks did not agree to stop."""
    document = read_json(attempt.decision)
    return None if document is None else Decision(**document)
