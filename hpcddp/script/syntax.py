"""The syntax errors that bash itself finds in shell text; nothing of it is run."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from typing import Final

from hpcddp.script.shell import read_shell

BASH_SYNTAX: Final = frozenset({"bash", "sh"})
"""The shells whose text bash can judge."""
_TIMEOUT_S: Final = 10.0
# A here-document without its end is a warning.
_ERROR: Final = re.compile(r"^[^:\n]*: line (?P<line>[0-9]+): (?!warning: )(?P<message>.+)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class BashError:
    """The first syntax error of a text.

    Args:
        line: the number of the line in which bash notices it, from 1: the last one for what does not end.
        message: bash's own words.
    """

    line: int
    message: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.message}"


def bash_error(text: str) -> BashError | None:
    """Return the first syntax error that bash would come to; None if there is none, or no bash here.

    Args:
        text: shell text, with line breaks of Unix.
    """
    bash = shutil.which("bash")
    if bash is None:
        return None
    read_text = _text_until_exit(text)
    # The patterns of extglob are no error, because a line of the text may turn them on; without them, "!(" begins a
    # subshell, as in "if !(test -d data) then".
    error = _error_of(bash, "-O", read_text)
    return None if error is None or _error_of(bash, "+O", read_text) is None else error


def _error_of(bash: str, extglob: str, read_text: str) -> BashError | None:
    try:
        # bash names the lines of a file, not those of its standard input.
        done = subprocess.run(
            [bash, extglob, "extglob", "-n", "/dev/stdin"],
            input=read_text.encode(errors="replace"),
            capture_output=True,
            env={"LC_ALL": "C"},
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode == 0:
        return None
    error = _ERROR.search(done.stderr.decode(errors="replace"))
    if error is None:
        return None
    last_line = read_text.rstrip("\n").count("\n") + 1
    return BashError(line=min(int(error["line"]), last_line), message=error["message"])


def _text_until_exit(text: str) -> str:
    """Return the text without what stands behind its first certain ``exit`` or ``exec PROGRAM``, never read."""
    for statement in read_shell(text)[0]:
        words = () if statement.command is None else statement.command.words
        # A variable behind exec may be empty, and exec then only redirects.
        is_exec = len(words) > 1 and words[0].text == "exec" and re.match(r"[\w./]", words[1].text)
        if is_exec or (words and words[0].text == "exit"):
            return "\n".join(text.split("\n")[: statement.last_line])
    return text
