"""The error boundary of the command line: prints one message and returns the exit code."""

from __future__ import annotations

import errno
import json
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, TextIO

import typer

from hpcddp.cli.help import ClickObject
from hpcddp.cli.output import OutputError, echo, sentences, write
from hpcddp.errors import HpcddpError

INTERRUPTED = 130
_FIXABLE = 2
_SHOWN = 80
# UsageError of click: from 0.20 on typer has a private copy of click and exports only some of its error classes.
USAGE_ERROR: tuple[type[Any], ...] = typer.BadParameter.__bases__

_PREFIX = "hpcddp:"
# What click raises for a group of commands that is called without one; typer's copy of click exports it from no module.
_HELP = "NoArgsIsHelpError"


class InterruptedCommandError(HpcddpError):
    """A command was interrupted, and its user has to know what it did; ``code`` is its exit code."""

    kind = "interrupted"
    advice = "Run the command again."


def run(app: typer.Typer, arguments: Sequence[str]) -> int:
    """Run the command line, and print an error as one message.

    Args:
        arguments: the arguments without the program's name.

    Returns:
        The exit code: 0 success, 1 failure, 2 an error that the user can fix, 130 interrupted, 143 ended by SIGTERM.
    """
    code = _run(app, arguments)
    # Where the errors cannot be written either, the exit code is all that is left to say.
    _flush(sys.stderr)
    return code if _flush(sys.stdout) else code or 1


def _run(app: typer.Typer, arguments: Sequence[str]) -> int:
    options = _options(arguments)
    as_json = "--json" in options
    debug = "--debug" in options
    try:
        code = app(args=_debug_first(arguments), prog_name="hpcddp", standalone_mode=False)
    except HpcddpError as error:
        if debug:
            _print_traceback()
        _report_error(error, as_json=as_json)
        # The exit codes of jobs mean nothing here: what has one is a damaged file of a run, which the message names.
        is_interrupted = isinstance(error, InterruptedCommandError)
        return int(error.code) if is_interrupted else min(error.exit_code, _FIXABLE)
    except USAGE_ERROR as error:
        _report_usage_error(error, arguments, as_json=as_json)
        return int(error.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of the pipe has ended (`hpcddp render job.yaml | head`).
        _discard(sys.stdout)
        return 0
    except Exception as error:  # noqa: BLE001  the outermost boundary; --debug prints the traceback
        if debug:
            _print_traceback()
        message, hint = _unforeseen(error)
        document = {"error": {"kind": "unforeseen", "message": message, "hint": hint}}
        _report(document, f"{_PREFIX} {message}", hint, as_json=as_json)
        return 1
    return code if isinstance(code, int) else 0


def _report_error(error: HpcddpError, *, as_json: bool) -> None:
    text = f"{_PREFIX} {error.message}"
    if error.kind == "job_file":
        # Each line is a problem of its own.
        text = text.replace("\n", f"\n{_PREFIX} ")
    if isinstance(error, OutputError):
        # Standard output is what could not be written.
        as_json = False
    _report(error.as_json(), text, error.hint, as_json=as_json)


def _report_usage_error(error: ClickObject, arguments: Sequence[str], *, as_json: bool) -> None:
    message = _usage_message(error)
    see_help = _usage_hint(error, arguments)
    document = {"error": {"kind": "usage", "message": message, "hint": see_help}}
    if type(error).__name__ == _HELP:
        # The message is the help, which needs neither prefix nor hint.
        _report(document, message, None, as_json=as_json)
    else:
        _report(document, f"{_PREFIX} {message}", see_help, as_json=as_json)


def _options(arguments: Sequence[str]) -> Sequence[str]:
    """Return the arguments before ``--``; those after it belong to the user's command."""
    return arguments[: arguments.index("--")] if "--" in arguments else arguments


def _debug_first(arguments: Sequence[str]) -> list[str]:
    """Move ``--debug`` to the front, so that it is accepted at any position."""
    options = _options(arguments)
    if "--debug" not in options:
        return list(arguments)
    return ["--debug", *(word for word in options if word != "--debug"), *arguments[len(options) :]]


def _unforeseen(error: Exception) -> tuple[str, str]:
    """Return a message and a hint for an error that is not an ``HpcddpError``."""
    from hpcddp.run.files import is_full

    if isinstance(error, FileNotFoundError) and not _has_working_directory():
        return "the working directory does not exist any more", "Change to another directory."
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        path = str(error.filename)[:_SHOWN]
        return f"a path is longer than the file system allows: {path}...", "Write a shorter one."
    if isinstance(error, OSError) and is_full(error):
        where = f"writing {error.filename}" if error.filename else "writing"
        hint = "Make room on that disk, and run the command again; with --debug it shows which file."
        return f"{where} failed: {error.strerror}", hint
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename} cannot be used" if error.filename else "reading or writing failed"
        return f"{where}: {error.strerror}", "Run it again with --debug to see where."
    return f"{type(error).__name__}: {error}", "That is a mistake of hpcddp: run it again with --debug, and report it."


def _has_working_directory() -> bool:
    try:
        os.getcwd()  # noqa: PTH109  pathlib asks in the same way, and creates a path
    except FileNotFoundError:
        return False
    return True


def _usage_message(error: ClickObject) -> str:
    """Return the message of a wrong call, with the option or the field of the job that was meant."""
    from hpcddp.errors import did_you_mean
    from hpcddp.jobfile.messages import field_named

    option = getattr(error, "option_name", None)
    if option is None or error.ctx is None:
        # Some versions of typer pass on the words of pydantic.
        text = str(error.format_message()).replace("Value error, ", "").replace("Input should", "it has to")
        return text.partition(", unable to")[0]
    names = [name for parameter in error.ctx.command.params for name in parameter.opts]
    field = field_named(option.removeprefix("--")) if "--set" in names else None
    if field is not None:
        return f"there is no option {option}; write --set {field}=VALUE, which is the field of the job file"
    return f"there is no option {option}; {did_you_mean(option, names, '--help --all lists all')}"


def _usage_hint(error: ClickObject, arguments: Sequence[str]) -> str:
    command_path = "hpcddp"
    if error.ctx is not None:
        command_path = error.ctx.command_path
    elif arguments and not arguments[0].startswith("-"):
        # Without a context the words of a command were read, and one of its options lacks its value.
        command_path = f"hpcddp {arguments[0]}"
    return f"See '{command_path} --help'."


def _report(document: Mapping[str, object], sentence: str, hint: str | None, *, as_json: bool) -> None:
    with suppress(OutputError, BrokenPipeError):
        if as_json:
            write(json.dumps(document, indent=2))
            return
    with suppress(OutputError, BrokenPipeError):
        if sentence.startswith(f"{_PREFIX} "):
            for text in sentence.removeprefix(f"{_PREFIX} ").split(f"\n{_PREFIX} "):
                sentences(_PREFIX, "bad", text)
        else:
            # The help, whose lines fit.
            echo(sentence, err=True)
        if hint is not None:
            sentences("", "quiet", f"  {hint}")


def _print_traceback() -> None:
    echo(traceback.format_exc(), err=True, nl=False)


def _flush(stream: TextIO) -> bool:
    """Write what a stream holds back, and return whether that was possible; what cannot be written is discarded.

    The interpreter would try again at its end, and exit with 120 in place of the command's code.
    """
    try:
        stream.flush()
    except OSError:
        _discard(stream)
        return False
    return True


def _discard(stream: TextIO) -> None:
    """Connect a stream that cannot be written to /dev/null (docs.python.org, signal, Note on SIGPIPE)."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
