"""The error boundary: one sentence, one way out, one exit code."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import typer

from hpcddp.errors import HpcddpError

INTERRUPTED = 130
# typer carries its own copy of click from 0.20 on and exports only the leaves of its errors: this is UsageError.
USAGE_ERROR: tuple[type[Any], ...] = typer.BadParameter.__bases__


def run(app: typer.Typer, arguments: Sequence[str]) -> int:
    """Run ``app`` with ``arguments``; print what went wrong.

    Args:
        app: the command line.
        arguments: the words after the program's name.

    Returns:
        The exit code: 0 done, 1 something broke, 2 the user can fix it, 130 interrupted.
    """
    as_json, debug = "--json" in _options(arguments), "--debug" in _options(arguments)
    try:
        code = app(args=_debug_first(arguments), prog_name="hpcddp", standalone_mode=False)
    except HpcddpError as error:
        if debug:
            traceback.print_exc()
        _report(error.as_json(), f"hpcddp: {error.message}", error.hint, as_json=as_json)
        return error.exit_code
    except USAGE_ERROR as error:
        message = error.format_message()
        document = {"error": {"kind": "usage", "message": message, "hint": None}}
        # Without any argument the message is the help, which needs neither our name nor a hint.
        hint = _usage_hint(error) if arguments else None
        _report(document, f"hpcddp: {message}" if arguments else message, hint, as_json=as_json)
        return int(error.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of a pipe has gone (`hpcddp render job.yaml | head`): nobody is left to tell.
        sys.stderr.close()
        return 0
    except Exception as error:  # noqa: BLE001  the last boundary: a sentence, and the traceback for who asks for it
        if debug:
            traceback.print_exc()
        sentence, hint = _unforeseen(error)
        document = {"error": {"kind": "unforeseen", "message": sentence, "hint": hint}}
        _report(document, f"hpcddp: {sentence}", hint, as_json=as_json)
        return 1
    return code if isinstance(code, int) else 0


def _options(arguments: Sequence[str]) -> Sequence[str]:
    """Return the arguments before a lone ``--``: what follows belongs to the user's command."""
    return arguments[: arguments.index("--")] if "--" in arguments else arguments


def _debug_first(arguments: Sequence[str]) -> list[str]:
    """Move ``--debug`` to the front: it is an option of all commands, wherever it stands."""
    options = _options(arguments)
    if "--debug" not in options:
        return list(arguments)
    return ["--debug", *(word for word in options if word != "--debug"), *arguments[len(options) :]]


def _unforeseen(error: Exception) -> tuple[str, str]:
    """Return the sentence and the way out for an error that nothing below has explained."""
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename} cannot be used" if error.filename else "reading or writing failed"
        return f"{where}: {error.strerror}", "Run it again with --debug to see where."
    return f"{type(error).__name__}: {error}", "That is a mistake of hpcddp: run it again with --debug, and report it."


def _usage_hint(error: Any) -> str | None:  # noqa: ANN401
    return f"See '{error.ctx.command_path} --help'." if error.ctx is not None else None


def _report(document: Mapping[str, object], sentence: str, hint: str | None, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
        return
    sys.stderr.write(f"{sentence}\n")
    if hint:
        sys.stderr.write(f"  {hint}\n")
