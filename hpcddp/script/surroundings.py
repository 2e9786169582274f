"""What the shell lines around the launch become: modules, environments, setup lines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from hpcddp.jobfile.environment import ACTIVATED
from hpcddp.script.launch import CommandKind, kind_of, launch_of, program_words
from hpcddp.script.request import SETUP, Draft, may_be_secret
from hpcddp.script.shell import Command, Statement, Word, read_shell, read_word

_ASSIGNMENT: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.ASCII | re.DOTALL)
_NAME_USED: Final = re.compile(r"\$\{?([A-Za-z_][A-Za-z0-9_]*)", re.ASCII)
# Neither loads nor prepares anything that a module or an environment needs.
_PREPARES_NOTHING: Final[frozenset[CommandKind]] = frozenset(
    {"export", "assignment", "set", "directory", "print", "trap"}
)
_REPORTS: Final[frozenset[CommandKind]] = frozenset({"print", "set", "trap", "control", "assignment", "export"})
_WAITS: Final = frozenset({"wait", "sleep", "exit", "return", "true", ":", "jobs", "[", "[[", "test", "tee"})
_SAME_DIRECTORY: Final = re.compile(r"\$\{?PWD\}?/?|\$\(pwd\)|\.|-")
_SUBMIT_DIRECTORY: Final = re.compile(r"\$\{?SLURM_SUBMIT_DIR\}?/?")
_REQUEUE: Final = re.compile(r"scontrol\s+requeue|sbatch\s+.*(\$0|BASH_SOURCE|--dependency)")
_EXPORT_IT: Final = "it may be a secret, which is not written into a file: export it in the shell in which you submit"
_HOME: Final = Word(written="~", text="~", expands=True)
_ML_COMMANDS: Final = frozenset(
    {"load", "add", "purge", "use", "unuse", "swap", "switch", "unload", "rm", "del", "avail", "av", "list", "show",
     "spider", "save", "restore", "reset", "refresh", "update"}
)  # fmt: skip


@dataclass(slots=True)
class Surroundings:
    """Collects what the statements in front of the launch, and behind it, become. Nothing of them is evaluated.

    Attributes:
        directory: where the program starts; None is the directory of submission.
    """

    draft: Draft
    directory: Word | None = None
    _directory_row: tuple[int, str] = (0, "")
    _assigned: set[str] = field(default_factory=set)
    _modules: list[str] = field(default_factory=list)
    _setup: list[str] = field(default_factory=list)
    _has_prepared: bool = False

    def read_before(self, statement: Statement) -> None:
        """Sort in a statement in front of the launch."""
        command = statement.command
        if statement.problem is not None:
            self.draft.leave_open(statement.line, statement.text, f"hpcddp cannot read it: {statement.problem}")
        elif _is_requeue(statement):
            self.draft.drop(statement.line, statement.text, "hpcddp requeues the job")
        elif command is not None and kind_of(command) == "module" and self._takes_modules(command):
            self.draft.note_taken(statement.line, statement.text, ("environment", "modules"))
        elif command is not None and kind_of(command) == "activate" and self._takes_activation(command):
            pass
        elif any(_holds_secret(word) for word in _assignments_in(statement)):
            self._read_secrets(statement)
        else:
            self._keep(statement)

    def read_prefix(self, line: int, assignments: Sequence[Word]) -> None:
        """Sort in the assignments in front of the launch, ``NAME=VALUE srun ...``: the tasks have them."""
        for word in assignments:
            (statement,), _ = read_shell(f"export {word.written}")
            self.read_before(replace(statement, line=line, last_line=line))

    def read_after(self, statement: Statement) -> None:
        """Sort in a statement behind the launch: the job file has no lines that run after the tasks."""
        if _is_requeue(statement):
            self.draft.drop(statement.line, statement.text, "hpcddp requeues the job")
        elif statement.commands and all(_only_reports(command) for command in statement.commands):
            why = "it prints, waits or ends, and nothing in the job file runs after the training"
            self.draft.drop(statement.line, statement.text, why)
        else:
            self.draft.leave_open(
                statement.line,
                statement.text,
                "it runs after the training, and a job file has no such lines: write it into the program, or submit "
                "it as a job with --after",
            )

    def change_directory(self, line: int, shown: str, target: Word) -> None:
        """Note that the program starts in another directory than so far.

        Args:
            shown: the text in the script.
        """
        is_absolute = target.text.startswith("/") or (target.expands and target.text.startswith(("~", "$")))
        if self.directory is None or is_absolute:
            self.directory = target
        else:
            self.directory = Word(
                written=f"{self.directory.written}/{target.written}",
                text=f"{self.directory.text}/{target.text}",
                expands=self.directory.expands or target.expands,
            )
        self._directory_row = (line, shown)

    def add_setup(self, line: int, text: str, shown: str) -> None:
        """Add a line to ``environment.setup``; ``shown`` is the text in the script."""
        self._setup.append(text)
        self.draft.note_setup(line, shown)

    def finish(self, line: int, *, needs_export: bool) -> None:
        """Set ``environment.modules`` and ``environment.setup``.

        Args:
            line: the line of the launch.
            needs_export: whether a shell in the tasks expands words of the command.
        """
        if self._modules:
            self.draft.values["environment", "modules"] = self._modules
        if self.directory is not None:
            self.draft.note_taken(*self._directory_row, ("command",), "the program starts there (env -C)")
        if self._setup and needs_export:
            # Also what a file that is sourced assigns.
            self._setup.insert(0, "set -a")
            self.draft.note_setup(line, "set -a", "it exports the variables, which the tasks expand in the command")
        if self._setup:
            self.draft.values[SETUP] = self._setup

    def _keep(self, statement: Statement) -> None:
        """Keep a statement as a setup line, as it is written."""
        self.add_setup(statement.line, statement.text, statement.text)
        self._assigned |= {word.written.partition("=")[0] for word in _assignments_in(statement)}
        if statement.compound != "function":
            kinds = {kind_of(command) for command in statement.commands}
            self._has_prepared = self._has_prepared or not kinds <= _PREPARES_NOTHING
        for command in statement.commands:
            if command.texts[:1] == ("cd",) and not command.inside:
                self._follow(statement, (*command.words, _HOME)[1])

    def _follow(self, statement: Statement, target: Word) -> None:
        """Follow ``cd`` into another directory."""
        if _SUBMIT_DIRECTORY.fullmatch(target.text):
            self.directory = None
        elif not _SAME_DIRECTORY.fullmatch(target.text):
            self.change_directory(statement.line, statement.text, target)

    def _read_secrets(self, statement: Statement) -> None:
        """Sort in a statement that holds a secret: that is passed by its name, and the rest is kept."""
        command = statement.command
        if command is None or kind_of(command) not in {"export", "assignment"}:
            why = f"{_EXPORT_IT}, and name it in environment.pass_env"
            self.draft.leave_open(statement.line, statement.text, why)
            return
        words = [*command.assignments, *command.words]
        passed = self.draft.values.setdefault(("environment", "pass_env"), [])
        for word in words:
            name = word.written.partition("=")[0]
            if _holds_secret(word):
                if name not in passed:
                    passed.append(name)
                self.draft.note_taken(statement.line, f"export {name}=...", ("environment", "pass_env"), _EXPORT_IT)
        rest = " ".join(word.written for word in words if not _holds_secret(word))
        if rest not in {"", "export"}:
            self.add_setup(statement.line, rest, rest)

    def _takes_modules(self, command: Command) -> bool:
        """Take the modules that a command loads, where no line has to run before it; return whether it did."""
        program, *arguments = command.texts
        if program == "ml" and arguments and not arguments[0].startswith("-") and arguments[0] not in _ML_COMMANDS:
            arguments = ["load", *arguments]
        names = arguments[1:]
        loads_modules = arguments[:1] in (["load"], ["add"]) and bool(names)
        has_plain_names = not any(name.startswith("-") or "$" in name for name in names)
        if not (loads_modules and has_plain_names and self._is_in_order) or command.redirections:
            return False
        self._modules += names
        return True

    def _takes_activation(self, command: Command) -> bool:
        """Take the environment that a command activates, where no line has to run before it; return whether it did."""
        texts = [word.text for word in program_words(command.words)]
        name, value = _environment_of(texts)
        is_known = "$(" not in value and not set(_NAME_USED.findall(value)) & self._assigned
        is_relative_path = "/" in texts[-1] and not value.startswith(("/", "~", "$"))
        is_elsewhere = is_relative_path and self.directory is not None
        if name is None or not is_known or is_elsewhere or not self._is_in_order:
            return False
        key = ("environment", name)
        self.draft.take(command.line, command.text, key, value, "hpcddp must be installed there")
        return True

    @property
    def _is_in_order(self) -> bool:
        """Whether no setup line has to run first: fields of ``environment`` are prepared before them."""
        has_environment = any(("environment", name) in self.draft.values for name in ACTIVATED)
        return not self._has_prepared and not has_environment


def _environment_of(texts: Sequence[str]) -> tuple[str | None, str]:
    """Return the field of ``environment`` that an activation means, and its value."""
    program, *arguments = texts
    if program in {"conda", "mamba", "source", "."} and arguments[:1] == ["activate"] and len(arguments) == 2:  # noqa: PLR2004
        return "conda", arguments[1]
    if program in {"source", "."} and len(arguments) == 1 and arguments[0].endswith("/bin/activate"):
        return "venv", arguments[0].removesuffix("/bin/activate")
    return None, ""


def _assignments_in(statement: Statement) -> Iterator[Word]:
    for command in statement.commands:
        words = command.words if kind_of(command) == "export" else ()
        yield from (word for word in (*command.assignments, *words) if _ASSIGNMENT.fullmatch(word.written))


def _holds_secret(word: Word) -> bool:
    """Return whether a word assigns a value, which stands in the script, to what may be a secret."""
    assignment = _ASSIGNMENT.fullmatch(word.written)
    if assignment is None or not may_be_secret(assignment[1]):
        return False
    value, _ = read_word(assignment[2], 0)
    return bool(value.text) and not value.expands


def _is_requeue(statement: Statement) -> bool:
    """Return whether a statement submits the job again; a function that does is kept, with the lines that call it."""
    return statement.compound != "function" and _REQUEUE.search(statement.text) is not None


def _only_reports(command: Command) -> bool:
    """Return whether a command prints, waits, tests or ends; not one that writes a file."""
    if any(re.match(r"&?>|[12]>(?!&)", redirection) for redirection in command.redirections):
        return False
    return kind_of(command) in _REPORTS or command.texts[:1] == () or command.texts[0] in _WAITS


def read_around(statement: Statement, launch: Command, surroundings: Surroundings) -> None:
    """Sort in the other commands of the statement that holds the launch: a list, a pipeline, a loop, a function.

    Args:
        launch: the command in it that starts the ranks.
        surroundings: gets what they become.
    """
    draft = surroundings.draft
    launch_index = statement.commands.index(launch)
    for command in statement.commands[:launch_index]:
        is_test = command.texts[:1] in {("[",), ("[[",), ("test",)}
        is_always_run = command.openings == launch.openings[: len(command.openings)] and not is_test
        if is_always_run and kind_of(command) != "control":
            surroundings.read_before(_alone(command))
        else:
            draft.leave_open(
                command.line,
                command.text,
                "a job file has no loops and no conditions: the program runs once, on every node; for the values of a "
                "loop, write a sweep",
            )
    is_piped = launch.is_piped
    for command in statement.commands[launch_index + 1 :]:
        if is_piped:
            draft.drop(command.line, command.text, "each rank has a log of its own")
        elif launch_of(command).certainty:
            draft.leave_open(command.line, command.text, "it starts a program too, and a job file has one command")
        else:
            surroundings.read_after(_alone(command))
        is_piped = is_piped and command.is_piped


def _alone(command: Command) -> Statement:
    return Statement(
        line=command.line, last_line=command.last_line, text=command.text, commands=(replace(command, end=""),)
    )
