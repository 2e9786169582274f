"""Commands of hpcddp that take the words of another command, and flags of sbatch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from hpcddp.cli.help import ClickObject
from hpcddp.cli.job_arguments import JobArguments, field_parameters, take_field_texts

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
        words = list(args)
        if "--" in words:
            dashes = words.index("--")
            ctx.meta[_COMMAND] = tuple(words[dashes + 1 :])
            words = words[:dashes]
        elif not ctx.resilient_parsing:
            start = self.start_of_command(words)
            if start is not None:
                ctx.meta[_COMMAND] = tuple(words_that_run(*words[start:]))
                words = words[:start]
        return super().parse_args(ctx, self.with_fields(words))

    def start_of_command(self, words: Sequence[str]) -> int | None:
        """Return where the other command begins without ``--``; None if it does not."""
        # The first one is the run.
        return next(iter(self.argument_indices(words)[1:]), None)

    def with_fields(self, words: list[str]) -> list[str]:
        """Return the words with options in place of what is none."""
        return words

    def takes_value(self) -> dict[str, bool]:
        """Return the names of all options, and whether each takes a value."""
        takes_value = {}
        for parameter in self.params:
            if parameter.param_type_name == "option":
                is_flag = getattr(parameter, "is_flag", False)
                takes_value.update(dict.fromkeys(parameter.opts, not is_flag))
        return takes_value

    def argument_indices(self, words: Sequence[str]) -> list[int]:
        """Return the indices of the words that are neither options nor values of options."""
        takes_value = self.takes_value()
        indices = []
        is_value = False
        for index, word in enumerate(words):
            if is_value:
                is_value = False
            elif word.startswith("-"):
                is_value = takes_value.get(word, False)
            else:
                indices.append(index)
        return indices


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

    def start_of_command(self, words: Sequence[str]) -> int | None:
        """Return where a program stands; None if none does."""
        return next((index for index in self.argument_indices(words) if is_program(words[index])), None)

    def argument_indices(self, words: Sequence[str]) -> list[int]:
        """Return the indices of the words that are neither options, of hpcddp or sbatch, nor their values."""
        replaced = [index for index, _, count in _flags_of_sbatch(words, self.takes_value()) if count > 1]
        values = {index + 1 for index in replaced}
        return [index for index in super().argument_indices(words) if index not in values]

    def with_fields(self, words: list[str]) -> list[str]:
        """Return the words with ``--set`` in place of each flag of sbatch that is no option of this command."""
        for index, assignments, count in reversed(list(_flags_of_sbatch(words, self.takes_value()))):
            options = [word for assignment in assignments for word in ("--set", assignment)]
            words = [*words[:index], *options, *words[index + count :]]
        return words


def _flags_of_sbatch(words: Sequence[str], options: Mapping[str, bool]) -> Iterator[tuple[int, list[str], int]]:
    """Yield where a flag of sbatch stands that is no option, the fields that it sets, and the number of its words.

    Args:
        options: the options of the command, and whether each takes a value.
    """
    from hpcddp.jobfile.resources import field_of_flag, fields_of_gres
    from hpcddp.jobfile.slurm_flags import SBATCH

    is_value = False
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        flag = _flag_of(name)
        if is_value or flag is None or name in options:
            is_value = not is_value and options.get(word, False)
            continue
        if not equals:
            value = "true"
            if flag in SBATCH.with_value:
                value = next(iter(words[index + 1 :]), "")
                is_value = True
        if flag == "gres":
            assignments = [f"resources.{field}={text}" for field, text in fields_of_gres(value)]
        else:
            assignments = [f"{field_of_flag(flag)}={value}"]
        yield index, assignments, 1 + is_value


def _flag_of(name: str) -> str | None:
    """Return the long flag of sbatch that a word is; None for another word, and for the name of a field."""
    from hpcddp.jobfile.job import find_key
    from hpcddp.jobfile.slurm_flags import SBATCH

    if name.startswith("--"):
        flag = name.removeprefix("--")
    elif name.startswith("-"):
        flag = SBATCH.short.get(name.removeprefix("-"), "")
    else:
        return None
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
