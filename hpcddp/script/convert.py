"""Makes a job file from an sbatch script."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from hpcddp.errors import UserError
from hpcddp.jobfile.document import Path, dotted, path_of
from hpcddp.jobfile.launchers import OWN
from hpcddp.jobfile.placeholders import SHELLS, shell_text_index
from hpcddp.jobfile.problems import JobFileError
from hpcddp.jobfile.read import DefaultSettings, ResolvedJob, load_job
from hpcddp.jobfile.resources import SRUN_VARIABLES
from hpcddp.jobfile.units import TimeLimit, UnitError
from hpcddp.jobfile.write import write_values
from hpcddp.script.directives import Flag
from hpcddp.script.launch import Launch, LauncherWords, gives_code, kind_of_words, launch_of
from hpcddp.script.parse import Script
from hpcddp.script.request import (
    CONTAINER_FLAGS,
    Counts,
    Draft,
    Ranks,
    Row,
    effective_flags,
    flag_text,
    job_name_of,
    read_counts,
    take_container,
    take_counts,
    take_other_flags,
)
from hpcddp.script.shell import Statement, Word
from hpcddp.script.surroundings import Surroundings, read_around
from hpcddp.slurm.directives import Directive, directives_for

_MOST_ROUNDS: Final = 20


class ConversionError(UserError):
    """A script that no job file can be made from."""

    kind = "conversion"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """A job file that was made from a script.

    Args:
        text: the job file.
        rows: what became of each part of the script, in the order of its lines.
        added: the directives of the job's script that the script does not have.
    """

    text: str
    job: ResolvedJob
    rows: tuple[Row, ...]
    added: tuple[str, ...]


def convert(script: Script, *, name: str, environment: Mapping[str, str]) -> Conversion:
    """Make a job file from an sbatch script.

    Args:
        name: the name of its file, without its suffix: the name of a job that states none.
        environment: the variables that paths of the job file may use.

    Raises:
        ConversionError: nothing in the script starts a program, or it is one that sbatch refuses as a whole.
    """
    _refuse_unreadable(script)
    draft = Draft()
    flags = effective_flags(script, draft)
    _note_foreign_directives(script, draft)
    launch, launch_index = _find_launch(script)
    line = launch.command.line
    index_behind_call = _index_behind_call(script.statements, launch_index)
    surroundings = Surroundings(draft)
    if {"-l", "--login"} & set((script.shebang or "").split()):
        surroundings.add_setup(1, "source /etc/profile", script.lines[0])
    if "chdir" in flags:
        chdir = flags["chdir"]
        # sbatch takes a dollar sign as it is.
        target = _plain(chdir.value or ".")
        surroundings.add_setup(chdir.line, f"cd {target.written}", flag_text(chdir))
        surroundings.change_directory(chdir.line, flag_text(chdir), target)
    for statement in script.statements[:launch_index]:
        surroundings.read_before(statement)
    for statement in script.statements[launch_index + 1 : index_behind_call - 1]:
        surroundings.read_before(statement)
    read_around(script.statements[launch_index], launch.command, surroundings)
    for statement in launch.before:
        surroundings.read_before(replace(statement, line=line, last_line=line))
    for flag in launch.srun:
        if flag.name == "chdir":
            surroundings.change_directory(line, f"srun {flag_text(flag)}", _word_of_srun(flag))
    surroundings.read_prefix(line, launch.command.assignments)
    needs_export = _take_launch(launch, flags, surroundings)
    if index_behind_call > launch_index + 1:
        call = script.statements[index_behind_call - 1]
        draft.drop(call.line, call.text, "it calls the function that starts the program")
    for statement in script.statements[index_behind_call:]:
        surroundings.read_after(statement)
    surroundings.finish(line, needs_export=needs_export)
    draft.values.setdefault(("name",), job_name_of(name))
    take_other_flags(flags, draft)
    job = _valid_job(draft, environment)
    directives = directives_for(job.spec, run_id=None)
    _note_differences(flags, directives, draft)
    return Conversion(
        text=_job_text(draft),
        job=job,
        rows=tuple(sorted(draft.rows, key=lambda row: row.line)),
        added=tuple(str(directive) for directive in directives if not _is_given(directive, flags)),
    )


def _is_given(directive: Directive, flags: Mapping[str, Flag]) -> bool:
    """Return whether the script has the flag of a directive, or another one for the same."""
    asks_for_gpus = any(name.startswith("gpus") for name in flags)
    return directive.flag in flags or (directive.flag == "gres" and asks_for_gpus)


def _refuse_unreadable(script: Script) -> None:
    """Refuse a script that sbatch refuses as a whole, and one of another language.

    Raises:
        ConversionError: it is one.
    """
    if script.has_byte_order_mark:
        raise ConversionError(
            "a byte order mark is in front of the first line, and sbatch refuses such a script; run hpcddp check --fix "
            "on it first"
        )
    if script.has_dos_line_breaks:
        raise ConversionError(
            "the lines end as on Windows, and sbatch refuses such a script; run hpcddp check --fix on it first"
        )
    if "hpcddp.supervise begin" in script.text:
        raise ConversionError("hpcddp wrote this script from a job file, which stands in it; change that job file")
    if script.shebang is None:
        raise ConversionError(
            "the first line does not begin with #!, and sbatch refuses such a script; add #!/bin/bash"
        )
    if script.interpreter not in SHELLS:
        raise ConversionError(
            f"the script is for {script.shebang}, and hpcddp reads those for bash and sh; write the job file yourself, "
            "with the script as its command"
        )


def _note_foreign_directives(script: Script, draft: Draft) -> None:
    for comment in script.comments:
        if comment.column == 0 and re.match(r"#(PBS|BSUB|COBALT)\s+-", comment.text):
            draft.leave_open(
                comment.line, comment.text, "it is for another scheduler; write it as a field of resources"
            )
        elif comment.column == 0 and re.match(r"#SLURM\b", comment.text):
            draft.leave_open(comment.line, comment.text, "sbatch refuses a script with #SLURM; write #SBATCH")


def _find_launch(script: Script) -> tuple[Launch, int]:
    """Return the command that starts the ranks, and the index of its statement: the first of the most certain ones.

    Raises:
        ConversionError: nothing in the script starts a program.
    """
    launches = [
        (launch_of(command), index)
        for index, statement in enumerate(script.statements)
        for command in statement.commands
    ]
    best, index = max(launches, key=lambda launch: launch[0].certainty, default=(None, 0))
    if best is None or not best.certainty:
        raise ConversionError(_why_no_launch(script))
    return best, index


def _why_no_launch(script: Script) -> str:
    """Return why no command of a script can be that of the job, and what to do."""
    for command in script.commands:
        if gives_code(launch_of(command).words):
            return (
                f"line {command.line} gives Python its code in the script itself, and no other line starts a program; "
                "write the code into a file, and let the line start that: python FILE.py"
            )
    return (
        "no line starts a program that can be the work of the job, as srun PROGRAM, torchrun, accelerate, mpirun and "
        "python FILE do; write the job file yourself: docs/any-script.md says how"
    )


def _index_behind_call(statements: Sequence[Statement], launch_index: int) -> int:
    """Return the index behind the call of the function that holds the launch; behind the launch, if it is in none."""
    function = re.match(r"(?:function\s+)?([A-Za-z_][\w.-]*)", statements[launch_index].text)
    if statements[launch_index].compound == "function" and function is not None:
        for number, statement in enumerate(statements[launch_index + 1 :], launch_index + 1):
            command = statement.command
            if command is not None and command.texts[:1] == (function[1],):
                return number + 1
    return launch_index + 1


def _word_of_srun(flag: Flag) -> Word:
    text = flag.value or "."
    return Word(written=f'"{text}"', text=text, expands=True) if "$" in text else _plain(text)


def _take_launch(launch: Launch, flags: Mapping[str, Flag], surroundings: Surroundings) -> bool:
    """Set the command, the launcher and the numbers of the job; return whether a shell in the tasks expands words."""
    draft = surroundings.draft
    directory = surroundings.directory
    counts = read_counts(flags, launch, draft)
    parts = launch.parts
    ranks = _ranks_of(launch, counts)
    take_counts(flags, counts, ranks, _stated_ranks(parts, counts), draft)
    if ranks == "own":
        draft.values["launcher",] = OWN
    words = launch.words if parts is None else _launcher_command(parts, directory)
    command = _command_of(words, directory, parts)
    draft.take(launch.command.line, launch.command.text, ("command",), list(command), _launch_note(launch, parts))
    _take_srun_flags(launch, draft)
    _note_launch_problems(launch, counts, ranks, command, draft)
    return "$" in " ".join(command)


def _stated_ranks(parts: LauncherWords | None, counts: Counts) -> int | None:
    """Return the ranks of a node that the options of a launcher state; None if they do not."""
    if parts is None or parts.ranks is None or not parts.ranks.isdecimal():
        return None
    ranks = int(parts.ranks)
    # accelerate counts those of all nodes.
    return max(1, ranks // counts.nodes) if parts.counts_all_nodes else ranks


def _ranks_of(launch: Launch, counts: Counts) -> Ranks:
    if launch.parts is not None:
        return "launcher"
    if launch.launcher is not None or kind_of_words(launch.words) == "deepspeed":
        return "own"
    if launch.started_by == "shell":
        return "own" if counts.gpus_per_node > 1 else "alone"
    if counts.gpus_per_node > 1 and counts.tasks_per_node == 1:
        return "own"
    return "tasks"


def _launcher_command(parts: LauncherWords, directory: Word | None) -> tuple[Word, ...]:
    """Return the launcher with its program; a program whose words a shell has to expand gets a shell of its own."""
    change = "" if directory is None or not directory.expands else f"cd {directory.written} && "
    if not parts.program or (not change and not any(word.expands for word in parts.program)):
        return (*parts.head, *parts.options, *parts.program)
    options = tuple(word for word in parts.options if word.text not in {"-m", "--module"})
    runs_module = len(options) < len(parts.options)
    runs_python = runs_module or parts.program[0].text.endswith(".py")
    python = ("python", "-u", *(("-m",) if runs_module else ()))
    text = " ".join([*(python if runs_python else ()), *(word.written for word in parts.program)])
    no_python = "--no_python" if parts.counts_all_nodes else "--no-python"
    kept = tuple(word for word in options if word.text.replace("_", "-") != "--no-python")
    return (*parts.head, *kept, *(_plain(word) for word in (no_python, "bash", "-c", f"{change}exec {text}")))


def _plain(text: str) -> Word:
    return Word(written=shlex.quote(text), text=text, expands=False)


def _command_of(words: tuple[Word, ...], directory: Word | None, parts: LauncherWords | None) -> tuple[str, ...]:
    """Return the words of the job's command.

    No shell reads them. Where the script's shell would have expanded one, ``bash -c`` does it in the task.
    """
    prefix: tuple[str, ...] = ()
    if directory is not None and not directory.expands:
        prefix = ("env", "-C", directory.text)
    must_expand = any(word.expands for word in words) or (directory is not None and directory.expands)
    if not must_expand or parts is not None:
        return (*prefix, *(word.text for word in words))
    written = " ".join(word.written for word in words)
    *shell, text = words
    is_shell = words[0].text.rpartition("/")[2] in SHELLS
    if is_shell and shell_text_index([word.text for word in words]) == len(shell):
        # The shell of the script expands the text once, and the shell that it is for expands the result.
        return (*prefix, *(word.text for word in shell), f"eval {text.written}")
    change = f"cd {directory.written} && " if directory is not None and directory.expands else ""
    return (*prefix, "bash", "-c", f"{change}exec {written}")


def _launch_note(launch: Launch, parts: LauncherWords | None) -> str:
    notes = []
    if launch.started_by in {"srun", "mpirun"}:
        notes.append("hpcddp starts the tasks with srun itself")
    elif launch.started_by == "ssh":
        notes.append("hpcddp starts the program on every node")
    if parts is not None and parts.world:
        dropped = " ".join(word.written for word in parts.world if word.text.startswith("-"))
        notes.append(f"hpcddp fills in {dropped}")
    if len(_inputs_of(launch)) < len(launch.command.redirections):
        notes.append("each rank has a log of its own in place of the redirections")
    return "; ".join(notes)


def _inputs_of(launch: Launch) -> list[str]:
    """Return the redirections of the standard input, here-documents among them."""
    return [redirection for redirection in launch.command.redirections if re.match("0?<", redirection)]


def _take_srun_flags(launch: Launch, draft: Draft) -> None:
    """Add a row for each flag of srun whose meaning is not in the numbers of the job."""
    for flag in launch.srun:
        text = f"srun {flag_text(flag)}"
        line = launch.command.line
        if flag.name == "chdir" or (flag.name, flag.value) == ("wait", "0"):
            continue
        if flag.name in SRUN_VARIABLES and flag.value is not None and "$" not in flag.value:
            draft.take(line, text, ("environment", "env", SRUN_VARIABLES[flag.name]), flag.value)
        elif flag.name in CONTAINER_FLAGS:
            take_container(replace(flag, line=line), text, draft)
        elif flag.name.startswith(("container", "no-container")) or flag.problem is not None:
            draft.leave_open(line, text, "no field of the job file has it")
        else:
            draft.drop(line, text, _why_no_srun_flag(flag.name))


def _why_no_srun_flag(name: str) -> str:
    if name in {
        "nodes",
        "ntasks",
        "ntasks-per-node",
        "cpus-per-task",
        "gres",
        "gpus",
        "gpus-per-node",
        "gpus-per-task",
    }:
        return "hpcddp starts a task for each rank of resources, with its CPUs and GPUs"
    if name in {"output", "error", "label", "unbuffered", "open-mode"}:
        return "each rank has a log of its own, which hpcddp logs shows"
    if name in {"kill-on-bad-exit", "signal", "immediate", "quit-on-interrupt"}:
        return "hpcddp ends the other ranks when one fails"
    if name == "wait":
        return "hpcddp lets each rank work as long as it needs"
    return "hpcddp calls srun itself"


def _note_launch_problems(launch: Launch, counts: Counts, ranks: Ranks, command: tuple[str, ...], draft: Draft) -> None:
    line = launch.command.line
    shown = " ".join(launch.texts[:3])
    if launch.started_by == "shell" and counts.most_nodes > 1:
        draft.leave_open(
            line, shown, "without srun it runs on the first node alone; hpcddp starts it on every node of the job"
        )
    for redirection in _inputs_of(launch):
        draft.leave_open(
            line,
            redirection,
            "the standard input of a task is empty: let the program open a file, or a shell in the task redirect it: "
            "bash -c 'PROGRAM < FILE'",
        )
    if ranks == "own":
        note = "own: one task on each node, which uses all GPUs of the node"
        if launch.launcher is not None:
            note += "; the options of the launcher stay as they are, because a shell has to expand them"
        draft.note_taken(line, shown, ("launcher",), note)
    if ranks == "tasks" and counts.gpus_per_node and counts.tasks_per_node != counts.gpus_per_node:
        draft.leave_open(
            line,
            shown,
            f"the script has {counts.tasks_per_node} tasks and {counts.gpus_per_node} GPUs on a node, and hpcddp "
            "starts one task for each GPU",
        )
    text = " ".join(command)
    if re.search(r"\$\{\w+\[", text):
        draft.leave_open(line, shown, "an array does not reach the tasks: write its values into the command")
    if re.search(r"\$(\{?[0-9@*#]|\{?SLURM_ARRAY_TASK_ID)", text):
        draft.leave_open(
            line, shown, "it uses arguments of the script, or the index of an array: write the values in, or sweep them"
        )
    if re.search(r"\bray\b.*\bstart\b|hostfile", text):
        draft.leave_open(line, shown, "it joins the nodes in its own way")


def _valid_job(draft: Draft, environment: Mapping[str, str]) -> ResolvedJob:
    """Return the job; a value that no field can have is taken away, and its row says why.

    Raises:
        ConversionError: the job is not valid for another reason.
    """
    container = ("environment", "container")
    if (*container, "runtime") in draft.values and (*container, "image") not in draft.values:
        _remove(draft, container, "needs an image, and the script names none with --container-image")
    for _ in range(_MOST_ROUNDS):
        try:
            return load_job(_nested(draft.values), defaults=DefaultSettings(environment=environment))
        except JobFileError as error:
            problems = error.problems
        removed = [_remove(draft, path_of(problem.key), problem.sentence) for problem in problems if problem.key]
        if not any(removed):
            raise ConversionError(f"the job file would not be valid: {problems[0]}")
    raise ConversionError("the job file would not be valid; write it yourself: docs/any-script.md says how")


def _remove(draft: Draft, key: Path, why: str) -> bool:
    """Take a value away, and say why in its rows."""
    candidates = [path for path in draft.values if path[: len(key)] == key or key[: len(path)] == path]
    removable = [path for path in candidates if path not in {("command",), ("name",)}]
    for path in removable:
        del draft.values[path]
        draft.rows = [
            replace(row, outcome="open", reason=f"{dotted(path)} {why}", key=None) if row.key == path else row
            for row in draft.rows
        ]
    return bool(removable)


def _nested(values: Mapping[Path, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for path, value in values.items():
        section = nested
        for key in path[:-1]:
            section = section.setdefault(key, {})
        section[path[-1]] = value
    return nested


_ORDER: Final = ("name", "resources", "environment", "requeue", "launcher", "command")


def _job_text(draft: Draft) -> str:
    nested = _nested(draft.values)
    return write_values({key: nested[key] for key in _ORDER if key in nested})


def _note_differences(flags: Mapping[str, Flag], directives: tuple[Directive, ...], draft: Draft) -> None:
    """Say in the row of each flag what the job's script has in its place, where that is not the same."""
    rendered = {directive.flag: directive for directive in directives}
    noted: set[str] = set()
    for number, row in enumerate(draft.rows):
        flag = next((flag for flag in flags.values() if flag.line == row.line and flag_text(flag) == row.text), None)
        if flag is None or row.outcome == "dropped" or flag.name in noted:
            continue
        noted.add(flag.name)
        directive = rendered.get(flag.name)
        if directive is None and flag.name.startswith("gpus"):
            directive = rendered.get("gres")
        if directive is None:
            addition = f"the script of the job has no --{flag.name}"
        elif canonical(flag.name, flag.value) == canonical(directive.flag, directive.value):
            continue
        else:
            addition = f"the script of the job has {directive}"
        draft.rows[number] = replace(row, reason=f"{row.reason}; {addition}")


def canonical(flag: str, value: str | None) -> tuple[str, str | None]:
    """Return a flag and its value in the form in which two that mean the same are equal."""
    if value is None:
        return flag, None
    if flag == "time":
        try:
            return flag, str(TimeLimit.parse(value))
        except UnitError:
            return flag, "UNLIMITED"
    if flag.startswith("mem"):
        return flag, _megabytes(value)
    return flag, value


def _megabytes(value: str) -> str:
    match = re.fullmatch(r"([0-9]+)([KMGT]?)B?", value.upper(), re.ASCII)
    if match is None:
        return value
    sizes = {"K": 1, "M": 1024, "": 1024, "G": 1024**2, "T": 1024**3}
    return str(int(match[1]) * sizes[match[2]])
