"""The shell completes commands, options, values and runs, and waits for nothing slow."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.slow_libraries import SLOW, UNINSTALL

pytestmark = pytest.mark.depends_on(
    "hpcddp/__main__.py", "hpcddp/cli", "hpcddp/site", "pyproject.toml", "tests/cli/test_completion.py"
)

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
    run = UNINSTALL.format(names=SLOW - {"asyncio"}) + "from hpcddp.__main__ import main; main()"
    (tmp_path / "bin" / "run.py").write_text(run)
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{tmp_path}/bin/run.py" "$@"\n')
    program.chmod(0o755)
    path = f"{program.parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(Path(__file__).parents[2]), "HOME": str(tmp_path)}


def offered(environment: dict[str, str], *words: str, cwd: Path | None = None, timeout_s: float = 60) -> list[str]:
    """Return what bash offers for the last of some words."""
    done = subprocess.run(
        ["bash", "--norc", "-c", BASH, "bash", *words],
        env=environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout.split()


def test_commands_options_and_values_are_completed(environment: dict[str, str]) -> None:
    assert {"render", "submit", "doctor", "sandbox"} <= set(offered(environment, "hpcddp", ""))
    assert offered(environment, "hpcddp", "ren") == ["render"]
    assert offered(environment, "hpcddp", "submit", "--clus") == ["--cluster"]
    assert offered(environment, "hpcddp", "submit", "--cluster", "") == ["auto", "slurm", "local", "here"]
    assert offered(environment, "hpcddp", "doctor", "") == ["ddp", "loss", "install"]


def test_options_that_the_short_help_only_names_are_completed_too(environment: dict[str, str]) -> None:
    assert offered(environment, "hpcddp", "submit", "--mail") == ["--mail-type", "--mail-user"]
    assert offered(environment, "hpcddp", "submit", "--mail-type", "END,F") == ["END,FAIL"]


def test_partitions_accounts_and_kinds_of_gpu_are_those_of_the_profile(
    environment: dict[str, str], tmp_path: Path
) -> None:
    profile = tmp_path / ".config" / "hpcddp" / "profiles" / "default.yaml"
    profile.parent.mkdir(parents=True)
    profile.write_text(
        "cluster:\n  name: c\n  accounts: {names: [lab, own], qos: [high]}\n  partitions:\n"
        "    gpu:\n      kinds: [{nodes: 1, cpus: 8, mem_mb: 1000, gpus: 4, gpu_types: {a100: 4}}]\n"
        "    cpu: {}\n    maintenance: {hidden: true}\n"
    )
    kept = {name: value for name, value in environment.items() if not name.startswith("XDG_")}
    assert offered(kept, "hpcddp", "submit", "--partition", "") == ["cpu", "gpu"]
    assert offered(kept, "hpcddp", "submit", "-p", "g") == ["gpu"]
    assert offered(kept, "hpcddp", "submit", "-A", "") == ["lab", "own"]
    assert offered(kept, "hpcddp", "submit", "--qos", "") == ["high"]
    assert offered(kept, "hpcddp", "submit", "--gpu-type", "") == ["a100"]
    profile.write_text("broken [")
    assert offered(kept, "hpcddp", "submit", "--partition", "") == []


def test_a_controller_that_does_not_answer_holds_a_tab_for_two_seconds_at_most(
    environment: dict[str, str], tmp_path: Path
) -> None:
    sinfo = tmp_path / "bin" / "sinfo"
    sinfo.write_text("#!/bin/sh\nexec sleep 50\n")
    sinfo.chmod(0o755)
    kept = {name: value for name, value in environment.items() if not name.startswith("XDG_")}
    # Within the time limit of ``offered`` less than the sleep would need.
    assert offered(kept, "hpcddp", "submit", "--partition", "", timeout_s=40) == []


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


# How each shell prints its prompt, and the file in which it does.
PROMPTS = {
    "bash": (".bashrc", 'PS1="ready> "\n'),
    "zsh": (".zshrc", 'PS1="ready> "\n'),
    "fish": (".config/fish/config.fish", 'set -g fish_greeting\nfunction fish_prompt\n  echo -n "ready> "\nend\n'),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.skipif(shutil.which(name) is None, reason=f"{name} is not installed"))
        for name in PROMPTS
    ],
)
def test_a_tab_in_a_real_shell_completes_after_the_installation(
    environment: dict[str, str], tmp_path: Path, name: str
) -> None:
    """``--install-completion`` asks which shell it was called from, so it is typed into one.

    A line that was completed is run: what it prints shows the words that the shell had.
    """
    sinfo = tmp_path / "bin" / "sinfo"
    sinfo.write_text("#!/bin/sh\nprintf 'long\\nshort\\n'\n")
    sinfo.chmod(0o755)
    shell = Shell(name, environment, tmp_path)
    shell.type("hpcddp --install-completion\n", until="installed in")
    shell.close()
    shell = Shell(name, environment, tmp_path)
    # zsh loads the function for the completion at the first tab, which completes nothing: CTRL-U removes the line.
    shell.type("hpcddp \t\x15hpcddp --vers\t\n", until="hpcddp 0.")
    # An option that the short help only names, and a type of mail.
    shell.type("hpcddp rend\t--mail-t\tREQ\t-- true | grep mail\n", until="#SBATCH --mail-type=REQUEUE")
    shell.type("hpcddp render --part\tlo\t-- true | grep partition\n", until="#SBATCH --partition=long")
    shell.type("hpcddp plan --global-batch 8 --world-size 2 --tail dr\t--json | grep tail\n", until='"tail_samples"')
    shell.close()


class Shell:
    """An interactive shell."""

    def __init__(self, name: str, environment: dict[str, str], home: Path) -> None:
        file, prompt = PROMPTS[name]
        if not (home / file).exists():
            (home / file).parent.mkdir(parents=True, exist_ok=True)
            (home / file).write_text(prompt)
        # Otherwise the first fish of a home reads all man pages.
        (home / ".local/share/fish/generated_completions").mkdir(parents=True, exist_ok=True)
        self._terminal, slave = pty.openpty()
        # Of the variables of whoever runs the tests, those that lead to files of a shell would be used.
        kept = {key: value for key, value in environment.items() if not key.startswith(("XDG_", "ZDOTDIR", "BASH_ENV"))}
        command = ["setsid", "--ctty", name, "-i"]
        self._process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, cwd=home, env={**kept, "TERM": "dumb"}
        )
        os.close(slave)
        self.type("", until="ready> ")

    def type(self, text: str, *, until: str) -> str:
        """Type a text, key by key, and return what the terminal shows until a text comes."""
        for part in re.split("(?<=\t)", text):
            os.write(self._terminal, part.encode())
        shown, deadline = "", time.monotonic() + 60
        while until not in shown:
            assert time.monotonic() < deadline, shown
            if select.select([self._terminal], [], [], 1)[0]:
                shown += os.read(self._terminal, 4096).decode(errors="replace")
        return shown

    def close(self) -> None:
        """End it."""
        os.close(self._terminal)
        self._process.wait(timeout=30)
