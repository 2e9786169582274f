"""The commands of a script that start its work: steps of srun, launchers, Python programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from hpcddp.script.directives import Flag
from hpcddp.script.launch import HOUSEKEEPING, HOUSEKEEPING_MODULES, kind_of, kind_of_words, program_words, split_srun
from hpcddp.script.parse import Script
from hpcddp.script.shell import Command

LAUNCHERS: Final = frozenset({"torchrun", "accelerate"})
"""Kinds of commands that start the ranks of one node."""
_WORK: Final = frozenset({"torchrun", "accelerate", "deepspeed", "mpirun", "python"})
# Programs that prepare the work, or look at a node.
_PREPARATIONS: Final = frozenset({"print", "module", "activate", "export", "set", "directory"})
# The module that copies the data to the nodes.
_OWN_STEP: Final = "hpcddp.supervise"
_SHORT_PYTHON: Final = frozenset({"-c", "-V", "--version"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A command that starts the work of a script.

    Args:
        kind: what it starts, a kind of ``hpcddp.script.launch``.
        words: the program that it starts, and its arguments.
        srun_flags: the flags of srun; None if the batch shell itself starts the program.
    """

    command: Command
    kind: str
    words: tuple[str, ...]
    srun_flags: tuple[Flag, ...] | None

    @property
    def is_step(self) -> bool:
        """Whether srun starts it."""
        return self.srun_flags is not None

    def srun_value(self, *names: str) -> str | None:
        """Return the value of the first of these flags that srun is given; None without one."""
        values = {flag.name: flag.value for flag in self.srun_flags or ()}
        return next((values[name] for name in names if name in values), None)


def launches_of(script: Script) -> list[Launch]:
    """Return the commands that start the work of a script, in their order."""
    return list(_launches(script))


def _launches(script: Script) -> Iterator[Launch]:
    for command in script.commands:
        words = program_words(command.words)
        kind = str(kind_of(command))
        srun_flags = None
        if kind == "srun":
            flags, words = split_srun(words)
            srun_flags = tuple(flags)
            kind = str(kind_of_words(words))
        texts = tuple(word.text for word in words)
        is_work = kind in _WORK if srun_flags is None else kind not in _PREPARATIONS
        if texts and is_work and not _only_prepares(texts, kind):
            yield Launch(command=command, kind=kind, words=texts, srun_flags=srun_flags)


def _only_prepares(words: tuple[str, ...], kind: str) -> bool:
    """Return whether a program only prepares the work: it copies, installs, or prints a version."""
    if words[0].rpartition("/")[2] in HOUSEKEEPING or _OWN_STEP in words:
        return True
    if kind != "python" or len(words) == 1:
        return False
    return words[1] in _SHORT_PYTHON or (words[1] == "-m" and words[2:3] != () and words[2] in HOUSEKEEPING_MODULES)


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
