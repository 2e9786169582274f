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
        code = app(args=list(arguments), prog_name="hpcddp", standalone_mode=False)
    except HpcddpError as error:
        if debug:
            traceback.print_exc()
        _report(error.as_json(), f"hpcddp: {error.message}", error.hint, as_json=as_json)
        return error.exit_code
    except USAGE_ERROR as error:
        document = {"error": {"kind": "usage", "message": error.format_message(), "hint": None}}
        _report(document, f"hpcddp: {error.format_message()}", _usage_hint(error), as_json=as_json)
        return int(error.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of a pipe has gone (`hpcddp render job.yaml | head`): nobody is left to tell.
        sys.stderr.close()
        return 0
    return code if isinstance(code, int) else 0


def _options(arguments: Sequence[str]) -> Sequence[str]:
    """Return the arguments before a lone ``--``: what follows belongs to the user's command."""
    return arguments[: arguments.index("--")] if "--" in arguments else arguments


def _usage_hint(error: Any) -> str | None:  # noqa: ANN401
    return f"See '{error.ctx.command_path} --help'." if error.ctx is not None else None


def _report(document: Mapping[str, object], sentence: str, hint: str | None, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
        return
    sys.stderr.write(f"{sentence}\n")
    if hint:
        sys.stderr.write(f"  {hint}\n")
