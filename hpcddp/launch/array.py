"""What a submission tells the script beside its text: where in a sweep it is, and what the pickle must be."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PICKLE_DIGEST = "HPCDDP_PICKLE_SHA256"
"""The environment variable that carries the pickle's sha256 from the submission to the task."""

FIRST = "HPCDDP_SWEEP_FIRST"
"""The environment variable that says which element index 0 of the job array is; 0 without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayPlace:
    """One element of a sweep, to run as an array of one.

    Args:
        index: its array index.
        first: the element that index 0 is.
        log: the file that its batch script writes to.
    """

    index: int
    first: int
    log: Path

    @property
    def environment(self) -> dict[str, str]:
        """What the script needs to know."""
        return {FIRST: str(self.first)}

    @property
    def options(self) -> tuple[str, ...]:
        """What sbatch needs to know: the directives of the script are those of the whole sweep."""
        log = str(self.log).replace("%", "%%")
        return (f"--array={self.index}", f"--output={log}", f"--error={log}")
