"""What ``scontrol show`` prints, as fields by their names."""

from __future__ import annotations

import re

_KEY = re.compile(r"(?:^|\s)([A-Z][A-Za-z/:]*)=")
# What a user writes freely stands last on its line, so it may hold anything but a line break.
_TO_THE_END_OF_THE_LINE = frozenset(
    {"JobName", "Comment", "AdminComment", "SystemComment", "Command", "WorkDir", "StdErr", "StdIn", "StdOut"}
)


def parse_job(output: str) -> dict[str, str]:
    """Return the fields of the first record in what ``scontrol show job`` printed."""
    fields: dict[str, str] = {}
    record, _, _ = output.strip("\n").partition("\n\n")
    for line in record.splitlines():
        for key, value in _fields_of(line.strip()):
            fields.setdefault(key, value)
    return fields


def _fields_of(line: str) -> list[tuple[str, str]]:
    """Return the (key, value) pairs of one line."""
    found: list[tuple[str, str]] = []
    position = 0
    while match := _KEY.search(line, position):
        following = _KEY.search(line, match.end())
        whole = following is None or match[1] in _TO_THE_END_OF_THE_LINE
        position = len(line) if following is None or whole else following.start()
        found.append((match[1], line[match.end() : position]))
    return found
