"""The facts that a message must tell, whatever its sentence is."""

from __future__ import annotations

import re


def assert_facts(message: str, *facts: str) -> None:
    """Assert that a message tells each fact in whole words and numbers, in this order."""
    position = 0
    for fact in facts:
        whole = re.compile(rf"(?<![\w.-]){re.escape(fact)}(?!\.?\w)")
        match = whole.search(message, position)
        assert match is not None, f"{fact!r} is not where it belongs in: {message}"
        position = match.end()


def line_from(log: str, words: str) -> str:
    """Return the one line of a log that contains these words, from them on."""
    (line,) = (line for line in log.splitlines() if words in line)
    return line[line.index(words) :]
