"""The commands of a script that start its work: steps of srun, launchers, Python programs."""

from __future__ import annotations

from typing import Final

from hpcddp.script.directives import Flag
from hpcddp.script.launch import Launch, launch_of
from hpcddp.script.parse import Script

LAUNCHERS: Final = frozenset({"torchrun", "accelerate"})
"""Kinds of commands that start the ranks of one node."""
_WORK: Final = frozenset({"torchrun", "accelerate", "deepspeed", "mpirun", "python"})
# The module that copies the data to the nodes.
_OWN_STEP: Final = "hpcddp.supervise"


def launches_of(script: Script) -> list[Launch]:
    """Return the commands that start the work of a script, in their order."""
    return [launch for command in script.commands if _is_work(launch := launch_of(command))]


def _is_work(launch: Launch) -> bool:
    if not launch.certainty or any(word.text == _OWN_STEP for word in launch.words):
        return False
    return launch.is_step or launch.kind in _WORK


def last_flag(script: Script, *names: str) -> Flag | None:
    """Return the flag that counts of those that sbatch reads, under one of these names; None without one."""
    return next((flag for flag in reversed(script.flags) if flag.name in names), None)


def flag_count(script: Script, *names: str) -> int | None:
    """Return the number that a flag of sbatch gives, the smaller one of a range; None without a number."""
    flag = last_flag(script, *names)
    return None if flag is None else count_in(flag.value)


def count_in(value: str | None) -> int | None:
    """Return the number at the beginning of a value, such as ``2`` of ``2-4``; None without one."""
    number = (value or "").partition("-")[0].partition(":")[0]
    return int(number) if number.isascii() and number.isdecimal() else None
