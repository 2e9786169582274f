"""Command-line options for fields of the job file, and the command after ``--``."""

from __future__ import annotations

import functools
import inspect
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand

from hpcddp.cli.boundary import USAGE_ERROR
from hpcddp.cli.options import (
    complete_accounts,
    complete_gpu_types,
    complete_mail_types,
    complete_partitions,
    complete_qos,
    run_argument,
)
from hpcddp.errors import UserError

if TYPE_CHECKING:
    from hpcddp.jobfile.job import JobSpec
    from hpcddp.jobfile.overrides import Override
    from hpcddp.jobfile.read import ResolvedJob
    from hpcddp.run.directory import RunDirectory

_COMMAND = "hpcddp.command"


class _Field(NamedTuple):
    """A field of the job file that has an option of its own."""

    path: str
    option: str
    help: str
    short: str | None = None
    """The option of sbatch with one letter."""
    listed: bool = False
    """Whether ``--help`` describes it; ``--help --all`` describes every option."""
    flag: bool = False
    metavar: str = "VALUE"
    values: Callable[..., Sequence[str]] | None = None
    """Completes its value in the shell."""


FIELDS = (
    _Field("run_root", "--run-root", "Directory of all runs; overrides run_root.", listed=True, metavar="DIR"),
    _Field("name", "--name", "Name of the job.", short="-J", metavar="NAME"),
    _Field("batch.global_batch_size", "--global-batch-size", "Samples of an optimizer step, over all ranks."),
    _Field("resources.nodes", "--nodes", "Number of nodes.", short="-N", listed=True),
    _Field("resources.min_nodes", "--min-nodes", "Nodes that must be left when a node is lost."),
    _Field("resources.spare_nodes", "--spare-nodes", "Nodes that take the places of lost ones."),
    _Field("resources.gpus_per_node", "--gpus-per-node", "GPUs on each node; one rank for each GPU.", listed=True),
    _Field("resources.gpu_type", "--gpu-type", "Kind of GPU, such as a100.", values=complete_gpu_types),
    _Field("resources.tasks_per_node", "--tasks-per-node", "Ranks on each node of a CPU job.", listed=True),
    _Field("resources.cpus_per_task", "--cpus-per-task", "CPUs of each rank.", short="-c", listed=True),
    _Field("resources.mem", "--mem", "Memory of each node, such as 64G.", listed=True),
    _Field("resources.mem_per_cpu", "--mem-per-cpu", "Memory for each CPU, in place of --mem."),
    _Field("resources.mem_per_gpu", "--mem-per-gpu", "Memory for each GPU, in place of --mem."),
    _Field("resources.time_limit", "--time", "Time limit: 2h, 90min, 1:30:00, or minutes.", short="-t", listed=True),
    _Field(
        "resources.partition", "--partition", "Slurm partition.", short="-p", listed=True, values=complete_partitions
    ),
    _Field("resources.account", "--account", "Account to charge.", short="-A", values=complete_accounts),
    _Field("resources.qos", "--qos", "Quality of service.", short="-q", values=complete_qos),
    _Field("resources.constraint", "--constraint", "Node features that are required.", short="-C"),
    _Field("resources.reservation", "--reservation", "Reservation to run in."),
    _Field("resources.nodelist", "--nodelist", "Nodes that the job must get.", short="-w"),
    _Field("resources.exclude", "--exclude", "Nodes that the job must not get.", short="-x"),
    _Field("resources.exclusive", "--exclusive", "Share the nodes with no other job.", flag=True),
    _Field("resources.licenses", "--licenses", "Licenses that the job holds.", short="-L"),
    _Field("resources.mail_type", "--mail-type", "When Slurm sends mail: END,FAIL.", values=complete_mail_types),
    _Field("resources.mail_user", "--mail-user", "Who gets the mail.", metavar="ADDRESS"),
)
"""The options, in the order of the help. ``resources.sbatch`` is set with ``--set resources.sbatch.FLAG=VALUE``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobWords:
    """The fields of the job that the command line sets.

    Args:
        options: the text of each option that is given, by the field's key path.
        command: the words after ``--``; None if there is no ``--``.
    """

    options: Mapping[str, str]
    command: tuple[str, ...] | None

    @property
    def run_root(self) -> Path | None:
        """The value of ``--run-root``, in which ``--resume`` and ``--after`` look up runs too."""
        given = self.options.get("run_root")
        return None if given is None else Path(given)

    @property
    def is_empty(self) -> bool:
        """Whether no field except ``run_root`` is set."""
        return self.options.keys() <= {"run_root"} and self.command is None

    def load(
        self, job_file: Path | None, *, overrides: list[str] | None, sweep: Sequence[Override] = ()
    ) -> ResolvedJob:
        """Return the job of a job file and the command line.

        Args:
            job_file: the job file; None if the command line describes the whole job.
            overrides: the values of ``--set``.
            sweep: the fields that the sweep options set.

        Raises:
            UserError: there is neither a file nor a command, or one of them is invalid.
        """
        from hpcddp.api import read_job
        from hpcddp.errors import UserError
        from hpcddp.jobfile.overrides import read_options

        if job_file is None and self.command is None:
            raise UserError("no JOB is given; write a job file, or a command after --, as in: -- python train.py")
        names = {field.path: field.option for field in FIELDS}
        options = read_options({path: (names[path], text) for path, text in self.options.items()}, self.command)
        return read_job(job_file, overrides, options=[*options, *sweep])

    def change(
        self, spec: JobSpec, *, run: RunDirectory, overrides: list[str] | None, sweep: Sequence[Override] = ()
    ) -> ResolvedJob:
        """Return the job of a run with the changes of the command line.

        Args:
            spec: the run's job.
            run: the run.
            overrides: the values of ``--set``.
            sweep: the fields that the sweep options set, which make no change of a run.

        Raises:
            UserError: a change is invalid.
        """
        from hpcddp.api import profiles_directory
        from hpcddp.errors import UserError
        from hpcddp.jobfile.overrides import read_options
        from hpcddp.jobfile.read import change_job

        if sweep:
            raise UserError("--resume continues one run, and the sweep options start new ones; leave one of them out")
        self._refuse_training(spec, run, overrides or ())
        names = {field.path: field.option for field in FIELDS}
        # The run stays where it is; --run-root says where it is looked up.
        texts = {path: (names[path], text) for path, text in self.options.items() if path != "run_root"}
        options = read_options(texts, self.command)
        profiles = profiles_directory(os.environ)
        return change_job(
            spec,
            file=str(run.job_file),
            overrides=overrides or (),
            options=options,
            profiles=profiles,
            environment=os.environ,
        )

    @staticmethod
    def _refuse_training(spec: JobSpec, run: RunDirectory, overrides: Sequence[str]) -> None:
        """Reject a field of a training for a run that is none; without it the job would lack the other fields."""
        if spec.train is not None:
            return
        for text in overrides:
            key = text.partition("=")[0].strip()
            if key.startswith("train."):
                if spec.command is None:
                    kind, instead = "an entrypoint", "leave it out"
                else:
                    kind = "a command"
                    words = shlex.join(["hpcddp", "submit", "--resume", run_argument(run.path)])
                    instead = f"change its arguments: {words} -- COMMAND"
                raise UserError(f"{key} (--set) is for a training, and the run {run.run_id} is {kind}; {instead}")


def words_of_command(context: typer.Context) -> tuple[str, ...] | None:
    """Return the words after ``--``; None if there is no ``--``."""
    words: tuple[str, ...] | None = context.meta.get(_COMMAND)
    return words


class CommandWords(TyperCommand):
    """A command that keeps the words after ``--`` unchanged."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:  # noqa: ANN401  typer's own copy of click's Context
        """Return the words after the command's name in the first line of the help."""
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND...]"]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401  typer's own copy of click's Context
        """Keep the words after the first ``--``, and parse the others."""
        words = list(args)
        if "--" in words:
            cut = words.index("--")
            ctx.meta[_COMMAND] = tuple(words[cut + 1 :])
            words = words[:cut]
        return super().parse_args(ctx, words)

    def _places_of_arguments(self, args: Sequence[str]) -> Iterator[int]:
        """Yield where words before ``--`` stand that are neither options nor values of options."""
        takes_value = self._options()
        words = iter(enumerate(args))
        for place, word in words:
            if word == "--":
                return
            if not word.startswith("-"):
                yield place
            elif takes_value.get(word):
                next(words, None)

    def _options(self) -> dict[str, bool]:
        """Return the names of the options, and whether each takes a value."""
        options = [parameter for parameter in self.params if parameter.param_type_name == "option"]
        return {name: not getattr(option, "is_flag", False) for option in options for name in option.opts}


class RunCommand(CommandWords):
    """A command that takes a run and the words of a command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401  typer's own copy of click's Context
        """Say where ``--`` belongs, if the words of a command stand without it."""
        places = [] if ctx.resilient_parsing or "--" in args else list(self._places_of_arguments(args))
        own, command = (args[: places[1]], args[places[1] :]) if len(places) > 1 else (args, [])
        names = {word.partition("=")[0] for word in own if word.startswith("--")}
        # An option that does not exist may have a value, and is the error to name.
        if command and names <= self._options().keys():
            raise UserError(
                f"{command[0]} stands after the run, and a command stands after --, as in: "
                f"{shlex.join([*ctx.command_path.split(), *own, '--', *command])}"
            )
        return super().parse_args(ctx, args)


class JobCommand(CommandWords):
    """A command that takes a job file or the words of a command."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:  # noqa: ANN401, ARG002  as above
        """Return the words after the command's name in the first line of the help."""
        return ["[JOB]", "[OPTIONS]", "[-- COMMAND...]"]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401  typer's own copy of click's Context
        """Say where ``--`` belongs, if the words of a command stand without it, and what else a command needs."""
        if not ctx.resilient_parsing:
            self._refuse_option_as_value(args)
            self._refuse_time_in_two_words(args)
            _refuse_no_command(ctx.command_path, args)
        place = None if ctx.resilient_parsing or "--" in args else self._place_of_program(args)
        if place is None:
            return super().parse_args(ctx, args)
        try:
            rest = super().parse_args(ctx, args)
        except USAGE_ERROR:
            rest = None
        if rest is not None and ctx.params.get("job_file") != Path(args[place]):
            return rest
        raise UserError(
            f"{args[place]} is a program, and no job file; write a command after --, as in: "
            f"{shlex.join([*ctx.command_path.split(), *self._with_dashes(args, place)])}"
        )

    def _refuse_option_as_value(self, args: Sequence[str]) -> None:
        """Reject ``-q --follow``, of which the second word would be the value of the first one."""
        takes_value = self._options()
        own = args[: args.index("--")] if "--" in args else args
        for word, following in pairwise(own):
            if takes_value.get(word) and following in takes_value:
                raise UserError(
                    f"{word} needs a value, and {following} is another option; write the value after {word}"
                )

    def _refuse_time_in_two_words(self, args: Sequence[str]) -> None:
        """Reject ``--time 10 minutes``, of which the second word would be the job file."""
        from hpcddp.jobfile.units import UNITS

        place = next(self._places_of_arguments(args), 0)
        if not place or Path(args[place]).exists():
            return
        number = args[place - 1].removeprefix("--time=")
        option = args[place - 2] if number == args[place - 1] and place > 1 else "--time"
        unit = UNITS.get(args[place].lower())
        if unit is None or option not in {"--time", "-t"} or not re.fullmatch("[0-9]{1,6}", number, re.ASCII):
            return
        raise UserError(
            f"{args[place]} stands where the job file belongs; write the time in one word: {option} {number}{unit}"
        )

    def _place_of_program(self, args: Sequence[str]) -> int | None:
        """Return where a program stands in place of the job file; None if it is no program."""
        place = next(self._places_of_arguments(args), None)
        return None if place is None or not is_program(args[place]) else place

    def _with_dashes(self, args: Sequence[str], place: int) -> list[str]:
        """Return the words of the call with ``--`` before the program, and with hpcddp's own options before that."""
        takes_value = self._options()
        own, command = list(args[:place]), args[place].split() if " " in args[place] else [args[place]]
        words = iter(args[place + 1 :])
        for word in words:
            name, equals, _ = word.partition("=")
            if name in takes_value:
                own += [word] if equals or not takes_value[name] else [word, *islice(words, 1)]
            else:
                command.append(word)
        return [*own, "--", *called(*command)]


def _refuse_no_command(path: str, args: Sequence[str]) -> None:
    """Reject ``--`` without a command behind it, and a command that is one word because it is in quotes."""
    if "--" not in args:
        return
    cut = args.index("--")
    if cut + 1 == len(args):
        example = shlex.join([*path.split(), *args, "python", "train.py"])
        raise UserError(f"no command follows --; write one, as in: {example}")
    word, *more = args[cut + 1 :]
    program, *arguments = word.split() or [""]
    if more or not arguments or Path(word).exists() or shutil.which(word) or not shutil.which(program):
        return
    if _SHELL_SIGNS.search(word):
        instead = f"a shell runs it: -- {shlex.join(['bash', '-c', word])}"
    else:
        instead = f"remove the quotes: -- {word}"
    raise UserError(f"the command is one word, {word!r}, and no program has that name; {instead}")


# What has a meaning in a shell only; quotes and blanks end words in a call too.
_SHELL_SIGNS = re.compile("[;&|<>()$`*?~#]")
_INTERPRETERS = {".py": "python", ".sh": "bash"}
_JOB_FILES = {".yaml", ".yml", ".json"}


def called(program: str, *arguments: str) -> list[str]:
    """Return the words that call a program; those of a script begin with its interpreter."""
    interpreter = _INTERPRETERS.get(Path(program).suffix)
    return [*([interpreter] if interpreter else []), program, *arguments]


def is_program(word: str) -> bool:
    """Return whether a word that is given in place of a job file is a program, or a whole command in quotes."""
    from hpcddp.jobfile.read import is_sbatch_script

    path, first = Path(word), word.split(maxsplit=1)[:1]
    if word.startswith("-") or not first or path.suffix in _JOB_FILES:
        return False
    if path.is_file() and is_sbatch_script(path):
        # Reading it as a job file says how to make one from it.
        return False
    if path.suffix in _INTERPRETERS:
        return True
    if not path.is_file():
        return not path.exists() and shutil.which(first[0]) is not None
    # The mode says nothing on some file systems.
    with suppress(OSError), path.open("rb") as file:
        return os.access(path, os.X_OK) and file.read(4).startswith((b"#!", b"\x7fELF"))
    return False


def takes_job_words(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options of ``FIELDS`` to a command, which receives them as its argument ``words``."""

    @functools.wraps(function)
    def command(ctx: typer.Context, **arguments: Any) -> None:  # noqa: ANN401  typer has checked them
        given = {field.path: arguments.pop(_parameter(field)) for field in FIELDS}
        options = {path: str(value).lower() if value is True else value for path, value in given.items() if value}
        function(**arguments, words=JobWords(options=options, command=words_of_command(ctx)))

    own = inspect.signature(function, eval_str=True).parameters
    kept = [parameter for name, parameter in own.items() if name != "words"]
    context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    parameters = [context, *kept, *(_as_parameter(field) for field in FIELDS)]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads it
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _parameter(field: _Field) -> str:
    return field.option.removeprefix("--").replace("-", "_")


def _as_parameter(field: _Field) -> inspect.Parameter:
    kind = bool if field.flag else str | None
    # The help shows the metavar instead of the type.
    metavar = "N" if field.option.endswith(("nodes", "node", "task", "size")) else field.metavar
    shown: dict[str, Any] = {} if field.flag else {"metavar": metavar, "autocompletion": field.values}
    names = [name for name in (field.short, field.option) if name is not None]
    option: Any = typer.Option(*names, help=field.help, hidden=not field.listed, show_default=False, **shown)
    return inspect.Parameter(
        _parameter(field),
        inspect.Parameter.KEYWORD_ONLY,
        default=False if field.flag else None,
        annotation=Annotated[kind, option],
    )
