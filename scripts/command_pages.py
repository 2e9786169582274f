"""The reference pages of the commands, made from the commands themselves."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping
from enum import Enum
from types import MappingProxyType
from typing import Final

import typer

from hpcddp.cli.field_options import field_options
from hpcddp.cli.help import ClickObject, built

INDEX: Final = "README.md"
_INTRODUCTION: Final = """\
# The commands

`scripts/generate-docs` writes these pages from the commands themselves: change a docstring, not its page.

`--help` prints the same text. `--json` prints one JSON document on stdout and nothing else; progress and errors go to
stderr. [Exit codes](../exit-codes.md#of-the-commands) are the same for all. `--debug` prints the
traceback of an error. Colours are used on a terminal only, and never with `NO_COLOR`.

"""
_ENVIRONMENT: Final = """\
## Environment

| variable | meaning |
|---|---|
| `SLURM_CONF` | configuration file of the Slurm to use; `hpcddp sandbox up` prints it |
| `XDG_CONFIG_HOME` | the directory that contains `hpcddp/profiles`; default `~/.config` |
| `XDG_STATE_HOME` | the directory that contains `hpcddp/sandbox`; default `~/.local/state` |
| `NO_COLOR` | disables colours |

## Completion

`hpcddp --install-completion` installs completion of commands, options, their values and run ids for bash, zsh or fish.
It takes effect in the next shell. `hpcddp --show-completion` prints the completion script instead.
"""
_WIDTH: Final = 120
# The default as the help text describes it, where it is not a plain value.
_DEFAULT_IN_HELP: Final = re.compile(r"\s*\[default: ([^\]]*)\]")
# Pages of the documentation about the subject of a command.
_SEE_ALSO: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "init": ("install", "profiles", "any-script"),
        "check": ("checks", "job-file", "any-script"),
        "render": ("job-file", "templates"),
        "submit": (
            "job-file",
            "any-script",
            "salloc",
            "sweeps",
            "environments",
            "stop-and-requeue",
            "trackers",
        ),
        "status": ("life-of-a-run",),
        "logs": ("life-of-a-run",),
        "why": ("life-of-a-run",),
        "report": ("report",),
        "shell": ("life-of-a-run",),
        "stacks": ("life-of-a-run",),
        "cancel": ("life-of-a-run", "stop-and-requeue"),
        "requeue": ("life-of-a-run", "stop-and-requeue"),
        "checkpoints": ("checkpoints",),
        "plan": ("batch",),
        "rehearse": ("rehearse", "any-script", "stop-and-requeue"),
        "doctor": ("questions",),
        "doctor loss": ("questions",),
        "doctor ddp": ("questions",),
        "doctor install": ("install",),
        "schema": ("job-file",),
        "sandbox": ("sandbox",),
        "sandbox up": ("sandbox",),
        "sandbox down": ("sandbox",),
        "sandbox status": ("sandbox",),
    }
)


_FIELD_TEXTS: Final = {option.name: f"`{option.path}` of the job file." for option in field_options()}
# The page that lists the options of the job file's fields for all commands.
_WITH_FIELD_OPTIONS: Final = "submit"


def all_commands(app: typer.Typer) -> list[tuple[tuple[str, ...], ClickObject]]:
    """Return every command and group, after the words that call it: no words for ``hpcddp`` itself."""
    return _with_subcommands((), typer.main.get_command(app))


def _with_subcommands(words: tuple[str, ...], command: ClickObject) -> list[tuple[tuple[str, ...], ClickObject]]:
    commands = [(words, command)]
    for name, subcommand in getattr(command, "commands", {}).items():
        if not subcommand.hidden:
            commands += _with_subcommands((*words, name), built(subcommand))
    return commands


def examples_of(command: ClickObject) -> list[str]:
    """Return the examples of a command, one line of shell each."""
    return [] if command.epilog is None else str(command.epilog).splitlines()


def command_pages(app: typer.Typer) -> dict[str, str]:
    """Return the pages by file name: the index, and one for each command."""
    (_, root_command), *commands = all_commands(app)
    rows = ["| command | what it does |", "|---|---|"]
    pages = {}
    for words, command in commands:
        file_name = _file_name(words)
        summary = command.get_short_help_str(1000)
        rows.append(f"| [hpcddp {' '.join(words)}]({file_name}) | {summary} |")
        pages[file_name] = _page(words, command)
    table = "\n".join(rows)
    examples = "\n".join(_examples_section(root_command))
    return {INDEX: f"{_INTRODUCTION}{table}\n\n{examples}\n{_ENVIRONMENT}", **pages}


def _file_name(words: tuple[str, ...]) -> str:
    return f"{'-'.join(words)}.md"


def _page(words: tuple[str, ...], command: ClickObject) -> str:
    context = typer.Context(command, info_name=" ".join(words))
    usage = " ".join(["hpcddp", *words, *command.collect_usage_pieces(context)])
    paragraphs = [" ".join(paragraph.split()) for paragraph in str(command.help).split("\n\n")]
    description = "\n\n".join(textwrap.fill(paragraph, _WIDTH, break_on_hyphens=False) for paragraph in paragraphs)
    return "\n".join(
        [
            f"# hpcddp {context.info_name}\n\n```\n{usage}\n```\n\n{description}\n",
            *_parameter_sections(command, context),
            *_examples_section(command),
            _related_pages_section(words, command),
        ]
    )


def _parameter_sections(command: ClickObject, context: ClickObject) -> Iterator[str]:
    parameters = [parameter for parameter in command.get_params(context) if parameter.name != "help"]
    arguments = [parameter for parameter in parameters if parameter.param_type_name == "argument"]
    options = [parameter for parameter in parameters if parameter.param_type_name == "option"]
    of_fields = [option for option in options if not _FIELD_TEXTS.keys().isdisjoint(option.opts)]
    if context.info_name == _WITH_FIELD_OPTIONS:
        of_fields = []
    options = [option for option in options if option not in of_fields]
    if arguments:
        yield "## Arguments\n\n| argument | meaning |\n|---|---|"
        for argument in arguments:
            name = str(argument.metavar or argument.name).strip("[]")
            yield f"| `{name}` | {_meaning(argument)} |"
        yield ""
    if options:
        yield "## Options\n\n| option | default | meaning |\n|---|---|---|"
        for option in options:
            yield f"| {_names(option, context)} | {_default(option)} | {_meaning(option)} |"
        yield ""
    if of_fields:
        yield f"And the options of the job file's fields, as [submit]({_WITH_FIELD_OPTIONS}.md#options) has them.\n"


def _names(option: ClickObject, context: ClickObject) -> str:
    record = option.get_help_record(context)
    if record is not None:
        return _cell(f"`{record[0].strip()}`")
    # The help does not list a hidden option.
    names = ", ".join(option.opts)
    if not option.is_flag:
        names += f" {option.metavar or 'VALUE'}"
    return _cell(f"`{names}`")


def _default(option: ClickObject) -> str:
    default_in_help = _DEFAULT_IN_HELP.search(option.help or "")
    if default_in_help is not None:
        return _cell(default_in_help[1])
    value = option.default.value if isinstance(option.default, Enum) else option.default
    if value is None or value is False or not option.show_default:
        return ""
    return f"`{value}`"


def _meaning(parameter: ClickObject) -> str:
    text = parameter.help or _FIELD_TEXTS.get(parameter.opts[0], "")
    return _cell(_DEFAULT_IN_HELP.sub("", text))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _examples_section(command: ClickObject) -> list[str]:
    examples = examples_of(command)
    return ["## Examples", "", "```sh", *examples, "```", ""] if examples else []


def _related_pages_section(words: tuple[str, ...], command: ClickObject) -> str:
    related_commands = [(*words, name) for name in getattr(command, "commands", ())]
    if len(words) > 1:
        related_commands.append(words[:1])
    links = [f"[hpcddp {' '.join(related)}]({_file_name(related)})" for related in related_commands]
    links += [f"[{page}](../{page}.md)" for page in _SEE_ALSO.get(" ".join(words), ())]
    links += ["[exit codes](../exit-codes.md#of-the-commands)", f"[all commands]({INDEX})"]
    return f"## See also\n\n{', '.join(links)}\n"
