"""The help of every command, those that come later too, fits a screen, teaches by example and loads nothing slow."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import pytest

from hpcddp.cli import boundary
from hpcddp.cli.main import app
from scripts.command_pages import all_commands, examples_of
from tests.cli.slow_libraries import SLOW

SCREEN = 80, 40
COMMANDS = {" ".join(words): command for words, command in all_commands(app)}
LEAVES = {name: command for name, command in COMMANDS.items() if not hasattr(command, "commands")}


def help_of(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(SCREEN[0]))
    assert boundary.run(app, [*name.split(), "--help"]) == 0
    return capsys.readouterr().out.splitlines()


def test_the_commands_are_found() -> None:
    assert {"", "render", "submit", "doctor loss", "sandbox up"} <= COMMANDS.keys()


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_a_screen(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lines = help_of(name, capsys, monkeypatch)
    columns, rows = SCREEN
    assert len(lines) <= rows
    assert [line for line in lines if len(line) > columns] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_help_ends_with_examples_that_can_be_copied(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = help_of(name, capsys, monkeypatch)
    examples = examples_of(COMMANDS[name])
    assert examples, f"write a paragraph 'Example: hpcddp {name} ...' into the docstring"
    assert lines[-len(examples) - 1 :] == ["Examples:", *(f"  {example}" for example in examples)]
    called = re.compile(rf"\bhpcddp {name}(?= |\)|$)" if name else r"\bhpcddp ")
    assert [example for example in examples if not called.search(example)] == []


@pytest.mark.parametrize("name", [name for name, command in COMMANDS.items() if hasattr(command, "commands")])
def test_help_of_a_group_says_in_one_whole_sentence_what_each_command_does(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = help_of(name, capsys, monkeypatch)
    first = lines.index("Commands:") + 1
    listed = lines[first : lines.index("", first)]
    assert len(listed) == len(COMMANDS[name].commands)
    assert [line for line in listed if not line.endswith(".") or line.endswith("...")] == []


@pytest.mark.parametrize("name", LEAVES)
def test_every_option_says_what_it_does(name: str) -> None:
    command: Any = LEAVES[name]
    silent = [parameter.opts for parameter in command.params if not parameter.help]
    assert silent == []


@pytest.mark.parametrize("name", LEAVES)
def test_help_names_every_option(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command: Any = LEAVES[name]
    text = "\n".join(help_of(name, capsys, monkeypatch))
    options = [parameter.opts[-1] for parameter in command.params if parameter.param_type_name == "option"]
    assert [option for option in options if option not in text] == []


@pytest.mark.parametrize("name", LEAVES)
def test_all_options_are_described_by_help_all(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command: Any = LEAVES[name]
    monkeypatch.setenv("COLUMNS", str(SCREEN[0]))
    assert boundary.run(app, [*name.split(), "--help", "--all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > SCREEN[0]] == []
    options = [parameter for parameter in command.params if parameter.param_type_name == "option"]
    text = "".join("".join(lines).split())
    assert [option.opts for option in options if option.opts[-1] not in text] == []
    assert [option.help for option in options if "".join(option.help.split()) not in text] == []
    assert "Moreoptions" not in text


def test_the_version_has_a_short_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert boundary.run(app, ["-V"]) == 0
    assert capsys.readouterr().out.startswith("hpcddp 0.")


def test_help_loads_nothing_slow() -> None:
    """All of them in one fresh interpreter, since what one loads stays loaded."""
    run = (
        "import sys\n"
        "from hpcddp.cli import boundary\n"
        "from hpcddp.cli.main import app\n"
        "for name in sys.argv[1:]:\n"
        "    assert boundary.run(app, [*name.split(), '--help']) == 0\n"
        "    loaded = {module.partition('.')[0] for module in sys.modules}\n"
        f"    print(sorted({{*{sorted(SLOW)!r}, 'rich'}} & loaded), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", run, *COMMANDS], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "[]\n" * len(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_holds_neither_colour_nor_markup(name: str) -> None:
    """Even where colours are asked for."""
    done = subprocess.run(
        [sys.executable, "-m", "hpcddp", *name.split(), "--help"],
        env={**os.environ, "TERM": "xterm-256color", "FORCE_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "\x1b" not in done.stdout
    assert not re.search(r"\[/?(bold|dim|red|green|cyan)", done.stdout)
