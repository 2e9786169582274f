"""The ``hpcddp`` command with all its subcommands."""

from __future__ import annotations

import os
import signal
import sys
from types import MappingProxyType
from typing import Annotated, Any

import typer

from hpcddp.cli import boundary
from hpcddp.cli.help import CommandsOnDemand, CommandToLoad, add_examples
from hpcddp.cli.output import echo
from hpcddp.errors import UserError
from hpcddp.version import __version__

app = typer.Typer(
    name="hpcddp",
    help="""Submit, follow and examine PyTorch DDP trainings under Slurm.

    Example: hpcddp submit job.yaml --follow

    Example: hpcddp submit --nodes 2 --gpus-per-node 4 --cpus-per-task 8 -- python train.py
    """,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(value: bool) -> None:  # noqa: FBT001  typer passes the value of the option
    if value:
        echo(f"hpcddp {__version__}")
        raise typer.Exit


@app.callback()
def hpcddp(
    *,
    version: Annotated[
        bool,
        typer.Option("--version", "-V", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Options that every command shares."""


# The order of the help.
_COMMANDS = tuple(
    CommandToLoad(name)
    for name in (
        "init", "check", "render", "submit", "status", "logs", "why", "report", "shell", "stacks", "cancel", "requeue",
        "checkpoints", "plan", "rehearse", "doctor", "schema", "sandbox",
    )
)  # fmt: skip


# Which commands people look for under another name.
_OTHER_NAMES = MappingProxyType(
    {
        "resume": "submit --resume RUN",
        "run": "submit",
        "stop": "cancel",
        "kill": "cancel",
        "list": "status",
        "ls": "status",
    }
)


class _Commands(CommandsOnDemand):
    """All commands."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:  # noqa: ANN401  typer's own copy of click's Context
        """Answer the name that another tool has for a command with the name here."""
        if args[0] in _OTHER_NAMES and not ctx.resilient_parsing:
            raise UserError(f"there is no command {args[0]}; write hpcddp {_OTHER_NAMES[args[0]]}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401  as above
        """End at SIGTERM as at Ctrl-C; keep signal and text of an interruption: typer returns 130 for each."""
        from hpcddp.submission.interrupts import exit_code_of, interrupted_by_signals

        try:
            with interrupted_by_signals(signal.SIGTERM):
                return super().invoke(ctx)
        except KeyboardInterrupt as interruption:
            code = exit_code_of(interruption)
            if not str(interruption):
                raise typer.Exit(code) from interruption
            raise boundary.InterruptedCommandError(f"interrupted: {interruption}", code=code) from interruption

    def __init__(self, **attributes: Any) -> None:  # noqa: ANN401  those of typer's groups
        super().__init__(**attributes)
        for command in _COMMANDS:
            self.add_command(command)


app.info.cls = _Commands
add_examples(app)


def main() -> None:
    """Run the command line and exit with its code."""
    _open_streams()
    sys.exit(boundary.run(app, sys.argv[1:]))


def _open_streams() -> None:
    """Replace the streams that the shell has closed (``>&-``), and let no character stop the output of the others."""
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            # In this order each gets its own descriptor, which the next file would get otherwise.
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115, PTH123  to the end
        elif name != "stdin":
            stream.reconfigure(errors="backslashreplace")
