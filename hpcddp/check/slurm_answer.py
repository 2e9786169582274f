"""The answer of Slurm to a script that is not submitted: ``sbatch --test-only``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpcddp.slurm import commands
from hpcddp.slurm.versions import Version, version_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmAnswer:
    """What Slurm answers to a script.

    Args:
        refusal: why Slurm would refuse the job; None if it would take it, or does not answer.
        start: when and where the job would start now, in Slurm's words; None where that is not known.
    """

    refusal: str | None = None
    start: str | None = None


def ask_slurm(script: str, environment: Mapping[str, str], directory: Path) -> SlurmAnswer:
    """Return what Slurm answers to a script; nothing is submitted.

    Args:
        script: the text of the script.
        environment: the environment of sbatch.
        directory: where the job would run.
    """
    try:
        return SlurmAnswer(
            start=commands.test_script(script, environment=environment, options=[f"--chdir={directory}"])
        )
    except commands.SlurmUnavailableError:
        return SlurmAnswer()
    except commands.SlurmCommandError as error:
        return SlurmAnswer(refusal=error.message)


def installed_version(environment: Mapping[str, str]) -> Version:
    """Return the version of the Slurm on this machine, as ``sbatch --version`` prints it; empty if it does not."""
    try:
        printed = commands.ask("sbatch", "--version", environment=environment)
    except commands.SlurmCommandError:
        return ()
    # Debian's packages print "slurm-wlm 24.11.5".
    return version_of(printed.split()[-1] if printed.split() else "")
