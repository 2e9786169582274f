"""Placeholders in the words of a command: ``{lr}`` of a sweep, and ``{run_dir}``, which each task fills in.

In a command with placeholders a literal brace is written twice. A command without one does not change.
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
BRACES: Final = re.compile(r"\{\{|\}\}|\{(" + PLACEHOLDER + r")\}|[{}]", re.ASCII)
"""A doubled brace, a placeholder (group 1 is its name), or a single brace."""

_RUN_NAMES: Final = "|".join(RUN_PLACEHOLDERS)
# A dollar before the brace makes it a variable of a shell. A doubled brace counts, so that {{run_dir}} is a text.
_RUN_PLACEHOLDER: Final = re.compile(r"(?<!\$)\{(?:" + _RUN_NAMES + r")\}")
_SHELL_VARIABLE: Final = re.compile(r"\$\{(?:" + _RUN_NAMES + r")\}")
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
    return {match[1] for word in command for match in BRACES.finditer(word) if match[1]}


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


def holds_run_placeholder(command: Sequence[str]) -> bool:
    """Return whether a command has placeholders that the task fills in, so that its literal braces are doubled."""
    return any(_RUN_PLACEHOLDER.search(word) for word in command)


def fill_sweep_placeholders(command: Sequence[str], values: Mapping[str, object]) -> list[str]:
    """Return the command of an element of a sweep.

    If it holds ``{run_dir}`` or the like, as a placeholder or as a text, literal braces stay doubled for the task.
    """
    words = [_substituted(word, values) for word in command]
    if holds_run_placeholder(words):
        return words
    return [_undoubled(word) for word in words]


def fill_run_placeholders(command: Sequence[str], variables: Mapping[str, str]) -> tuple[str, ...]:
    """Return the command that a task runs.

    Args:
        command: the command of the job.
        variables: the environment of the program, which holds the variables in ``RUN_PLACEHOLDERS``.
    """
    if not holds_run_placeholder(command):
        return tuple(command)
    values = {name: variables[variable] for name, variable in RUN_PLACEHOLDERS.items()}
    return tuple(_undoubled(_substituted(word, values)) for word in command)


def _substituted(word: str, values: Mapping[str, object]) -> str:
    """Return a word with the placeholders that have a value replaced; braces of a value are doubled."""

    def text(match: re.Match[str]) -> str:
        if match[1] in values:
            return doubled(argument_text(values[match[1]]))
        return match[0]

    return BRACES.sub(text, word)


def doubled(text: str) -> str:
    """Return a text as the words of a command with placeholders hold it."""
    return text.replace("{", "{{").replace("}", "}}")


def _undoubled(word: str) -> str:
    return word.replace("{{", "{").replace("}}", "}")


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
    if not holds_run_placeholder(command):
        return None
    for word in command:
        is_filled = all(match[0] in {"{{", "}}"} or match[1] in RUN_PLACEHOLDERS for match in BRACES.finditer(word))
        if not is_filled or _SHELL_VARIABLE.search(word):
            names = ", ".join(f"{{{name}}}" for name in RUN_PLACEHOLDERS)
            return (
                f"holds {word!r}; in a command with one of {names}, any other brace is written twice; write "
                f"{_with_doubled_braces(word)!r}"
            )
    return None


def _with_doubled_braces(word: str) -> str:
    """Return a word in which every brace is doubled that belongs to no placeholder of a task."""

    def text(match: re.Match[str]) -> str:
        is_variable = word[: match.start()].endswith("$")
        if match[1] in RUN_PLACEHOLDERS and not is_variable:
            return match[0]
        return doubled(match[0])

    return BRACES.sub(text, word)
