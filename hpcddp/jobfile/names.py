"""Spelling suggestions, and the names of the torchvision models."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from functools import cache
from importlib.resources import files

SHORTEST_BEGINNING = 3
"""Shorter beginnings of a name fit too many names."""


@cache
def torchvision_models() -> tuple[str, ...]:
    """Return the names of torchvision's classification models, sorted; read from a table, so torch is not loaded."""
    text = files("hpcddp.jobfile").joinpath("torchvision_models.txt").read_text(encoding="utf-8")
    return tuple(line for line in text.splitlines() if line and not line.startswith("#"))


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known name that was most likely meant by ``word``, or None.

    This is a name that differs only in case or separators, else the shortest name that begins with ``word``, else the
    closest name above a similarity of 0.6.
    """
    by_shape = {_shape(name): name for name in known}
    shape = _shape(word)
    if shape in by_shape:
        return by_shape[shape]
    long_enough = len(shape) >= SHORTEST_BEGINNING
    begins = sorted((name for key, name in by_shape.items() if long_enough and key.startswith(shape)), key=len)
    if begins:
        return begins[0]
    close = difflib.get_close_matches(shape, by_shape, n=1, cutoff=0.6)
    return by_shape[close[0]] if close else None


def _shape(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "").replace(" ", "")
