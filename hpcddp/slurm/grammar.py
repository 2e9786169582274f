r"""Grammar of ``#SBATCH`` lines: write a value so that sbatch reads it unchanged, and read lines as sbatch does.

Measured on Slurm 22.05.8; ``tests/cluster`` asks the real sbatch again:

- A directive starts with ``#SBATCH``, in capitals, in the first column. Blank lines and comments may come between;
  sbatch stops at the first other line.
- White space separates words. Both kinds of quotes group; inside one kind, the other is an ordinary character.
- A backslash escapes the next character, also inside single quotes. Before unquoted white space it escapes nothing: it
  is removed, and the word ends.
- An unquoted ``#`` ends the line, also in the middle of a word. An empty word ends it as well.
- Nothing is expanded: no ``$``, no backquote, no ``~``. There is no continuation line and no limit on a line's length.
- sbatch refuses a script with an unclosed quote, a NUL, or a carriage return at the end of a line.
"""

from __future__ import annotations

import re

from hpcddp.errors import UserError

_DIRECTIVE = "#SBATCH"
_WHITE_SPACE = " \t\v\f\r"
_GAP = re.compile(rf"[{_WHITE_SPACE}]+")
# The parts of a word. The last one is a backslash that escapes nothing.
_PIECE = re.compile(
    rf"""
      "(?P<double> (?: [^"\\] | \\. )* )"
    | '(?P<single> (?: [^'\\] | \\. )* )'
    | \\ (?P<escaped> [^{re.escape(_WHITE_SPACE)}] )
    | (?P<plain> [^{re.escape(_WHITE_SPACE)}"'\#\\]+ )
    | \\
    """,
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_PLAIN = re.compile(r"[A-Za-z0-9_.,:/@%+=-]+", re.ASCII)
_UNWRITABLE = {
    "\n": "a line break",
    "\r": "a carriage return",
    "\0": "a NUL character",
}


class UnwritableValueError(UserError):
    """A value that cannot be written, however it is quoted."""

    kind = "unwritable_value"


class UnreadableLineError(UserError):
    """A line that sbatch refuses."""

    kind = "unreadable_directive"


def quote_value(text: str, *, field: str = "the value") -> str:
    """Return ``text`` quoted for a ``#SBATCH`` line.

    Args:
        text: the value.
        field: its name in an error.

    Raises:
        UnwritableValueError: the value has a character that cannot be quoted; the message names the field.
    """
    refuse_unwritable(text, _UNWRITABLE, field=field, place="an #SBATCH line")
    if _PLAIN.fullmatch(text):
        return text
    escaped = text.replace("\\", r"\\").replace('"', r"\"")
    return f'"{escaped}"'


def refuse_unwritable(text: str, characters: dict[str, str], *, field: str, place: str) -> None:
    """Refuse a text that contains one of ``characters`` or a lone surrogate.

    Args:
        text: the text.
        characters: the characters that cannot be written there, with their names.
        field: the name of the text in an error.
        place: the name of the place in an error.

    Raises:
        UnwritableValueError: the text contains such a character.
    """
    found = next((name for character, name in characters.items() if character in text), None)
    if found is None and any("\ud800" <= character <= "\udfff" for character in text):
        # Half of a surrogate pair comes from YAML escapes and undecodable arguments, and UTF-8 cannot encode it.
        found = "half of a character (a lone surrogate)"
    if found is not None:
        raise UnwritableValueError(f"{field} is {text!r}, which holds {found}; {place} cannot carry it: remove it")


def parse_directive_line(line: str) -> list[str] | None:
    """Return the words that sbatch reads from one line, or None if the line is not a directive.

    Args:
        line: the line without its line break.

    Raises:
        UnreadableLineError: a quote is not closed.
    """
    if not line.startswith(_DIRECTIVE):
        return None
    words: list[str] = []
    position = len(_DIRECTIVE)
    while (position := _end_of(_GAP, line, position)) < len(line) and line[position] != "#":
        word, position = _read_word(line, position)
        if not word:
            break
        words.append(word)
    return words


def _end_of(pattern: re.Pattern[str], line: str, position: int) -> int:
    match = pattern.match(line, position)
    return position if match is None else match.end()


def _read_word(line: str, position: int) -> tuple[str, int]:
    """Return the word that starts at ``position``, and where it ends."""
    word = ""
    while match := _PIECE.match(line, position):
        quoted = match["double"] or match["single"]
        word += _ESCAPE.sub(r"\1", quoted) if quoted else match["escaped"] or match["plain"] or ""
        position = match.end()
    if position < len(line) and line[position] in "\"'":
        raise UnreadableLineError(f"the line {line!r} has a quote that does not close")
    return word, position


def read_directives(script: str) -> list[str]:
    """Return the words of all directives that sbatch reads from a script, in order.

    Args:
        script: the whole script.

    Raises:
        UnreadableLineError: a quote is not closed.
    """
    words: list[str] = []
    for line in script.split("\n"):
        first = line.lstrip(_WHITE_SPACE)[:1]
        if first not in {"", "#"}:
            break
        words += parse_directive_line(line) or []
    return words
