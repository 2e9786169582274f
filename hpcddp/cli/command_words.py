"""Commands of hpcddp that take the words of another command, and flags of sbatch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from hpcddp.cli.help import ClickObject, CommandToLoad
from hpcddp.cli.job_arguments import JobArguments, field_parameters, take_field_texts
from hpcddp.errors import UserError

# The keys of what a command keeps for its function (``typer.Context.meta``).
_COMMAND = "hpcddp.command"
_JOB_ARGUMENTS = "hpcddp.job_arguments"
_INTERPRETERS = {".py": "python", ".sh": "bash"}
_JOB_FILES = {".yaml", ".yml", ".json"}


def words_of_command(context: typer.Context) -> tuple[str, ...] | None:
    """Return the words of the command that was given; None without one."""
    words: tuple[str, ...] | None = context.meta.get(_COMMAND)
    return words


def job_arguments(context: typer.Context) -> JobArguments:
    """Return the fields of the job that the call of a ``JobCommand`` sets."""
    arguments: JobArguments = context.meta[_JOB_ARGUMENTS]
    return arguments


class CommandWords(TyperCommand):
    """A command that takes the words of another one, behind ``--`` or from the first word on that begins one."""

    def collect_usage_pieces(self, ctx: ClickObject) -> list[str]:
        """Return the words after the command's name in the first line of the help."""
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND...]"]

    def parse_args(self, ctx: ClickObject, args: list[str]) -> list[str]:
        """Keep the words of the other command unchanged, and parse those before it."""
        takes_value = {
            name: not getattr(parameter, "is_flag", False) for parameter in self.params for name in parameter.opts
        }
        words: list[str] = []
        arguments: list[str] = []
        rest = iter(args)
        for word in rest:
            if word == "--":
                ctx.meta[_COMMAND] = tuple(rest)
            elif word.startswith("-"):
                words += self.option_words(word, rest, takes_value)
            elif self.begins_command(word, arguments) and not ctx.resilient_parsing:
                ctx.meta[_COMMAND] = self.command_from(word, list(rest), takes_value)
            else:
                arguments.append(word)
                words.append(word)
        return super().parse_args(ctx, words)

    def option_words(self, word: str, rest: Iterator[str], takes_value: Mapping[str, bool]) -> list[str]:
        """Return the words of an option, with its value from the words behind it.

        Args:
            takes_value: the names of all options, and whether each takes a value.
        """
        return [word, *islice(rest, int(takes_value.get(word, False)))]

    def begins_command(self, word: str, arguments: Sequence[str]) -> bool:  # noqa: ARG002  a subclass looks at the word
        """Return whether a word begins the other command: the first argument is the run."""
        return bool(arguments)

    def command_from(self, word: str, rest: list[str], options: Container[str]) -> tuple[str, ...]:  # noqa: ARG002  as above
        """Return the words of the other command."""
        return (word, *rest)


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

    def begins_command(self, word: str, arguments: Sequence[str]) -> bool:  # noqa: ARG002  click passes it
        """Return whether a word is a program."""
        return is_program(word)

    def command_from(self, word: str, rest: list[str], options: Container[str]) -> tuple[str, ...]:
        """Return the words that call a program.

        Raises:
            UserError: one of them is an option of hpcddp, which may not be meant for the program.
        """
        for argument in rest:
            name = argument.partition("=")[0]
            if name.startswith("--") and name in options:
                raise UserError(
                    f"{name} stands behind the program {word}, and hpcddp has an option of that name; write it before "
                    f"{word}, or -- before {word} if the program shall get it"
                )
        return tuple(words_that_run(word, *rest))

    def option_words(self, word: str, rest: Iterator[str], takes_value: Mapping[str, bool]) -> list[str]:
        """Return the words of an option, with ``--set`` in place of a flag of sbatch that is no option.

        Raises:
            UserError: it is an option of submit that this command has not.
        """
        from hpcddp.jobfile.resources import field_of_flag, fields_of_gres
        from hpcddp.jobfile.slurm_flags import SBATCH

        name, equals, value = word.partition("=")
        if name in takes_value:
            return super().option_words(word, rest, takes_value)
        if any(name in parameter.opts for parameter in CommandToLoad("submit").build().params):
            raise UserError(f"{name} is an option of hpcddp submit; leave it out")
        flag = _flag_of(name)
        if flag is None:
            return [word]
        if not equals:
            value = next(rest, "") if flag in SBATCH.with_value else "true"
        if flag != "gres":
            return ["--set", f"{field_of_flag(flag)}={value}"]
        words = []
        for field, text in fields_of_gres(value):
            words += ["--set", f"resources.{field}={text}"]
        return words


def _flag_of(name: str) -> str | None:
    """Return the long flag of sbatch that an option is; None for another one, and for the name of a field."""
    from hpcddp.jobfile.job import find_key
    from hpcddp.jobfile.slurm_flags import SBATCH

    flag = name.removeprefix("--")
    if flag == name:
        flag = SBATCH.short.get(name.removeprefix("-"), "")
    is_flag = SBATCH.long_flags_of(flag) == [flag] and flag != "help"
    return flag if is_flag and find_key((flag,)) is None else None


def words_that_run(program: str, *arguments: str) -> list[str]:
    """Return the words that call a program; those of a script begin with its interpreter."""
    suffix = Path(program).suffix
    interpreter = [_INTERPRETERS[suffix]] if suffix in _INTERPRETERS else []
    return [*interpreter, program, *arguments]


def is_program(word: str) -> bool:
    """Return whether a word that is given in place of a job file is a program."""
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
        return not path.exists() and shutil.which(word) is not None
    # The mode says nothing on some file systems.
    with suppress(OSError), path.open("rb") as file:
        return os.access(path, os.X_OK) and file.read(4).startswith((b"#!", b"\x7fELF"))
    return False
