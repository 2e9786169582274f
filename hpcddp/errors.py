"""The exception tree of hpcddp, and helpers for the text of messages."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Final, Self

# Control characters but for newline and tab, those that change the direction or the line of what follows, and the lone
# surrogates that stand for the bytes of a name that is not UTF-8.
_UNPRINTABLE: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
# Shorter beginnings of a name fit too many names.
_SHORTEST_BEGINNING: Final = 3


def printable(text: str) -> str:
    r"""Return a text with escapes, such as ``\x1b``, in place of characters that control a terminal.

    Newlines and tabs stay.
    """
    return _UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], text)


def write_message(text: str) -> None:
    """Write a message of hpcddp itself to the standard error of a job, with escapes for control characters."""
    sys.stderr.write(f"hpcddp: {printable(text)}\n")


def counted(count: int, noun: str) -> str:
    """Return the number of things with their noun: ``1 rank``, ``2,048 ranks``."""
    return f"{count} {noun}" if count == 1 else f"{count:,} {noun}s"


def listed(words: Sequence[str]) -> str:
    """Return one or more words as a sentence lists them: ``a``, ``a and b``, ``a, b and c``."""
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known name that was most likely meant by ``word``, or None.

    This is a name that differs only in case or separators, else the shortest name that begins with ``word``, else the
    closest name above a similarity of 0.6.
    """
    by_shape = {_shape(name): name for name in known}
    shape = _shape(word)
    if shape in by_shape:
        return by_shape[shape]
    long_enough = len(shape) >= _SHORTEST_BEGINNING
    begins = sorted((name for key, name in by_shape.items() if long_enough and key.startswith(shape)), key=len)
    if begins:
        return begins[0]
    # Every process imports this module, and few have a name to correct.
    import difflib

    close = difflib.get_close_matches(shape, by_shape, n=1, cutoff=0.6)
    return by_shape[close[0]] if close else None


def did_you_mean(word: str, known: Iterable[str], otherwise: str) -> str:
    """Return the question whether the nearest known name is meant; other advice where none is near."""
    near = nearest(word, known)
    return otherwise if near is None else f"did you mean {near}?"


def _shape(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "").replace(" ", "")


class HpcddpError(Exception):
    """Base class of the errors that hpcddp raises.

    Args:
        message: one sentence: the place, the value, why it is wrong, and what to write instead.
        hint: the next command or change that helps, if the message does not contain it.
        values: the values in the message, by name; they become attributes.

    Attributes:
        kind: a stable identifier for programs, printed by ``--json``.
        exit_code: the exit code of the command line: 1 failure, 2 an error that the user can fix.
    """

    kind: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1
    advice: ClassVar[str] = "Run it again with --debug to see where it happened."
    """The hint of an error whose message has no way out."""

    def __init__(self, message: str, *, hint: str | None = None, **values: object) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.values: dict[str, Any] = values

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  each value has its own type
        values = self.__dict__.get("values", {})
        if name in values:
            return values[name]
        raise AttributeError(name)

    def __reduce__(self) -> tuple[Any, ...]:
        """Support pickling with keyword arguments, for errors that ``submitit.Job`` returns from another process."""
        return _rebuild, (type(self), self.message, self.hint, self.values)

    def as_json(self) -> dict[str, Any]:
        """Return the document that ``--json`` prints for the error.

        Its hint is never empty: without one of its own it is the end of the message, behind the semicolon.
        """
        way_out = self.message.rpartition("; ")[2] if "; " in self.message else self.advice
        return {"error": {"kind": self.kind, "message": self.message, "hint": self.hint or way_out}}

    @classmethod
    def rebuild(cls, message: str, hint: str | None, values: dict[str, Any]) -> Self:
        """Return an error with these parts, for unpickling."""
        return cls(message, hint=hint, **values)


def _rebuild(cls: type[HpcddpError], message: str, hint: str | None, values: dict[str, Any]) -> HpcddpError:
    return cls.rebuild(message, hint, values)


class UserError(HpcddpError):
    """An error that the user can fix: a wrong file, option or plan."""

    kind = "user"
    advice = "Correct the value that the message names; --help describes the options, docs/job-file.md the fields."
    exit_code = 2
