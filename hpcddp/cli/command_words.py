"""Commands of hpcddp that take the words of another command after ``--``, and what they say where ``--`` is missing."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from hpcddp.cli.boundary import USAGE_ERROR
from hpcddp.cli.help import ClickObject
from hpcddp.cli.job_arguments import JobArguments, field_parameters, take_field_texts
from hpcddp.errors import UserError

# The keys of what a command keeps for its function (``typer.Context.meta``).
_COMMAND = "hpcddp.command"
_JOB_ARGUMENTS = "hpcddp.job_arguments"


def words_of_command(context: typer.Context) -> tuple[str, ...] | None:
    """Return the words after ``--``; None if there is no ``--``."""
    words: tuple[str, ...] | None = context.meta.get(_COMMAND)
    return words


def job_arguments(context: typer.Context) -> JobArguments:
    """Return the fields of the job that the call of a ``JobCommand`` sets."""
    arguments: JobArguments = context.meta[_JOB_ARGUMENTS]
    return arguments


class CommandWords(TyperCommand):
    """A command that keeps the words after ``--`` unchanged."""

    def collect_usage_pieces(self, ctx: ClickObject) -> list[str]:
        """Return the words after the command's name in the first line of the help."""
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND...]"]

    def parse_args(self, ctx: ClickObject, args: list[str]) -> list[str]:
        """Keep the words after the first ``--``, and parse the others."""
        words = list(args)
        if "--" in words:
            dashes = words.index("--")
            ctx.meta[_COMMAND] = tuple(words[dashes + 1 :])
            words = words[:dashes]
        return super().parse_args(ctx, words)

    def _takes_value(self) -> dict[str, bool]:
        """Return the names of all options, and whether each takes a value."""
        takes_value = {}
        for parameter in self.params:
            if parameter.param_type_name == "option":
                is_flag = getattr(parameter, "is_flag", False)
                takes_value.update(dict.fromkeys(parameter.opts, not is_flag))
        return takes_value

    def _argument_indices(self, args: Sequence[str]) -> list[int]:
        """Return the indices of the words before ``--`` that are neither options nor values of options."""
        takes_value = self._takes_value()
        indices = []
        is_value = False
        for index, word in enumerate(args):
            if is_value:
                is_value = False
            elif word == "--":
                break
            elif word.startswith("-"):
                is_value = takes_value.get(word, False)
            else:
                indices.append(index)
        return indices


class RunCommand(CommandWords):
    """A command that takes a run and the words of a command."""

    def parse_args(self, ctx: ClickObject, args: list[str]) -> list[str]:
        """Say where ``--`` belongs, if the words of a command stand without it."""
        if not ctx.resilient_parsing and "--" not in args:
            self._refuse_command_without_dashes(ctx.command_path, args)
        return super().parse_args(ctx, args)

    def _refuse_command_without_dashes(self, command_path: str, args: Sequence[str]) -> None:
        indices = self._argument_indices(args)
        if len(indices) < 2:  # noqa: PLR2004  the first one is the run
            return
        before = args[: indices[1]]
        command = args[indices[1] :]
        options = {word.partition("=")[0] for word in before if word.startswith("--")}
        if not options <= self._takes_value().keys():
            # An option that does not exist may have a value, and is the error to name.
            return
        raise UserError(
            f"{command[0]} stands after the run, and a command stands after --, as in: "
            f"{shlex.join([*command_path.split(), *before, '--', *command])}"
        )


class JobCommand(CommandWords):
    """A command that takes a job file or the words of a command, and the options of fields of the job.

    Its function gets them from its context: ``job_arguments``.
    """

    def __init__(self, name: str | None, *, params: list[Any], **attributes: Any) -> None:  # noqa: ANN401  typer's
        super().__init__(name, params=[*params, *field_parameters()], **attributes)

    def invoke(self, ctx: ClickObject) -> Any:  # noqa: ANN401  typer's
        """Keep the fields of the job for the function, and call it with its own parameters."""
        fields = take_field_texts(ctx.params)
        ctx.meta[_JOB_ARGUMENTS] = JobArguments(fields=fields, command=words_of_command(ctx))
        return super().invoke(ctx)

    def collect_usage_pieces(self, ctx: ClickObject) -> list[str]:  # noqa: ARG002  click passes it
        """Return the words after the command's name in the first line of the help."""
        return ["[JOB]", "[OPTIONS]", "[-- COMMAND...]"]

    def parse_args(self, ctx: ClickObject, args: list[str]) -> list[str]:
        """Say where ``--`` belongs, if the words of a command stand without it, and what else a command needs."""
        if ctx.resilient_parsing:
            return super().parse_args(ctx, args)
        self._refuse_option_as_value(args)
        self._refuse_time_in_two_words(args)
        _refuse_no_command(ctx.command_path, args)
        program_index = self._index_of_program(args)
        if program_index is None:
            return super().parse_args(ctx, args)
        with suppress(*USAGE_ERROR):
            rest = super().parse_args(ctx, args)
            if ctx.params.get("job_file") != Path(args[program_index]):
                return rest
        raise UserError(
            f"{args[program_index]} is a program, not a job file; write a command after --, as in: "
            f"{shlex.join([*ctx.command_path.split(), *self._with_dashes(args, program_index)])}"
        )

    def _refuse_option_as_value(self, args: Sequence[str]) -> None:
        """Reject ``-q --follow``, of which the second word would be the value of the first one."""
        takes_value = self._takes_value()
        options_and_job = args[: args.index("--")] if "--" in args else args
        for word, next_word in pairwise(options_and_job):
            if takes_value.get(word) and next_word in takes_value:
                raise UserError(
                    f"{word} needs a value, and {next_word} is another option; write the value after {word}"
                )

    def _refuse_time_in_two_words(self, args: Sequence[str]) -> None:
        """Reject ``--time 10 minutes``, of which the second word would be the job file."""
        from hpcddp.jobfile.units import UNITS

        job_index = next(iter(self._argument_indices(args)), 0)
        if job_index == 0:
            return
        job_word = args[job_index]
        unit = UNITS.get(job_word.lower())
        if unit is None or Path(job_word).exists():
            return
        previous_word = args[job_index - 1]
        if previous_word.startswith("--time="):
            option = "--time"
            number = previous_word.removeprefix("--time=")
        else:
            option = args[job_index - 2]
            number = previous_word
        if option in {"--time", "-t"} and re.fullmatch("[0-9]{1,6}", number, re.ASCII):
            raise UserError(
                f"{job_word} stands where the job file belongs; write the time in one word: {option} {number}{unit}"
            )

    def _index_of_program(self, args: Sequence[str]) -> int | None:
        """Return where a program stands in place of the job file; None if none does."""
        if "--" in args:
            return None
        job_index = next(iter(self._argument_indices(args)), None)
        if job_index is None or not is_program(args[job_index]):
            return None
        return job_index

    def _with_dashes(self, args: Sequence[str], program_index: int) -> list[str]:
        """Return the words of the call with ``--`` before the program, and with the options of hpcddp before that."""
        takes_value = self._takes_value()
        options = list(args[:program_index])
        program = args[program_index]
        command = program.split() if " " in program else [program]
        is_value = False
        for word in args[program_index + 1 :]:
            name, equals, _ = word.partition("=")
            if is_value:
                options.append(word)
                is_value = False
            elif name in takes_value:
                options.append(word)
                is_value = takes_value[name] and not equals
            else:
                command.append(word)
        return [*options, "--", *words_that_run(*command)]


def _refuse_no_command(command_path: str, args: Sequence[str]) -> None:
    """Reject ``--`` without a command behind it, and a command that is one word because it is in quotes."""
    if "--" not in args:
        return
    command = args[args.index("--") + 1 :]
    if not command:
        example = shlex.join([*command_path.split(), *args, "python", "train.py"])
        raise UserError(f"no command follows --; write one, as in: {example}")
    if len(command) > 1:
        return
    (word,) = command
    parts = word.split()
    if len(parts) < 2 or Path(word).exists() or shutil.which(word) or not shutil.which(parts[0]):  # noqa: PLR2004
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


def words_that_run(program: str, *arguments: str) -> list[str]:
    """Return the words that call a program; those of a script begin with its interpreter."""
    suffix = Path(program).suffix
    interpreter = [_INTERPRETERS[suffix]] if suffix in _INTERPRETERS else []
    return [*interpreter, program, *arguments]


def is_program(word: str) -> bool:
    """Return whether a word that is given in place of a job file is a program, or a whole command in quotes."""
    from hpcddp.jobfile.read import is_sbatch_script

    path = Path(word)
    if word.startswith("-") or not word.strip() or path.suffix in _JOB_FILES:
        return False
    if path.is_file() and is_sbatch_script(path):
        # Reading it as a job file says how to make one from it.
        return False
    if path.suffix in _INTERPRETERS:
        return True
    if not path.is_file():
        first_word = word.split(maxsplit=1)[0]
        return not path.exists() and shutil.which(first_word) is not None
    # The mode says nothing on some file systems.
    with suppress(OSError), path.open("rb") as file:
        return os.access(path, os.X_OK) and file.read(4).startswith((b"#!", b"\x7fELF"))
    return False
