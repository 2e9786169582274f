"""Rules about the ``#SBATCH`` lines of a script."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path, PurePath
from typing import Final

from hpcddp.check.finding import Edit, Example, Hit, Rule, Severity, Subject
from hpcddp.jobfile.slurm_flags import SBATCH, SRUN
from hpcddp.jobfile.units import TimeLimit, UnitError
from hpcddp.script.directives import DirectiveLine, Flag

_SBATCH_FLAGS: Final = SBATCH.with_value | SBATCH.with_optional_value | SBATCH.without_value
_VERY_CLOSE: Final = 0.85
# Plugins of a site, such as pyxis, add flags to both commands.
_KNOWN_FLAGS: Final = _SBATCH_FLAGS | SRUN.with_value | SRUN.with_optional_value | SRUN.without_value


def _refused_text(subject: Subject) -> Iterator[Hit]:
    """Yield what makes sbatch refuse the text of the script."""
    script = subject.script
    if script.shebang is None:
        yield Hit(
            line=1,
            problem="the first line is not #! with the path of a shell",
            fix="write #!/bin/bash in the first line",
            edits=(Edit(line=1, lines=("#!/bin/bash", script.lines[0])),),
        )
    if script.has_byte_order_mark:
        yield Hit(
            line=1,
            problem="a byte order mark, which is not shown, is in front of the line",
            fix="save the script as UTF-8 without a mark",
            edits=(Edit(line=1, lines=(script.lines[0],)),),
        )
    if script.has_dos_line_breaks:
        numbers = [number for number, line in enumerate(subject.text.split("\n"), 1) if line.endswith("\r")]
        yield Hit(
            line=numbers[0],
            problem=f"{len(numbers)} lines end with a carriage return, as on Windows",
            fix="remove it: dos2unix SCRIPT",
            edits=tuple(Edit(line=number, lines=(script.lines[number - 1],)) for number in numbers),
        )
    for line in script.directive_lines:
        if line.is_ignored or line.problem is None:
            continue
        if not _may_be_a_plugins(line):
            yield Hit(line=line.number, problem=f"the line {line.problem}", fix=_instead(line))


def _may_be_a_plugins(line: DirectiveLine) -> bool:
    """Return whether a plugin of the site, or a later Slurm, may know what this Slurm does not."""
    wrong = [flag for flag in line.flags if flag.problem is not None]
    return bool(wrong) and all(_may_be_known(flag) for flag in wrong)


def _may_be_known(flag: Flag) -> bool:
    if (flag.name, flag.value) == ("requeue", "expedite"):
        return True
    is_unknown_flag = str(flag.problem).startswith("has -") and "which is no flag" in str(flag.problem)
    return is_unknown_flag and _meant(flag) is None


def _meant(flag: Flag) -> str | None:
    """Return the flag that was certainly meant; None for a name that a plugin may have given a flag of its own."""
    if flag.name in _KNOWN_FLAGS:
        return None
    close = difflib.get_close_matches(flag.name.replace("_", "-").lower(), _SBATCH_FLAGS, n=1, cutoff=_VERY_CLOSE)
    return next(iter(close), None)


def _instead(line: DirectiveLine) -> str:
    wrong = next((flag for flag in line.flags if flag.problem is not None), None)
    meant = None if wrong is None else _meant(wrong)
    if meant is not None:
        return f"did you mean --{meant}?"
    return "correct the line; a value with blanks needs quotes"


def _after_command(subject: Subject) -> Iterator[Hit]:
    """Yield directives behind the first command."""
    script = subject.script
    read_lines = [line.number for line in script.directive_lines if not line.is_ignored]
    last_line = read_lines[-1] if read_lines else 1
    for line in script.unread_directives:
        yield Hit(
            line=line.number,
            problem=f"{line.text.strip()} stands behind the command in line {script.first_command}",
            fix=f"move it to line {last_line + 1}",
            edits=(
                Edit(line=last_line, lines=(script.lines[last_line - 1], line.text)),
                Edit(line=line.number, lines=()),
            ),
        )


_LIKE_A_DIRECTIVE: Final = re.compile(r"#[ \t]?sbatch[ \t]+(-.*)", re.IGNORECASE)


def _not_read(subject: Subject) -> Iterator[Hit]:
    """Yield comments that look like directives; ``##SBATCH`` is how people turn one off."""
    script = subject.script
    given = {flag.name for flag in script.flags}
    for comment in script.comments:
        match = _LIKE_A_DIRECTIVE.match(comment.text)
        is_alone = not script.lines[comment.line - 1][: comment.column].strip()
        is_directive = comment.column == 0 and comment.text.startswith("#SBATCH")
        if match is None or not is_alone or is_directive:
            continue
        name = re.split("[= \t]", match[1].lstrip("-"), maxsplit=1)[0]
        name = SBATCH.short.get(name, name)
        # Beside another value of the same flag, it is one that its author has turned off.
        if name not in given:
            yield Hit(
                line=comment.line,
                problem=f"{comment.text.strip()} is a comment: a directive begins with #SBATCH in capitals, in the "
                "first column",
                fix=f"write #SBATCH {match[1].strip()}, or ##SBATCH to turn it off",
            )


_EXPANSION: Final = re.compile(r"\$[A-Za-z_{(]|`|^~/")


def _literal_value(subject: Subject) -> Iterator[Hit]:
    """Yield values that sbatch takes otherwise than a shell would: it expands nothing, and a # ends the line."""
    for line in subject.script.directive_lines:
        if line.is_ignored:
            continue
        for flag in line.flags:
            if flag.value is not None and _EXPANSION.search(flag.value):
                yield Hit(
                    line=line.number,
                    problem=f"--{flag.name} is {flag.value}, and sbatch expands no variable, no command and no ~",
                    fix="write the value itself (in --output %j is the job id, %x its name, %u the user), or give "
                    "the flag to sbatch on its command line",
                )
        if line.comment and not line.text.removesuffix(line.comment)[-1].isspace():
            yield Hit(
                line=line.number,
                problem=f"sbatch reads the line up to the # of {line.comment}",
                fix="put the value in quotes, or a blank in front of a comment",
            )


_MINUTES: Final = re.compile("[0-9]+")
_MINUTES_AND_SECONDS: Final = re.compile("[0-9]+:[0-9]{1,2}")


def _time_unit(subject: Subject) -> Iterator[Hit]:
    """Yield time limits that are minutes, where a reader may see hours."""
    flag = subject.script.last_flag("time")
    if flag is None or flag.value is None:
        return
    if _MINUTES.fullmatch(flag.value):
        unit = "minutes"
    elif _MINUTES_AND_SECONDS.fullmatch(flag.value):
        unit = "minutes and seconds"
    else:
        return
    try:
        limit = str(TimeLimit.parse(flag.value))
    except UnitError:
        return
    # No repair by itself: it would hide a limit that is sixty times too short.
    yield Hit(
        line=flag.line,
        problem=f"--time={flag.value} is a number of {unit}",
        fix=f"write --time={limit} if that is meant",
    )


_ELEMENT: Final = re.compile(r"%[0-9]*[ajJ]")
_ONE_ELEMENT: Final = re.compile("[0-9]+(?:%[0-9]+)?")


def _output_of_an_array(subject: Subject) -> Iterator[Hit]:
    """Yield a file that all elements of a job array write to."""
    array = subject.script.last_flag("array")
    if array is None or array.value is None or _ONE_ELEMENT.fullmatch(array.value):
        return
    for name in ("output", "error"):
        flag = subject.script.last_flag(name)
        if flag is None or flag.value is None or flag.value == "/dev/null" or _ELEMENT.search(flag.value):
            continue
        yield Hit(
            line=flag.line,
            problem=f"--{name}={flag.value} names one file for all elements of --array={array.value}",
            fix="add %A_%a to its name, the ids of the array and of the element",
        )


_PATTERN: Final = re.compile("%[0-9]*(%|[A-Za-z])")
# sbatch(1), filename pattern, of 22.05 to 26.05.
_LETTERS: Final = frozenset("%AabJjNnrSstux")


def _output_pattern(subject: Subject) -> Iterator[Hit]:
    """Yield patterns of output files that sbatch does not replace, or not by what they stand for."""
    script = subject.script
    has_array = script.last_flag("array") is not None
    for name in ("output", "error"):
        flag = script.last_flag(name)
        letters = [] if flag is None or flag.value is None else _PATTERN.findall(flag.value)
        unknown = [letter for letter in letters if letter not in _LETTERS]
        if flag is not None and unknown:
            yield Hit(
                line=flag.line,
                problem=f"--{name}={flag.value} holds %{unknown[0]}, which sbatch does not replace",
                fix="write %j for the job id, %x for the job's name, %N for the host, %% for a percent sign",
            )
        elif flag is not None and not has_array and "a" in letters:
            yield Hit(
                line=flag.line,
                problem=f"--{name}={flag.value} holds %a, the number in an array, and the script has no --array",
                fix="write %j, or give --array",
            )


_MAKES_DIRECTORIES: Final = (23, 2)


def _output_directory(subject: Subject) -> Iterator[Hit]:
    """Yield a directory for the output that does not exist."""
    script = subject.script
    if subject.slurm_version >= _MAKES_DIRECTORIES:
        return
    chdir = script.last_flag("chdir")
    base = subject.directory if chdir is None or chdir.value is None else subject.directory / chdir.value
    missing: dict[str, Flag] = {}
    for name in ("output", "error"):
        flag = script.last_flag(name)
        if flag is None or flag.value is None or _EXPANSION.search(flag.value):
            continue
        # As far as the name holds no pattern of sbatch.
        parts = takewhile(lambda part: "%" not in part, PurePath(flag.value).parent.parts)
        directory = Path(*parts)
        # A file system of the cluster need not be there on the machine of the check.
        is_elsewhere = directory.is_absolute() and not Path(*directory.parts[:2]).exists()
        if not is_elsewhere and not (base / directory).is_dir():
            missing.setdefault(str(directory), flag)
    for name, flag in missing.items():
        yield Hit(
            line=flag.line,
            problem=f"--{flag.name}={flag.value}, and there is no directory {name} here",
            fix=f"make it before you submit: mkdir -p {shlex.quote(name)}",
        )


def _truncated_log(subject: Subject) -> Iterator[Hit]:
    """Yield a log that a requeue empties."""
    script = subject.script
    requeue = script.last_flag("requeue", "no-requeue")
    mode = script.last_flag("open-mode")
    if requeue is None or requeue.name != "requeue" or (mode is not None and mode.value == "append"):
        return
    text = script.lines[requeue.line - 1]
    yield Hit(
        line=requeue.line,
        problem="--requeue is given, and --open-mode=append is not",
        fix="add #SBATCH --open-mode=append",
        edits=() if mode is not None else (Edit(line=requeue.line, lines=(text, "#SBATCH --open-mode=append")),),
    )


def _script(*lines: str) -> str:
    return "\n".join(("#!/bin/bash", *lines, "srun python train.py", ""))


RULES = (
    Rule(
        code="refused-text",
        severity=Severity.ERROR,
        otherwise="sbatch refuses the script",
        sources=("sbatch(1)", "measured on Slurm 22.05.8, 24.11.5 and 26.05.5"),
        find=_refused_text,
        bad=Example("#SBATCH --nodes=2\nsrun python train.py\n"),
        good=Example(_script("#SBATCH --nodes=2")),
    ),
    Rule(
        code="directive-after-command",
        severity=Severity.ERROR,
        otherwise="sbatch stops to read at the first command, so that the job does not get what the line asks for",
        sources=("sbatch(1), DESCRIPTION", "https://github.com/ultimatile/hpc/pull/11"),
        find=_after_command,
        bad=Example(_script("#SBATCH --nodes=2", "export OMP_NUM_THREADS=1", "#SBATCH --mem=64G")),
        good=Example(_script("#SBATCH --nodes=2", "#SBATCH --mem=64G", "export OMP_NUM_THREADS=1")),
    ),
    Rule(
        code="directive-not-read",
        severity=Severity.WARNING,
        otherwise="sbatch does not read the line, so that the job does not get what it asks for",
        sources=("sbatch(1), DESCRIPTION", "measured on Slurm 22.05.8"),
        find=_not_read,
        bad=Example(_script("#SBATCH --nodes=2", "# SBATCH --mem=64G")),
        good=Example(_script("#SBATCH --nodes=2", "##SBATCH --mem=64G")),
    ),
    Rule(
        code="directive-value",
        severity=Severity.ERROR,
        otherwise="the value is taken as it is written: a directory named $HOME, a job named $NAME",
        sources=("sbatch(1), filename pattern", "measured on Slurm 22.05.8"),
        find=_literal_value,
        bad=Example(_script("#SBATCH --output=$HOME/logs/%j.out")),
        good=Example(_script("#SBATCH --output=%x-%j.out  # beside the script")),
    ),
    Rule(
        code="time-unit",
        severity=Severity.NOTE,
        otherwise="who reads hours submits a job that Slurm ends sixty times earlier",
        sources=("sbatch(1), --time",),
        find=_time_unit,
        bad=Example(_script("#SBATCH --time=90")),
        good=Example(_script("#SBATCH --time=01:30:00")),
    ),
    Rule(
        code="output-shared",
        severity=Severity.ERROR,
        otherwise="the elements overwrite each other's output",
        sources=("sbatch(1), filename pattern",),
        find=_output_of_an_array,
        bad=Example(_script("#SBATCH --array=0-9", "#SBATCH --output=train.out")),
        good=Example(_script("#SBATCH --array=0-9", "#SBATCH --output=train-%A_%a.out")),
    ),
    Rule(
        code="output-pattern",
        severity=Severity.NOTE,
        otherwise="the file is named with the letter itself, or with 4294967294 for an element that does not exist",
        sources=("sbatch(1), filename pattern", "measured on Slurm 22.05.8"),
        find=_output_pattern,
        bad=Example(_script("#SBATCH --output=%x-%d.out")),
        good=Example(_script("#SBATCH --output=%x-%j.out")),
    ),
    Rule(
        code="output-directory",
        severity=Severity.WARNING,
        otherwise="before Slurm 23.02, which makes the directory, the job fails at once and leaves no log that says so",
        sources=(
            "https://github.com/SchedMD/slurm/blob/master/CHANGELOG/slurm-23.02.md",
            "measured on Slurm 22.05.8 and 24.11.5",
        ),
        find=_output_directory,
        bad=Example(_script("#SBATCH --output=logs/%j.out")),
        good=Example(_script("#SBATCH --output=logs/%j.out"), files={"logs/.keep": ""}, given="with a directory logs"),
    ),
    Rule(
        code="requeue-truncates-log",
        severity=Severity.WARNING,
        otherwise="each requeue empties the log, unless the site has set JobFileAppend",
        sources=("sbatch(1), --open-mode", "slurm.conf(5), JobFileAppend"),
        find=_truncated_log,
        bad=Example(_script("#SBATCH --requeue", "# train.py resumes from checkpoints/last.pt")),
        good=Example(
            _script("#SBATCH --requeue", "#SBATCH --open-mode=append", "# train.py resumes from checkpoints/last.pt")
        ),
    ),
)
"""The rules about directives."""
