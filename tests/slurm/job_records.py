"""Reads what tests ask of ``scontrol show job``."""

from __future__ import annotations

import re


def comment_in(record: str) -> str | None:
    """Return the comment in a record of ``scontrol show job``, with the blanks that its user wrote."""
    line = re.search(r"\n   Comment=(.*)\n", record)
    if line is None:
        return None
    # Before 25.11, which shows the command line too, scontrol puts a blank behind the comment.
    return line[1] if "\n   SubmitLine=" in record else line[1].removesuffix(" ")
