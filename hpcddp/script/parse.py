"""Reads a whole sbatch script."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpcddp.errors import UserError
from hpcddp.jobfile.document import BYTE_ORDER_MARK, read_text
from hpcddp.jobfile.problems import Problem
from hpcddp.script.directives import DirectiveLine, Flag, is_blank_or_comment, read_directive_lines
from hpcddp.script.shell import Command, Comment, Statement, read_shell
from hpcddp.script.syntax import interpreter_of


class ScriptError(UserError):
    """A file is no script that sbatch could read."""

    kind = "script"


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """An sbatch script as a text: nothing of it is executed or expanded.

    Args:
        text: the script, with line breaks of Unix.
        shebang: the text behind ``#!`` in its first line; None without one, so that sbatch refuses it.
        has_byte_order_mark: whether a byte order mark is in front of it, so that sbatch refuses it.
        has_dos_line_breaks: whether its lines end as on Windows, so that sbatch refuses it.
        first_command: the number of the line where sbatch stops to look for directives; None if there is none.
        directive_lines: its lines that start with ``#SBATCH``, also those behind the first command. Lines in a
            here-document or in quotes are not among them.
        statements: its shell lines.
        comments: its comments, ``#SBATCH`` lines among them.
    """

    text: str
    lines: tuple[str, ...]
    shebang: str | None
    has_byte_order_mark: bool
    has_dos_line_breaks: bool
    first_command: int | None
    directive_lines: tuple[DirectiveLine, ...]
    statements: tuple[Statement, ...]
    comments: tuple[Comment, ...]

    @property
    def interpreter(self) -> str:
        """The name of the program that its first line names, also behind ``env``; empty without one."""
        return interpreter_of(self.text)

    @property
    def flags(self) -> tuple[Flag, ...]:
        """The flags that sbatch reads, in their order; of a flag that is given twice, the last one counts."""
        return tuple(flag for line in self.directive_lines if not line.is_ignored for flag in line.flags)

    def last_flag(self, *names: str) -> Flag | None:
        """Return the flag that counts of those that sbatch reads, under one of these names; None without one."""
        return next((flag for flag in reversed(self.flags) if flag.name in names), None)

    @property
    def unread_directives(self) -> tuple[DirectiveLine, ...]:
        """The directives behind the first command, of which sbatch reads none."""
        return tuple(line for line in self.directive_lines if line.is_ignored and line.flags)

    @property
    def commands(self) -> Iterator[Command]:
        """The simple commands, in their order, also those inside loops, conditions and functions."""
        return (command for statement in self.statements for command in statement.commands)


def parse_script(text: str) -> Script:
    """Read the text of an sbatch script. What cannot be read is a ``problem`` of its part, not an error."""
    has_dos_line_breaks = "\r\n" in text
    has_byte_order_mark = text.startswith(BYTE_ORDER_MARK)
    text = text.removeprefix(BYTE_ORDER_MARK).replace("\r\n", "\n")
    lines = tuple(text.split("\n"))
    statements, comments = read_shell(text)
    comment_lines = {comment.line for comment in comments}
    return Script(
        text=text,
        lines=lines,
        shebang=lines[0][2:].strip() if lines[0].startswith("#!") else None,
        has_byte_order_mark=has_byte_order_mark,
        has_dos_line_breaks=has_dos_line_breaks,
        first_command=next((number for number, line in enumerate(lines, 1) if not is_blank_or_comment(line)), None),
        directive_lines=tuple(line for line in read_directive_lines(lines) if line.number in comment_lines),
        statements=statements,
        comments=comments,
    )


def read_script(file: Path) -> Script:
    """Read an sbatch script from a file.

    Raises:
        ScriptError: the file cannot be read, is empty, is larger than 1 MB or is no text.
    """
    text = read_text(file, keeps_mark=True)
    if isinstance(text, Problem):
        raise ScriptError(str(text))
    if not text.removeprefix(BYTE_ORDER_MARK).strip():
        raise ScriptError(f"{file} is empty; name a script for sbatch")
    return parse_script(text)
