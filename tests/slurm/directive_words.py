"""What sbatch reads from a script."""

from __future__ import annotations

from hpcddp.script.directives import read_directive_lines


def directive_words(script: str) -> list[str]:
    """Return the words of all directives that sbatch reads from a script, in order."""
    lines = read_directive_lines(script.split("\n"))
    return [word for line in lines if not line.is_ignored for word in line.words]
