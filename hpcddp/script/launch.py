"""Finds the command of a script that starts the ranks, and what surrounds its program."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Final, Literal

from hpcddp.jobfile.launchers import (
    PYTHON,
    WORLD_OPTIONS,
    WORLD_OPTIONS_WITHOUT_VALUE,
    LauncherCommand,
    find_launcher,
    is_deepspeed,
    program_of_python,
)
from hpcddp.jobfile.placeholders import SHELLS, shell_text_index
from hpcddp.jobfile.slurm_flags import SRUN
from hpcddp.script.directives import Flag, read_flags
from hpcddp.script.shell import Command, Word, read_shell
from hpcddp.script.syntax import program_behind_starters

StartedBy = Literal["srun", "mpirun", "shell"]
"""``shell``: the batch script itself, on the first node alone."""

# Programs that prepare, tidy up or report, but do not train.
_HOUSEKEEPING: Final = frozenset(
    {"mkdir", "rm", "rmdir", "cp", "mv", "ln", "rsync", "tar", "unzip", "zip", "touch", "chmod", "sleep", "wait",
     "exit", "return", "true", "false", ":", "test", "[", "[[", "kill", "scancel", "sbatch", "sync", "sed", "grep",
     "awk", "cut", "head", "tail", "tee", "wc", "sort", "find", "basename", "dirname", "realpath", "readlink", "pip",
     "pip3", "uv", "git", "wget", "curl", "alias", "shift", "read", "let", "local", "continue", "break",
     "eval", "chown", "stat", "du", "df", "type",
     "wandb", "huggingface-cli", "hf", "seff", "scp", "sbcast", "xargs", "envsubst", "dos2unix",
     "nvidia-cuda-mps-control", "dcgmi", "sacctmgr", "sinfo", "ssh-keygen", "getopts"}
)  # fmt: skip
_HOUSEKEEPING_MODULES: Final = frozenset({"compileall", "venv", "pip", "ensurepip", "virtualenv", "json.tool"})
_NO_WORK: Final = frozenset(
    {"module", "activate", "export", "assignment", "set", "directory", "print", "trap", "control", "ssh"}
)
# How certain it is that a command starts the ranks.
_LAUNCHER: Final = 4
_STEP: Final = 3
_PYTHON: Final = 2
_PROGRAM: Final = 1
_NO_LAUNCH: Final = 0
_BEFORE_SRUN: Final = frozenset({"env", "timeout", "nice", "numactl", "stdbuf", "taskset"})
_VALUES_OF_MPIRUN: Final = MappingProxyType(
    {
        **dict.fromkeys(
            ("-np", "-n", "-N", "-c", "-x", "-o", "-H", "-host", "-hosts", "-hostfile", "-machinefile", "-f", "-ppn",
             "-bind-to", "-map-by", "-rank-by", "-npernode"),
            1,
        ),
        **dict.fromkeys(("-mca", "-env", "-genv"), 2),
    }
)  # fmt: skip


_LAUNCHER_NAMES: Final = frozenset(
    {"torchrun", "torch.distributed.run", "torch.distributed.launch", "launch", "accelerate-launch",
     "accelerate.commands.launch"}
)  # fmt: skip
MODULE_OPTIONS: Final = frozenset({"-m", "--module"})
_LAUNCHER_IN_TEXT: Final = re.compile(r"\b(?:torchrun|torch\.distributed|accelerate|deepspeed)\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A command of the script that starts a program.

    Args:
        command: the command, as it stands in the script.
        words: the program and its arguments.
        started_by: what starts the program.
        srun: the flags of srun.
        in_front_of_srun: the program that starts srun, with its arguments: ``timeout 23h``, ``env A=1``.
        certainty: how certain it is that this starts the ranks; 0 if it does not.
    """

    command: Command
    words: tuple[Word, ...]
    started_by: StartedBy = "shell"
    srun: tuple[Flag, ...] = ()
    in_front_of_srun: tuple[Word, ...] = ()
    certainty: int

    @property
    def kind(self) -> CommandKind:
        """What the program is for."""
        return "mpirun" if self.started_by == "mpirun" else kind_of_words(self.words)

    @property
    def is_step(self) -> bool:
        """Whether srun starts it."""
        return self.started_by == "srun"

    def srun_value(self, *names: str) -> str | None:
        """Return the value of the first of these flags that srun is given; None without one."""
        values = {flag.name: flag.value for flag in self.srun}
        return next((values[name] for name in names if name in values), None)

    @property
    def has_launcher(self) -> bool:
        """Whether the program is a launcher, or a shell that starts one."""
        return self.certainty == _LAUNCHER


def launch_of(command: Command) -> Launch:
    """Return what a command starts; ``certainty`` says whether that can be the ranks."""
    words = program_words(command.words)
    texts = [word.text for word in words]
    start = texts.index("srun") if "srun" in texts and texts[0] in _BEFORE_SRUN else 0
    kind = kind_of_words(words[start:])
    if kind == "srun":
        behind_srun = words[start + 1 :]
        flags, count = read_flags([(0, word.text) for word in behind_srun], SRUN, stops_at_word=True)
        program = program_words(behind_srun[count:])
        return Launch(
            command=command,
            words=program,
            started_by="srun",
            srun=tuple(flags),
            in_front_of_srun=words[:start],
            certainty=_certainty_of_step(program),
        )
    if kind == "mpirun":
        program = program_words(_behind_mpirun(words))
        return Launch(command=command, words=program, started_by="mpirun", certainty=_certainty_of_step(program))
    return Launch(command=command, words=words, certainty=_certainty(words))


def _certainty_of_step(words: tuple[Word, ...]) -> int:
    """Return the certainty of a program behind srun or mpirun, which may be any but one that only reports."""
    certainty = _certainty(words)
    is_program = certainty in {_PYTHON, _PROGRAM} or any(word.text.startswith("$") for word in words[:1])
    return _STEP if is_program else certainty


def _certainty(words: tuple[Word, ...]) -> int:
    kind = kind_of_words(words)
    if not words or kind in _NO_WORK:
        return _NO_LAUNCH
    texts = [word.text for word in words]
    name = PurePosixPath(texts[0]).name
    text_index = shell_text_index(texts) if name in SHELLS else None
    if kind in {"torchrun", "accelerate", "deepspeed"}:
        return _LAUNCHER
    if text_index is not None:
        return _certainty_of_text(texts[text_index])
    if kind == "python":
        runs_module = "-m" in texts[:-1] and texts[texts.index("-m") + 1] in _HOUSEKEEPING_MODULES
        return _NO_LAUNCH if runs_module or gives_code(words) else _PYTHON
    return _NO_LAUNCH if name in _HOUSEKEEPING or "$" in texts[0] else _PROGRAM


def _certainty_of_text(text: str) -> int:
    """Return the certainty of what a shell runs: the highest one of its commands; a variable may hold a program."""
    if _LAUNCHER_IN_TEXT.search(text):
        return _LAUNCHER
    commands = (command for statement in read_shell(text)[0] for command in statement.commands)
    starts_program = text.startswith("$") or any(launch_of(command).certainty for command in commands)
    return _PROGRAM if starts_program else _NO_LAUNCH


def gives_code(words: tuple[Word, ...]) -> bool:
    """Return whether a command gives Python its code itself: behind ``-c``, or in a here-document."""
    if kind_of_words(words) != "python":
        return False
    texts = [word.text for word in words]
    if PYTHON.fullmatch(PurePosixPath(texts[0]).name):
        return program_of_python(texts) == (None, None)
    # Behind env or uv run.
    return "-c" in texts


def _behind_mpirun(words: tuple[Word, ...]) -> tuple[Word, ...]:
    rest = words[1:]
    while rest and rest[0].text.startswith("-"):
        option = f"-{rest[0].text.lstrip('-')}"
        rest = rest[1 + _VALUES_OF_MPIRUN.get(option, 0) :]
    return rest


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherWords:
    """The parts of a launcher's command.

    Args:
        head: the words up to the launcher's own.
        options: its options that the job file keeps.
        world: its options that hpcddp fills in, with their values.
        program: what it launches: a script or the name of a module, with its arguments.
        command: all of it, as the job file reads it.
    """

    head: tuple[Word, ...]
    options: tuple[Word, ...]
    world: tuple[Word, ...]
    program: tuple[Word, ...]
    command: LauncherCommand


def split_launcher(words: tuple[Word, ...]) -> LauncherWords | None:
    """Return the parts of a launcher's command.

    None for another program, with options that are not known, where it is not seen what it launches, and where a shell
    has to expand what the launcher itself reads: its options, or the name of its program.
    """
    texts = tuple(word.text for word in words)
    launcher = find_launcher(texts, {})
    if launcher is None or launcher.options is None:
        return None
    command = launcher.options
    head = next((index for index, text in enumerate(texts, 1) if PurePosixPath(text).name in _LAUNCHER_NAMES), 1)
    start = len(words) - len(command.arguments)
    if command.launcher == "accelerate":
        # The job file does not split its options from its program.
        start = head
        while start < len(texts) and not (texts[start].endswith(".py") or texts[start - 1] in MODULE_OPTIONS):
            start += 1
    options: list[Word] = []
    world: list[Word] = []
    position = head
    while position < start:
        option, equals, _ = texts[position].replace("_", "-").partition("=")
        if option not in WORLD_OPTIONS[command.launcher]:
            options.append(words[position])
            position += 1
            continue
        count = 2
        if equals or option in WORLD_OPTIONS_WITHOUT_VALUE:
            count = 1
        world += words[position : position + count]
        position += count
    if start == len(words) or any(word.expands for word in (*words[:head], *options, words[start])):
        return None
    return LauncherWords(
        head=words[:head], options=tuple(options), world=tuple(world), program=words[start:], command=command
    )


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
            ("echo", "printf", "date", "hostname", "pwd", "nvidia-smi", "rocm-smi", "amd-smi", "env", "printenv",
             "lscpu", "which", "cat", "ls", "uname", "whoami", "id", "free", "scontrol", "squeue", "sacct"),
            "print",
        ),
        **dict.fromkeys(("for", "case", "select"), "control"),
        **dict.fromkeys(
            ("mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun", "jsrun", "aprun", "ibrun"), "mpirun"
        ),
        **dict.fromkeys(("ssh", "pdsh", "clush"), "ssh"),
        "trap": "trap",
        "srun": "srun",
    }
)  # fmt: skip
# -p is an option of time and of command; TACC has task_affinity, which stands behind ibrun.
_IN_FRONT: Final = frozenset({"exec", "nohup", "time", "command", "builtin", "-p", "task_affinity"})


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
    elif name == "env" and (program := program_behind_starters(texts)):
        kind = kind_of_words(words[-len(program) :])
    elif name == "eval" and re.search(r"conda|mamba|pyenv", " ".join(texts[1:])):
        kind = "activate"
    return kind


def program_words(words: tuple[Word, ...]) -> tuple[Word, ...]:
    """Return the words of a command from its program on: without ``exec``, ``nohup``, ``time``."""
    while words and words[0].text in _IN_FRONT:
        words = words[1:]
    return words
