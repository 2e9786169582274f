"""Error messages for wrong values and unknown keys."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pydantic_core import ErrorDetails

from hpcddp.errors import did_you_mean, nearest
from hpcddp.jobfile.document import Path, dotted
from hpcddp.jobfile.field_facts import facts_of
from hpcddp.jobfile.fields import REFUSED
from hpcddp.jobfile.job import example_of, field_paths, find_key, is_secret
from hpcddp.jobfile.problems import shown


def error_path(error: ErrorDetails) -> Path:
    """Return the key path of a validation error."""
    return tuple(str(part) for part in error["loc"] if part != "[key]")


def sentence_of(error: ErrorDetails, path: Path, written: str | None) -> str:
    """Return the message for one validation error.

    Args:
        written: how the value was spelled, where it was no text.
    """
    kind = error["type"]
    value = error["input"]
    if kind == "extra_forbidden":
        return unknown_key(path)
    if kind == "missing":
        if path[-1].isdecimal():
            return f"is missing from the list; write {int(path[-1]) + 1} items or more"
        return f"is missing; write for example {path[-1]}: {example_of(path) or '...'}"
    reason = _reason(error, path)
    if "[key]" in error["loc"]:
        return f"is not a valid key: {reason.removeprefix('and ')}"
    if is_secret(path) and not isinstance(value, dict | list | None):
        return f"contains a value that is not shown here, {reason}"
    return f"is {shown(value, written=written)}, {reason}"


def _reason(error: ErrorDetails, path: Path) -> str:
    """Return why a value is wrong, and what to write instead."""
    kind = error["type"]
    context = error.get("ctx", {})
    if kind == REFUSED:
        return f"and {context['why']}; {context['instead']}"
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", context["expected"])
        listed = ", ".join(choices)
        return f"expected one of {listed}; {did_you_mean(str(error['input'] or ''), choices, 'write one of them')}"
    if kind == "tuple_type" and path == ("command",):
        return "expected the list of its words; write for example [python, train.py]"
    if kind in {"model_type", "model_attributes_type"}:
        key_type = find_key(path)
        if key_type is not None and key_type.section is not None:
            # Most people mean the first field.
            return f"expected a section; write {dotted((*path, next(iter(key_type.section.model_fields))))}"
    if kind not in _REASONS:
        return f"which is not valid; {error['msg'].lower()}"
    return _REASONS[kind].format(**context)


_NO_INTEGER = "expected an integer; write one without quotes, point or unit, or leave it out"
_NO_MAPPING = "expected a mapping; write keys with values below it, or {{key: value}}"
_REASONS: Mapping[str, str] = {
    "string_type": "expected a string; put double quotes around it, or leave the key out",
    "int_type": _NO_INTEGER,
    "int_from_float": _NO_INTEGER,
    "float_type": "expected a number; write one without quotes or unit, or leave it out",
    "finite_number": "expected a finite number; write one",
    "bool_type": "expected true or false; write one of them without quotes",
    "greater_than_equal": "and it must be at least {ge:.15g}; write {ge:.15g} or more",
    "greater_than": "and it must be more than {gt:.15g}; write a number above {gt:.15g}",
    "less_than_equal": "and it must be at most {le:.15g}; write {le:.15g} or less",
    "less_than": "and it must be less than {lt:.15g}; write a number below {lt:.15g}",
    "mapping_type": _NO_MAPPING,
    "dict_type": _NO_MAPPING,
    "tuple_type": "expected a list; write [VALUE, VALUE]",
    "too_short": "and it has {actual_length} items; write {min_length}",
    "too_long": "and it has {actual_length} items; write {max_length}",
}


def unknown_key(path: Path) -> str:
    """Return the message about an unknown key path, with the nearest one that exists."""
    depth = next(length for length in range(1, len(path) + 1) if find_key(path[:length]) is None)
    parent = path[: depth - 1]
    key = path[depth - 1]
    key_type = find_key(parent)
    if key_type is None or key_type.section is None:
        return f"is not a field, because {dotted(parent)} is a single value; write {dotted(parent)} alone"
    where = f"a field of {dotted(parent)}" if parent else "a field of the job file"
    return f"is not {where}; {_instead(parent, key, tuple(key_type.section.model_fields), path[depth:])}"


def _instead(parent: Path, key: str, siblings: tuple[str, ...], below: Path) -> str:
    # A field of another section may have the same name.
    paths = {name: path for name, path in _paths_by_name().items() if path[:-1] == parent}
    paths |= {name: (*parent, name) for name in siblings}
    sibling = nearest(key, paths)
    if sibling is not None:
        return f"did you mean {dotted(paths[sibling])}?"
    # The name of a flag of sbatch may look like that of a field elsewhere.
    elsewhere = field_named(key) or (None if parent == ("resources",) else _elsewhere(key))
    if elsewhere is not None:
        return f"did you mean {elsewhere}?"
    if parent == ("resources",):
        # Other tools have a mapping of flags here.
        flag = (below[0] if below else key).replace("_", "-")
        return f"any other sbatch flag goes under resources.sbatch, as in {{{flag}: ...}}"
    return f"the fields are {', '.join(siblings)}"


def field_named(word: str) -> str | None:
    """Return the field of which a word is the last name, or another name; None if there is none."""
    path = _paths_by_name().get(word.lower().replace("-", "_"))
    return None if path is None else dotted(path)


def _elsewhere(key: str) -> str | None:
    paths = _paths_by_name()
    near = nearest(key, paths)
    return None if near is None else dotted(paths[near])


def _paths_by_name() -> dict[str, Path]:
    """Return the path of every field by its last name, and by the names that other tools have for it."""
    names: dict[str, Path] = {}
    other_names: dict[str, Path] = {}
    # Of two fields with the same name, the first is meant.
    for path, field in reversed(list(field_paths())):
        names[path[-1]] = path
        other_names |= dict.fromkeys(facts_of(field).other_names, path)
    return names | other_names
