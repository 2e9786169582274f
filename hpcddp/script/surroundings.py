"""What the shell lines around the launch become: modules, environments, setup lines."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Final

from hpcddp.script.launch import CommandKind, kind_of
from hpcddp.script.request import SECRET, Draft
from hpcddp.script.shell import Statement, read_shell

PROGRAM_DIRECTORY: Final = "$PROGRAM_DIRECTORY"
"""The variable of the setup lines with the directory where they have ended."""
_SETUP: Final = ("environment", "setup")
# What becomes a field, written in exactly this way.
_MODULES: Final = re.compile(r"(?:module|ml) (?:load|add) ([^$`-][^$`]*)")
_ENVIRONMENTS: Final = (
    (re.compile(r"(?:conda|mamba|source|\.) activate ((?:\$HOME|~)?[^\s$`]+)"), "conda"),
    (re.compile(r"(?:source|\.) ((?:\$HOME|~)?[^\s$`]+)/bin/activate"), "venv"),
)
# Neither loads nor prepares anything that a module or an environment needs.
_PREPARES_NOTHING: Final[frozenset[CommandKind]] = frozenset({"export", "assignment", "set", "print", "trap"})
_SUBMIT_DIRECTORY: Final = frozenset({"$SLURM_SUBMIT_DIR", "${SLURM_SUBMIT_DIR}", "$SLURM_SUBMIT_DIR/"})
_SAME_DIRECTORY: Final = frozenset({"$PWD", "$(pwd)", "."})
_REQUEUE: Final = re.compile(r"scontrol\s+requeue|sbatch\s+.*(\$0|BASH_SOURCE|--dependency)")


@dataclass(slots=True)
class Surroundings:
    """Collects what the statements in front of the launch, and behind it, become. Nothing of them is evaluated.

    Attributes:
        directory: where the program starts: an absolute path, or ``PROGRAM_DIRECTORY``; None is the directory of
            submission.
    """

    draft: Draft
    directory: str | None = None
    _setup: list[str] = field(default_factory=list)
    _has_prepared: bool = False

    def read_before(self, statement: Statement) -> None:
        """Sort in a statement in front of the launch."""
        if statement.problem is not None:
            why = f"hpcddp cannot read it: {statement.problem}"
            self.draft.tell(statement.line, statement.text, "to do", why)
        elif _is_requeue(statement):
            self.draft.tell(statement.line, statement.text, "dropped", "hpcddp requeues the job")
        elif SECRET.search(statement.text):
            self._read_secrets(statement)
        elif self._has_prepared or not self._takes_field(statement):
            self._keep(statement)

    def read_line(self, line: int, text: str) -> None:
        """Sort in a shell line that stands for something else in a line of the script."""
        for statement in read_shell(text)[0]:
            self.read_before(replace(statement, line=line))

    def read_after(self, statement: Statement) -> None:
        """Sort in a statement behind the launch: the job file has no lines that run after the tasks."""
        only_reports = all(
            not command.redirections and (kind_of(command) == "print" or command.texts[:1] in {("wait",), ("exit",)})
            for command in statement.commands
        )
        if _is_requeue(statement):
            self.draft.tell(statement.line, statement.text, "dropped", "hpcddp requeues the job")
        elif only_reports:
            why = "it prints, waits or ends, and nothing in the job file runs after the training"
            self.draft.tell(statement.line, statement.text, "dropped", why)
        else:
            why = "it runs after the training, and a job file has no such lines"
            way_out = "write it into the program, or submit it as a job with --after"
            self.draft.tell(statement.line, statement.text, "to do", f"{why}: {way_out}")

    def finish(self, line: int, *, needs_export: bool) -> None:
        """Set ``environment.setup``.

        Args:
            line: the line of the launch.
            needs_export: whether a shell in the tasks expands words of the command.
        """
        if self.directory == PROGRAM_DIRECTORY:
            self._add(line, "export PROGRAM_DIRECTORY=$PWD", "the program starts where the setup lines end")
        if self._setup and needs_export:
            # Also what a file that is sourced assigns.
            self._setup.insert(0, "set -a")
            why = "it exports the variables, which the tasks expand in the command"
            self.draft.tell(line, "set -a", "setup line", f"environment.setup; {why}", _SETUP)
        if self._setup:
            self.draft.values[_SETUP] = self._setup

    def _add(self, line: int, text: str, note: str = "") -> None:
        self._setup.append(text)
        reason = f"environment.setup; {note}" if note else "environment.setup"
        self.draft.tell(line, text, "setup line", reason, _SETUP)

    def _keep(self, statement: Statement) -> None:
        """Keep a statement as a setup line, as it is written."""
        self._add(statement.line, statement.text)
        if statement.compound == "function":
            return
        kinds = {kind_of(command) for command in statement.commands}
        self._has_prepared = self._has_prepared or not kinds <= _PREPARES_NOTHING
        if "directory" not in kinds:
            return
        command = statement.command
        target = "" if command is None else " ".join(command.texts[1:])
        if target in _SUBMIT_DIRECTORY:
            self.directory = None
        elif target.startswith("/") and command is not None and not any(word.expands for word in command.words):
            self.directory = target
        elif target not in _SAME_DIRECTORY:
            self.directory = PROGRAM_DIRECTORY

    def _read_secrets(self, statement: Statement) -> None:
        """Sort in a statement that holds a secret: that is passed by its name, and the rest is kept."""
        why = "it may be a secret, which is not written into a file: export it in the shell in which you submit"
        command = statement.command
        if command is None or kind_of(command) not in {"export", "assignment"}:
            self.draft.tell(statement.line, statement.text, "to do", f"{why}, and name it in environment.pass_env")
            return
        key = ("environment", "pass_env")
        passed = self.draft.values.setdefault(key, [])
        passed += dict.fromkeys(match[1] for match in SECRET.finditer(statement.text) if match[1] not in passed)
        self.draft.tell(statement.line, statement.text, "taken", f"environment.pass_env; {why}", key)
        rest = SECRET.sub("", statement.text).strip()
        if rest not in {"", "export"}:
            self._add(statement.line, rest)

    def _takes_field(self, statement: Statement) -> bool:
        """Take the modules, or the environment, of a statement; return whether it has them, and nothing else."""
        command = statement.command
        if command is None or command.redirections or command.assignments:
            return False
        text = " ".join(command.texts)
        modules = _MODULES.fullmatch(text)
        if modules is not None:
            key = ("environment", "modules")
            names = [*self.draft.values.get(key, []), *modules[1].split()]
            self.draft.take(statement.line, statement.text, key, names)
            return True
        for pattern, name in _ENVIRONMENTS:
            environment = pattern.fullmatch(text)
            if environment is not None:
                key = ("environment", name)
                self.draft.take(statement.line, statement.text, key, environment[1], "hpcddp must be installed there")
                # The job activates one environment, behind its modules.
                self._has_prepared = True
                return True
        return False


def _is_requeue(statement: Statement) -> bool:
    """Return whether a statement submits the job again; a function that does is kept, with the lines that call it."""
    return statement.compound != "function" and _REQUEUE.search(statement.text) is not None
