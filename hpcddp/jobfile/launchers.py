"""Torchrun and ``accelerate launch`` in a command: what they launch, and the options that join them into one world.

A command that begins with a launcher is started once on each node, with the options that the job fills in. A launcher
that is hidden, or that states itself where the launchers meet, gets no options: it is only examined for whether the
launchers of several tasks would share a world.
"""

from __future__ import annotations

import re
import shlex
from argparse import REMAINDER, ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
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
        meeting_option: the option by which the command itself says which launchers share a world, and where they meet;
            None if it leaves that to the job.
        kind_option: the option of accelerate for the kind of training; None if there is none.
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
    meeting_option: str | None = None
    kind_option: str | None = None
    configuration: str | None = None

    def ranks_on_each(self, nodes: int) -> int | None:
        """Return the number of ranks on each of so many nodes that its options state; None if they state none."""
        ranks = _count(self.ranks)
        if ranks is not None and self.is_total:
            return ranks // nodes
        return ranks

    def contradictions(self, *, nodes: int, ranks_per_node: int, gpus_per_node: int) -> Iterator[str]:
        """Yield what its options state otherwise than the job; the arguments are those of the job.

        Each text continues the sentence "command ...".
        """
        if self.nodes not in {None, nodes}:
            yield (
                f"has {self.node_option} {self.nodes}, and resources.nodes is {nodes}; write the same number, or leave "
                f"{self.node_option} out"
            )
        is_counted_by_launcher = gpus_per_node > 0 and self.ranks in _COUNTED_DEVICES
        if self.ranks is None or is_counted_by_launcher:
            return
        ranks_of_job = ranks_per_node
        where = "on each node"
        if self.is_total:
            ranks_of_job = ranks_per_node * nodes
            where = "in all"
        if self.ranks != str(ranks_of_job):
            yield (
                f"has {self.rank_option} {self.ranks}, and resources makes {ranks_of_job} ranks {where}; write "
                f"{self.rank_option} {ranks_of_job}, or leave it out"
            )

    def in_world(self, world: World) -> tuple[str, ...]:
        """Return the command of one node's task, with the options that join its launcher to the others."""
        options: tuple[str, ...] = ()
        if self.launcher == "torchrun":
            options = (
                f"--nnodes={world.nodes}",
                f"--nproc-per-node={world.ranks_per_node}",
                "--rdzv-backend=static",
                f"--rdzv-id={world.name}",
                f"--node-rank={world.node_rank}",
                f"--master-addr={world.address}",
                f"--master-port={world.port}",
            )
        elif self.launcher == "accelerate":
            options = _accelerate_options(self, world)
        return (*self.words, *options, *self.arguments)


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
            stated = str(most)
            if fewest != most:
                stated = f"{fewest}:{most}"
            return (
                f"{self.option} is {stated}, but the job has {tasks} tasks, each of which would start one {self.name}"
            )
        # One without a host comes from an unset variable.
        if nodes > 1 and re.match(r"\[?(localhost|127\.|0\.0\.0\.0|::1|:[0-9]+$)", self.host or ""):
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
    """Return a command, which starts the ranks of its node by itself, as a launcher."""
    return LauncherCommand(launcher=OWN, words=command, arguments=(), node_option="", rank_option="")


@cache
def launcher_command_of(command: tuple[str, ...]) -> LauncherCommand | None:
    """Return the launcher that a command begins with, also behind ``env`` or ``uv run``; None if there is none."""
    launcher = find_launcher(command, {})
    return None if launcher is None else launcher.options


def find_launcher(words: Sequence[str], environment: Mapping[str, str]) -> Launcher | None:
    """Return the launcher that a command starts, also behind ``env``, ``uv run`` or ``bash -c``; None without one."""
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
    program = _program_of(words)
    name = program.name
    arguments = program.arguments
    if name in _ACCELERATE_CLI and arguments[:1] == ("launch",):
        name = _ACCELERATE
        arguments = arguments[1:]
    launcher_words = words[: len(words) - len(arguments)]
    try:
        if name in _TORCHRUN:
            return _torchrun(name, launcher_words, arguments, environment, program.python)
        if name == _ACCELERATE or name in _ACCELERATE_LAUNCH:
            return _accelerate(launcher_words, arguments, program.python)
    except ValueError:
        return Launcher(name=name, option="")
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Program:
    """The program of a command line.

    Args:
        name: the program, or the module or the script that Python runs; empty if there is none.
        arguments: the words behind it.
        python: the command for Python that runs a program which this one launches.
    """

    name: str
    arguments: tuple[str, ...]
    python: tuple[str, ...]


def _program_of(words: tuple[str, ...]) -> _Program:
    name = Path(words[0]).name if words else ""
    if not PYTHON.fullmatch(name):
        return _Program(name=name, arguments=words[1:], python=("python",))
    for position, word in enumerate(words[1:], start=1):
        behind = words[position + 1 :]
        module_option = _MODULE.fullmatch(word)
        if module_option is not None and not module_option[1] and behind:
            return _Program(name=behind[0], arguments=behind[1:], python=words[:position])
        if word.startswith("-c"):
            break
        is_value = words[position - 1] in PYTHON_OPTIONS_WITH_VALUE
        if not word.startswith("-") and not is_value:
            return _Program(name=Path(word).name, arguments=behind, python=("python",))
    return _Program(name="", arguments=(), python=())


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
    name: str,
    launcher_words: tuple[str, ...],
    arguments: tuple[str, ...],
    environment: Mapping[str, str],
    python: tuple[str, ...],
) -> Launcher:
    options, program = _parsed(arguments, _TORCHRUN_FLAGS, _TORCHRUN_VALUES)
    option_words = arguments[: len(arguments) - len(program)]
    if option_words[-1:] == ("--",):
        option_words = option_words[:-1]

    fewest_nodes = None
    meeting_option = _first_given(options, _TORCHRUN_MEETING)
    if options.nnodes is not None:
        fewest_nodes, most_nodes = _node_range(options.nnodes) or (None, None)
        has_fixed_nodes = fewest_nodes is not None and fewest_nodes == most_nodes
        if not has_fixed_nodes:
            # Only the launchers themselves can agree on a number of nodes in a range.
            meeting_option = "--nnodes"
    command = LauncherCommand(
        launcher="torchrun",
        words=(*launcher_words, *option_words),
        arguments=program,
        nodes=fewest_nodes,
        node_option="--nnodes",
        ranks=options.nproc_per_node,
        rank_option="--nproc-per-node",
        meeting_option=meeting_option,
    )

    if options.standalone:
        shared_by: tuple[int, int] | None = (1, 1)
    else:
        # The default of an option is the variable PET_<NAME> (torch/distributed/argparse_util.py).
        shared_by = _node_range(options.nnodes or environment.get("PET_NNODES", "1"))
    if options.no_python:
        program_of_rank = program
    elif options.module:
        program_of_rank = (*python, "-m", *program)
    else:
        program_of_rank = (*python, *program)
    return Launcher(
        name=name,
        option="--nnodes",
        shared_by=shared_by,
        host=options.rdzv_endpoint or options.master_addr,
        program=program_of_rank,
        options=command,
    )


def _accelerate(launcher_words: tuple[str, ...], arguments: tuple[str, ...], python: tuple[str, ...]) -> Launcher:
    script_index = next((index for index, word in enumerate(arguments) if word.endswith(".py")), None)
    if script_index is not None:
        program: tuple[str, ...] = (*python, *arguments[script_index:])
        end_of_options: int | None = script_index
    else:
        program = ()
        end_of_options = next((index + 2 for index, word in enumerate(arguments) if word in {"-m", "--module"}), None)
    # Only these options are parsed, in front of the script: a script can have options of the same names.
    parser = _option_parser(_ACCELERATE_FLAGS, _ACCELERATE_VALUES)
    options, _ = parser.parse_known_args(arguments[:end_of_options])

    machines = _count(options.num_machines)
    starts_one_process = options.num_processes == "1"
    if starts_one_process or options.config_file is not None:
        # A single process in each task can be that task's rank. A configuration file can set any number.
        shared_by = None
    elif options.num_machines is None or machines == 0:
        shared_by = (1, 1)
    elif machines is None:
        shared_by = None
    else:
        shared_by = (machines, machines)

    meeting_option = _first_given(options, _ACCELERATE_MEETING)
    if meeting_option is None and starts_one_process:
        meeting_option = "--num_processes 1"
    kind_options = [flag for flag in _ACCELERATE_FLAGS if flag != "--cpu"]
    command = LauncherCommand(
        launcher="accelerate",
        words=launcher_words,
        arguments=arguments,
        nodes=machines,
        node_option="--num_machines",
        ranks=options.num_processes,
        rank_option="--num_processes",
        is_total=True,
        meeting_option=meeting_option,
        kind_option=_first_given(options, kind_options),
        configuration=options.config_file,
    )
    return Launcher(
        name=_ACCELERATE,
        option="--num_machines",
        shared_by=shared_by,
        host=options.main_process_ip,
        may_inherit=True,
        program=program,
        options=command,
    )


def _accelerate_options(command: LauncherCommand, world: World) -> tuple[str, ...]:
    ranks = world.nodes * world.ranks_per_node
    options = (
        f"--num_machines={world.nodes}",
        f"--num_processes={ranks}",
        f"--machine_rank={world.node_rank}",
        f"--main_process_ip={world.address}",
        f"--main_process_port={world.port}",
        # DeepSpeed would otherwise reach the other nodes by ssh.
        "--deepspeed_multinode_launcher=standard",
    )
    # Without --multi_gpu, which works on CPUs too, accelerate starts a single process if it sees fewer than two GPUs on
    # the node. The other kinds of training start as many processes as they are told to.
    has_kind = command.kind_option is not None or _configured_kind(command, world.environment) in _KINDS_OF_THEIR_OWN
    if ranks > 1 and not has_kind:
        return (*options, "--multi_gpu")
    return options


_KINDS_OF_THEIR_OWN: Final = frozenset({"DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA"})
_DISTRIBUTED_TYPE: Final = re.compile(r"""^\s*"?distributed_type"?:\s*["']?(\w+)""", re.ASCII | re.MULTILINE)
_LONGEST_CONFIGURATION: Final = 1 << 20


def _configured_kind(launch: LauncherCommand, environment: Mapping[str, str]) -> str | None:
    """Return the kind of training in accelerate's configuration file; None without one."""
    files = [Path(launch.configuration)] if launch.configuration else _default_configurations(environment)
    for file in files:
        with suppress(OSError, UnicodeDecodeError):
            if not file.is_file():
                # What a pipe holds is for accelerate, and its opening may wait for ever.
                continue
            with file.open(encoding="utf-8") as text:
                match = _DISTRIBUTED_TYPE.search(text.read(_LONGEST_CONFIGURATION))
            return None if match is None else match[1]
    return None


def _default_configurations(environment: Mapping[str, str]) -> list[Path]:
    # accelerate/commands/config/config_args.py
    cache_home = environment.get("XDG_CACHE_HOME") or str(Path(environment.get("HOME", "~")) / ".cache")
    home = Path(environment.get("HF_HOME") or Path(cache_home) / "huggingface")
    return [home / "accelerate" / f"default_config.{suffix}" for suffix in ("yaml", "json")]


def _count(text: str | None) -> int | None:
    """Return the number that an option states; None if it is not given, or states none."""
    return int(text) if text is not None and _COUNT.fullmatch(text) else None


def _node_range(text: str) -> tuple[int, int] | None:
    """Return the fewest and the most nodes that ``4`` or ``1:4`` means to torchrun; None if it is another text."""
    match = _RANGE.fullmatch(text)
    if match is None:
        return None
    fewest = int(match[1])
    most = fewest if match[2] is None else int(match[2])
    return fewest, most


def _first_given(options: Namespace, names: Sequence[str]) -> str | None:
    """Return the first of some options that a command gives; None if it gives none of them."""
    return next((name for name in names if getattr(options, name[2:].replace("-", "_"))), None)


def _behind_env(words: tuple[str, ...], environment: Mapping[str, str]) -> Launcher | None:
    _, assignments_and_command = _parsed(words[1:], ("-i/--ignore-environment",), ("-u/--unset", "-C/--chdir"))
    assignments = tuple(takewhile(_ASSIGNMENT.fullmatch, assignments_and_command))
    environment_of_command = dict(environment)
    for assignment in assignments:
        name, _, value = assignment.partition("=")
        environment_of_command[name] = value
    command = assignments_and_command[len(assignments) :]
    prefix = words[: len(words) - len(command)]
    return _with_prefix(prefix, find_launcher(command, environment_of_command))


def _behind_uv(words: tuple[str, ...], environment: Mapping[str, str]) -> Launcher | None:
    options, command = _parsed(words[2:], _UV_FLAGS, _UV_VALUES)
    prefix = words[: len(words) - len(command)]
    if options.module:
        prefix = tuple(word for word in prefix if word not in {"-m", "--module"})
        command = ("python", "-m", *command)
    return _with_prefix(prefix, find_launcher(command, environment))


def _with_prefix(prefix: tuple[str, ...], launcher: Launcher | None) -> Launcher | None:
    """Return a launcher with words that stand in front of it, and of its program where that is known."""
    if launcher is None:
        return None
    program = launcher.program
    if program:
        program = (*prefix, *program)
    command = launcher.options
    if command is not None:
        command = replace(command, words=(*prefix, *command.words))
    return replace(launcher, program=program, options=command)


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
    parser = _option_parser(flags, values)
    parser.add_argument("program")
    parser.add_argument("arguments", nargs=REMAINDER)
    options, unknown = parser.parse_known_args(words)
    if unknown:
        raise ValueError(unknown[0])
    return options, (options.program, *options.arguments)


def _option_parser(flags: Sequence[str], values: Sequence[str]) -> _Parser:
    parser = _Parser(add_help=False)
    for flag in flags:
        parser.add_argument(*_spellings(flag), action="store_true")
    for value in values:
        parser.add_argument(*_spellings(value))
    return parser


def _spellings(option: str) -> list[str]:
    """Return the names of ``-m/--module``, or of an option without a short name; with dashes and with underscores."""
    *short_names, long_name = option.split("/")
    names = [*short_names, long_name]
    with_underscores = f"--{long_name[2:].replace('-', '_')}"
    if with_underscores != long_name:
        names.append(with_underscores)
    return names
