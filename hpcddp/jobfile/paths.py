"""Paths of a job that are used when it is submitted: ``$NAME``, ``${NAME}`` and a leading ``~`` are expanded then.

What only a node can expand is left to it: ``environment.stage.target``, and ``train.data_dir`` below it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from hpcddp.jobfile.document import Path, dotted
from hpcddp.jobfile.field_facts import facts_of
from hpcddp.jobfile.job import field_paths
from hpcddp.jobfile.merge import MergedValues, Source
from hpcddp.jobfile.problems import Problem

_STAGE_TARGET: Final[Path] = ("environment", "stage", "target")
_VARIABLE: Final = re.compile(r"\$(?:\{([A-Za-z_][A-Za-z0-9_]*)\}|([A-Za-z_][A-Za-z0-9_]*))", re.ASCII)
_HOME: Final = re.compile("~(?=/|$)")


def expand_paths(merged: MergedValues, environment: Mapping[str, str], fallback: Source) -> Iterator[Problem]:
    """Expand the paths in place, and yield a problem for each variable that is not set, and what only a shell expands.

    Args:
        merged: the values of the job.
        environment: the variables of the shell that submits the job.
        fallback: the source of values that have none.
    """
    target = _value(merged, _STAGE_TARGET)
    for path, field in field_paths():
        text = _value(merged, path) if facts_of(field).is_expanded else None
        if text is None or (path == ("train", "data_dir") and target is not None and text.startswith(target)):
            continue
        meant = _HOME.sub("$HOME", text, count=1) if text.startswith("~") else text
        sentence = _why_unusable(text, meant, environment)
        if sentence is not None:
            source = merged.owner(path) or fallback
            yield Problem(file=source.file, line=source.line_of(path), key=dotted(path), sentence=sentence)
        elif meant != text or "$" in text:
            merged.replace(path, _VARIABLE.sub(lambda found: environment[found[1] or found[2]], meant))


def _why_unusable(text: str, meant: str, environment: Mapping[str, str]) -> str | None:
    unset = [name for name in _names(meant) if not environment.get(name)]
    if unset:
        return f"is {text!r}, and {unset[0]} is not set here; export it, or write the whole path"
    if "$" in _VARIABLE.sub("", meant) or meant.startswith("~"):
        return f"is {text!r}, and hpcddp expands only $NAME, ${{NAME}} and ~/ in it; write the whole path"
    return None


def _value(merged: MergedValues, path: Path) -> str | None:
    value: Any = merged.value
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, str) else None


def _names(text: str) -> list[str]:
    return [braced or plain for braced, plain in _VARIABLE.findall(text)]
