"""The variables that a script sets, as far as their values can be read from its text."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Final

from hpcddp.script.shell import Statement, Word, read_word

_REFERENCE: Final = re.compile(
    r"\$(?:(?P<plain>[A-Za-z_][A-Za-z0-9_]*)|\{(?P<braced>[A-Za-z_][A-Za-z0-9_]*)(?P<array>\[[@*]\])?\})", re.ASCII
)
_ANY_USE: Final = re.compile(r"\$\{?[#!]?([A-Za-z_][A-Za-z0-9_]*)", re.ASCII)
# What a shell reads as more than one word.
_SPECIAL: Final = re.compile(r"[\s;&|()<>#]")
_MOST_ROUNDS: Final = 10
_PATTERN: Final = re.compile(r"[*?\[{~\s]")
# In arithmetic, a variable has no dollar sign.
_ARITHMETIC: Final = re.compile(r"\(\(|\s-(?:eq|ne|lt|le|gt|ge)\s|\blet\b")
_NAME: Final = re.compile("[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_ASSIGNMENT: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.ASCII | re.DOTALL)
# A command, or a value that differs between the batch shell and the tasks.
_CHANGES: Final = re.compile(r"\$\(|`|\$\{?SLURM_(?:PROCID|NODEID|LOCALID)\b|\$[0-9@*?#!]|\$\{[^}]*[^}A-Za-z0-9_@\[\]]")


def names_in(text: str) -> set[str]:
    """Return the names of the variables that a text uses; where it computes, also those that are no variables."""
    if _ARITHMETIC.search(text):
        return set(_NAME.findall(text))
    return set(_ANY_USE.findall(text))


def split_assignment(word: Word) -> tuple[str, str] | None:
    """Return the name and the value, as it is written, of ``NAME=VALUE``; None for another word."""
    match = _ASSIGNMENT.fullmatch(word.written)
    return None if match is None else (match[1], match[2])


class Variables:
    """The variables whose values are known from the text of a script, while it is read from its beginning.

    A value may use variables of the job, such as ``$HOME`` and ``$SLURM_JOB_ID``.
    """

    def __init__(self) -> None:
        self._words: dict[str, tuple[Word, ...]] = {}
        self._arrays: set[str] = set()
        # Those whose values a word in double quotes would not hold unchanged; the text of a program can.
        self._hard: set[str] = set()
        # The names that the value of each variable uses, as it is written.
        self._uses: dict[str, set[str]] = {}

    def assign(self, word: Word) -> None:
        """Note an assignment; a value that the text does not tell makes the variable unknown."""
        assignment = split_assignment(word)
        if assignment is None:
            return
        name, written = assignment
        self.forget(name)
        self._uses.setdefault(name, set()).update(names_in(written))
        if written.startswith("("):
            words = tuple(self.resolve(list(_words_of(written[1:-1]))))
            self._arrays.add(name)
        else:
            value, _ = read_word(written, 0)
            words = (self._substituted(value),)
        if any(_CHANGES.search(re.sub(r"\\.", "", word.written, flags=re.DOTALL)) for word in words):
            return
        self._words[name] = words
        if any(_is_hard_to_quote(word) for word in words):
            self._hard.add(name)

    def names_behind(self, text: str) -> set[str]:
        """Return the names that a text uses, and those that their values use."""
        names: set[str] = set()
        remaining = names_in(text)
        while remaining:
            names |= remaining
            remaining = {name for used in remaining for name in self._uses.get(used, ())} - names
        return names

    def forget(self, name: str) -> None:
        """Note that the value of a variable is not known any more."""
        self._words.pop(name, None)
        self._arrays.discard(name)
        self._hard.discard(name)

    def forget_all_of(self, statement: Statement) -> None:
        """Note that a statement may or may not assign its variables."""
        for command in statement.commands:
            for word in (*command.assignments, *command.words):
                assignment = split_assignment(word)
                if assignment is not None:
                    self.forget(assignment[0])

    def resolve(self, words: Sequence[Word]) -> list[Word]:
        """Return the words of a command with the values of the known variables, split as the shell splits them."""
        resolved: list[Word] = []
        for word in words:
            whole = _REFERENCE.fullmatch(word.text) if word.expands else None
            name = None if whole is None else whole["plain"] or whole["braced"]
            values = None if name is None or name in self._hard else self._words.get(name)
            if whole is None or values is None:
                resolved.append(self._substituted(word))
            elif name in self._arrays:
                # Without [@], an array is its first item.
                resolved += values if whole["array"] else values[:1]
            elif word.written.startswith('"'):
                resolved.append(self._substituted(word))
            else:
                resolved += [_unquoted(piece) for value in values for piece in value.text.split()]
        return resolved

    def resolve_program(self, text: str) -> str:
        """Return the text of a program, ``bash -c "TEXT"``, with the values of the known variables.

        The shell of the script expands it before the shell in it reads it, so that a value may be any shell code.
        """
        for _ in range(_MOST_ROUNDS):
            resolved = _REFERENCE.sub(self._value_of, text)
            if resolved == text:
                break
            text = resolved
        return text

    def _resolve_text(self, text: str) -> str:
        """Return a text with the values of the known variables in place of them, as in double quotes."""
        return _REFERENCE.sub(self._easy_value_of, text)

    def _value_of(self, reference: re.Match[str]) -> str:
        words = self._words.get(reference["plain"] or reference["braced"])
        return reference[0] if words is None else " ".join(word.text for word in words)

    def _easy_value_of(self, reference: re.Match[str]) -> str:
        name = reference["plain"] or reference["braced"]
        return reference[0] if name in self._hard else self._value_of(reference)

    def _substituted(self, word: Word) -> Word:
        written = word.written.replace("\\\n", "")
        inner = written.removeprefix('"').removesuffix('"')
        if not word.expands or "'" in written or "\\" in written or ('"' in inner and _PATTERN.search(inner)):
            # Quotes that the new word would not have may protect a part of it.
            return word
        text = self._resolve_text(word.text)
        if text == word.text:
            return word
        if '"' in written:
            return Word(written=f'"{text}"', text=text, expands=_expands(text))
        return _unquoted(text) if _SPECIAL.search(text) is None else word


def _is_hard_to_quote(word: Word) -> bool:
    """Return whether the value of a word could be another one in double quotes."""
    has_dollar = "$" in word.text and not word.expands
    has_escape = re.search(r"\\[$`]", word.written) is not None
    return has_dollar or has_escape or re.search(r'["\\`]', word.text) is not None


def _unquoted(text: str) -> Word:
    """Return a text as a word of a command; where a shell has nothing to expand in it, with quotes as it needs them."""
    if _expands(text):
        return Word(written=text, text=text, expands=True)
    return Word(written=shlex.quote(text), text=text, expands=False)


def _expands(text: str) -> bool:
    word, end = read_word(text.replace(" ", "_").replace("'", "_"), 0)
    return word.expands or (end < len(text) and "$" in text)


def _words_of(text: str) -> Iterator[Word]:
    """Yield the words of a text, which the shell would split at white space."""
    position = 0
    while position < len(text):
        if text[position].isspace():
            position += 1
        elif text[position] == "\\" and text[position + 1 : position + 2] == "\n":
            position += 2
        elif text[position] == "#":
            end = text.find("\n", position)
            position = len(text) if end < 0 else end
        else:
            word, end = read_word(text, position)
            if end == position:
                end = position + 1
                word = Word(written=text[position], text=text[position], expands=False)
            yield word
            position = end
