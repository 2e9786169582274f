"""What is wrong with a job file: every problem of it, each with its place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from hpcddp.errors import UserError

LONGEST_SHOWN = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong.

    Args:
        file: the file that holds the value, or ``--set key.path``.
        line: its line, counted from 1; None where no line is to blame.
        key: the key path, ``train.model``; empty when the whole file is at fault.
        value: what stands there; None where it is missing or is not to be shown.
        sentence: what it holds, why that cannot be, and what to write instead.
    """

    file: str
    line: int | None = None
    key: str = ""
    value: Any = None
    sentence: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line is not None else self.file
        key = f" {self.key}:" if self.key and not self.file.endswith(f" {self.key}") else ""
        line = f"{place}:{key} {self.sentence}"
        # One problem is one line, and a key or a path must not steer the terminal.
        return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in line)


class JobFileError(UserError):
    """A job file with everything that is wrong with it.

    Attributes:
        problems: each problem; those of files first, in the order of their lines.
    """

    kind = "job_file"

    @classmethod
    def of(cls, problems: Iterable[Problem]) -> Self:
        """Return the error that lists ``problems``."""
        ordered = tuple(
            sorted(problems, key=lambda problem: (problem.file.startswith("--"), problem.file, problem.line or 0))
        )
        return cls("\n".join(str(problem) for problem in ordered), problems=ordered)

    def as_json(self) -> dict[str, Any]:
        """Return the document that ``--json`` prints, with a list of the problems."""
        document = super().as_json()
        problems: Sequence[Problem] = self.values.get("problems", ())
        document["error"]["problems"] = [asdict(problem) for problem in problems]
        return document


def shown(value: object, *, written: str | None = None) -> str:
    """Return a value as a sentence names it: as it was written, and cut where it is long.

    Args:
        value: the value.
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
