from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from hpcddp.cli.main import app
from scripts.command_pages import INDEX, all_commands, command_pages

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "commands"


@pytest.mark.parametrize("python", [sys.executable, f"{sys.base_prefix}/bin/python3"], ids=["venv", "not in venv"])
def test_the_pages_are_what_the_commands_say_now(python: str) -> None:
    done = subprocess.run(
        [python, str(ROOT / "scripts" / "generate-docs"), "--check"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_every_command_has_a_page_with_its_options_and_examples() -> None:
    pages = command_pages(app)
    for words, command in all_commands(app):
        if not words:
            continue
        page = pages[f"{'-'.join(words)}.md"]
        assert page.startswith(f"# hpcddp {' '.join(words)}\n")
        names = [parameter.opts[0] for parameter in command.params if parameter.param_type_name == "option"]
        listed = page + pages["submit.md"] if "](submit.md#options)" in page else page
        assert [name for name in names if name not in listed] == []
        assert "\n## Examples\n\n```sh\n" in page
        assert f"]({'-'.join(words)}.md)" in pages[INDEX]


def test_every_link_of_the_pages_leads_somewhere() -> None:
    for page in FOLDER.glob("*.md"):
        links = re.findall(r"\]\(([^)#:]+)[)#]", page.read_text(encoding="utf-8"))
        assert links
        assert [link for link in links if not (FOLDER / link).exists()] == []


def test_a_hidden_option_has_all_its_names_and_says_what_it_takes() -> None:
    page = command_pages(app)["submit.md"]
    for names in (
        "-J, --name NAME",
        "-A, --account VALUE",
        "--sweep-file FILE",
        "--max-parallel N",
        "-x, --exclude VALUE",
    ):
        assert f"| `{names}` |" in page
