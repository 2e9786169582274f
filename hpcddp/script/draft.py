"""A job file that is being made from a script, with a row for each line of the script."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from hpcddp.jobfile.document import Path, dotted

Outcome = Literal["taken", "setup", "dropped", "open"]
"""What became of a part of the script: ``taken`` into a field; ``setup``, a line of ``environment.setup``; ``dropped``,
not needed for the reason in the row; ``open``, left to the user."""


SETUP: Final = ("environment", "setup")
_MASKED_NAME: Final = r"[A-Za-z0-9_]*(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS)(?:_[A-Za-z0-9_]*)?"
_MASKED: Final = re.compile(rf"\b({_MASKED_NAME}=)(?:'[^']*'|\"[^\"]*\"|\S)+", re.IGNORECASE)


def may_be_secret(name: str) -> bool:
    """Return whether the value of a variable of this name may be a secret."""
    return re.fullmatch(_MASKED_NAME, name, re.IGNORECASE) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What became of a part of the script.

    Args:
        line: the number of its line, from 1.
        text: the part, as it is written; without the value of what may be a secret.
        outcome: what became of it.
        reason: the field and its value, or why it is dropped or open.
        key: the key path of the field that it became; None for none.
    """

    line: int
    text: str
    outcome: Outcome
    reason: str
    key: Path | None = None


@dataclass(slots=True)
class Draft:
    """The values of the job file so far, by key path, and the rows of the table."""

    values: dict[Path, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    def take(self, line: int, text: str, key: Path, value: object, note: str = "") -> None:
        """Set a field.

        Args:
            line: the line of the script.
            text: what stands there.
            key: the key path of the field.
            note: what the user should know about it.
        """
        self.values[key] = value
        self.note_taken(line, text, key, note)

    def note_taken(self, line: int, text: str, key: Path, note: str = "") -> None:
        """Add the row of a part that is in a field which is set already, or elsewhere."""
        reason = dotted(key)
        if note:
            reason = f"{reason}; {note}"
        self._add(line, text, "taken", reason, key)

    def note_setup(self, line: int, text: str, note: str = "") -> None:
        """Add the row of a line of ``environment.setup``."""
        self._add(line, text, "setup", f"{dotted(SETUP)}; {note}" if note else dotted(SETUP), SETUP)

    def drop(self, line: int, text: str, why: str) -> None:
        """Add the row of a part that the job file does not need."""
        self._add(line, text, "dropped", why)

    def leave_open(self, line: int, text: str, why: str) -> None:
        """Add the row of a part that the user has to look at."""
        self._add(line, text, "open", why)

    def _add(self, line: int, text: str, outcome: Outcome, reason: str, key: Path | None = None) -> None:
        shown = _MASKED.sub(r"\1...", text)
        self.rows.append(Row(line=line, text=shown, outcome=outcome, reason=_MASKED.sub(r"\1...", reason), key=key))
