"""Problems of a job file, each with its file, line and key."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from hpcddp.errors import UserError

LONGEST_SHOWN = 60
MOST_PROBLEMS = 100
"""More of them are not looked for: a user does not read as many, and each takes a while to explain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One problem of a job file.

    Args:
        file: the file that contains the value, or ``--set key.path``.
        line: its line, counted from 1; None if it has none.
        key: the key path, ``train.model``; empty for a problem of the whole file.
        sentence: what the value is, why it is wrong, and what to write instead.
    """

    file: str
    line: int | None = None
    key: str = ""
    sentence: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line is not None else self.file
        key = f" {self.key}:" if self.key and not self.file.endswith(f" {self.key}") else ""
        line = f"{place}:{key} {self.sentence}"
        # One line for each problem, and no control characters from a key or path.
        return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in line)


class JobFileError(UserError):
    """A job file is invalid; lists all its problems.

    Attributes:
        problems: the problems, those of files first, in the order of their lines.
    """

    kind = "job_file"

    @classmethod
    def of(cls, problems: Iterable[Problem]) -> Self:
        """Return the error that lists ``problems``."""
        ordered = tuple(
            sorted(problems, key=lambda problem: (problem.file.startswith("--"), problem.file, problem.line or 0))
        )
        lines = [str(problem) for problem in ordered[:MOST_PROBLEMS]]
        if len(ordered) >= MOST_PROBLEMS:
            lines.append(f"these are the first {MOST_PROBLEMS} problems; there may be more")
        return cls("\n".join(lines), problems=ordered[:MOST_PROBLEMS])

    def as_json(self) -> dict[str, Any]:
        """Return the document that ``--json`` prints, with a list of the problems."""
        document = super().as_json()
        problems: Sequence[Problem] = self.values.get("problems", ())
        document["error"]["problems"] = [asdict(problem) for problem in problems]
        return document


def shown(value: object, *, written: str | None = None) -> str:
    """Return a value as text for a message, shortened if it is long.

    Args:
        written: how the file spells it, where that differs.
    """
    match value:
        case None:
            return "empty"
        case dict():
            return "a mapping"
        case list() | tuple():
            return "a list"
        case str():
            text = f"{value!r}"
        case bool():
            text = written or str(value).lower()
        case _:
            text = written or str(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."
