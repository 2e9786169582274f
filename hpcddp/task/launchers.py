"""Find torchrun and ``accelerate launch`` in a command: how many launchers share a world, and what they launch."""

from __future__ import annotations

import re
import shlex
from argparse import REMAINDER, ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import dropwhile, groupby, pairwise, takewhile
from pathlib import Path
from typing import Final, NoReturn

PYTHON: Final = re.compile(r"python[0-9.]*", re.ASCII)
# python(1): the options that take a separate argument.
PYTHON_OPTIONS_WITH_VALUE: Final = ("-W", "-X")
_MODULE: Final = re.compile("-[bBdEiIOPqsSuvx]*m", re.ASCII)

_TORCHRUN: Final = frozenset({"torchrun", "torch.distributed.run", "torch.distributed.launch"})
_ACCELERATE: Final = "accelerate launch"
_ACCELERATE_LAUNCH: Final = frozenset({"accelerate-launch", "accelerate.commands.launch"})
_ACCELERATE_CLI: Final = frozenset({"accelerate", "accelerate.commands.accelerate_cli"})
# torch/distributed/run.py, get_args_parser; --use-env is torch.distributed.launch's.
_TORCHRUN_FLAGS: Final = (
    "--standalone", "-m/--module", "--no-python", "--run-path", "--virtual-local-rank", "--use-env",
)  # fmt: skip
_TORCHRUN_VALUES: Final = (
    "--nnodes", "--nproc-per-node", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--max-restarts",
    "--monitor-interval", "--start-method", "--event-log-handler", "--role", "--log-dir", "-r/--redirects", "-t/--tee",
    "--log-line-prefix-template", "--local-ranks-filter", "--duplicate-stdout-filters", "--duplicate-stderr-filters",
    "--node-rank", "--master-addr", "--master-port", "--local-addr", "--logs-specs", "--numa-binding",
    "--signals-to-handle", "--shutdown-timeout",
)  # fmt: skip
# uv run --help; with an option that is missing here, the launcher is found while the program runs (world_check.py).
_UV_FLAGS: Final = (
    "--active", "--all-extras", "--all-groups", "--all-packages", "--exact", "--frozen", "--isolated", "--locked",
    "-m/--module", "-n/--no-cache", "--no-dev", "--no-env-file", "--no-progress", "--no-project", "--no-sync",
    "--offline", "-q/--quiet", "-v/--verbose",
)  # fmt: skip
_UV_VALUES: Final = (
    "--directory", "--env-file", "--extra", "--group", "--index", "-i/--index-url", "--no-extra", "--no-group",
    "--only-group", "--package", "--project", "-p/--python", "-w/--with", "--with-editable", "--with-requirements",
)  # fmt: skip
_SHELLS: Final = frozenset({"bash", "dash", "ksh", "sh", "zsh"})
_SHELL_COMMAND_OPTION: Final = re.compile(r"-[a-zA-Z]*c[a-zA-Z]*", re.ASCII)
_SHELL_CONDITIONS: Final = frozenset({"if", "case", "for", "while", "until", "select", "[", "[[", "test", "||"})
_BEFORE_A_COMMAND: Final = frozenset({"exec", "time", "nohup"})
_ASSIGNMENT: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.ASCII | re.DOTALL)
_RANGE: Final = re.compile(r"([0-9]{1,9})(?::([0-9]{1,9}))?", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """A program that starts the processes of a world.

    Args:
        name: its name.
        option: its option for the number of launchers that share a world.
        shared_by: the smallest and the largest number of launchers that share a world; None if it is not known.
        host: the host of the rendezvous; None if the command does not give it.
        may_inherit: whether its process may be a rank of the world in its own environment variables.
        program: the command that it launches; empty if it is not known.
    """

    name: str
    option: str
    shared_by: tuple[int, int] | None = None
    host: str | None = None
    may_inherit: bool = False
    program: tuple[str, ...] = ()

    @property
    def is_alone(self) -> bool:
        """Whether its processes are certainly a world without any other launcher."""
        return self.shared_by is not None and self.shared_by[1] == 1 and not self.may_inherit

    def obstacle(self, *, tasks: int, nodes: int) -> str | None:
        """Return why the launchers of all tasks cannot share one world, as part of a sentence; None if they can.

        Args:
            tasks: tasks of the job, more than one; each starts a launcher.
            nodes: nodes of the job.
        """
        if self.shared_by is None:
            return None
        fewest, most = self.shared_by
        if most == 1:
            return f"each of the {tasks} tasks would start a training of its own"
        if not fewest <= tasks <= most:
            stated = f"{most}" if fewest == most else f"{fewest}:{most}"
            return (
                f"{self.option} is {stated}, but the job has {tasks} tasks, each of which would start one {self.name}"
            )
        if nodes > 1 and _is_loopback(self.host or ""):
            return f"{self.host} means another host on each of the {nodes} nodes, so that they would not meet"
        return None

    @property
    def advice(self) -> str:
        """The change that helps, as part of a sentence."""
        return f"leave {self.name} and its options out, every task is a rank already"


class _Parser(ArgumentParser):
    """A parser that raises ``ValueError`` instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def find_launcher(words: Sequence[str], environment: Mapping[str, str]) -> Launcher | None:
    """Return the launcher that a command starts, also behind ``env``, ``uv run`` or ``bash -c``; None if there is none.

    Args:
        words: the command.
        environment: its environment.
    """
    words = tuple(words)
    name = Path(words[0]).name if words else ""
    try:
        if name in _SHELLS:
            return _in_shell(words, environment)
        if name == "env":
            return _behind_env(words, environment)
        if name == "uv" and words[1:2] == ("run",):
            return _behind_uv(words, environment)
    except ValueError:
        # An unknown option, or an unclosed quote.
        return None
    return launcher_of(words, environment)


def launcher_of(words: Sequence[str], environment: Mapping[str, str]) -> Launcher | None:
    """Return the launcher that a process with this command line is; the arguments are those of ``find_launcher``."""
    words = tuple(words)
    name, rest, python = _program_of(words)
    if name in _ACCELERATE_CLI and rest[:1] == ("launch",):
        name, rest = _ACCELERATE, rest[1:]
    try:
        if name in _TORCHRUN:
            return _torchrun(name, rest, environment, python)
        if name == _ACCELERATE or name in _ACCELERATE_LAUNCH:
            return _accelerate(rest, python)
    except ValueError:
        return Launcher(name=name, option="")
    return None


def _program_of(words: tuple[str, ...]) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Return the program, or the module or script that Python runs; its arguments; and the command for Python."""
    if not words or not PYTHON.fullmatch(Path(words[0]).name):
        return Path(words[0]).name if words else "", words[1:], ("python",)
    for number, word in enumerate(words[1:], 1):
        if _MODULE.fullmatch(word) and number + 1 < len(words):
            return words[number + 1], words[number + 2 :], words[:number]
        if word.startswith("-c"):
            break
        if not word.startswith("-") and words[number - 1] not in PYTHON_OPTIONS_WITH_VALUE:
            return Path(word).name, words[number + 1 :], ("python",)
    return "", (), ()


def _torchrun(name: str, words: tuple[str, ...], environment: Mapping[str, str], python: tuple[str, ...]) -> Launcher:
    options, program = _parsed(words, _TORCHRUN_FLAGS, _TORCHRUN_VALUES)
    if not options.no_python:
        program = (*python, *(("-m",) if options.module else ()), *program)
    # The default of an option is the variable PET_<NAME> (torch/distributed/argparse_util.py).
    stated = "1" if options.standalone else options.nnodes or environment.get("PET_NNODES", "1")
    numbers = _RANGE.fullmatch(stated)
    return Launcher(
        name=name,
        option="--nnodes",
        shared_by=None if numbers is None else (int(numbers[1]), int(numbers[2] or numbers[1])),
        host=options.rdzv_endpoint or options.master_addr,
        program=program,
    )


def _accelerate(words: tuple[str, ...], python: tuple[str, ...]) -> Launcher:
    # Only these options are parsed. If the script has options of the same names, the launcher is not refused.
    parser = _Parser(add_help=False)
    for option in ("--num-machines", "--num-processes", "--main-process-ip", "--config-file"):
        parser.add_argument(*_spellings(option))
    options, _ = parser.parse_known_args(words)
    machines = options.num_machines or "1"
    # A configuration file can set any number; a single process in each task can be that task's rank.
    known = machines.isdecimal() and options.config_file is None and options.num_processes != "1"
    script = next((number for number, word in enumerate(words) if word.endswith(".py")), None)
    return Launcher(
        name=_ACCELERATE,
        option="--num_machines",
        shared_by=(int(machines), int(machines)) if known else None,
        host=options.main_process_ip,
        may_inherit=True,
        program=() if script is None else (*python, *words[script:]),
    )


def _behind_env(words: tuple[str, ...], environment: Mapping[str, str]) -> Launcher | None:
    _, rest = _parsed(words[1:], ("-i/--ignore-environment",), ("-u/--unset", "-C/--chdir"))
    assigned = tuple(takewhile(_ASSIGNMENT.fullmatch, rest))
    environment = {**environment, **dict(word.split("=", 1) for word in assigned)}
    command = rest[len(assigned) :]
    return _with_prefix(words[: len(words) - len(command)], find_launcher(command, environment))


def _behind_uv(words: tuple[str, ...], environment: Mapping[str, str]) -> Launcher | None:
    options, command = _parsed(words[2:], _UV_FLAGS, _UV_VALUES)
    prefix = words[: len(words) - len(command)]
    if options.module:
        prefix, command = tuple(word for word in prefix if word not in {"-m", "--module"}), ("python", "-m", *command)
    return _with_prefix(prefix, find_launcher(command, environment))


def _with_prefix(prefix: tuple[str, ...], launcher: Launcher | None) -> Launcher | None:
    if launcher is None or not launcher.program:
        return launcher
    return replace(launcher, program=(*prefix, *launcher.program))


def _in_shell(words: tuple[str, ...], environment: Mapping[str, str]) -> Launcher | None:
    """Return the launcher in the text of ``bash -c TEXT`` that runs unconditionally."""
    text = next((after for before, after in pairwise(words) if _SHELL_COMMAND_OPTION.fullmatch(before)), "")
    lexer = shlex.shlex(text.replace("\\\n", " ").replace("\n", ";"), posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    tokens = [token for token in lexer if token not in _BEFORE_A_COMMAND]
    if "PET_" in text or _SHELL_CONDITIONS.intersection(tokens):
        # Only the shell knows the variables that it sets and the commands that it runs.
        return None
    commands = (list(group) for ends, group in groupby(tokens, _ends_a_command) if not ends)
    for command in commands:
        launcher = find_launcher(list(dropwhile(_ASSIGNMENT.fullmatch, command)), environment)
        if launcher is not None:
            # A program that needs the shell, or is one of several commands, cannot replace the text.
            stays = command != tokens or "$" in text or "`" in text
            return replace(launcher, program=()) if stays else launcher
    return None


def _ends_a_command(token: str) -> bool:
    return not token.strip("();<>|&")


def _parsed(words: tuple[str, ...], flags: Sequence[str], values: Sequence[str]) -> tuple[Namespace, tuple[str, ...]]:
    """Return the options of a command, and the program and its arguments that follow them.

    Args:
        words: the options, the program and its arguments.
        flags: the options without a value, ``-m/--module`` for one with two names.
        values: the options with a value.

    Raises:
        ValueError: there is no program, or an unknown option: the next word may be its value.
    """
    parser = _Parser(add_help=False)
    for flag in flags:
        parser.add_argument(*_spellings(flag), action="store_true")
    for value in values:
        parser.add_argument(*_spellings(value))
    parser.add_argument("program")
    parser.add_argument("arguments", nargs=REMAINDER)
    options, unknown = parser.parse_known_args(words)
    if unknown:
        raise ValueError(unknown[0])
    return options, (options.program, *options.arguments)


def _spellings(option: str) -> list[str]:
    *short, long = option.split("/")
    return [*short, *dict.fromkeys((long, f"--{long[2:].replace('-', '_')}"))]


def _is_loopback(endpoint: str) -> bool:
    return endpoint.lstrip("[").startswith(("localhost", "127.", "::1"))
