"""The reference pages of the commands, generated from the commands."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping
from enum import Enum
from types import MappingProxyType
from typing import Final

import typer

from hpcddp.cli.help import ClickObject, built, examples_of
from hpcddp.cli.job_arguments import FIELDS

INDEX: Final = "README.md"
_WRITTEN: Final = "Written by `scripts/generate-docs` from the command itself: change its docstring, not this page."
_INTRODUCTION: Final = f"""\
# The commands

{_WRITTEN}

`--help` prints the same text. `--json` prints one JSON document on stdout and nothing else; progress and errors go to
stderr. `--debug` prints the traceback of an error. Colours are used on a terminal only, and never with `NO_COLOR`.

"""
_EXIT_CODES: Final = """\
## Exit codes

| code | meaning |
|---|---|
| 0 | success |
| 1 | failure, or the command found a defect or a run that failed |
| 2 | an error that you can fix: the message says what to write instead |
| 130 | interrupted by Ctrl-C, or cancelled by its user |

With `--json` an error is `{"error": {"kind": ..., "message": ..., "hint": ...}}`.
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
_SHORT_EXIT_CODES: Final = (
    f"0 success, 1 failure, 2 an error that you can fix, 130 cancelled by its user: [more]({INDEX}#exit-codes)."
)
_FILES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "job_file": "| `JOB` | the [job file](../job-file.md) |",
        "overrides": "| `hpcddp/profiles/default.toml` | the default [profile](../profiles.md), in `~/.config` |",
        "run_root": "| `RUN_ROOT/NAME/RUN_ID/` | the directory of a run |",
    }
)
_WIDTH: Final = 120
# The default as the help text describes it, where it is not a plain value.
_SAID_DEFAULT: Final = re.compile(r"\s*\[default: ([^\]]*)\]")
# Pages of the documentation about the subject of a command.
_SEE_ALSO: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "init": ("install", "profiles", "from-a-script"),
        "check": ("checks", "job-file", "any-script"),
        "render": ("job-file", "templates"),
        "submit": (
            "job-file",
            "any-script",
            "launchers",
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


def walk(app: typer.Typer) -> Iterator[tuple[tuple[str, ...], ClickObject]]:
    """Yield every command and group with the words that call it: none for ``hpcddp`` itself."""
    yield from _below((), typer.main.get_command(app))


def _below(words: tuple[str, ...], command: ClickObject) -> Iterator[tuple[tuple[str, ...], ClickObject]]:
    yield words, command
    for name, below in getattr(command, "commands", {}).items():
        if not below.hidden:
            yield from _below((*words, name), built(below))


def command_pages(app: typer.Typer) -> dict[str, str]:
    """Return the pages by file name: one for each command, and the index."""
    found = list(walk(app))
    pages = {_file(words): _page(words, command) for words, command in found if words}
    rows = [f"| [hpcddp {' '.join(words)}]({_file(words)}) | {_first(command)} |" for words, command in found if words]
    root = "\n".join(_examples(found[0][1]))
    table = "\n".join(["| command | what it does |", "|---|---|", *rows])
    return {INDEX: f"{_INTRODUCTION}{table}\n\n{root}\n{_EXIT_CODES}\n{_ENVIRONMENT}"} | pages


def _file(words: tuple[str, ...]) -> str:
    return f"{'-'.join(words)}.md"


def _first(command: ClickObject) -> str:
    return str(command.get_short_help_str(1000))


def _page(words: tuple[str, ...], command: ClickObject) -> str:
    context = typer.Context(command, info_name=" ".join(words))
    usage = " ".join(["hpcddp", *words, *command.collect_usage_pieces(context)])
    paragraphs = [" ".join(paragraph.split()) for paragraph in str(command.help).split("\n\n")]
    description = "\n\n".join(textwrap.fill(paragraph, _WIDTH, break_on_hyphens=False) for paragraph in paragraphs)
    return "\n".join(
        [
            f"# hpcddp {context.info_name}\n\n{_WRITTEN}\n\n```\n{usage}\n```\n\n{description}\n",
            *_parameters(command, context),
            *_examples(command),
            f"## Exit codes\n\n{_SHORT_EXIT_CODES}\n",
            *_files(command),
            *_see_also(words, command),
        ]
    )


def _parameters(command: ClickObject, context: ClickObject) -> Iterator[str]:
    shown = [parameter for parameter in command.get_params(context) if parameter.name != "help"]
    arguments = [parameter for parameter in shown if parameter.param_type_name == "argument"]
    options = [parameter for parameter in shown if parameter.param_type_name == "option"]
    if arguments:
        yield "## Arguments\n\n| argument | meaning |\n|---|---|"
        for argument in arguments:
            yield f"| `{str(argument.metavar or argument.name).strip('[]')}` | {_text(argument)} |"
        yield ""
    if options:
        yield "## Options\n\n| option | default | meaning |\n|---|---|---|"
        for option in options:
            yield f"| {_names(option, context)} | {_default(option)} | {_text(option)} |"
        yield ""


def _names(option: ClickObject, context: ClickObject) -> str:
    record = option.get_help_record(context)
    if record is None:
        # A hidden option.
        value = "" if option.is_flag else f" {option.metavar or 'VALUE'}"
        return _cell(f"`{', '.join(option.opts)}{value}`")
    return _cell(f"`{record[0].strip()}`")


def _default(option: ClickObject) -> str:
    said = _SAID_DEFAULT.search(option.help or "")
    if said is not None:
        return _cell(said[1])
    value = option.default.value if isinstance(option.default, Enum) else option.default
    return "" if value is None or value is False or not option.show_default else f"`{value}`"


def _text(parameter: ClickObject) -> str:
    return _cell(_SAID_DEFAULT.sub("", parameter.help or _FIELD_OF.get(parameter.opts[0], "")))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


_FIELD_OF: Final = {field.option: f"`{field.path}` of the job file." for field in FIELDS}


def _examples(command: ClickObject) -> list[str]:
    examples = examples_of(command)
    return ["## Examples", "", "```sh", *examples, "```", ""] if examples else []


def _files(command: ClickObject) -> Iterator[str]:
    found = [text for name, text in _FILES.items() if any(parameter.name == name for parameter in command.params)]
    if found:
        yield "\n".join(["## Files\n\n| file | what it is |\n|---|---|", *found, ""])


def _see_also(words: tuple[str, ...], command: ClickObject) -> Iterator[str]:
    below = [
        f"[hpcddp {' '.join((*words, name))}]({_file((*words, name))})" for name in getattr(command, "commands", ())
    ]
    above = [f"[hpcddp {words[0]}]({_file(words[:1])})"] if len(words) > 1 else []
    pages = [f"[{page}](../{page}.md)" for page in _SEE_ALSO.get(" ".join(words), ())]
    yield f"## See also\n\n{', '.join([*below, *above, *pages, f'[all commands]({INDEX})'])}\n"
