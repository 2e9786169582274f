"""The one tree of errors that hpcddp raises on purpose."""

from __future__ import annotations

from typing import Any, ClassVar, Self


class HpcddpError(Exception):
    """An error that hpcddp explains to the person who sees it.

    Args:
        message: one sentence: where is what it holds, why that cannot be; what to write instead.
        hint: the next command or change that helps, if it is not in the sentence already.
        values: the facts behind the sentence, by name; they become attributes.

    Attributes:
        kind: a stable word for programs, printed by ``--json``.
        exit_code: what the command line exits with: 1 something broke, 2 the user can fix it.
    """

    kind: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str | None = None, **values: Any) -> None:  # noqa: ANN401
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.values = values

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        values = self.__dict__.get("values", {})
        if name in values:
            return values[name]
        raise AttributeError(name)

    def __reduce__(self) -> tuple[Any, ...]:
        """Errors cross process borders in a ``submitit.Job``; keyword arguments need help for that."""
        return _rebuild, (type(self), self.message, self.hint, self.values)

    def as_json(self) -> dict[str, Any]:
        """Return the document that ``--json`` prints in place of a result."""
        return {"error": {"kind": self.kind, "message": self.message, "hint": self.hint}}

    @classmethod
    def rebuild(cls, message: str, hint: str | None, values: dict[str, Any]) -> Self:
        """Return the error that these parts were taken from."""
        return cls(message, hint=hint, **values)


def _rebuild(cls: type[HpcddpError], message: str, hint: str | None, values: dict[str, Any]) -> HpcddpError:
    return cls.rebuild(message, hint, values)


class UserError(HpcddpError):
    """Something that the user can fix: a bad file, flag or plan."""

    kind = "user"
    exit_code = 2
