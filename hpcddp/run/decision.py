"""What rank 0 writes after a stop, for the supervisor: where the ranks stopped, why, and whether it is saved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hpcddp.run.directory import AttemptDirectory
from hpcddp.run.record import Record, read_record, write_record
from hpcddp.stop.reasons import Cause, StopReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision(Record):
    """All ranks of an attempt stopped after the same step.

    Args:
        attempt: the attempt's number.
        step: optimizer steps done.
        reason: why the ranks stopped.
        cause: the ``Cause``'s word, None if it was not asked or not known in time.
        saved: whether a checkpoint of that very step is there.
        save_s: how long the save took, in seconds; 0 if there was nothing to save.
        time: seconds since the epoch.
    """

    ADVICE: ClassVar[str] = "the checkpoints are as they were; to go on from the newest, resume the run"

    attempt: int
    step: int
    reason: StopReason
    cause: str | None
    saved: bool
    save_s: float
    time: float

    @property
    def known_cause(self) -> Cause | None:
        """The cause, None if it was not asked, not known in time, or is one of a newer version."""
        return next((cause for cause in Cause if cause == self.cause), None)


def write_decision(attempt: AttemptDirectory, decision: Decision) -> None:
    """Write the decision into the attempt's directory."""
    write_record(attempt.decision, decision)


def read_decision(attempt: AttemptDirectory) -> Decision | None:
    """Return the attempt's decision, or None if its ranks did not agree to stop.

    Raises:
        RecordError: the record is damaged.
    """
    return read_record(attempt.decision, Decision)
