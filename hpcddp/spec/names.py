"""Names that a job file may hold, and the nearest one to a name that it does hold."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from functools import cache
from importlib.resources import files


@cache
def torchvision_models() -> tuple[str, ...]:
    """Return the names of torchvision's classification models, sorted; read from a table, so torch is not loaded."""
    text = files("hpcddp.spec").joinpath("torchvision_models.txt").read_text(encoding="utf-8")
    return tuple(line for line in text.splitlines() if line and not line.startswith("#"))


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known name that ``word`` was most likely meant to be, or None.

    Args:
        word: what was written.
        known: the names that exist.

    Returns:
        A name that differs in case or separators alone, else the closest one above a similarity of 0.6, else a name
        that begins with ``word``.
    """
    by_shape = {_shape(name): name for name in known}
    shape = _shape(word)
    if shape in by_shape:
        return by_shape[shape]
    begins = sorted((name for key, name in by_shape.items() if len(shape) > 2 and key.startswith(shape)), key=len)  # noqa: PLR2004
    if begins:
        return begins[0]
    close = difflib.get_close_matches(shape, by_shape, n=1, cutoff=0.6)
    return by_shape[close[0]] if close else None


def _shape(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "").replace(" ", "")
