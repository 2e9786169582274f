r"""How sbatch reads the ``#SBATCH`` lines of a script, and how to write a value so that it arrives as it is.

Measured on Slurm 22.05.8; ``tests/slurm`` asks the real sbatch again:

- A line counts if it begins with ``#SBATCH``, in capitals, in its first column. Blank lines and comments may stand
  between; the first other line ends the reading.
- White space parts the line into words. Both kinds of quotes group; inside either, the other is an ordinary character.
- A backslash takes the next character as it is, also inside single quotes. Only in front of unquoted white space it
  takes nothing: it vanishes, and the word ends.
- An unquoted ``#`` ends the line, in the middle of a word too. An empty word ends it as well.
- Nothing is expanded: no ``$``, no backquote, no ``~``. There is no continuation line and no limit on a line's length.
- A quote that does not close, a NUL, and a carriage return at the end of a line make sbatch refuse the script.
"""

from __future__ import annotations

import re

from hpcddp.errors import UserError

_DIRECTIVE = "#SBATCH"
_WHITE_SPACE = " \t\v\f\r"
_GAP = re.compile(rf"[{_WHITE_SPACE}]+")
# What a word is made of, one piece after another. The last one is the backslash that stands for nothing.
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
    """A value that no quoting can carry."""

    kind = "unwritable_value"


class UnreadableLineError(UserError):
    """A line that sbatch would refuse."""

    kind = "unreadable_directive"


def quote_value(text: str, *, field: str = "the value") -> str:
    """Return ``text`` as it must be written on a ``#SBATCH`` line.

    Args:
        text: the value.
        field: what to call it in an error.

    Raises:
        UnwritableValueError: the value holds a character that no quoting can carry; the field is named.
    """
    refuse_unwritable(text, _UNWRITABLE, field=field, place="an #SBATCH line")
    if _PLAIN.fullmatch(text):
        return text
    escaped = text.replace("\\", r"\\").replace('"', r"\"")
    return f'"{escaped}"'


def refuse_unwritable(text: str, characters: dict[str, str], *, field: str, place: str) -> None:
    """Refuse a text that holds one of ``characters`` (each with its name), or half of a character.

    Args:
        text: the text.
        characters: what cannot be written there, and what to call it.
        field: what to call the text in an error.
        place: what to call the place in an error.

    Raises:
        UnwritableValueError: it holds one.
    """
    found = next((name for character, name in characters.items() if character in text), None)
    if found is None and any("\ud800" <= character <= "\udfff" for character in text):
        # Half of a surrogate pair: YAML escapes and undecodable arguments can make one, UTF-8 cannot carry it.
        found = "half of a character (a lone surrogate)"
    if found is not None:
        raise UnwritableValueError(f"{field} is {text!r}, which holds {found}; {place} cannot carry it: remove it")


def parse_directive_line(line: str) -> list[str] | None:
    """Return the words that sbatch takes from one line, or None if the line is no directive.

    Args:
        line: the line without its line break.

    Raises:
        UnreadableLineError: a quote does not close.
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
    """Return the word that begins at ``position``, and where it ends."""
    word = ""
    while match := _PIECE.match(line, position):
        quoted = match["double"] or match["single"]
        word += _ESCAPE.sub(r"\1", quoted) if quoted else match["escaped"] or match["plain"] or ""
        position = match.end()
    if position < len(line) and line[position] in "\"'":
        raise UnreadableLineError(f"the line {line!r} has a quote that does not close")
    return word, position


def read_directives(script: str) -> list[str]:
    """Return the words of all directives that sbatch takes from a script, in order.

    Args:
        script: the whole script.

    Raises:
        UnreadableLineError: a quote does not close.
    """
    words: list[str] = []
    for line in script.split("\n"):
        first = line.lstrip(_WHITE_SPACE)[:1]
        if first not in {"", "#"}:
            break
        words += parse_directive_line(line) or []
    return words
