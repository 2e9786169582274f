"""What the shell lines around the launch become: modules, environments, variables, setup lines."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from hpcddp.jobfile.environment import ACTIVATED
from hpcddp.script.draft import SETUP, Draft, may_be_secret
from hpcddp.script.kinds import CommandKind, kind_of, program_words
from hpcddp.script.launch import launch_of
from hpcddp.script.shell import Command, Statement, Word, read_word
from hpcddp.script.variables import Variables, names_in, split_assignment

SET_BY_HPCDDP: Final = frozenset(
    {"MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK",
     "GROUP_WORLD_SIZE"}
)  # fmt: skip
_NOT_NEEDED: Final = MappingProxyType(
    {
        **dict.fromkeys(SET_BY_HPCDDP, "hpcddp sets it in every task"),
        "CUDA_VISIBLE_DEVICES": "Slurm gives each task its GPUs",
        "SRUN_CPUS_PER_TASK": "hpcddp passes the CPUs of a task to srun",
        "SLURM_CPUS_PER_TASK": "hpcddp passes the CPUs of a task to srun",
        "PYTHONUNBUFFERED": "hpcddp sets it",
        "PYTHONFAULTHANDLER": "hpcddp sets it",
    }
)
_REPORTS: Final = frozenset({"print", "set", "trap"})
_FILTERS: Final = frozenset({"tee", "wc", "sort", "head", "tail", "grep"})
_HARMLESS_TO_DROP: Final = frozenset({"wait", "sleep", "exit", "return", "true", ":", "jobs"})


_DIRECTORY: Final = "the directory"
_STARTS_THERE: Final = "tasks start in the directory in which you submit"


@dataclass(slots=True)
class _SetupLine:
    """A line that ``environment.setup`` may need.

    Args:
        line: the number of its line in the script.
        text: the line of the setup.
        shown: the text in the script.
        why: why it is dropped where it is not needed; None for the ordinary reason.
        serves: the variable that it sets, or ``_DIRECTORY``: it is needed only if a later line, or the command, uses
            that. None for a line that is always needed.
        is_in_env: whether ``environment.env`` has the variable too, which is set behind the setup lines: the command
            does not need this line.
    """

    line: int
    text: str
    shown: str
    serves: str | None = None
    why: str | None = None
    is_in_env: bool = False


@dataclass(slots=True)
class Surroundings:
    """Collects what the statements in front of the launch, and behind it, become."""

    draft: Draft
    variables: Variables = field(default_factory=Variables)
    directory: Word | None = None
    assigned: set[str] = field(default_factory=set)
    """The names that the script assigns in front of the launch."""
    substituted: set[str] = field(default_factory=set)
    """Those whose values the words of the launch need."""
    _setup: list[_SetupLine] = field(default_factory=list)
    _functions: list[tuple[str, _SetupLine]] = field(default_factory=list)
    _modules: list[str] = field(default_factory=list)

    def read_before(self, statement: Statement) -> None:
        """Sort in a statement in front of the launch."""
        command = statement.command
        if statement.problem is not None:
            self.draft.leave_open(statement.line, statement.text, f"hpcddp cannot read it: {statement.problem}")
        elif command is None:
            self._read_compound(statement)
        else:
            self._read_command(statement, command)

    def read_after(self, statement: Statement) -> None:
        """Sort in a statement behind the launch: the job file has no lines that run after the tasks."""
        why = _why_not_needed(statement)
        if why is None and statement.command is not None and kind_of(statement.command) in {"assignment", "export"}:
            why = "nothing in the job file runs after the training"
        if why is not None:
            self.draft.drop(statement.line, statement.text, why)
        else:
            self.draft.leave_open(
                statement.line,
                statement.text,
                "it runs after the training, and a job file has no such lines: write it into the program, or submit "
                "it as a job with --after",
            )

    def forget(self, command: Command) -> None:
        """Note that a command may or may not assign its variables."""
        for name in _assigned_names(command):
            self.assigned.add(name)
            self.variables.forget(name)

    def needs_login_shell(self) -> bool:
        """Return whether a setup line may use what only a login shell defines: modules and conda."""
        return any(re.search(r"\b(module|ml|conda|mamba|spack)\b", line.text) for line in self._setup)

    def finish(self, used: Iterable[str]) -> None:
        """Set ``environment.modules`` and ``environment.setup``.

        Args:
            used: the names of the variables and the functions that the command uses.
        """
        if self._modules:
            self.draft.values["environment", "modules"] = self._modules
        for line in self._setup:
            if line.serves == _DIRECTORY and line.why is None:
                self.draft.note_taken(line.line, line.shown, ("command",), "the program starts there (env -C)")
        are_needed = self._needed(set(used) - _NOT_NEEDED.keys())
        for line, is_needed in zip(self._setup, are_needed, strict=True):
            if is_needed:
                self._keep(line)
            elif not line.is_in_env:
                self._drop(line)
        setup = " ".join(self.draft.values.get(SETUP, ()))
        for name, line in self._functions:
            if re.search(rf"\b{re.escape(name)}\b", setup):
                self._keep(line, first=True)
            else:
                self.draft.drop(line.line, line.shown, "nothing in the job file calls it")

    def _needed(self, used_by_command: set[str]) -> list[bool]:
        """Return which setup lines are needed: the last ones first, because a line uses what earlier ones set."""
        needed = []
        used_by_setup: set[str] = set()
        for line in reversed(self._setup):
            used = used_by_setup if line.is_in_env else used_by_setup | used_by_command
            is_needed = line.serves is None or line.serves in used
            if is_needed:
                used_by_setup |= {*names_in(line.text), _DIRECTORY}
            needed.append(is_needed)
        return needed[::-1]

    def _drop(self, line: _SetupLine) -> None:
        """Say why a line is not needed; another row tells what became of a change of the directory."""
        if line.why is not None:
            self.draft.drop(line.line, line.shown, line.why)
        elif line.serves in self.substituted:
            self.draft.drop(
                line.line, line.shown, "its value stands where the command uses it, or hpcddp fills that in"
            )
        elif line.serves != _DIRECTORY:
            self.draft.drop(line.line, line.shown, f"nothing else in the job file uses ${line.serves}")

    def _keep(self, line: _SetupLine, *, first: bool = False) -> None:
        setup = self.draft.values.setdefault(SETUP, [])
        setup.insert(0 if first else len(setup), line.text)
        self.draft.note_setup(line.line, line.shown)

    def _add_setup(self, statement: Statement, *, serves: str | None = None) -> None:
        self._setup.append(_SetupLine(statement.line, statement.text, statement.text, serves))

    @property
    def _is_in_order(self) -> bool:
        """Whether no setup line has to run first: fields of ``environment`` are prepared before them."""
        return all(line.serves is not None for line in self._setup)

    @property
    def _has_environment(self) -> bool:
        return any(("environment", name) in self.draft.values for name in ACTIVATED)

    def _read_compound(self, statement: Statement) -> None:
        """Sort in a list, a pipeline, a loop, a condition or a function."""
        self.variables.forget_all_of(statement)
        function = re.match(r"(?:function\s+)?([A-Za-z_][\w.-]*)", statement.text)
        assigned = {name for command in statement.commands for name in _assigned_names(command)}
        self.assigned |= assigned
        why = _why_not_needed(statement)
        if statement.compound == "function" and function is not None:
            self._functions.append((function[1], _SetupLine(statement.line, statement.text, statement.text)))
        elif why is not None:
            self.draft.drop(statement.line, statement.text, why)
        elif assigned and assigned <= SET_BY_HPCDDP:
            self.draft.drop(statement.line, statement.text, _NOT_NEEDED["MASTER_ADDR"])
        else:
            self._add_setup(statement)

    def _read_command(self, statement: Statement, command: Command) -> None:
        kind = kind_of(command)
        readers: Mapping[CommandKind, Callable[[Statement, Command], None]] = {
            "module": self._read_module,
            "activate": self._read_activation,
            "export": self._read_export,
            "assignment": self._read_assignment,
            "directory": self._read_directory,
        }
        reader = readers.get(kind)
        why = _why_not_needed(statement)
        if reader is not None:
            reader(statement, command)
        elif why is not None:
            self.draft.drop(statement.line, statement.text, why)
        else:
            self._add_setup(statement)

    def _read_module(self, statement: Statement, command: Command) -> None:
        program, *arguments = [word.text for word in self.variables.resolve(command.words)]
        if program == "ml" and arguments and not arguments[0].startswith("-") and arguments[0] not in _ML_COMMANDS:
            arguments = ["load", *arguments]
        names = arguments[1:]
        loads_modules = arguments[:1] in (["load"], ["add"]) and bool(names)
        has_plain_names = not any(name.startswith("-") or "$" in name for name in names)
        is_plain = loads_modules and has_plain_names and not command.redirections
        if is_plain and self._is_in_order and not self._has_environment:
            self._modules += names
            self.draft.note_taken(statement.line, statement.text, ("environment", "modules"))
        else:
            self._add_setup(statement)

    def _read_activation(self, statement: Statement, command: Command) -> None:
        words = self.variables.resolve(program_words(command.words))
        texts = [word.text for word in words]
        field_name, value = _environment_of(texts)
        is_known = "$(" not in value and not names_in(value) & self.assigned
        is_relative_path = "/" in texts[-1] and not texts[-1].startswith(("/", "~", "$"))
        is_elsewhere = is_relative_path and self.directory is not None
        if field_name is not None and is_known and not is_elsewhere and self._is_in_order and not self._has_environment:
            self.draft.take(
                statement.line,
                statement.text,
                ("environment", field_name),
                value,
                "hpcddp must be installed there",
            )
        else:
            self._add_setup(statement)

    def _read_export(self, statement: Statement, command: Command) -> None:
        words = command.words[1:]
        if command.words[0].text != "export" or not words or any(word.text.startswith("-") for word in words):
            self._add_setup(statement)
            return
        for word in words:
            if split_assignment(word) is not None:
                self._read_variable(statement, word, is_exported=True)
            else:
                self._read_exported_name(statement, word.text)

    def _read_exported_name(self, statement: Statement, name: str) -> None:
        """Keep the assignment of a variable that a later line exports."""
        for line in self._setup:
            if line.serves == name and line.why is None:
                line.serves = None
        self.draft.drop(statement.line, f"export {name}", "its assignment exports it, or the tasks inherit it")

    def _read_assignment(self, statement: Statement, command: Command) -> None:
        for word in command.assignments:
            self._read_variable(statement, word, is_exported=False)

    def read_prefix(self, line: int, assignments: Sequence[Word]) -> None:
        """Sort in the assignments in front of the launch, ``NAME=VALUE srun ...``."""
        for word in assignments:
            statement = Statement(line=line, last_line=line, text=word.written, commands=())
            self._read_variable(statement, word, is_exported=True)

    def _read_variable(self, statement: Statement, word: Word, *, is_exported: bool) -> None:
        assignment = split_assignment(word)
        if assignment is None:
            # NAME+=VALUE, or an element of an array.
            self.variables.forget(re.split(r"[+\[=]", word.written)[0])
            self._add_setup(statement)
            return
        name, written_value = assignment
        self.assigned.add(name)
        self.variables.assign(word)
        line = statement.line
        export = f"export {word.written}"
        shown = export if is_exported else word.written
        if name in _NOT_NEEDED:
            # A later line of the script may use its value.
            self._setup.append(_SetupLine(line, export, shown, serves=name, why=_NOT_NEEDED[name]))
            return
        if name == "OMP_NUM_THREADS" and "SLURM_CPUS" in written_value:
            self.draft.drop(line, shown, "hpcddp sets it to the CPUs of a rank")
            return
        value, _ = read_word(written_value, 0)
        is_array = written_value.startswith("(")
        is_exported_text = is_exported and not value.expands
        if is_exported_text and may_be_secret(name) and value.text:
            self._pass_secret(line, name)
        elif is_exported_text and not is_array:
            self.draft.take(line, shown, ("environment", "env", name), value.text)
            self._setup.append(_SetupLine(line, export, shown, serves=name, is_in_env=True))
        else:
            text = word.written if is_array else export
            serves = None if is_exported else name
            self._setup.append(_SetupLine(line, text, shown, serves=serves))

    def _pass_secret(self, line: int, name: str) -> None:
        passed = self.draft.values.setdefault(("environment", "pass_env"), [])
        if name not in passed:
            passed.append(name)
        self.draft.note_taken(
            line,
            f"export {name}=...",
            ("environment", "pass_env"),
            "it may be a secret, which is not written into a file: export it in the shell in which you submit",
        )

    def _read_directory(self, statement: Statement, command: Command) -> None:
        words = self.variables.resolve(command.words)
        target = words[1] if len(words) > 1 else Word(written="~", text="~", expands=True)
        if words[0].text != "cd" or target.text == "-":
            self._add_setup(statement)
        elif re.fullmatch(r"\$\{?PWD\}?/?|\$\(pwd\)|\.", target.text):
            why = _STARTS_THERE if self.directory is None else "it does not change the directory"
            self.draft.drop(statement.line, statement.text, why)
        elif re.fullmatch(r"\$\{?SLURM_SUBMIT_DIR\}?/?", target.text):
            self._return_to_submit_directory(statement)
        else:
            self.change_directory(statement.line, statement.text, target)

    def change_directory(self, line: int, shown: str, target: Word) -> None:
        """Note that the lines behind this one, and the program, run in another directory.

        Args:
            shown: the text in the script.
        """
        is_absolute = target.text.startswith("/") or (target.expands and target.text.startswith(("~", "$")))
        if self.directory is None or is_absolute:
            self._leave_directory()
            self.directory = target
        else:
            self.directory = Word(
                written=f"{self.directory.written}/{target.written}",
                text=f"{self.directory.text}/{target.text}",
                expands=self.directory.expands or target.expands,
            )
        # Later lines of the setup run there too.
        self._setup.append(_SetupLine(line, f"cd {target.written}", shown, serves=_DIRECTORY))

    def _return_to_submit_directory(self, statement: Statement) -> None:
        if self.directory is None:
            self.draft.drop(statement.line, statement.text, _STARTS_THERE)
            return
        self._leave_directory()
        self.directory = None
        self._setup.append(_SetupLine(statement.line, statement.text, statement.text, _DIRECTORY, _STARTS_THERE))

    def _leave_directory(self) -> None:
        """Note that the program does not start in the directory of the lines so far."""
        for line in self._setup:
            if line.serves == _DIRECTORY:
                line.why = line.why or "a later line changes the directory again"


_ML_COMMANDS: Final = frozenset(
    {"load", "add", "purge", "use", "unuse", "swap", "switch", "unload", "rm", "del", "avail", "av", "list", "show",
     "spider", "save", "restore", "reset", "refresh", "update"}
)  # fmt: skip


def _environment_of(texts: Sequence[str]) -> tuple[str | None, str]:
    """Return the field of ``environment`` that an activation means, and its value."""
    program, *arguments = texts
    if program in {"conda", "mamba"} and arguments[:1] == ["activate"] and len(arguments) == 2:  # noqa: PLR2004
        return "conda", arguments[1]
    if program in {"source", "."} and arguments[:1] == ["activate"] and len(arguments) == 2:  # noqa: PLR2004
        return "conda", arguments[1]
    if program in {"source", "."} and len(arguments) == 1 and arguments[0].endswith("/bin/activate"):
        return "venv", arguments[0].removesuffix("/bin/activate")
    return None, ""


def _assigned_names(command: Command) -> set[str]:
    words = [*command.assignments, *(command.words if kind_of(command) == "export" else ())]
    assignments = [split_assignment(word) for word in words]
    return {assignment[0] for assignment in assignments if assignment is not None}


def _why_not_needed(statement: Statement) -> str | None:
    """Return why a statement that only reports, waits or requeues is not needed; None for another one."""
    if statement.compound == "function":
        return None
    if re.search(r"scontrol\s+requeue|sbatch\s+.*(\$0|BASH_SOURCE|--dependency)", statement.text):
        return "hpcddp requeues the job"
    kinds = [_kind_of_reporting(command) for command in statement.commands]
    if not kinds or None in kinds or any(_writes_a_file(command) for command in statement.commands):
        return None
    if kinds == ["set"]:
        return _why_not_set(statement)
    reasons = (
        ("trap", "hpcddp handles the signals of the job"),
        ("print", "it only prints; hpcddp records the job, its nodes and its times in the run directory"),
    )
    return next((why for kind, why in reasons if kind in kinds), "it waits for, or ends, what hpcddp runs")


def _writes_a_file(command: Command) -> bool:
    return any(re.match(r"&?>|[12]>(?!&)", redirection) for redirection in command.redirections)


def _why_not_set(statement: Statement) -> str | None:
    words = statement.commands[0].texts
    options = set("".join(word.lstrip("-+") for word in words[1:]))
    if words[0] != "set" or not options or options - set("euxv"):
        return None
    if options <= {"x", "v"}:
        return "hpcddp render shows the lines that run"
    return "a command of environment.setup that fails ends the job"


def _kind_of_reporting(command: Command) -> str | None:
    """Return ``print``, ``set``, ``trap``, ``wait`` or ``test``; None for a command that does something."""
    kind = kind_of(command)
    words = program_words(command.words)
    name = words[0].text if words else ""
    reports: str | None = None
    if kind in _REPORTS:
        reports = kind
    elif name in _HARMLESS_TO_DROP:
        reports = "wait"
    elif kind == "control" or name in {"[", "[[", "test"}:
        reports = "test"
    elif name in _FILTERS or (name == "srun" and _prints(words)):
        reports = "print"
    return reports


def _prints(words: Sequence[Word]) -> bool:
    return words[-1].text.rpartition("/")[2] in {"hostname", "nvidia-smi", "env", "date", "rocm-smi"}


def read_around(statement: Statement, launch: Command, surroundings: Surroundings) -> None:
    """Sort in the other commands of the statement that holds the launch: a list, a pipeline, a loop, a function.

    Args:
        launch: the command in it that starts the ranks.
        surroundings: gets what they become.
    """
    draft = surroundings.draft
    launch_index = statement.commands.index(launch)
    for command in statement.commands[:launch_index]:
        kind = kind_of(command)
        if kind == "control":
            surroundings.assigned |= {word.text for word in command.words[1:2]}
            draft.leave_open(command.line, command.text, _why_no_loop(command))
        elif command.texts[:1] in {("[",), ("[[",), ("test",)} or command.texts[-1:] == ("]]",):
            draft.leave_open(command.line, command.text, "the job file has no conditions: it always runs the program")
        elif command.openings == launch.openings[: len(command.openings)]:
            surroundings.read_before(_alone(command))
        else:
            surroundings.forget(command)
            draft.leave_open(command.line, command.text, "the script runs it in a loop or under a condition")
    is_piped = launch.is_piped
    for command in statement.commands[launch_index + 1 :]:
        if is_piped:
            draft.drop(command.line, command.text, "each rank has a log of its own")
        elif launch_of(command, surroundings.variables).certainty:
            draft.leave_open(command.line, command.text, "it starts a program too, and a job file has one command")
        else:
            surroundings.read_after(_alone(command))
        is_piped = is_piped and command.is_piped


def _alone(command: Command) -> Statement:
    return Statement(
        line=command.line, last_line=command.last_line, text=command.text, commands=(replace(command, end=""),)
    )


def _why_no_loop(command: Command) -> str:
    if re.search("host|node|seq|SLURM_N", command.text, re.IGNORECASE):
        return "hpcddp starts the program on every node: the loop is not needed if it goes over the nodes"
    return "a job file is one run: write a sweep with the values of the loop, or a job file for each"
