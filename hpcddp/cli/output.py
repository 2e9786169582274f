"""Print to the terminal, with escapes in place of the characters that control it: names and logs may hold any."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, Literal

import typer

from hpcddp.errors import HpcddpError, printable


class OutputError(HpcddpError):
    """The output of a command cannot be written."""

    kind = "output"
    advice = "Write the output to another place."


Role = Literal["heading", "name", "good", "active", "waiting", "bad", "quiet"]
# The colours of the help, of errors, of tables and of logs.
_THEME: Final[Mapping[Role, Mapping[str, Any]]] = MappingProxyType(
    {
        "heading": {"bold": True},
        "name": {"fg": "cyan"},
        "good": {"fg": "green"},
        "active": {"fg": "cyan"},
        "waiting": {"fg": "yellow"},
        "bad": {"fg": "red"},
        "quiet": {"dim": True},
    }
)


def styled(text: str, role: Role, *, err: bool = False) -> str:
    """Return a text in the colour of its role, or unchanged where no terminal shows it (https://no-color.org).

    Args:
        text: the text, without characters that control a terminal; ``write`` prints the result.
        role: what the text is.
        err: whether it goes to stderr.
    """
    stream = sys.stderr if err else sys.stdout
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not stream.isatty():
        return text
    return typer.style(text, **_THEME[role])


def sentences(prefix: str, role: Role, text: str) -> None:
    """Print sentences to stderr behind a prefix in a colour, on a terminal without breaking a word at its edge.

    Args:
        prefix: the word before them, ``hpcddp:`` or ``warning:``; empty for none.
        role: the colour of the prefix; without one, of the text.
        text: the sentences; newlines stay.

    Raises:
        OutputError: they cannot be written.
        BrokenPipeError: the reader of the pipe has ended.
    """
    shown = printable(f"{prefix} {text}" if prefix else text)
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns
        shown = "\n".join(
            textwrap.fill(
                line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False,
                replace_whitespace=False, drop_whitespace=True,
            )
            if len(line) > width
            else line
            for line in shown.split("\n")
        )  # fmt: skip
    coloured = prefix or shown
    write(styled(coloured, role, err=True) + shown.removeprefix(coloured), err=True)


def warn(text: str) -> None:
    """Print a warning; errors as ``sentences`` has them."""
    sentences("warning:", "waiting", text)


def echo(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print a text, with escapes in place of characters that control a terminal.

    Args:
        text: the text; newlines and tabs stay.
        err: whether it goes to stderr.
        nl: whether a newline follows.

    Raises:
        OutputError: it cannot be written.
        BrokenPipeError: the reader of the pipe has ended.
    """
    write(printable(text), err=err, nl=nl)


def write(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print a text as it is; arguments and errors as ``echo`` has them."""
    stream = sys.stderr if err else sys.stdout
    try:
        stream.write(f"{text}\n" if nl else text)
        stream.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"the output cannot be written: {error.strerror}") from error
