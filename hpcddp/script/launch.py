"""Finds the command of a script that starts the ranks, and what surrounds its program."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Final, Literal

from hpcddp.jobfile.launchers import (
    PYTHON,
    WORLD_OPTIONS,
    WORLD_OPTIONS_WITHOUT_VALUE,
    LauncherName,
    find_launcher,
    is_deepspeed,
    program_of_python,
)
from hpcddp.jobfile.placeholders import SHELLS, shell_text_index
from hpcddp.jobfile.slurm_flags import SRUN
from hpcddp.script.directives import Flag, read_flags
from hpcddp.script.shell import Command, Statement, Word, read_shell
from hpcddp.script.syntax import program_behind_starters

StartedBy = Literal["srun", "mpirun", "ssh", "shell"]
"""``shell``: the batch script itself, on the first node alone."""

# Programs that prepare, tidy up or report, but do not train.
HOUSEKEEPING: Final = frozenset(
    {"mkdir", "rm", "rmdir", "cp", "mv", "ln", "rsync", "tar", "unzip", "zip", "touch", "chmod", "sleep", "wait",
     "exit", "return", "true", "false", ":", "test", "[", "[[", "kill", "scancel", "sbatch", "sync", "sed", "grep",
     "awk", "cut", "head", "tail", "tee", "wc", "sort", "find", "basename", "dirname", "realpath", "readlink", "pip",
     "pip3", "uv", "git", "wget", "curl", "module", "alias", "shift", "read", "let", "local", "continue", "break",
     "exec", "eval", "chown", "stat", "du", "df", "ulimit", "type", "command",
     "wandb", "huggingface-cli", "hf", "sacct", "seff", "scp", "sbcast", "xargs", "envsubst", "dos2unix",
     "nvidia-cuda-mps-control", "dcgmi", "sacctmgr", "sinfo", "ssh-keygen", "getopts", "printenv"}
)  # fmt: skip
HOUSEKEEPING_MODULES: Final = frozenset({"compileall", "venv", "pip", "ensurepip", "virtualenv", "json.tool"})
_PREPARING: Final = frozenset(
    {"module", "activate", "export", "assignment", "set", "directory", "print", "trap", "control"}
)
# How certain it is that a command starts the ranks.
_LAUNCHER: Final = 4
_STEP: Final = 3
_PYTHON: Final = 2
_PROGRAM: Final = 1
_NO_LAUNCH: Final = 0
_MPIRUN_VALUES: Final = frozenset(
    {"-np", "-n", "-N", "-c", "-x", "-H", "-host", "-hosts", "-hostfile", "-machinefile", "-f", "-ppn", "-bind-to",
     "-map-by", "-rank-by", "-npernode", "-env", "-genv"}
)  # fmt: skip
_MPIRUN_TWO_VALUES: Final = frozenset({"-mca", "-env", "-genv"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A command of the script that starts a program.

    Args:
        command: the command, as it stands in the script.
        words: the program and its arguments.
        started_by: what starts the program.
        before: the statements that run in front of the program in the text that a shell gets (``bash -c TEXT``).
        certainty: how certain it is that this starts the ranks; 0 if it does not.
    """

    command: Command
    words: tuple[Word, ...]
    started_by: StartedBy = "shell"
    srun: tuple[Flag, ...] = ()
    before: tuple[Statement, ...] = ()
    certainty: int

    @property
    def texts(self) -> tuple[str, ...]:
        """The program and its arguments, without their quotes."""
        return tuple(word.text for word in self.words)

    @property
    def launcher(self) -> LauncherName | None:
        """The launcher that the program is, also in the text of a shell; None for another program."""
        return launcher_name(self.words)

    @property
    def parts(self) -> LauncherWords | None:
        """The parts of the launcher's command; None for another program.

        None, too, where a shell has to expand what the launcher itself reads: its options, or the name of its program.
        """
        name = self.launcher
        if name is None or PurePosixPath(self.words[0].text).name in SHELLS:
            return None
        parts = split_launcher(self.words, name)
        read_by_launcher = (*parts.head, *parts.options, *parts.program[:1])
        return None if any(word.expands for word in read_by_launcher) else parts


def launcher_name(words: Sequence[Word]) -> LauncherName | None:
    """Return the launcher that a command begins with, also one with options that are not known; None for others."""
    kind = kind_of_words(tuple(words))
    if kind == "torchrun":
        return "torchrun"
    return "accelerate" if kind == "accelerate" else None


def launch_of(command: Command) -> Launch:
    """Return what a command starts; ``certainty`` says whether that can be the ranks."""
    return _read_launch(Launch(command=command, words=program_words(command.words), certainty=_NO_LAUNCH))


def _read_launch(launch: Launch) -> Launch:
    words = launch.words
    kind = kind_of_words(words)
    if not words or kind in _PREPARING:
        return launch
    name = PurePosixPath(words[0].text).name
    if kind == "srun":
        flags, program = split_srun(words)
        return _read_step(replace(launch, words=program, started_by="srun", srun=tuple(flags)))
    if kind == "mpirun":
        return _read_step(replace(launch, words=_behind_mpirun(words), started_by="mpirun"))
    if kind == "ssh":
        return _read_ssh(launch)
    if name in SHELLS and len(words) > 1:
        return _read_shell_text(launch)
    return replace(launch, certainty=_certainty(words))


def _read_step(launch: Launch) -> Launch:
    """Return the program behind srun or mpirun: any program can be the ranks there, except one that only reports."""
    inner = _read_launch(launch)
    if inner.certainty in {_PYTHON, _PROGRAM} or any(word.text.startswith("$") for word in launch.words[:1]):
        return replace(inner, certainty=_STEP)
    return inner


def _certainty(words: tuple[Word, ...]) -> int:
    kind = kind_of_words(words)
    texts = [word.text for word in words]
    if kind in {"torchrun", "accelerate", "deepspeed"}:
        return _LAUNCHER
    if kind == "python":
        runs_module = "-m" in texts[:-1] and texts[texts.index("-m") + 1] in HOUSEKEEPING_MODULES
        return _NO_LAUNCH if runs_module or gives_code(words) else _PYTHON
    name = PurePosixPath(texts[0]).name
    return _NO_LAUNCH if name in HOUSEKEEPING or "$" in texts[0] else _PROGRAM


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
        count = 1
        if option in _MPIRUN_TWO_VALUES:
            count = 3
        elif option in _MPIRUN_VALUES:
            count = 2
        rest = rest[count:]
    return rest


def _read_ssh(launch: Launch) -> Launch:
    """Return the launcher in the text that ssh runs on another host."""
    inner = _launch_in_text(launch, " ".join(word.text for word in launch.words[2:]))
    if inner is None or inner.certainty < _PYTHON:
        return launch
    return replace(inner, started_by="ssh")


def _read_shell_text(launch: Launch) -> Launch:
    """Return the launcher in the text of ``bash -c TEXT``; another program stays with its shell."""
    text_index = shell_text_index(launch.texts)
    if text_index is None:
        return replace(launch, certainty=_PROGRAM)
    text = launch.texts[text_index]
    inner = _launch_in_text(launch, text)
    if inner is None:
        # A variable may hold the program.
        certainty = _PROGRAM if text.startswith("$") else _NO_LAUNCH
        return replace(launch, certainty=certainty)
    if inner.parts is not None or (inner.certainty == _PYTHON and not inner.before):
        return inner
    return replace(launch, certainty=_LAUNCHER if inner.certainty == _LAUNCHER else _PROGRAM)


def _launch_in_text(launch: Launch, text: str) -> Launch | None:
    """Return the last command of a text that starts a program, with the statements in front of it."""
    statements, _ = read_shell(text)
    best_launch: Launch | None = None
    for index, statement in enumerate(statements):
        for command in statement.commands:
            inner = _read_launch(replace(launch, words=program_words(command.words), certainty=_NO_LAUNCH))
            if inner.certainty and (best_launch is None or inner.certainty >= best_launch.certainty):
                before = [*statements[:index], *_commands_in_front(statement, command)]
                best_launch = replace(inner, before=(*before, *inner.before))
    return best_launch


def _commands_in_front(statement: Statement, last: Command) -> Iterator[Statement]:
    """Yield the commands of a list, ``A && B && last``, as statements of their own."""
    for command in statement.commands:
        if command is last:
            return
        text = " ".join(word.written for word in (*command.assignments, *command.words))
        yield Statement(line=command.line, last_line=command.last_line, text=text, commands=(replace(command, end=""),))


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherWords:
    """The parts of a launcher's command.

    Args:
        head: the launcher itself.
        options: its options that the job file keeps.
        world: its options that hpcddp fills in, with their values.
        program: what it launches: a script or the name of a module, with its arguments.
        ranks: the number of ranks that the options state, as text; None if they do not.
        counts_all_nodes: whether that is the number of ranks on all nodes, not on each.
    """

    head: tuple[Word, ...]
    options: tuple[Word, ...]
    world: tuple[Word, ...]
    program: tuple[Word, ...]
    ranks: str | None
    counts_all_nodes: bool


def split_launcher(words: tuple[Word, ...], name: LauncherName) -> LauncherWords:
    """Return the parts of a command that begins with a launcher."""
    texts = tuple(word.text for word in words)
    head = _head_length(texts)
    start = max(head, _program_start(texts, head, name))
    options: list[Word] = []
    world: list[Word] = []
    ranks = None
    position = head
    while position < start:
        written, equals, value = texts[position].partition("=")
        option = written.replace("_", "-")
        if option not in WORLD_OPTIONS[name]:
            options.append(words[position])
            position += 1
            continue
        count = 2
        if equals or option in WORLD_OPTIONS_WITHOUT_VALUE:
            count = 1
        if option in {"--nproc-per-node", "--num-processes"}:
            ranks = value if equals else next(iter(texts[position + 1 :]), None)
        world += words[position : position + count]
        position += count
    if options and options[-1].text == "--":
        options.pop()
    return LauncherWords(
        head=words[:head],
        options=tuple(options),
        world=tuple(world),
        program=words[start:],
        ranks=ranks,
        counts_all_nodes=name == "accelerate",
    )


def _head_length(texts: Sequence[str]) -> int:
    """Return the number of words of the launcher itself: ``python -m torch.distributed.run`` has three."""
    names = {"torchrun", "accelerate-launch"}
    for position, text in enumerate(texts):
        name = PurePosixPath(text).name
        if name == "launch" and position > 0 and "accelerate" in texts[position - 1]:
            return position + 1
        if name in names or text in {
            "torch.distributed.run",
            "torch.distributed.launch",
            "accelerate.commands.launch",
        }:
            return position + 1
    return 1


def _program_start(texts: tuple[str, ...], head: int, name: LauncherName) -> int:
    launcher = find_launcher(texts, {})
    if name == "torchrun" and launcher is not None and launcher.options is not None:
        return len(texts) - len(launcher.options.arguments)
    script = next((index for index, text in enumerate(texts) if index >= head and text.endswith(".py")), None)
    module = next((index + 1 for index, text in enumerate(texts) if index >= head and text in {"-m", "--module"}), None)
    starts = [start for start in (script, module) if start is not None]
    return min(starts, default=_first_operand(texts, head))


def _first_operand(texts: tuple[str, ...], head: int) -> int:
    """Return where the first word stands that is no option and follows none: it may be an option's value else."""
    for position in range(head, len(texts)):
        is_value = position > head and texts[position - 1].startswith("-") and "=" not in texts[position - 1]
        if not texts[position].startswith("-") and not is_value:
            return position
    return len(texts)


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
