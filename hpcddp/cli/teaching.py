"""Examples in the help: every docstring has some, and they stand at its end, each on a line of its own."""

from __future__ import annotations

import inspect
import textwrap
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

_EXAMPLE = "Example: "


def teach(app: typer.Typer) -> None:
    """Let the help of all commands end with their examples.

    A docstring, or the help of a group, gives each as a paragraph ``Example: hpcddp ...``.
    """
    app.info.help, app.info.epilog = _parts(str(app.info.help))
    app.info.cls = _showing_examples(TyperGroup)
    for command in app.registered_commands:
        command.help, command.epilog = _parts(command.help or inspect.getdoc(command.callback) or "")
        command.cls = _showing_examples(command.cls or TyperCommand)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            teach(group.typer_instance)


def examples_of(command: Any) -> list[str]:  # noqa: ANN401  typer's own copy of click's Command
    """Return the examples of a command that has been taught, a line of shell each."""
    return [] if command.epilog is None else str(command.epilog).splitlines()


class _Examples:
    epilog: str | None
    params: list[Any]

    def format_epilog(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401, ARG002  as above
        """Name the options that the list leaves out, and write the examples, unbroken: they are there to be copied."""
        hidden = [parameter.opts[0] for parameter in self.params if getattr(parameter, "hidden", False)]
        if hidden:
            with formatter.section("More options"):
                width = formatter.width - formatter.current_indent
                _write_lines(formatter, textwrap.wrap(" ".join(hidden), width, break_on_hyphens=False))
        if self.epilog is not None:
            with formatter.section("Examples"):
                _write_lines(formatter, self.epilog.splitlines())


def _write_lines(formatter: Any, lines: list[str]) -> None:  # noqa: ANN401
    for line in lines:
        formatter.write(f"{'':>{formatter.current_indent}}{line}\n")


def _showing_examples(cls: type[Any]) -> type[Any]:
    return type(cls.__name__, (_Examples, cls), {})


def _parts(help_text: str) -> tuple[str, str | None]:
    """Return a help without its examples, and the examples."""
    paragraphs = inspect.cleandoc(help_text).split("\n\n")
    examples = [paragraph for paragraph in paragraphs if paragraph.startswith(_EXAMPLE)]
    rest = [paragraph for paragraph in paragraphs if not paragraph.startswith(_EXAMPLE)]
    lines = [" ".join(example.removeprefix(_EXAMPLE).split()) for example in examples]
    return "\n\n".join(rest), "\n".join(lines) or None
