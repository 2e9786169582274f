"""What a new job may inherit of the environment that it is submitted from."""

from __future__ import annotations

from collections.abc import Mapping

_DROPPED_PREFIXES = ("SBATCH_", "SLURM_", "SLURMD_", "SUBMITIT_", "TORCHELASTIC_", "HPCDDP_")
_KEPT = frozenset({"SLURM_CONF"})


def submission_environment(environment: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the environment that a new job may inherit.

    sbatch reads ``SBATCH_*`` and some ``SLURM_*`` variables as flags that win over the script's directives (sbatch(1),
    INPUT ENVIRONMENT VARIABLES). What an outer job's launcher said about its own ranks would mislead the new ones.

    Args:
        environment: the submitter's environment.

    Returns:
        The environment without them, but with ``SLURM_CONF``; and the names that were dropped, sorted.
    """
    dropped = tuple(sorted(name for name in environment if name.startswith(_DROPPED_PREFIXES) and name not in _KEPT))
    return {name: value for name, value in environment.items() if name not in dropped}, dropped
