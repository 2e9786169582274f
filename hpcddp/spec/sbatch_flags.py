"""Which sbatch flags ``resources.sbatch`` may hold: any but those that hpcddp writes or needs itself."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

FLAG_PATTERN = r"[a-z][a-z0-9-]*"

_RUN_DIRECTORY = "hpcddp writes the job's output into the run directory"
_GPUS = "it has its own field; write resources.gpus_per_node"
_TASKS = "it has its own field; write resources.nodes and resources.tasks_per_node"

# Long flags (man sbatch), each with why it is refused and what helps.
REFUSED_FLAGS: Mapping[str, str] = MappingProxyType(
    {
        "account": "it has its own field; write resources.account",
        "array": "one job file is one job; remove it",
        "chdir": "relative paths mean the directory of submission; remove it and submit from there",
        "constraint": "it has its own field; write resources.constraint",
        "cpus-per-task": "it has its own field; write resources.cpus_per_task",
        "error": f"{_RUN_DIRECTORY}; set run_root",
        "exclude": "it has its own field; write resources.exclude",
        "exclusive": "it has its own field; write resources.exclusive",
        "export": "the tasks need the submitter's environment; write environment.env or environment.pass_env",
        "export-file": "the tasks need the submitter's environment; write environment.env or environment.pass_env",
        "gpus": _GPUS,
        "gpus-per-node": _GPUS,
        "gpus-per-socket": _GPUS,
        "gpus-per-task": _GPUS,
        "gres": _GPUS,
        "help": "sbatch would submit nothing; remove it",
        "job-name": "it has its own field; write name",
        "licenses": "it has its own field; write resources.licenses",
        "mem": "it has its own field; write resources.mem",
        "mem-per-cpu": "it has its own field; write resources.mem_per_cpu",
        "mem-per-gpu": "it has its own field; write resources.mem_per_gpu",
        "no-requeue": "it follows from requeue.causes; write causes: [] there",
        "nodefile": "it has its own field; write resources.nodelist",
        "nodelist": "it has its own field; write resources.nodelist",
        "nodes": "it has its own field; write resources.nodes",
        "ntasks": _TASKS,
        "ntasks-per-gpu": _TASKS,
        "ntasks-per-node": "it has its own field; write resources.tasks_per_node",
        "open-mode": "a requeue must not truncate the log; remove it",
        "output": f"{_RUN_DIRECTORY}; set run_root",
        "parsable": "hpcddp reads sbatch's answer itself; remove it",
        "partition": "it has its own field; write resources.partition",
        "qos": "it has its own field; write resources.qos",
        "requeue": "it follows from requeue.causes; write them there",
        "reservation": "it has its own field; write resources.reservation",
        "signal": "it has its own field; write requeue.signal_lead",
        "tasks-per-node": "it has its own field; write resources.tasks_per_node",
        "test-only": "sbatch would submit nothing; remove it",
        "time": "it has its own field; write resources.time_limit",
        "usage": "sbatch would submit nothing; remove it",
        "version": "sbatch would submit nothing; remove it",
        "wait": "submit returns at once; remove it and use hpcddp submit --follow",
        "wrap": "the script is the rendered one; remove it",
    }
)

_SHORT_FLAGS: Mapping[str, str] = MappingProxyType(
    {
        "A": "account",
        "C": "constraint",
        "D": "chdir",
        "F": "nodefile",
        "G": "gpus",
        "J": "job-name",
        "L": "licenses",
        "N": "nodes",
        "V": "version",
        "W": "wait",
        "a": "array",
        "c": "cpus-per-task",
        "e": "error",
        "h": "help",
        "n": "ntasks",
        "o": "output",
        "p": "partition",
        "q": "qos",
        "t": "time",
        "w": "nodelist",
        "x": "exclude",
    }
)


def refused_because(name: str) -> tuple[str, str] | None:
    """Return why ``resources.sbatch`` may not hold a flag, and what to write instead; None where it may.

    sbatch reads a long flag by any beginning of it that fits one flag alone (getopt_long), so that ``arr`` would be
    ``--array``: a beginning of a refused flag is refused with it.

    Args:
        name: the flag as the user wrote it, with or without dashes in front.
    """
    bare = name.strip().lstrip("-")
    word = _SHORT_FLAGS.get(bare, bare.lower().replace("_", "-").partition("=")[0])
    known = [flag for flag in REFUSED_FLAGS if flag.startswith(word)] if word else []
    if known:
        flag = word if word in known else known[0]
        why, _, instead = REFUSED_FLAGS[flag].partition("; ")
        return (f"--{flag} cannot be set here: {why}", instead)
    if len(word) == 1 or not re.fullmatch(FLAG_PATTERN, name, re.ASCII):
        likely = word if len(word) > 1 and re.fullmatch(FLAG_PATTERN, word, re.ASCII) else "mail-type"
        return ("a flag is the long name that man sbatch lists, without dashes in front", f"write for example {likely}")
    return None
