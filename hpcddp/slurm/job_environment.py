"""Environment of a new job: what it inherits from the submission, and the variables that hpcddp adds."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_DROPPED_PREFIXES = ("SBATCH_", "SLURM_", "SLURMD_", "SUBMITIT_", "TORCHELASTIC_", "HPCDDP_")
_KEPT = frozenset({"SLURM_CONF"})
_UMASK = "HPCDDP_UMASK"


def submission_environment(environment: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the environment that a new job inherits.

    sbatch reads ``SBATCH_*`` and some ``SLURM_*`` variables as options, which override the directives of the script
    (sbatch(1), INPUT ENVIRONMENT VARIABLES). The rank variables of an outer job are wrong in the new job.

    Args:
        environment: the submitter's environment.

    Returns:
        The environment without them, but with ``SLURM_CONF``; and the names that were dropped, sorted.
    """
    dropped = tuple(sorted(name for name in environment if name.startswith(_DROPPED_PREFIXES) and name not in _KEPT))
    return {name: value for name, value in environment.items() if name not in dropped}, dropped


@contextmanager
def submitters_umask(environment: Mapping[str, str]) -> Iterator[None]:
    """Apply the submitter's umask, which the batch script exports, to the files that are created in the block.

    The files of hpcddp itself have fixed modes. If the script exports no umask, nothing changes.

    Args:
        environment: the environment of a process that the batch script has started.
    """
    kept = environment.get(_UMASK)
    if kept is None:
        yield
        return
    private = os.umask(int(kept, base=8))
    try:
        yield
    finally:
        os.umask(private)


PICKLE_DIGEST = "HPCDDP_PICKLE_SHA256"
"""The environment variable that carries the pickle's sha256 from the submission to the task."""
INDEX = "HPCDDP_SWEEP_INDEX"
"""The environment variable that says which element of its sweep a run is."""
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
        """The variables for the script."""
        return {FIRST: str(self.first)}

    @property
    def options(self) -> tuple[str, ...]:
        """The options for sbatch, because the directives of the script are those of the whole sweep."""
        log = str(self.log).replace("%", "%%")
        return (f"--array={self.index}", f"--output={log}", f"--error={log}")


NO_LIMIT_S = 10 * 365 * 24 * 3600
"""The time limit of a local run without one: submitit needs a number."""
