"""Environment of a new job: what it inherits from the submission, and the variables that hpcddp adds."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from hpcddp.errors import UserError

FOREIGN_PREFIXES: Final = ("SBATCH_", "SUBMITIT_", "TORCHELASTIC_", "HPCDDP_")
"""Variables with these prefixes belong to an outer job; Slurm sets none of them for a new one."""
_DROPPED_PREFIXES: Final = (*FOREIGN_PREFIXES, "SLURM_", "SLURMD_")
_KEPT: Final = frozenset({"SLURM_CONF"})
_UMASK: Final = "HPCDDP_UMASK"

# What srun reads as options (srun(1), INPUT ENVIRONMENT VARIABLES; src/srun/opt.c of Slurm 22.05 to 26.05), and what
# Slurm exports with them. Not here is what every job has of its own: its id, name, nodes, tasks and CPUS_PER_TASK.
_STEP_OPTIONS: Final = tuple(
    f"SLURM_{name}"
    for name in """
    ACCOUNT ACCTG_FREQ BCAST BCAST_EXCLUDE BURST_BUFFER CLUSTER_CONSTRAINT COMPRESS CONSOLIDATE_SEGMENTS CONSTRAINT
    CORE_SPEC CPUS_PER_GPU CPU_BIND CPU_BIND_LIST CPU_BIND_TYPE CPU_BIND_VERBOSE CPU_FREQ_REQ DELAY_BOOT DEPENDENCY
    DISABLE_STATUS DISTRIBUTION DIST_PLANESIZE EPILOG EXACT EXCLUSIVE EXPORT_ENV EXTERNAL_LAUNCHER GPUS GPUS_PER_NODE
    GPUS_PER_SOCKET GPUS_PER_TASK GPU_BIND GPU_FREQ GRES GRES_FLAGS HINT KILL_BAD_EXIT LABELIO MEM_BIND MEM_BIND_LIST
    MEM_BIND_PREFER MEM_BIND_SORT MEM_BIND_TYPE MEM_BIND_VERBOSE MEM_PER_CPU MEM_PER_GPU MEM_PER_NODE MPI_TYPE
    NCORES_PER_SOCKET NETWORK NO_KILL NSOCKETS_PER_NODE NTASKS_PER_CORE NTASKS_PER_GPU NTASKS_PER_SOCKET
    NTASKS_PER_TRES OOM_KILL_STEP OPEN_MODE OVERCOMMIT OVERLAP PARTITION POWER PROFILE PROLOG QOS REMOTE_CWD
    REQ_SWITCH RESERVATION RESV_PORTS SEND_LIBS SIGNAL SPREAD_JOB SPREAD_SEGMENTS SRUN_MULTI STDERRMODE STDINMODE
    STDOUTMODE TASK_EPILOG TASK_PROLOG THREADS THREADS_PER_CORE THREAD_SPEC TIMELIMIT TRES_BIND TRES_PER_TASK
    UNBUFFEREDIO USE_MIN_NODES WAIT WAIT4SWITCH WCKEY WORKING_DIR
    """.split()  # noqa: SIM905  ninety names
)
# sbatch and slurmd export some of them for the job itself, if it was submitted with this flag, and never the others.
_SET_BY_FLAG: Final = MappingProxyType(
    {
        "acctg-freq": ("SLURM_ACCTG_FREQ",),
        "cpu-freq": ("SLURM_CPU_FREQ_REQ",),
        "cpus-per-gpu": ("SLURM_CPUS_PER_GPU",),
        "distribution": ("SLURM_DISTRIBUTION", "SLURM_DIST_PLANESIZE"),
        "export": ("SLURM_EXPORT_ENV",),
        "gpu-freq": ("SLURM_GPU_FREQ",),
        "gpus-per-node": ("SLURM_GPUS_PER_NODE",),
        "hint": ("SLURM_HINT",),
        "mem": ("SLURM_MEM_PER_NODE",),
        "mem-bind": tuple(name for name in _STEP_OPTIONS if name.startswith("SLURM_MEM_BIND")),
        "mem-per-cpu": ("SLURM_MEM_PER_CPU",),
        "mem-per-gpu": ("SLURM_MEM_PER_GPU",),
        "network": ("SLURM_NETWORK",),
        "ntasks-per-core": ("SLURM_NTASKS_PER_CORE",),
        "ntasks-per-socket": ("SLURM_NTASKS_PER_SOCKET",),
        "overcommit": ("SLURM_OVERCOMMIT",),
        "profile": ("SLURM_PROFILE",),
        "threads-per-core": ("SLURM_THREADS_PER_CORE",),
        "wckey": ("SLURM_WCKEY",),
    }
)


def foreign_step_options(flags: Iterable[str]) -> list[str]:
    """Return the variables that a job script must unset before srun, because they can only be those of an outer job.

    Args:
        flags: the flags of the job's own directives, without dashes.
    """
    set_by_job = {name for flag in flags for name in _SET_BY_FLAG.get(flag, ())}
    return [name for name in _STEP_OPTIONS if name not in set_by_job]


def submission_environment(environment: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the environment that a new job inherits.

    sbatch reads ``SBATCH_*`` and some ``SLURM_*`` variables as options, which override the directives of the script
    (sbatch(1), INPUT ENVIRONMENT VARIABLES). The rank variables of an outer job are wrong in the new job.

    Returns:
        The environment without them, but with ``SLURM_CONF``; and the names that were dropped, sorted.
    """
    dropped = sorted(name for name in environment if name.startswith(_DROPPED_PREFIXES) and name not in _KEPT)
    inherited = {name: value for name, value in environment.items() if name not in dropped}
    return inherited, tuple(dropped)


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


AFTER = "HPCDDP_AFTER"
"""The environment variable with the runs and sweeps that must have finished before the job, a JSON list of paths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependency:
    """What a job waits for.

    Slurm only waits for the end of other jobs: since 24.05 it shows a job that has finished as preempted if it was
    preempted before. The start of the job looks whether the runs have finished.

    Args:
        conditions: the parts of the value of sbatch's ``--dependency``, such as ``afterany:12:13``.
        runs: the directories of the runs and sweeps that must have finished.
    """

    conditions: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()

    @property
    def text(self) -> str | None:
        """The value of sbatch's ``--dependency``; None waits for nothing."""
        return ",".join(self.conditions) or None

    @property
    def environment(self) -> dict[str, str]:
        """The variables for the script."""
        return {AFTER: json.dumps(self.runs)} if self.runs else {}

    def also(self, condition: str) -> Dependency:
        """Return the dependency that has another condition, such as ``afterany:12``."""
        return replace(self, conditions=(*self.conditions, condition))


NO_DEPENDENCY: Final = Dependency()


def runs_before(environment: Mapping[str, str]) -> list[Path]:
    """Return the directories of the runs and sweeps that must have finished before this job.

    Args:
        environment: the batch script's environment.

    Raises:
        UserError: the variable holds something else.
    """
    text = environment.get(AFTER, "[]")
    try:
        return [Path(path) for path in json.loads(text)]
    except (ValueError, TypeError):
        raise UserError(
            f"{AFTER} is {text!r}, which is no JSON list of paths; unset it, and submit the job again"
        ) from None


NO_LIMIT_S = 10 * 365 * 24 * 3600
"""The time limit of a local run without one: submitit needs a number."""
