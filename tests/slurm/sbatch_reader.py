"""Reads ``#SBATCH`` lines as sbatch does, by the grammar in ``hpcddp.slurm.directives``.

Tests read with it what the package writes; ``tests/cluster`` compares it with the real sbatch.
"""

from __future__ import annotations

import re

_DIRECTIVE = "#SBATCH"
_WHITE_SPACE = " \t\v\f\r"
_GAP = re.compile(rf"[{_WHITE_SPACE}]+")
# The parts of a word. The last one is a backslash that escapes nothing.
_PIECE_TEXT = rf"""
      "(?P<double> (?: [^"\\] | \\. )* )"
    | '(?P<single> (?: [^'\\] | \\. )* )'
    | \\ (?P<escaped> [^{re.escape(_WHITE_SPACE)}] )
    | (?P<plain> [^{re.escape(_WHITE_SPACE)}"'\#\\]+ )
    """
_PIECE = re.compile(rf"{_PIECE_TEXT} | \\", re.VERBOSE | re.DOTALL)
_PIECE_SINCE_24_05 = re.compile(rf"{_PIECE_TEXT} | \\ (?P<blank>[ ]) | \\", re.VERBOSE | re.DOTALL)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)


class UnreadableLineError(Exception):
    """A line that sbatch refuses."""


def parse_directive_line(line: str, *, escapes_blanks: bool = False) -> list[str] | None:
    """Return the words that sbatch reads from one line, or None if the line is not a directive.

    Args:
        line: the line without its line break.
        escapes_blanks: whether a backslash makes the blank behind it a part of the word, as since Slurm 24.05; before,
            the word ends there.

    Raises:
        UnreadableLineError: a quote is not closed.
    """
    if not line.startswith(_DIRECTIVE):
        return None
    words: list[str] = []
    position = len(_DIRECTIVE)
    while (position := _end_of(_GAP, line, position)) < len(line) and line[position] != "#":
        word, position = _read_word(line, position, _PIECE_SINCE_24_05 if escapes_blanks else _PIECE)
        if not word:
            break
        words.append(word)
    return words


def _end_of(pattern: re.Pattern[str], line: str, position: int) -> int:
    match = pattern.match(line, position)
    return position if match is None else match.end()


def _read_word(line: str, position: int, piece: re.Pattern[str]) -> tuple[str, int]:
    """Return the word that starts at ``position``, and where it ends."""
    word = ""
    while match := piece.match(line, position):
        quoted = match["double"] or match["single"]
        if quoted:
            word += _ESCAPE.sub(r"\1", quoted)
        else:
            word += match["escaped"] or match["plain"] or match.groupdict().get("blank") or ""
        position = match.end()
    if position < len(line) and line[position] in "\"'":
        raise UnreadableLineError(f"the line {line!r} has a quote that does not close")
    return word, position


def comment_in(record: str) -> str | None:
    """Return the comment in a record of ``scontrol show job``, with the blanks that its user wrote."""
    line = re.search(r"\n   Comment=(.*)\n", record)
    if line is None:
        return None
    # Before 25.11, which shows the command line too, scontrol puts a blank behind the comment.
    return line[1] if "\n   SubmitLine=" in record else line[1].removesuffix(" ")


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
