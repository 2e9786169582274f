"""Reads ``#SBATCH`` lines as sbatch does; ``hpcddp.slurm.directives`` describes their grammar.

sbatch collects the words of all lines and reads them as one command line: the value of a flag may stand in the next
``#SBATCH`` line (measured on Slurm 22.05.8).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from hpcddp.jobfile.slurm_flags import SBATCH, SlurmFlags

DIRECTIVE: Final = "#SBATCH"
HETEROGENEOUS: Final = frozenset({"hetjob", "packjob"})
"""The words that separate the components of a heterogeneous job."""
_WHITE_SPACE: Final = " \t\v\f\r"
_GAP: Final = re.compile(rf"[{_WHITE_SPACE}]+")
# The parts of a word. The last one is a backslash that escapes nothing.
_PIECE_TEXT: Final = rf"""
      "(?P<double> (?: [^"\\] | \\. )* )"
    | '(?P<single> (?: [^'\\] | \\. )* )'
    | \\ (?P<escaped> [^{re.escape(_WHITE_SPACE)}] )
    | (?P<plain> [^{re.escape(_WHITE_SPACE)}"'\#\\]+ )
    """
_PIECE: Final = re.compile(rf"{_PIECE_TEXT} | \\", re.VERBOSE | re.DOTALL)
_PIECE_SINCE_24_05: Final = re.compile(rf"{_PIECE_TEXT} | \\ (?P<blank>[ ]) | \\", re.VERBOSE | re.DOTALL)
_ESCAPE: Final = re.compile(r"\\(.)", re.DOTALL)


class UnreadableLineError(Exception):
    """A line that sbatch refuses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """A flag of sbatch or srun, as getopt_long reads it.

    Args:
        line: the number of its line, from 1; 0 for a flag that stands in no line of its own.
        name: the long flag without dashes; the text that the user wrote if it is no flag, or could be several.
        value: its value; None for a flag without one.
        problem: why the command refuses it, as a sentence without its subject; None if it reads it.
        is_unknown: whether the command does not have this long flag; a plugin of a site may add it.
        is_word: whether it is no flag but a word among the flags, which is ``name``.
    """

    line: int
    name: str
    value: str | None
    problem: str | None = None
    is_unknown: bool = False
    is_word: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectiveLine:
    """A line that starts with ``#SBATCH``.

    Args:
        number: its number, from 1.
        words: its words, without their quotes; empty if a quote does not close.
        comment: the text from an unquoted ``#`` on, which sbatch does not read; empty without one.
        is_ignored: whether it stands after the first command, where sbatch reads no more.
        problem: why sbatch refuses it; None if it does not.
        flags: the flags that begin in this line; empty for an ignored line of which nothing can be read.
    """

    number: int
    text: str
    words: tuple[str, ...]
    comment: str = ""
    is_ignored: bool = False
    problem: str | None = None
    flags: tuple[Flag, ...] = ()


def split_directive_line(line: str, *, escapes_blanks: bool = False) -> tuple[list[str], str]:
    """Return the words of a line that starts with ``#SBATCH``, and the text behind them that sbatch does not read.

    Args:
        line: the line without its line break.
        escapes_blanks: whether a backslash makes the blank behind it a part of the word, as since Slurm 24.05; before,
            the word ends there.

    Raises:
        UnreadableLineError: a quote is not closed.
    """
    piece = _PIECE_SINCE_24_05 if escapes_blanks else _PIECE
    words: list[str] = []
    position = len(DIRECTIVE)
    while (position := _end_of_gap(line, position)) < len(line) and line[position] != "#":
        word, end = _read_word(line, position, piece)
        if not word:
            break
        words.append(word)
        position = end
    return words, line[position:]


def _end_of_gap(line: str, position: int) -> int:
    gap = _GAP.match(line, position)
    return position if gap is None else gap.end()


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


def is_blank_or_comment(line: str) -> bool:
    """Return whether sbatch goes on to look for directives behind this line."""
    return line.lstrip(_WHITE_SPACE)[:1] in {"", "#"}


def read_directive_lines(lines: Sequence[str]) -> tuple[DirectiveLine, ...]:
    """Return the lines of a script that start with ``#SBATCH``, also those that sbatch does not read any more.

    Args:
        lines: all lines of the script, without their line breaks.
    """
    directive_lines = []
    is_ignored = False
    for number, line in enumerate(lines, 1):
        if line.startswith(DIRECTIVE):
            directive_lines.append(_read_directive_line(number, line, is_ignored=is_ignored))
        is_ignored = is_ignored or not is_blank_or_comment(line)
    words = [(line.number, word) for line in directive_lines if not line.is_ignored for word in line.words]
    flags, _ = read_flags(words, SBATCH)
    return tuple(_with_flags(line, flags) for line in directive_lines)


def _read_directive_line(number: int, text: str, *, is_ignored: bool) -> DirectiveLine:
    try:
        words, rest = split_directive_line(text)
    except UnreadableLineError:
        return DirectiveLine(
            number=number, text=text, words=(), is_ignored=is_ignored, problem="has a quote that does not close"
        )
    comment = rest if rest.startswith("#") else ""
    return DirectiveLine(number=number, text=text, words=tuple(words), comment=comment, is_ignored=is_ignored)


def _with_flags(line: DirectiveLine, flags: Sequence[Flag]) -> DirectiveLine:
    if line.is_ignored:
        line_flags, _ = read_flags([(line.number, word) for word in line.words], SBATCH)
    else:
        line_flags = [flag for flag in flags if flag.line == line.number]
    problem = line.problem or next((flag.problem for flag in line_flags if flag.problem is not None), None)
    return replace(line, problem=problem, flags=tuple(line_flags))


def read_flags(
    words: Sequence[tuple[int, str]], slurm_flags: SlurmFlags, *, stops_at_word: bool = False
) -> tuple[list[Flag], int]:
    """Return the flags of a command line as getopt_long reads them, and the number of words that they take.

    Args:
        words: the words, each with the number of its line.
        slurm_flags: the flags of the command.
        stops_at_word: whether the first word that is no flag ends the flags, as for srun; sbatch refuses such a word.
    """
    flags: list[Flag] = []
    remaining = list(words)
    while remaining:
        line, word = remaining[0]
        is_flag = word.startswith("-") and word not in {"-", "--"}
        if not is_flag and stops_at_word:
            return flags, len(words) - len(remaining) + (word == "--")
        del remaining[0]
        if word in HETEROGENEOUS:
            flags.append(Flag(line=line, name="hetjob", value=None))
        elif not is_flag:
            problem = f"has the word {word!r}, which is no flag"
            flags.append(Flag(line=line, name=word, value=None, problem=problem, is_word=True))
        elif word.startswith("--"):
            flags.append(_read_long_flag(line, word, remaining, slurm_flags))
        else:
            flags += _read_short_flags(line, word, remaining, slurm_flags)
    return flags, len(words)


def _read_long_flag(line: int, word: str, remaining: list[tuple[int, str]], slurm_flags: SlurmFlags) -> Flag:
    written, equals, text = word[2:].partition("=")
    candidates = slurm_flags.long_flags_of(written)
    if len(candidates) != 1:
        if candidates:
            meanings = ", ".join(f"--{candidate}" for candidate in candidates)
            problem = f"has --{written}, which is the beginning of several flags: {meanings}"
        else:
            problem = f"has --{written}, which is no flag"
        return Flag(line=line, name=written, value=text if equals else None, problem=problem, is_unknown=not candidates)
    name = candidates[0]
    if name in slurm_flags.without_value and equals:
        return Flag(line=line, name=name, value=text, problem=f"gives --{name} a value, and it takes none")
    if equals:
        return Flag(line=line, name=name, value=text)
    return _with_next_word(line, name, remaining, slurm_flags)


def _with_next_word(line: int, name: str, remaining: list[tuple[int, str]], slurm_flags: SlurmFlags) -> Flag:
    if name not in slurm_flags.with_value:
        return Flag(line=line, name=name, value=None)
    if not remaining:
        return Flag(line=line, name=name, value=None, problem=f"gives --{name} no value")
    return Flag(line=line, name=name, value=remaining.pop(0)[1])


def _read_short_flags(
    line: int, word: str, remaining: list[tuple[int, str]], slurm_flags: SlurmFlags
) -> Iterator[Flag]:
    letters = word[1:]
    while letters:
        letter = letters[0]
        letters = letters[1:]
        name = slurm_flags.short.get(letter)
        if name is None:
            yield Flag(line=line, name=letter, value=letters or None, problem=f"has -{letter}, which is no flag")
            return
        if name not in slurm_flags.without_value and letters:
            yield Flag(line=line, name=name, value=letters)
            return
        yield _with_next_word(line, name, remaining, slurm_flags)


_SIGNAL_NAMES: Final = {"1": "HUP", "2": "INT", "10": "USR1", "12": "USR2", "15": "TERM"}


def signal_name(text: str) -> str:
    """Return the name of a signal, without SIG, from its name or its number."""
    name = text.upper().removeprefix("SIG")
    return _SIGNAL_NAMES.get(name, name)
