"""The groups and commands of the help: examples at the end, and commands that are loaded when they are called."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property
from importlib import import_module
from typing import Any, TypeAlias

import typer
from typer.core import TyperCommand, TyperGroup

from hpcddp.cli.output import styled

ClickObject: TypeAlias = Any
"""A command, parameter, context or formatter of click, of which typer has a private copy without public types."""
_EXAMPLE = "Example: "
_ALL = "--all"


def add_examples(app: typer.Typer) -> None:
    """Let the help of all commands end with their examples.

    A docstring, or the help of a group, has a paragraph ``Example: hpcddp ...`` for each.
    """
    if isinstance(app.info.help, str):
        app.info.help, app.info.epilog = _help_and_examples(app.info.help)
    app.info.cls = _showing_examples(app.info.cls if isinstance(app.info.cls, type) else TyperGroup)
    for command in app.registered_commands:
        command.help, command.epilog = _help_and_examples(command.help or inspect.getdoc(command.callback) or "")
        command.cls = _showing_examples(command.cls or TyperCommand)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            add_examples(group.typer_instance)


class CommandToLoad(TyperCommand):
    """A command or group of a module of this package, which is imported for its help and to call it.

    Args:
        name: its name and that of its module, whose ``register`` adds it to an app.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._module = f"{__package__}.{name}"

    @cached_property
    def _app(self) -> typer.Typer:
        app = typer.Typer(rich_markup_mode=None)
        import_module(self._module).register(app)
        add_examples(app)
        return app

    def get_short_help_str(self, limit: int = 45) -> str:
        """Return the first sentence of the help."""
        texts = [command.help for command in self._app.registered_commands]
        texts += [group.typer_instance.info.help for group in self._app.registered_groups if group.typer_instance]
        self.help = texts[0]
        return super().get_short_help_str(limit)

    def build(self) -> ClickObject:
        """Return the command with its parameters."""
        return typer.main.get_group(self._app).commands[str(self.name)]


class CommandsOnDemand(TyperGroup):
    """A group that imports and builds a command when it is called: all of them take as long as to import typer."""

    def resolve_command(self, ctx: ClickObject, args: list[str]) -> tuple[str | None, ClickObject, list[str]]:
        """Return the name of the command that is called, the command, and its arguments."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, built(command), rest


def built(command: ClickObject) -> ClickObject:
    """Return a command with its parameters."""
    return command.build() if isinstance(command, CommandToLoad) else command


class _Examples:
    """Mixin for a command or group of typer, which has the methods of ``super()``."""

    epilog: str | None
    params: list[ClickObject]

    def parse_args(self, ctx: ClickObject, args: list[str]) -> list[str]:
        """Take ``--all`` beside ``--help``, which is no option of the command."""
        words = args[: args.index("--")] if "--" in args else args
        # The help of a command of a group is asked for behind its name.
        is_about_subcommand = hasattr(self, "commands") and bool(words) and not words[0].startswith("-")
        asks_for_help = any(word in ctx.help_option_names for word in words)
        if _ALL in words and asks_for_help and not is_about_subcommand:
            ctx.meta[_ALL] = True
            args = [word for word in words if word != _ALL]
        rest: list[str] = super().parse_args(ctx, args)  # type: ignore[misc]
        return rest

    def shell_complete(self, ctx: ClickObject, incomplete: str) -> list[ClickObject]:
        """Complete every option, also one that the short help only names."""
        with self._all_listed():
            completions: list[ClickObject] = super().shell_complete(ctx, incomplete)  # type: ignore[misc]
            return completions

    def format_help(self, ctx: ClickObject, formatter: ClickObject) -> None:
        """Write the help, with all options after ``--all``, on a terminal in the colours of the theme."""
        write_heading = formatter.write_heading
        write_dl = formatter.write_dl
        write_usage = formatter.write_usage
        formatter.write_heading = lambda heading: write_heading(styled(heading, "heading"))
        formatter.write_dl = lambda rows, *more, **named: write_dl(
            [(styled(first, "name"), second) for first, second in rows], *more, **named
        )
        formatter.write_usage = lambda name, *more: write_usage(styled(name, "heading"), *more)
        with self._all_listed() if ctx.meta.get(_ALL) else nullcontext():
            super().format_help(ctx, formatter)  # type: ignore[misc]

    @contextmanager
    def _all_listed(self) -> Iterator[None]:
        hidden = [parameter for parameter in self.params if getattr(parameter, "hidden", False)]
        for parameter in hidden:
            parameter.hidden = False
        try:
            yield
        finally:
            for parameter in hidden:
                parameter.hidden = True

    def format_epilog(self, ctx: ClickObject, formatter: ClickObject) -> None:
        """Write the names of hidden options, and the examples without line breaks, so that they can be copied."""
        hidden = [parameter.opts[-1] for parameter in self.params if getattr(parameter, "hidden", False)]
        if hidden and not ctx.meta.get(_ALL):
            with formatter.section("More options, which --help --all describes"):
                width = formatter.width - formatter.current_indent
                _write_lines(formatter, textwrap.wrap(" ".join(hidden), width, break_on_hyphens=False))
        if self.epilog is not None:
            with formatter.section("Examples"):
                _write_lines(formatter, self.epilog.splitlines())


def _write_lines(formatter: ClickObject, lines: list[str]) -> None:
    for line in lines:
        formatter.write(f"{'':>{formatter.current_indent}}{line}\n")


def _showing_examples(cls: type[Any]) -> type[Any]:
    return type(cls.__name__, (_Examples, cls), {})


def _help_and_examples(help_text: str) -> tuple[str, str | None]:
    """Return the help without its examples, and the examples."""
    paragraphs = inspect.cleandoc(help_text).split("\n\n")
    examples = [paragraph for paragraph in paragraphs if paragraph.startswith(_EXAMPLE)]
    rest = [paragraph for paragraph in paragraphs if not paragraph.startswith(_EXAMPLE)]
    lines = [" ".join(example.removeprefix(_EXAMPLE).split()) for example in examples]
    return "\n\n".join(rest), "\n".join(lines) or None
