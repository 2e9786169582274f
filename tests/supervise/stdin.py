"""What a script gives to ``begin`` on its standard input."""

from __future__ import annotations

import io


def stdin_of(content: bytes, encoding: str = "utf-8") -> io.TextIOWrapper:
    """A standard input with a content, as Python opens it in a locale with an encoding."""
    return io.TextIOWrapper(io.BytesIO(content), encoding=encoding)
