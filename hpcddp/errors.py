"""The exception tree of hpcddp."""

from __future__ import annotations

from typing import Any, ClassVar, Self


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

    def __init__(self, message: str, *, hint: str | None = None, **values: object) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.values: dict[str, Any] = values

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        values = self.__dict__.get("values", {})
        if name in values:
            return values[name]
        raise AttributeError(name)

    def __reduce__(self) -> tuple[Any, ...]:
        """Support pickling with keyword arguments, for errors that ``submitit.Job`` returns from another process."""
        return _rebuild, (type(self), self.message, self.hint, self.values)

    def as_json(self) -> dict[str, Any]:
        """Return the document that ``--json`` prints for the error."""
        return {"error": {"kind": self.kind, "message": self.message, "hint": self.hint}}

    @classmethod
    def rebuild(cls, message: str, hint: str | None, values: dict[str, Any]) -> Self:
        """Return an error with these parts, for unpickling."""
        return cls(message, hint=hint, **values)


def _rebuild(cls: type[HpcddpError], message: str, hint: str | None, values: dict[str, Any]) -> HpcddpError:
    return cls.rebuild(message, hint, values)


class UserError(HpcddpError):
    """An error that the user can fix: a wrong file, option or plan."""

    kind = "user"
    exit_code = 2
