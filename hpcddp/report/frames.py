"""A traceback without what lies between the user's own lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

_FRAME: Final = '  File "'
_INNER: Final = ("/hpcddp/", "/submitit/", "/torch/", "<frozen runpy>")


def shortened(traceback: Sequence[str]) -> list[str]:
    """Return a traceback with a line in place of frames of libraries that lead to the user's code.

    The innermost frame stays. A traceback without any frame of the user's stays as it is.

    Args:
        traceback: its lines, as Python prints them.
    """
    parts = list(_parts(traceback))
    if all(_is_inner(part) or not _is_frame(part) for part in parts):
        return list(traceback)
    shown: list[str] = []
    skipped = 0
    for part, following in zip(parts, [*parts[1:], []], strict=True):
        if _is_inner(part) and _is_frame(following):
            skipped += 1
            continue
        if skipped:
            shown.append(f"  ... {skipped} frame{'s' if skipped > 1 else ''} of libraries")
            skipped = 0
        shown += part
    return shown


def _parts(lines: Sequence[str]) -> Iterator[list[str]]:
    """Yield the frames, each with the lines that belong to it, and what stands between them line by line."""
    part: list[str] = []
    for line in lines:
        belongs = bool(part) and _is_frame(part) and line.startswith("    ")
        if not belongs and part:
            yield part
            part = []
        part.append(line)
    if part:
        yield part


def _is_frame(part: Sequence[str]) -> bool:
    return bool(part) and part[0].startswith(_FRAME)


def _is_inner(part: Sequence[str]) -> bool:
    return _is_frame(part) and any(word in part[0] for word in _INNER)
