"""The shell completes commands, options, values and runs, and waits for nothing slow."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.test_imports import SLOW, UNINSTALL

BASH = """
eval "$(_HPCDDP_COMPLETE=source_bash hpcddp)"
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
_hpcddp_completion hpcddp
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return an environment with an ``hpcddp`` that cannot load what is slow."""
    program = tmp_path / "bin" / "hpcddp"
    program.parent.mkdir()
    run = UNINSTALL.format(names=SLOW - {"asyncio"}) + "from hpcddp.cli import main; main()"
    (tmp_path / "bin" / "run.py").write_text(run)
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{tmp_path}/bin/run.py" "$@"\n')
    program.chmod(0o755)
    path = f"{program.parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(Path(__file__).parents[2]), "HOME": str(tmp_path)}


def offered(environment: dict[str, str], *words: str, cwd: Path | None = None) -> list[str]:
    """Return what bash offers for the last of some words."""
    done = subprocess.run(
        ["bash", "--norc", "-c", BASH, "bash", *words],
        env=environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout.split()


def test_commands_options_and_values_are_completed(environment: dict[str, str]) -> None:
    assert {"render", "submit", "doctor", "sandbox"} <= set(offered(environment, "hpcddp", ""))
    assert offered(environment, "hpcddp", "ren") == ["render"]
    assert offered(environment, "hpcddp", "submit", "--clus") == ["--cluster"]
    assert offered(environment, "hpcddp", "submit", "--cluster", "") == ["auto", "slurm", "local"]
    assert offered(environment, "hpcddp", "doctor", "") == ["ddp", "loss"]


def test_where_a_file_belongs_the_shell_completes_by_itself(environment: dict[str, str]) -> None:
    assert offered(environment, "hpcddp", "submit", "jo") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_gets_a_script(environment: dict[str, str], shell: str) -> None:
    done = subprocess.run(
        ["hpcddp"],
        env={**environment, "_HPCDDP_COMPLETE": f"source_{shell}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert f"complete_{shell}" in done.stdout


@pytest.mark.parametrize(
    ("shell", "words"),
    [
        ("zsh", {"_TYPER_COMPLETE_ARGS": "hpcddp ren"}),
        ("fish", {"_TYPER_COMPLETE_ARGS": "hpcddp ren", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}),
    ],
)
def test_what_the_scripts_of_other_shells_ask_is_answered(
    environment: dict[str, str], shell: str, words: dict[str, str]
) -> None:
    done = subprocess.run(
        ["hpcddp"],
        env={**environment, "_HPCDDP_COMPLETE": f"complete_{shell}", **words},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "render" in done.stdout
    assert "submit" not in done.stdout


def test_a_tab_in_a_real_shell_completes_after_the_installation(environment: dict[str, str], tmp_path: Path) -> None:
    """``--install-completion`` asks which shell it was called from, so it is typed into one."""
    shell = Shell({**environment, "TERM": "dumb"}, tmp_path)
    shell.type("hpcddp --install-completion\n", until="installed in")
    shell.type("exec env SHELL_NAME=second bash -i\n", until="second> ")
    shell.type("hpcddp ren\t", until="hpcddp render ")
    shell.close()


class Shell:
    """An interactive bash."""

    def __init__(self, environment: dict[str, str], home: Path) -> None:
        (home / ".bashrc").write_text('PS1="${SHELL_NAME:-first}> "\n')
        self._terminal, slave = pty.openpty()
        command = ["setsid", "--ctty", "bash", "-i"]
        self._process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, cwd=home, env=environment)
        os.close(slave)
        self.type("", until="first> ")

    def type(self, text: str, *, until: str) -> str:
        """Type a text and return what the terminal shows until a text comes."""
        os.write(self._terminal, text.encode())
        shown, deadline = "", time.monotonic() + 30
        while until not in shown:
            assert time.monotonic() < deadline, shown
            if select.select([self._terminal], [], [], 1)[0]:
                shown += os.read(self._terminal, 4096).decode(errors="replace")
        return shown

    def close(self) -> None:
        """End it."""
        os.close(self._terminal)
        self._process.wait(timeout=30)
