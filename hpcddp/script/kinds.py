"""What a command of a script is for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal

from hpcddp.jobfile.launchers import PYTHON, find_launcher, is_deepspeed
from hpcddp.jobfile.slurm_flags import SRUN
from hpcddp.script.directives import Flag, read_flags
from hpcddp.script.shell import Command, Word
from hpcddp.script.syntax import program_behind_starters

CommandKind = Literal[
    "module", "activate", "export", "assignment", "set", "directory", "print", "trap", "control",
    "srun", "torchrun", "accelerate", "deepspeed", "mpirun", "ssh", "python", "other",
]  # fmt: skip

_KINDS: Final[Mapping[str, CommandKind]] = MappingProxyType(
    {
        **dict.fromkeys(("module", "ml", "spack"), "module"),
        **dict.fromkeys(("source", ".", "conda", "mamba", "micromamba", "workon", "pyenv"), "activate"),
        **dict.fromkeys(("export", "declare", "typeset", "readonly", "unset"), "export"),
        **dict.fromkeys(("set", "shopt", "ulimit", "umask"), "set"),
        **dict.fromkeys(("cd", "pushd", "popd"), "directory"),
        **dict.fromkeys(
            ("echo", "printf", "date", "hostname", "pwd", "nvidia-smi", "rocm-smi", "env", "printenv", "lscpu", "which",
             "cat", "ls", "uname", "whoami", "id", "free", "scontrol", "squeue", "sacct"),
            "print",
        ),
        **dict.fromkeys(("for", "case", "select"), "control"),
        **dict.fromkeys(("mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun", "jsrun", "aprun"), "mpirun"),
        **dict.fromkeys(("ssh", "pdsh", "clush"), "ssh"),
        "trap": "trap",
        "srun": "srun",
    }
)  # fmt: skip
_IN_FRONT: Final = frozenset({"exec", "nohup", "time", "command", "builtin"})


def kind_of(command: Command) -> CommandKind:
    """Return what a command is for, by the program that it starts; a program that is not known is ``other``."""
    return kind_of_words(program_words(command.words), has_assignments=bool(command.assignments))


def kind_of_words(words: tuple[Word, ...], *, has_assignments: bool = False) -> CommandKind:
    """Return what a program with its arguments is for.

    Args:
        words: the words, without assignments.
        has_assignments: whether assignments stand in front of them.
    """
    if not words:
        return "assignment" if has_assignments else "other"
    texts = tuple(word.text for word in words)
    name = texts[0].rpartition("/")[2] or texts[0]
    launcher = find_launcher(texts, {})
    kind: CommandKind = _KINDS.get(name, "other")
    if launcher is not None:
        kind = "accelerate" if "accelerate" in launcher.name else "torchrun"
    elif is_deepspeed(texts):
        kind = "deepspeed"
    elif PYTHON.fullmatch(name) or texts[:2] == ("uv", "run"):
        kind = "python"
    elif name == "env" and (program := _behind_env(words)):
        kind = kind_of_words(program)
    elif name == "eval" and re.search(r"conda|mamba|pyenv", " ".join(texts[1:])):
        kind = "activate"
    return kind


def _behind_env(words: tuple[Word, ...]) -> tuple[Word, ...]:
    program = program_behind_starters([word.text for word in words])
    return words[len(words) - len(program) :]


def program_words(words: tuple[Word, ...]) -> tuple[Word, ...]:
    """Return the words of a command from its program on: without ``exec``, ``nohup``, ``time``."""
    while words and words[0].text in _IN_FRONT:
        words = words[1:]
    return words


def split_srun(words: tuple[Word, ...]) -> tuple[list[Flag], tuple[Word, ...]]:
    """Return the flags of an srun command, and the program with its arguments.

    Args:
        words: the words from ``srun`` on.
    """
    flags, count = read_flags([(0, word.text) for word in words[1:]], SRUN, stops_at_word=True)
    return flags, words[1 + count :]
