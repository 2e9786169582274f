"""The flags of sbatch and srun, and which of them take a value.

Measured with sbatch and srun of Slurm 22.05.8, 24.11.5 and 26.05.5; ``tests/cluster`` asks sbatch again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmFlags:
    """The flags of one command, without their dashes.

    Args:
        short: the long flag of each letter.
        with_value: the long flags whose value is required, so that it may be the next word.
        with_optional_value: those whose value, if there is one, follows ``=``.
        without_value: those without a value.
    """

    short: Mapping[str, str]
    with_value: frozenset[str]
    with_optional_value: frozenset[str]
    without_value: frozenset[str]

    def long_flags_of(self, beginning: str) -> list[str]:
        """Return the long flags that a word can mean: itself, or all flags that begin with it (getopt_long)."""
        flags = self.with_value | self.with_optional_value | self.without_value
        if beginning in flags:
            return [beginning]
        return sorted(flag for flag in flags if flag.startswith(beginning))


_SHARED_SHORT: Final = {
    "A": "account",
    "B": "extra-node-info",
    "C": "constraint",
    "D": "chdir",
    "F": "nodefile",
    "G": "gpus",
    "H": "hold",
    "J": "job-name",
    "L": "licenses",
    "M": "clusters",
    "N": "nodes",
    "O": "overcommit",
    "Q": "quiet",
    "S": "core-spec",
    "V": "version",
    "W": "wait",
    "b": "begin",
    "c": "cpus-per-task",
    "d": "dependency",
    "e": "error",
    "h": "help",
    "i": "input",
    "k": "no-kill",
    "m": "distribution",
    "n": "ntasks",
    "o": "output",
    "p": "partition",
    "q": "qos",
    "s": "oversubscribe",
    "t": "time",
    "v": "verbose",
    "w": "nodelist",
    "x": "exclude",
}
_SHARED_WITH_VALUE: Final = frozenset(
    {
        "account", "acctg-freq", "bb", "bbf", "begin", "chdir", "cluster", "cluster-constraint", "clusters", "comment",
        "constraint", "container", "container-id", "context", "core-spec", "cores-per-socket", "cpu-freq",
        "cpus-per-gpu", "cpus-per-task", "deadline", "delay-boot", "dependency", "distribution", "error", "exclude",
        "export", "extra", "extra-node-info", "gid", "gpu-bind", "gpu-freq", "gpus", "gpus-per-node",
        "gpus-per-socket", "gpus-per-task", "gres", "gres-flags", "hint", "input", "job-name", "licenses", "mail-type",
        "mail-user", "mcs-label", "mem", "mem-bind", "mem-per-cpu", "mem-per-gpu", "mincpus", "network", "nodefile",
        "nodelist", "nodes", "ntasks", "ntasks-per-core", "ntasks-per-gpu", "ntasks-per-node", "ntasks-per-socket",
        "open-mode", "output", "partition", "power", "prefer", "priority", "profile", "qos", "reservation",
        "segment", "signal", "sockets-per-node", "switches", "tasks-per-node", "thread-spec", "threads-per-core",
        "time", "time-min", "tmp", "tres-bind", "tres-per-task", "uid", "wckey",
    }
)  # fmt: skip
_SHARED_WITH_OPTIONAL_VALUE: Final = frozenset({"exclusive", "nice", "no-kill", "propagate", "resv-ports"})
_SHARED_WITHOUT_VALUE: Final = frozenset(
    {
        "consolidate-segments", "contiguous", "external", "help", "hold", "overcommit", "oversubscribe", "quiet",
        "reboot", "spread-job", "spread-segments", "stepmgr", "test-only", "usage", "use-min-nodes", "verbose",
        "version",
    }
)  # fmt: skip

SBATCH: Final = SlurmFlags(
    short=MappingProxyType({**_SHARED_SHORT, "a": "array"}),
    with_value=_SHARED_WITH_VALUE | {"array", "batch", "export-file", "kill-on-invalid-dep", "wait-all-nodes", "wrap"},
    with_optional_value=_SHARED_WITH_OPTIONAL_VALUE | {"get-user-env", "oom-kill-step"},
    without_value=_SHARED_WITHOUT_VALUE | {"ignore-pbs", "no-requeue", "parsable", "requeue", "wait"},
)
SRUN: Final = SlurmFlags(
    short=MappingProxyType(
        {
            **_SHARED_SHORT,
            "E": "preserve-env",
            "I": "immediate",
            "K": "kill-on-bad-exit",
            "T": "threads",
            "X": "disable-status",
            "Z": "no-allocate",
            "l": "label",
            "r": "relative",
            "u": "unbuffered",
        }
    ),
    with_value=_SHARED_WITH_VALUE
    | {
        "accel-bind", "bcast-exclude", "cpu-bind", "cpu_bind", "epilog", "het-group", "jobid", "mpi", "msg-timeout",
        "pack-group", "prolog", "relative", "slurmd-debug", "task-epilog", "task-prolog", "threads", "wait",
        # Of the plugin pyxis, and of CSCS.
        "container-env", "container-image", "container-mounts", "container-name", "container-save",
        "container-workdir", "environment",
    },
    with_optional_value=_SHARED_WITH_OPTIONAL_VALUE
    | {"bcast", "compress", "immediate", "kill-on-bad-exit", "overlap", "send-libs"},
    without_value=_SHARED_WITHOUT_VALUE
    | {
        "debugger-test", "disable-status", "exact", "interactive", "label", "multi-prog", "no-allocate",
        "preserve-env", "pty", "quit-on-interrupt", "unbuffered", "whole",
        # Of the plugin pyxis.
        "container-entrypoint", "container-mount-home", "container-readonly", "container-remap-root",
        "container-writable", "no-container-entrypoint", "no-container-mount-home", "no-container-remap-root",
    },
)  # fmt: skip
