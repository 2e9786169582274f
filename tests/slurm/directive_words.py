"""What sbatch reads from a script."""

from __future__ import annotations

from hpcddp.script.directives import DIRECTIVE, read_directive_lines, split_directive_line


def directive_words(script: str) -> list[str]:
    """Return the words of all directives that sbatch reads from a script, in order."""
    lines = read_directive_lines(script.split("\n"))
    return [word for line in lines if not line.is_ignored for word in line.words]


def words_of_line(line: str, *, escapes_blanks: bool = False) -> list[str] | None:
    """Return the words that sbatch reads from one line, or None if the line is not a directive."""
    if not line.startswith(DIRECTIVE):
        return None
    words, _ = split_directive_line(line, escapes_blanks=escapes_blanks)
    return words
