"""Print to the terminal, in which a name, a log or an error of anybody's must control nothing."""

from __future__ import annotations

import os
import sys
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


def warn(text: str) -> None:
    """Print a warning; errors as ``echo`` has them."""
    write(f"{styled('warning:', 'waiting', err=True)} {printable(text)}", err=True)


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
