"""What the shell text of a command calls, as far as it can be read: ``bash -c TEXT``, and scripts that are here."""

from __future__ import annotations

import re
import shlex
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import dropwhile
from pathlib import Path
from typing import Final

from hpcddp.jobfile.cluster import Cluster
from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.launchers import Launcher, launcher_of
from hpcddp.jobfile.placeholders import (
    RUN_PLACEHOLDERS,
    SHELLS,
    fill_run_placeholders,
    shell_script,
    shell_text_index,
)
from hpcddp.run.files import open_regular
from hpcddp.script.shell import Statement, read_shell
from hpcddp.script.syntax import BASH_SYNTAX, bash_error, interpreter_of, program_behind_starters
from hpcddp.submission.request import Obstacle

# What follows one of these may never run.
_LEAVES: Final = frozenset({("exit",), ("return",)})
_DIRECTIVE: Final = re.compile(r"^#SBATCH[ \t]+(.*\S)", re.MULTILINE)
_LARGEST_SCRIPT: Final = 1 << 18
_SHOWN: Final = 6
# How options of srun and their values begin; a value may be empty.
_VALUE_OF_SRUN: Final = frozenset({"", "-", *string.digits})


@dataclass(frozen=True, kw_only=True)
class ShellText:
    """The text that a shell runs.

    Args:
        name: what to call it in a sentence.
        shell: the name of the shell.
        file: the script; None for the text of ``-c``.
    """

    name: str
    shell: str
    text: str
    file: str | None = None

    @cached_property
    def statements(self) -> tuple[Statement, ...]:
        """What can be read of it."""
        return read_shell(self.text.replace("\r\n", "\n"))[0]

    @property
    def commands(self) -> list[list[str]]:
        """The simple commands, word by word, without what stands before their programs."""
        commands = (command for statement in self.statements for command in statement.commands)
        programs = (program_behind_starters(command.texts) for command in commands)
        return [program for program in programs if program]

    @property
    def is_certain(self) -> bool:
        """Whether each command is certainly run: the text has no branch, no function, and no command that ends it."""
        for statement in self.statements:
            if statement.compound is not None or statement.problem is not None:
                return False
            for command in statement.commands:
                if command.end in {"&&", "||"} or command.texts[:1] in _LEAVES:
                    return False
        return True


def shell_text_of(command: Sequence[str]) -> ShellText | None:
    """Return the text that a command gives to a shell; None if it gives none, or one that is not here."""
    words = program_behind_starters(command)
    if not words:
        return None
    shell = Path(words[0]).name
    if shell not in SHELLS:
        # A name without a slash is looked up in PATH.
        text = read_program(words[0]) if "/" in words[0] else ""
        interpreter = interpreter_of(text)
        if interpreter not in SHELLS:
            return None
        return ShellText(name=words[0], shell=interpreter, text=text, file=words[0])
    text_index = shell_text_index(words)
    if text_index is not None:
        return ShellText(name=f"the text of {words[0]} -c", shell=shell, text=words[text_index])
    file = shell_script(words)
    if file is None:
        return None
    return ShellText(name=file, shell=shell, text=read_program(file), file=file)


def shell_obstacles(spec: JobSpec, _: Cluster, environment: Mapping[str, str]) -> Iterator[Obstacle]:
    """Yield what in the shell text of a command cannot work in a task: srun, sbatch, a launcher for each task."""
    if spec.command is None or spec.environment.container is not None:
        return
    words = program_behind_starters(spec.command)
    if words and Path(words[0]).name == "sbatch":
        script = next((word for word in words[1:] if not word.startswith("-")), "SCRIPT")
        yield _submits(f"command is {shlex.join(words)}", spec, script=script)
    text = shell_text_of(spec.command)
    if text is None:
        return
    yield from _syntax_error(spec.command)
    for command in text.commands:
        name = Path(command[0]).name
        if name in {"srun", "salloc"} and "--overlap" not in command:
            # The options of srun and their values.
            program = list(dropwhile(lambda word: word[:1] in _VALUE_OF_SRUN, command[1:])) or ["PROGRAM"]
            yield Obstacle(
                sentence=f"{text.name} calls {shlex.join(command[:3])}, and hpcddp starts the tasks with srun itself: "
                "a step in a task waits for the CPUs of the task until the time limit; write --nodes and "
                f"--tasks-per-node, then -- {' '.join(program)}, or add --overlap to srun",
                certain=text.is_certain,
                can_force=False,
            )
        elif name == "sbatch":
            yield _submits(f"{text.name} calls {shlex.join(command[:3])}", spec, certain=text.is_certain)
        elif spec.tasks_per_node > 1 and (launcher := launcher_of_a_node(command, environment)):
            yield Obstacle(
                sentence=f"{text.name} starts {launcher.name} for the ranks of a node, and each of the "
                f"{spec.ranks_per_node} tasks of a node would start it; add --set launcher=own, with which one task on "
                "each node runs the command",
                # The launchers may know of each other; if they do not, the run fails and names them.
                certain=False,
            )
    if ignored := _DIRECTIVE.findall(text.text):
        more = f" and {len(ignored) - _SHOWN} more" if len(ignored) > _SHOWN else ""
        yield Obstacle(
            sentence=f"{text.name} has #SBATCH lines, which are ignored here: {' '.join(ignored[:_SHOWN])}{more}; "
            "give what is needed of them to hpcddp, before --",
            certain=False,
        )


def _syntax_error(command: tuple[str, ...]) -> Iterator[Obstacle]:
    """Yield shell text that bash cannot read, as the task gives it to bash: braces of a placeholder are filled in."""
    variables = dict.fromkeys(RUN_PLACEHOLDERS.values(), "value")
    text = shell_text_of(fill_run_placeholders(command, variables))
    error = None if text is None or text.shell not in BASH_SYNTAX else bash_error(text.text)
    if text is not None and error is not None:
        # Another machine may have another file of this name.
        may_differ = text.file is not None
        yield Obstacle(sentence=f"{text.name} is not valid bash ({error}); correct it", can_force=may_differ)


def _submits(what: str, spec: JobSpec, *, script: str = "SCRIPT", certain: bool = True) -> Obstacle:
    tasks = "the task" if spec.tasks == 1 else f"each of the {spec.tasks} tasks"
    return Obstacle(
        sentence=f"{what}, so that {tasks} would submit another job, and this one would end at once; give the script "
        f"to sbatch yourself, or run it in this job: -- bash {script}",
        certain=certain,
        can_force=False,
    )


def launcher_of_a_node(command: Sequence[str], environment: Mapping[str, str]) -> Launcher | None:
    """Return the launcher that a command is, if it starts several ranks on its node."""
    launcher = launcher_of(command, environment)
    if launcher is None or launcher.options is None:
        return None
    ranks = launcher.options.ranks
    one_by_default = launcher.options.launcher == "torchrun"
    return None if ranks == "1" or (ranks is None and one_by_default) else launcher


def read_program(file: str) -> str:
    """Return the text of a script; empty if it is missing, large, or no regular file that may be trusted."""
    try:
        with open_regular(Path(file), follow_links=True) as (stream, size):
            return stream.read().decode("utf-8", errors="replace") if size <= _LARGEST_SCRIPT else ""
    except (OSError, ValueError):
        return ""
