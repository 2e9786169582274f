"""The syntax errors that bash itself finds in shell text; nothing of it is run."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Final

BASH_SYNTAX: Final = frozenset({"bash", "sh"})
"""The shells whose text bash can judge."""
# Programs that start the one behind their options, and which of these options the next word belongs to.
_STARTERS: Final[Mapping[str, Sequence[str]]] = MappingProxyType(
    {
        "busybox": (),
        "env": ("-u", "--unset", "-C", "--chdir"),
        "exec": ("-a",),
        "nice": ("-n", "--adjustment"),
        "nohup": (),
        "time": ("-f", "--format", "-o", "--output"),
    }
)
_ASSIGNMENT: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_TIMEOUT_S: Final = 10.0
# A here-document without its end is a warning: it ends with the text.
_OPEN_DOCUMENT: Final = re.compile(
    r"line (?P<end>[0-9]+): warning: here-document at line (?P<line>[0-9]+) delimited by end-of-file "
    r"(?P<wanted>\(.*\))"
)
_ERROR: Final = re.compile(r"^[^:\n]*: line (?P<line>[0-9]+): (?!warning: )(?P<message>.+)", re.MULTILINE)
# bash is run for each line that may end a text: 30 take less than half a second.
_MOST_CANDIDATES: Final = 30
# A variable behind exec may be empty, and exec then only redirects.
_LAST_LINE: Final = re.compile(r"(?:[^{(|&#]*;)?\s*(?:exit\b[^|&]*|exec\s+[\w./].*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class BashError:
    """The first syntax error of a text.

    Args:
        line: the number of the line in which bash notices it, from 1: the last one for what does not end.
    """

    line: int
    message: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.message}"


def interpreter_of(script: str) -> str:
    """Return the name of the program that runs a script, by its first line; empty where that names none."""
    first_line = script.partition("\n")[0]
    if not first_line.startswith("#!"):
        return ""
    words = program_behind_starters(first_line.removeprefix("#!").split())
    return PurePosixPath(words[0]).name if words else ""


def program_behind_starters(words: Sequence[str]) -> list[str]:
    """Return the program that a command starts, with its arguments: without ``env -u A B=1`` or ``nice -n 5``."""
    rest = list(words)
    options_with_value: Sequence[str] = ()
    while rest:
        name = PurePosixPath(rest[0]).name
        if rest[0] in options_with_value:
            rest = rest[2:]
        elif name in _STARTERS or rest[0].startswith("-") or _ASSIGNMENT.match(rest[0]):
            options_with_value = _STARTERS.get(name, options_with_value)
            rest = rest[1:]
        else:
            break
    return rest


def bash_error(text: str) -> BashError | None:
    """Return the first syntax error that bash would come to; None if there is none, or no bash here.

    Args:
        text: shell text, with line breaks of Unix.
    """
    bash = shutil.which("bash")
    if bash is None:
        return None
    error = _ERROR.search(_complaint(bash, text))
    if error is None:
        return None
    lines = text.rstrip("\n").split("\n")
    line = min(int(error["line"]), len(lines))
    if _ends_before(bash, lines[: line - 1]):
        return None
    return BashError(line=line, message=error["message"])


def script_error(text: str) -> BashError | None:
    """Return the first syntax error of a script, or its here-document that never ends; None if there is neither.

    bash would write the rest of the script into such a here-document, and end with exit code 0.

    Args:
        text: shell text, with line breaks of Unix.
    """
    return bash_error(text) or _open_here_document(text)


def _open_here_document(text: str) -> BashError | None:
    bash = shutil.which("bash")
    if bash is None:
        return None
    warning = _OPEN_DOCUMENT.search(_complaint(bash, text))
    lines = text.rstrip("\n").split("\n")
    # One in $(...) may end with the parenthesis.
    if warning is None or int(warning["end"]) < len(lines):
        return None
    line = int(warning["line"])
    if _ends_before(bash, lines[: line - 1]):
        return None
    return BashError(line=line, message=f"the here-document does not end {warning['wanted']}")


@lru_cache(maxsize=16)
def _complaint(bash: str, text: str) -> str:
    """Return what bash says of a text that it cannot read; empty if it can, with or without the patterns of extglob.

    A line of the text may turn them on. Without them, "!(" begins a subshell, as in "if !(test -d data) then".
    The elements of a sweep often share one script.
    """
    complaints = []
    for extglob in ("-O", "+O"):
        try:
            # bash names the lines of a file, not those of its standard input.
            done = subprocess.run(
                [bash, extglob, "extglob", "-n", "/dev/stdin"],
                input=text.encode(errors="replace"),
                capture_output=True,
                env={"LC_ALL": "C"},
                timeout=_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return ""
        complaint = done.stderr.decode(errors="replace")
        if not complaint:
            return ""
        complaints.append(complaint)
    return complaints[0]


def _ends_before(bash: str, lines: Sequence[str]) -> bool:
    """Return whether a text ends in these lines by ``exit`` or ``exec PROGRAM``: bash never reads what is behind that.

    A line inside a condition, a loop or a here-document does not end it: bash cannot read the text up to there alone.
    """
    candidates = 0
    for count, line in enumerate(lines, start=1):
        is_continued = count > 1 and lines[count - 2].rstrip().endswith(("||", "&&", "|", "\\"))
        if is_continued or not _LAST_LINE.fullmatch(line):
            continue
        candidates += 1
        if candidates > _MOST_CANDIDATES:
            # Nobody knows where a text ends that has so many: it is not judged.
            return True
        if not _complaint(bash, "\n".join(lines[:count]) + "\n"):
            return True
    return False
