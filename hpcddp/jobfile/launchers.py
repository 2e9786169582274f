"""Torchrun and ``accelerate launch`` in a command: what they launch, and the options that join them into one world.

A command that begins with a launcher is started once on each node, with the options that the job fills in. A launcher
that is hidden, or that states itself where the launchers meet, gets no options: it is only examined for whether the
launchers of several tasks would share a world.
"""

from __future__ import annotations

import re
import shlex
from argparse import REMAINDER, ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import dropwhile, groupby, pairwise, takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal, NoReturn

from hpcddp.jobfile.placeholders import SHELLS, shell_text_index

LauncherName = Literal["torchrun", "accelerate", "own"]
OWN: Final = "own"
"""The launcher of a program that starts the ranks of its node by itself: it gets no options."""

PYTHON: Final = re.compile(r"python[0-9.]*", re.ASCII)
# python(1): the options that take a separate argument.
PYTHON_OPTIONS_WITH_VALUE: Final = ("-W", "-X")
# The options with -m, which has the module behind it or in the next word (python(1)).
_MODULE: Final = re.compile("-[bBdEiIOPqsSuvx]*m(.*)", re.ASCII)

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
_SHELL_CONDITIONS: Final = frozenset({"if", "case", "for", "while", "until", "select", "[", "[[", "test", "||"})
_BEFORE_A_COMMAND: Final = frozenset({"exec", "time", "nohup"})
_ASSIGNMENT: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.ASCII | re.DOTALL)
# With one of these the command itself says where the launchers meet.
_TORCHRUN_MEETING: Final = (
    "--standalone", "--rdzv-endpoint", "--rdzv-backend", "--master-addr", "--master-port", "--node-rank",
)  # fmt: skip
# accelerate launch --help; --cpu starts its processes by MPI.
_ACCELERATE_FLAGS: Final = ("--cpu", "--multi-gpu", "--tpu", "--use-deepspeed", "--use-fsdp", "--use-megatron-lm")
_ACCELERATE_VALUES: Final = (
    "--num-machines", "--num-processes", "--main-process-ip", "--main-process-port", "--machine-rank",
    "--rdzv-backend", "--config-file",
)  # fmt: skip
_ACCELERATE_MEETING: Final = (
    "--main-process-ip", "--main-process-port", "--machine-rank", "--rdzv-backend", "--cpu", "--tpu",
)  # fmt: skip
WORLD_OPTIONS: Final[Mapping[LauncherName, frozenset[str]]] = MappingProxyType(
    {
        "torchrun": frozenset({*_TORCHRUN_MEETING, "--nnodes", "--nproc-per-node", "--rdzv-id", "--local-addr"}),
        "accelerate": frozenset(
            {*_ACCELERATE_MEETING, "--num-machines", "--num-processes", "--same-network",
             "--deepspeed-multinode-launcher", "--deepspeed-hostfile"}
        ) - {"--cpu", "--tpu"},
    }
)  # fmt: skip
"""The options with which a launcher joins a world, which the job fills in; with dashes in the place of underscores."""
WORLD_OPTIONS_WITHOUT_VALUE: Final = frozenset({"--standalone", "--same-network"})
# torchrun counts the devices itself.
_COUNTED_DEVICES: Final = frozenset({"auto", "gpu"})
_COUNT: Final = re.compile("[0-9]{1,9}", re.ASCII)
_RANGE: Final = re.compile(r"([0-9]{1,9})(?::([0-9]{1,9}))?", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The world that the launchers of a job join, as one of them sees it.

    Args:
        nodes: nodes of the job, each with one launcher.
        node_rank: 0 to nodes - 1.
        ranks_per_node: the ranks that each launcher starts.
        address: the first node, as this one reaches it.
        port: a port that is free there.
        name: identifies the world.
        environment: the environment of the launcher.
    """

    nodes: int
    node_rank: int
    ranks_per_node: int
    address: str
    port: int
    name: str
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherCommand:
    """A launcher at the beginning of a command, with options that are all known.

    Args:
        words: the words in front of the place where more options can stand.
        arguments: the words behind it.
        nodes: how many nodes its options state; None if they do not.
        ranks: how many ranks its options state, as text; None if they do not.
        is_total: whether that is the number of ranks on all nodes, not on each.
        states: the option by which the command starts the world in its own way; None if there is none.
        kind: the option of accelerate for the kind of training; None if there is none.
        configuration: accelerate's configuration file; None if its options do not give one.
    """

    launcher: LauncherName
    words: tuple[str, ...]
    arguments: tuple[str, ...]
    nodes: int | None = None
    node_option: str
    ranks: str | None = None
    rank_option: str
    is_total: bool = False
    states: str | None = None
    kind: str | None = None
    configuration: str | None = None

    def ranks_on_each(self, nodes: int) -> int | None:
        """Return the number of ranks on each of so many nodes that its options state; None if they state none."""
        ranks = _count(self.ranks)
        return ranks // nodes if ranks is not None and self.is_total else ranks

    def contradictions(self, *, nodes: int, ranks_per_node: int, gpus_per_node: int) -> Iterator[str]:
        """Yield what its options state otherwise than the job; the arguments are those of the job.

        Each text continues the sentence "command ...".
        """
        if self.nodes not in {None, nodes}:
            yield (
                f"has {self.node_option} {self.nodes}, and resources.nodes is {nodes}; write the same number, or leave "
                f"{self.node_option} out"
            )
        if self.ranks is None or (gpus_per_node and self.ranks in _COUNTED_DEVICES):
            return
        wanted = ranks_per_node * (nodes if self.is_total else 1)
        if self.ranks != str(wanted):
            where = "in all" if self.is_total else "on each node"
            yield (
                f"has {self.rank_option} {self.ranks}, and resources makes {wanted} ranks {where}; write "
                f"{self.rank_option} {wanted}, or leave it out"
            )

    def in_world(self, world: World) -> tuple[str, ...]:
        """Return the command of one node's task, with the options that join its launcher to the others."""
        return (*self.words, *_FILLED_IN[self.launcher](self, world), *self.arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """A program that starts the processes of a world.

    Args:
        option: its option for the number of launchers that share a world.
        shared_by: the smallest and the largest number of launchers that share a world; None if it is not known.
        host: the host of the rendezvous; None if the command does not give it.
        may_inherit: whether its process may be a rank of the world in its own environment variables.
        program: the command that it launches; empty if it is not known.
        options: the same with its options, if these are all known; None otherwise, and in a shell.
    """

    name: str
    option: str
    shared_by: tuple[int, int] | None = None
    host: str | None = None
    may_inherit: bool = False
    program: tuple[str, ...] = ()
    options: LauncherCommand | None = None

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
        if nodes > 1 and _is_own_host(self.host or ""):
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


def is_deepspeed(command: tuple[str, ...]) -> bool:
    """Return whether a command is DeepSpeed's launcher, which starts a rank for each GPU of its node."""
    return Path(command[0]).name in {"deepspeed", "deepspeed.pt"}


def own_launcher(command: tuple[str, ...]) -> LauncherCommand:
    """Return the launcher that a command is which starts the ranks of its node by itself."""
    return LauncherCommand(launcher=OWN, words=command, arguments=(), node_option="", rank_option="")


@cache
def launcher_command_of(command: tuple[str, ...]) -> LauncherCommand | None:
    """Return the launcher that a command begins with, also behind ``env`` or ``uv run``; None if there is none.

    Args:
        command: the command, word by word.
    """
    launcher = find_launcher(command, {})
    return None if launcher is None else launcher.options


def find_launcher(words: Sequence[str], environment: Mapping[str, str]) -> Launcher | None:
    """Return the launcher that a command starts, also behind ``env``, ``uv run`` or ``bash -c``; None if there is none.

    Args:
        words: the command.
    """
    words = tuple(words)
    name = Path(words[0]).name if words else ""
    try:
        if name in SHELLS:
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
        name = _ACCELERATE
        rest = rest[1:]
    before = words[: len(words) - len(rest)]
    try:
        if name in _TORCHRUN:
            return _torchrun(name, before, rest, environment, python)
        if name == _ACCELERATE or name in _ACCELERATE_LAUNCH:
            return _accelerate(before, rest, python)
    except ValueError:
        return Launcher(name=name, option="")
    return None


def _program_of(words: tuple[str, ...]) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Return the program, or the module or script that Python runs; its arguments; and the command for Python."""
    if not words or not PYTHON.fullmatch(Path(words[0]).name):
        return Path(words[0]).name if words else "", words[1:], ("python",)
    for number, word in enumerate(words[1:], 1):
        option = _MODULE.fullmatch(word)
        if option is not None and not option[1] and number + 1 < len(words):
            return words[number + 1], words[number + 2 :], words[:number]
        if word.startswith("-c"):
            break
        if not word.startswith("-") and words[number - 1] not in PYTHON_OPTIONS_WITH_VALUE:
            return Path(word).name, words[number + 1 :], ("python",)
    return "", (), ()


def program_of_python(words: Sequence[str]) -> tuple[str | None, str | None]:
    """Return the script and the module that a Python command runs; None for what it does not run.

    Both are None for another program, and where the code is behind ``-c``, or comes from standard input.
    """
    if not words or PYTHON.fullmatch(Path(words[0]).name) is None:
        return None, None
    for next_index, (previous, word) in enumerate(pairwise(words), 2):
        if word.startswith("-c") or word == "-":
            break
        if previous in PYTHON_OPTIONS_WITH_VALUE:
            continue
        if match := _MODULE.fullmatch(word):
            return None, match[1] or next(iter(words[next_index:]), None)
        if not word.startswith("-"):
            return word, None
    return None, None


def _torchrun(
    name: str, before: tuple[str, ...], words: tuple[str, ...], environment: Mapping[str, str], python: tuple[str, ...]
) -> Launcher:
    options, program = _parsed(words, _TORCHRUN_FLAGS, _TORCHRUN_VALUES)
    launcher_words = words[: len(words) - len(program)]
    numbers = None if options.nnodes is None else _RANGE.fullmatch(options.nnodes)
    # Only the launchers themselves can agree on a number of nodes in a range.
    elastic = options.nnodes is not None and (numbers is None or numbers[2] not in {None, numbers[1]})
    launch = LauncherCommand(
        launcher="torchrun",
        words=(*before, *(launcher_words[:-1] if launcher_words[-1:] == ("--",) else launcher_words)),
        arguments=program,
        nodes=None if numbers is None else int(numbers[1]),
        node_option="--nnodes",
        ranks=options.nproc_per_node,
        rank_option="--nproc-per-node",
        states="--nnodes" if elastic else _given(options, _TORCHRUN_MEETING),
    )
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
        options=launch,
    )


def _torchrun_options(_: LauncherCommand, world: World) -> tuple[str, ...]:
    return (
        f"--nnodes={world.nodes}",
        f"--nproc-per-node={world.ranks_per_node}",
        "--rdzv-backend=static",
        f"--rdzv-id={world.name}",
        f"--node-rank={world.node_rank}",
        f"--master-addr={world.address}",
        f"--master-port={world.port}",
    )


def _accelerate(before: tuple[str, ...], words: tuple[str, ...], python: tuple[str, ...]) -> Launcher:
    script = next((number for number, word in enumerate(words) if word.endswith(".py")), None)
    module = next((number + 2 for number, word in enumerate(words) if word in {"-m", "--module"}), None)
    # Only these options are parsed, in front of the script: a script can have options of the same names.
    parser = _Parser(add_help=False)
    for flag in _ACCELERATE_FLAGS:
        parser.add_argument(*_spellings(flag), action="store_true")
    for value in _ACCELERATE_VALUES:
        parser.add_argument(*_spellings(value))
    options, _ = parser.parse_known_args(words[: script if script is not None else module])
    machines = options.num_machines
    processes = options.num_processes
    # A single process in each task can be that task's rank.
    single = "--num_processes 1" if processes == "1" else None
    # A configuration file can set any number.
    count = _count(machines)
    is_count_certain = (count is not None or machines is None) and options.config_file is None and not single
    kinds = tuple(flag for flag in _ACCELERATE_FLAGS if flag != "--cpu")
    return Launcher(
        name=_ACCELERATE,
        option="--num_machines",
        shared_by=(count or 1, count or 1) if is_count_certain else None,
        host=options.main_process_ip,
        may_inherit=True,
        program=() if script is None else (*python, *words[script:]),
        options=LauncherCommand(
            launcher="accelerate",
            words=before,
            arguments=words,
            nodes=count,
            node_option="--num_machines",
            ranks=processes,
            rank_option="--num_processes",
            is_total=True,
            states=_given(options, _ACCELERATE_MEETING) or single,
            kind=_given(options, kinds),
            configuration=options.config_file,
        ),
    )


def _accelerate_options(launch: LauncherCommand, world: World) -> tuple[str, ...]:
    ranks = world.nodes * world.ranks_per_node
    # Without --multi_gpu, which works on CPUs too, accelerate starts a single process if it sees fewer than two GPUs on
    # the node. The other kinds of training start as many processes as they are told to.
    is_chosen = launch.kind is not None or _configured_kind(launch, world.environment) in _KINDS_OF_THEIR_OWN
    return (
        f"--num_machines={world.nodes}",
        f"--num_processes={ranks}",
        f"--machine_rank={world.node_rank}",
        f"--main_process_ip={world.address}",
        f"--main_process_port={world.port}",
        # DeepSpeed would otherwise reach the other nodes by ssh.
        "--deepspeed_multinode_launcher=standard",
        *(() if is_chosen or ranks == 1 else ("--multi_gpu",)),
    )


_KINDS_OF_THEIR_OWN: Final = frozenset({"DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA"})
_DISTRIBUTED_TYPE: Final = re.compile(r"""^\s*"?distributed_type"?:\s*["']?(\w+)""", re.ASCII | re.MULTILINE)
_LONGEST_CONFIGURATION: Final = 1 << 20


def _configured_kind(launch: LauncherCommand, environment: Mapping[str, str]) -> str | None:
    """Return the kind of training in accelerate's configuration file; None without one."""
    files = [Path(launch.configuration)] if launch.configuration else _default_configurations(environment)
    for file in files:
        with suppress(OSError, UnicodeDecodeError), file.open(encoding="utf-8") as text:
            match = _DISTRIBUTED_TYPE.search(text.read(_LONGEST_CONFIGURATION))
            return None if match is None else match[1]
    return None


def _default_configurations(environment: Mapping[str, str]) -> list[Path]:
    # accelerate/commands/config/config_args.py
    cache_home = environment.get("XDG_CACHE_HOME") or str(Path(environment.get("HOME", "~")) / ".cache")
    home = Path(environment.get("HF_HOME") or Path(cache_home) / "huggingface")
    return [home / "accelerate" / f"default_config.{suffix}" for suffix in ("yaml", "json")]


_FILLED_IN: Final[Mapping[LauncherName, Callable[[LauncherCommand, World], tuple[str, ...]]]] = MappingProxyType(
    {"torchrun": _torchrun_options, "accelerate": _accelerate_options, "own": lambda _, __: ()}
)


def _count(text: str | None) -> int | None:
    """Return the number that an option states; None if it is not given, or states none."""
    return int(text) if text is not None and _COUNT.fullmatch(text) else None


def _given(options: Namespace, names: Sequence[str]) -> str | None:
    """Return the first of some options that a command gives."""
    return next((name for name in names if getattr(options, name[2:].replace("-", "_"))), None)


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
        prefix = tuple(word for word in prefix if word not in {"-m", "--module"})
        command = ("python", "-m", *command)
    return _with_prefix(prefix, find_launcher(command, environment))


def _with_prefix(prefix: tuple[str, ...], launcher: Launcher | None) -> Launcher | None:
    if launcher is None:
        return None
    options = launcher.options
    return replace(
        launcher,
        program=(*prefix, *launcher.program) if launcher.program else (),
        options=None if options is None else replace(options, words=(*prefix, *options.words)),
    )


def _in_shell(words: tuple[str, ...], environment: Mapping[str, str]) -> Launcher | None:
    """Return the launcher in the text of ``bash -c TEXT`` that runs unconditionally."""
    text_index = shell_text_index(words)
    if text_index is None:
        return None
    text = words[text_index]
    lexer = shlex.shlex(text.replace("\\\n", " ").replace("\n", ";"), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = ""
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
            return replace(launcher, options=None, program=() if stays else launcher.program)
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


def _is_own_host(endpoint: str) -> bool:
    """Return whether every host takes an endpoint for itself; one without a host comes from an unset variable."""
    return re.match(r"\[?(localhost|127\.|0\.0\.0\.0|::1|:[0-9]+$)", endpoint) is not None
