"""Programs in place of Slurm's, which write down how they were called."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

_SBATCH = r"""#!/bin/bash
printf '%q ' "$@" >>"$RECORD/calls"; echo "first=${HPCDDP_SWEEP_FIRST:-0}" >>"$RECORD/calls"
number=$(wc -l <"$RECORD/calls")
[[ $number -ne ${REFUSED_CALL:-0} ]] || { echo "sbatch: error: ${REFUSAL:-refused}" >&2; exit 1; }
echo $((100 + number))
"""
_SCONTROL = r"""#!/bin/bash
[[ "$1 $2" != "show job" ]] || { echo "JobId=$3 ArrayJobId=$3 ArrayTaskId=0-99999 JobState=PENDING"; exit; }
echo "MaxArraySize            = ${MAX_ARRAY_SIZE:-1001}"
echo "SchedulerParameters     = ${SCHEDULER_PARAMETERS:-(null)}"
"""
_SCANCEL = r"""#!/bin/bash
printf '%s\n' "$@" >>"$RECORD/cancelled"
"""


@dataclass(frozen=True)
class FakeSlurm:
    """A directory with the programs and with what they wrote down."""

    directory: Path

    def environment(self, **more: str) -> dict[str, str]:
        """Return an environment whose Slurm this is."""
        return {"PATH": f"{self.directory / 'bin'}:/usr/bin:/bin", "RECORD": str(self.directory), **more}

    @property
    def calls(self) -> list[list[str]]:
        """The words of each call of sbatch, without those that are the same for all, and its offset."""
        path = self.directory / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [[word for word in shlex.split(line) if _matters(word)] for line in lines]

    @property
    def cancelled(self) -> list[str]:
        """The jobs that were cancelled."""
        path = self.directory / "cancelled"
        return path.read_text().splitlines() if path.exists() else []


def _matters(word: str) -> bool:
    return not word.startswith(("--parsable", "--chdir=")) and not word.endswith(("job.sbatch", ".sh"))


def make_fake_slurm(directory: Path) -> FakeSlurm:
    """Put the programs into a directory."""
    programs = {"sbatch": _SBATCH, "scontrol": _SCONTROL, "scancel": _SCANCEL, "srun": "#!/bin/bash\n"}
    for name, text in programs.items():
        path = directory / "bin" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o700)
    return FakeSlurm(directory)
