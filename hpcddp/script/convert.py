"""Makes a job file from an sbatch script."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from hpcddp.errors import UserError
from hpcddp.jobfile.document import Path, dotted, path_of
from hpcddp.jobfile.launchers import OWN
from hpcddp.jobfile.placeholders import SHELLS
from hpcddp.jobfile.problems import JobFileError, Problem
from hpcddp.jobfile.read import DefaultSettings, ResolvedJob, load_job
from hpcddp.jobfile.resources import FIELDS_WRITTEN_UNCHANGED, REFUSED_FLAGS_OF_SRUN
from hpcddp.jobfile.write import write_values
from hpcddp.script.directives import Flag
from hpcddp.script.launch import MODULE_OPTIONS, Launch, LauncherWords, gives_code, launch_of, split_launcher
from hpcddp.script.parse import Script
from hpcddp.script.request import (
    NO_NUMBER,
    Counts,
    Draft,
    Ranks,
    Row,
    effective_flags,
    flag_text,
    job_name_of,
    read_counts,
    take_counts,
    take_exported,
    take_field,
    take_other_flags,
)
from hpcddp.script.shell import Command, Statement
from hpcddp.script.surroundings import PROGRAM_DIRECTORY, Surroundings


class ConversionError(UserError):
    """A script that no job file can be made from."""

    kind = "conversion"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """A job file that was made from a script.

    Args:
        text: the job file.
        rows: what became of each part of the script, in the order of its lines.
    """

    text: str
    job: ResolvedJob
    rows: tuple[Row, ...]


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
    for comment in script.comments:
        if comment.column == 0 and re.match(r"#(?:PBS|BSUB|COBALT|SLURM)\b", comment.text):
            draft.tell(
                comment.line, comment.text, "to do", "it is for another scheduler: write it as a field of resources"
            )
    launch, launch_index = _find_launch(script)
    line = launch.command.line
    surroundings = Surroundings(draft)
    if {"-l", "--login"} & set((script.shebang or "").split()):
        surroundings.read_line(1, "source /etc/profile")
    if "chdir" in flags:
        chdir = flags["chdir"]
        draft.tell(chdir.line, flag_text(chdir), "setup line", "environment.setup; a line changes the directory")
        # sbatch takes a dollar sign as it is.
        surroundings.read_line(chdir.line, f"cd {shlex.quote(chdir.value or '.')}")
    for statement in script.statements[:launch_index]:
        surroundings.read_before(statement)
    behind = [*_read_around(script.statements[launch_index], launch.command, surroundings)]
    _take_srun_flags(launch, script.text, surroundings)
    starter = launch.in_front_of_srun
    assignments = (*launch.command.assignments, *(word for word in starter if re.match(r"\w+=", word.text)))
    if assignments:
        surroundings.read_line(line, f"export {' '.join(word.written for word in assignments)}")
    others = " ".join(word.written for word in starter if word not in assignments)
    if others not in {"", "env"}:
        draft.tell(line, others, "to do", "hpcddp calls srun itself, and no other program does")
    command = _take_launch(launch, read_counts(flags, launch), surroundings, flags)
    for statement in [*behind, *script.statements[launch_index + 1 :]]:
        surroundings.read_after(statement)
    surroundings.finish(line, needs_export="$" in " ".join(command))
    draft.values.setdefault(("name",), job_name_of(name))
    take_other_flags(flags, draft)
    job = _valid_job(draft, environment)
    nested = _nested(draft.values)
    return Conversion(
        text=write_values({key: nested[key] for key in _ORDER if key in nested}),
        job=job,
        rows=tuple(sorted(draft.rows, key=lambda row: row.line)),
    )


_ORDER: Final = ("name", "resources", "environment", "requeue", "launcher", "command")


def _refuse_unreadable(script: Script) -> None:
    """Refuse a script that sbatch refuses as a whole, one of several jobs, and one of another language.

    Raises:
        ConversionError: it is one.
    """
    if script.has_byte_order_mark or script.has_dos_line_breaks:
        raise ConversionError(
            "the script begins with a byte order mark, or its lines end as on Windows, and sbatch refuses it; run "
            "hpcddp check --fix on it first"
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
    if any(flag.name == "hetjob" for flag in script.flags):
        raise ConversionError("a heterogeneous job is several jobs, and a job file is one; write a script for each")


def _find_launch(script: Script) -> tuple[Launch, int]:
    """Return the command that starts the ranks, and the index of its statement: the first of the most certain ones.

    Raises:
        ConversionError: nothing in the script starts a program, or a function does.
    """
    launches = [
        (launch_of(command), index)
        for index, statement in enumerate(script.statements)
        for command in statement.commands
    ]
    best, index = max(launches, key=lambda launch: launch[0].certainty, default=(None, 0))
    yourself = "write the job file yourself: docs/any-script.md says how"
    if best is not None and best.certainty and script.statements[index].compound == "function":
        raise ConversionError(f"line {best.command.line} starts the program in a function of the shell; {yourself}")
    if best is not None and best.certainty:
        return best, index
    for launch, _ in launches:
        if gives_code(launch.words):
            raise ConversionError(
                f"line {launch.command.line} gives Python its code in the script itself, and no other line starts a "
                "program; write the code into a file, and let the line start that: python FILE.py"
            )
    raise ConversionError(
        "no line starts a program that can be the work of the job, as srun PROGRAM, torchrun, accelerate, mpirun and "
        f"python FILE do, but not ssh; {yourself}"
    )


def _read_around(statement: Statement, launch: Command, surroundings: Surroundings) -> list[Statement]:
    """Sort in the commands in front of the launch in its statement; return those that run behind it."""
    draft = surroundings.draft
    if statement.compound is not None:
        why = "a job file has no loops and no conditions: it runs the program once, without the commands around it"
        draft.tell(statement.line, statement.text, "to do", f"{why}; for the values of a loop, write a sweep")
        return []
    index = statement.commands.index(launch)
    for command in statement.commands[:index]:
        if command.end == "&&":
            surroundings.read_before(_alone(command))
        else:
            draft.tell(command.line, command.text, "to do", "a job file has no pipes and no conditions: write a script")
    behind = []
    is_piped = launch.is_piped
    for command in statement.commands[index + 1 :]:
        if is_piped:
            draft.tell(command.line, command.text, "dropped", "each rank has a log of its own")
        else:
            behind.append(_alone(command))
        is_piped = is_piped and command.is_piped
    return behind


def _alone(command: Command) -> Statement:
    return Statement(line=command.line, last_line=command.line, text=command.text, commands=(replace(command, end=""),))


def _with_plain_values(text: str, script: str) -> str:
    """Return the value of a flag with the variables in it that the script assigns once, as CPU masks often are."""

    def value_of(variable: re.Match[str]) -> str:
        lines = re.findall(rf".*\b{variable[1] or variable[2]}\+?=.*", script)
        plain = re.fullmatch(r"(?:export )?\w+=([\"']?)([\w.,:/=-]+)\1[ \t]*", "\n".join(lines))
        return plain[2] if plain else variable[0]

    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", value_of, text)


def _take_srun_flags(launch: Launch, script: str, surroundings: Surroundings) -> None:
    """Add a row for each flag of srun; the numbers of the job follow from some of them."""
    draft = surroundings.draft
    line = launch.command.line
    for written in launch.srun:
        flag = replace(written, value=written.value and _with_plain_values(written.value, script))
        text = f"srun {flag_text(flag)}"
        is_expanded = re.search("[$`]", flag.value or "") is not None
        is_of_hpcddp = flag.name in REFUSED_FLAGS_OF_SRUN and not flag.name.startswith("container-")
        if flag.name == "chdir" and flag.value:
            draft.tell(line, text, "setup line", "environment.setup; a line changes the directory")
            surroundings.read_line(line, f'cd "{flag.value}"' if is_expanded else f"cd {shlex.quote(flag.value)}")
        elif NO_NUMBER.search(text) and not is_expanded:
            why = "srun takes a number here: write it into resources, and into command what belongs to the program"
            draft.tell(line, text, "to do", why)
        elif is_of_hpcddp and flag.name not in FIELDS_WRITTEN_UNCHANGED and not (flag.name == "export" and is_expanded):
            why = "hpcddp calls srun itself: a task for each rank, with all variables, and a log of its own"
            draft.tell(line, text, "dropped", why)
            if flag.name == "export":
                take_exported(flag, line, draft)
        elif is_of_hpcddp or is_expanded:
            why = "hpcddp calls srun itself: write the value into the job file, in its own field or in resources.srun"
            draft.tell(line, text, "to do", why)
        else:
            take_field(flag, line, text, draft)
    variable = re.match(r"\$\{?(\w+)", launch.words[0].text)
    if variable and re.search(rf"\b{variable[1]}\+?=[\s\\\"'(]*-", script):
        why = "it holds flags, and no program: write them into resources.srun, and let command begin with the program"
        draft.tell(line, variable.string, "to do", why)


def _take_launch(
    launch: Launch, counts: Counts, surroundings: Surroundings, flags: Mapping[str, Flag]
) -> tuple[str, ...]:
    """Set the command, the launcher and the numbers of the job; return the command."""
    draft = surroundings.draft
    line = launch.command.line
    parts = split_launcher(launch.words)
    ranks = _ranks_of(launch, counts, parts)
    stated = None if parts is None else parts.command.ranks_on_each(counts.nodes)
    take_counts(flags, counts, ranks, stated, draft)
    gpus_of_task = flags.get("gpus-per-task")
    if gpus_of_task and ranks == "tasks" and launch.is_step and not launch.srun_value("gpus-per-task"):
        # srun takes it from the variables of the job.
        take_field(gpus_of_task, gpus_of_task.line, flag_text(gpus_of_task), draft)
    command = _command_of(launch, parts, surroundings)
    notes = []
    if launch.started_by != "shell":
        notes.append("hpcddp starts the tasks with srun itself")
    if parts is not None and parts.world:
        dropped = " ".join(word.written for word in parts.world if word.text.startswith("-"))
        notes.append(f"hpcddp fills in {dropped}")
    if not counts.gpus_per_node:
        notes.append(
            "no line asks for GPUs: if your nodes come with them, write resources.gpus_per_node and gpu_request: none"
        )
    inputs = [redirection for redirection in launch.command.redirections if re.match("0?<", redirection)]
    if len(inputs) < len(launch.command.redirections):
        notes.append("each rank has a log of its own in place of the redirections")
    draft.take(line, launch.command.text, ("command",), list(command), "; ".join(notes))
    if ranks == "own":
        note = "one task on each node, which uses all GPUs of the node"
        if launch.has_launcher:
            note += "; the launcher keeps its options"
        draft.take(line, launch.command.text, ("launcher",), OWN, note)
    if launch.started_by == "shell" and draft.values["resources", "nodes"] != 1:
        why = "without srun it runs on the first node alone; hpcddp starts it on every node of the job"
        draft.tell(line, launch.command.text, "to do", why)
    for problem in _launch_problems(counts, ranks, command, inputs):
        draft.tell(line, launch.command.text, "to do", problem)
    return command


def _ranks_of(launch: Launch, counts: Counts, parts: LauncherWords | None) -> Ranks:
    if parts is not None:
        return "launcher"
    if launch.has_launcher or (counts.gpus_per_node > 1 and counts.tasks_per_node == 1):
        return "own"
    if launch.started_by == "shell":
        return "own" if counts.gpus_per_node > 1 else "alone"
    return "tasks"


def _command_of(launch: Launch, parts: LauncherWords | None, surroundings: Surroundings) -> tuple[str, ...]:
    """Return the words of the job's command.

    No shell reads them. Where the script's shell would have expanded one, ``bash -c`` does it in the task.
    """
    program = launch.words if parts is None else parts.program
    directory = surroundings.directory
    if ("environment", "container", "runtime") in surroundings.draft.values:
        directory = None
    change = ""
    prefix: tuple[str, ...] = ()
    if directory == PROGRAM_DIRECTORY:
        change = f'cd "{directory}" && '
    elif directory is not None:
        prefix = ("env", "-C", directory)
    launcher = () if parts is None else (*parts.head, *parts.options)
    if not change and not any(word.expands for word in program):
        return (*prefix, *(word.text for word in (*launcher, *program)))
    text = " ".join(word.written for word in program)
    if parts is None:
        return (*prefix, "bash", "-c", f"{change}exec {text}")
    # The shell stands in the place of the program, which the launcher starts with Python else.
    if MODULE_OPTIONS & {word.text for word in parts.options}:
        text = f"python -u -m {text}"
    elif program[0].text.endswith(".py"):
        text = f"python -u {text}"
    no_python = "--no_python" if parts.command.launcher == "accelerate" else "--no-python"
    kept = [word for word in parts.options if word.text not in {*MODULE_OPTIONS, no_python}]
    words = (word.text for word in (*parts.head, *kept))
    return (*prefix, *words, no_python, "bash", "-c", f"{change}exec {text}")


def _launch_problems(counts: Counts, ranks: Ranks, command: tuple[str, ...], inputs: list[str]) -> Iterator[str]:
    """Yield what the user has to look at in the command."""
    text = " ".join(command)
    if inputs:
        yield (
            "the standard input of a task is empty: let the program open a file, or a shell in the task redirect it: "
            "bash -c 'PROGRAM < FILE'"
        )
    if ranks == "tasks" and counts.gpus_per_node not in {0, counts.tasks_per_node}:
        yield (
            f"the script has {counts.tasks_per_node} tasks and {counts.gpus_per_node} GPUs on a node, and hpcddp "
            "starts one task for each GPU"
        )
    if re.search(r"\bexec .*(?:\$RANDOM|\$\((?!\()|`)", text):
        yield "each task expands it to a value of its own: assign it to a variable in a line before, and use that"
    if re.search(r"\$\{\w+\[", text):
        yield "an array does not reach the tasks: write its values into the command"
    if re.search(r"\$(\{?[0-9@*#]|\{?SLURM_ARRAY_TASK_ID)", text):
        yield "it uses arguments of the script, or the index of an array: write the values in, or sweep them"


def _valid_job(draft: Draft, environment: Mapping[str, str]) -> ResolvedJob:
    """Return the job; a value that no field can have is taken away, and its row says why.

    Raises:
        ConversionError: the job is not valid for another reason.
    """
    while True:
        try:
            return load_job(_nested(draft.values), defaults=DefaultSettings(environment=environment))
        except JobFileError as error:
            problems = error.problems
        kept = len(draft.values)
        for problem in problems:
            _remove(draft, problem)
        if len(draft.values) == kept:
            raise ConversionError(f"the job file would not be valid: {problems[0]}")


def _remove(draft: Draft, problem: Problem) -> None:
    """Take a value away, and say why in its rows."""
    key = path_of(problem.key)
    if key[:2] == ("environment", "container"):
        # The other fields mean nothing without the one that is wrong, or missing.
        key = key[:2]
    for path in list(draft.values):
        is_same = path[: len(key)] == key or key[: len(path)] == path
        if not is_same or path in {("command",), ("name",)}:
            continue
        del draft.values[path]
        for number, row in enumerate(draft.rows):
            if row.field == dotted(path):
                reason = f"{problem.key} {problem.sentence}"
                draft.rows[number] = replace(row, outcome="to do", reason=reason, field=None)


def _nested(values: Mapping[Path, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for path, value in values.items():
        section = nested
        for key in path[:-1]:
            section = section.setdefault(key, {})
        section[path[-1]] = value
    return nested
