"""Print to the terminal, in which a name, a log or an error of anybody's must control nothing."""

from __future__ import annotations

import sys

from hpcddp.errors import HpcddpError, printable


class OutputError(HpcddpError):
    """The output of a command cannot be written."""

    kind = "output"
    advice = "Write the output to another place."


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
