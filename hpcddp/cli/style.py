"""Colours for the states of runs, on a terminal that supports them."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from hpcddp.manage.status import State

_COLOURS = {
    "running": "green",
    "finished": "green",
    "starting": "cyan",
    "stopping": "cyan",
    "pending": "yellow",
    "requeued": "yellow",
    "held": "yellow",
    "suspended": "yellow",
    "failed": "red",
    "lost": "red",
    "timed out": "red",
    "preempted": "red",
}


def styled(text: str, state: State) -> str:
    """Return a text in the colour of a state, or unchanged without colours (https://no-color.org)."""
    colour = _COLOURS.get(str(state))
    if colour is None or os.environ.get("NO_COLOR") or not sys.stdout.isatty():
        return text
    return typer.style(text, fg=colour)
