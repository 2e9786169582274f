"""Placeholders in the words of a command: ``{lr}`` of a sweep, and ``{run_dir}``, which each task fills in.

Only the names that are known are filled in; every other brace stays as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from types import MappingProxyType
from typing import Final

RUN_PLACEHOLDERS: Final[Mapping[str, str]] = MappingProxyType(
    {"run_dir": "HPCDDP_RUN_DIR", "run_id": "HPCDDP_RUN_ID", "attempt": "HPCDDP_ATTEMPT"}
)
"""The placeholders that a task fills in, and the variable that has the same value."""

PLACEHOLDER: Final = r"[A-Za-z_][A-Za-z0-9_-]*"
# A dollar before the brace makes it a variable of a shell.
_IN_BRACES: Final = re.compile(r"(?<!\$)\{(" + PLACEHOLDER + r")\}", re.ASCII)
_RUN_VARIABLE: Final = re.compile(r"\$(\{)?(" + "|".join(RUN_PLACEHOLDERS.values()) + r")(?(1)\}|\b)", re.ASCII)
SHELLS: Final = frozenset({"bash", "dash", "ksh", "sh", "zsh"})
"""The names of the shells that take ``-c TEXT``."""
# Long options of bash that have a value (bash(1), OPTIONS).
_SHELL_OPTIONS_WITH_VALUE: Final = frozenset({"--rcfile", "--init-file"})

_ENCODER = json.JSONEncoder(ensure_ascii=False, sort_keys=True)


def as_text(value: object) -> str:
    """Return canonical JSON."""
    return _ENCODER.encode(value)


def argument_text(value: object) -> str:
    """Return the text that a value has in a command: a string as it is, else JSON."""
    return value if isinstance(value, str) else as_text(value)


def placeholders_of(command: Sequence[str]) -> set[str]:
    """Return the names that the words of a command hold in braces."""
    return {name for word in command for name in _IN_BRACES.findall(word)}


def words_outside_shell_texts(command: Sequence[str]) -> list[str]:
    """Return the words of a command without the texts that a shell in it reads, as in ``bash -c TEXT``."""
    text_indices = shell_text_indices(command)
    return [word for index, word in enumerate(command) if index not in text_indices]


def shell_text_index(words: Sequence[str]) -> int | None:
    """Return where the text of ``bash -c TEXT`` stands, also of ``bash -ce`` and ``bash -o pipefail -c``.

    None: the shell is given a script, or nothing.

    Args:
        words: a command that begins with a shell.
    """
    index, is_text = _shell_operand(words)
    return index if is_text and index < len(words) else None


def shell_script(words: Sequence[str]) -> str | None:
    """Return the script that a shell is given, as in ``bash -o pipefail SCRIPT``; None for a text, and for nothing.

    Args:
        words: a command that begins with a shell.
    """
    index, is_text = _shell_operand(words)
    return words[index] if not is_text and index < len(words) else None


def _shell_operand(words: Sequence[str]) -> tuple[int, bool]:
    """Return where the first word behind the options of a shell would stand, and whether an option makes it a text."""
    has_text = False
    index = 1
    while index < len(words) and words[index].startswith(("-", "+")):
        option = words[index]
        index += 1
        if option in {"-", "--"}:
            break
        if option.startswith("--"):
            if option in _SHELL_OPTIONS_WITH_VALUE:
                index += 1
            continue
        has_text = has_text or (option.startswith("-") and "c" in option)
        # Each o and O takes a word behind them, the name of an option.
        index += option.count("o") + option.count("O")
    return index, has_text


def shell_text_indices(command: Sequence[str]) -> set[int]:
    """Return where the texts stand that the shells in a command read, as in ``env A=1 bash -c TEXT``."""
    indices = set()
    for start, word in enumerate(command):
        index = shell_text_index(command[start:]) if PurePath(word).name in SHELLS else None
        if index is not None:
            indices.add(start + index)
    return indices


def fill_sweep_placeholders(command: Sequence[str], values: Mapping[str, object]) -> tuple[str, ...]:
    """Return the command of an element of a sweep."""

    def text(match: re.Match[str]) -> str:
        return argument_text(values[match[1]]) if match[1] in values else match[0]

    return tuple(_IN_BRACES.sub(text, word) for word in command)


def fill_run_placeholders(command: Sequence[str], variables: Mapping[str, str]) -> tuple[str, ...]:
    """Return the command that a task runs.

    Args:
        variables: the environment of the program, which holds the variables in ``RUN_PLACEHOLDERS``.
    """
    values = {name: variables[variable] for name, variable in RUN_PLACEHOLDERS.items() if variable in variables}
    return fill_sweep_placeholders(command, values)


def run_placeholder_error(command: Sequence[str]) -> str | None:
    """Return why a command cannot be filled in by its tasks, or None if it can."""
    for word in words_outside_shell_texts(command):
        variable = _RUN_VARIABLE.search(word)
        if variable is not None:
            name = next(name for name, value in RUN_PLACEHOLDERS.items() if value == variable[2])
            return (
                f"holds {word!r}, and no shell expands {variable[0]} there; write {{{name}}}, which each task fills "
                "in, or let a shell expand it: bash -c 'COMMAND'"
            )
    return None
