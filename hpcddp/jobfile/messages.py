"""Error messages for wrong values and unknown keys."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import ErrorDetails

from hpcddp.errors import did_you_mean, nearest
from hpcddp.jobfile.document import Path, dotted
from hpcddp.jobfile.field_facts import facts_of
from hpcddp.jobfile.fields import REFUSED
from hpcddp.jobfile.job import example_of, field_paths, find_key, is_secret
from hpcddp.jobfile.problems import shown
from hpcddp.jobfile.resources import fields_of_gres

Reason = tuple[str, str]
"""Why the value is wrong, and what to write instead."""
_GRES: Path = ("resources", "gres")
_HIDDEN = object()
LONGEST_EXAMPLE = 39


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
        return _sentence_about_missing(path)
    if "[key]" in error["loc"]:
        why, instead = _reason(error, value, None)
        return f"is not a valid key: {why.removeprefix('and ')}; {instead}"
    if path == _GRES and isinstance(value, str):
        return f"is {shown(value, written=written)}, as sbatch takes it; write {_instead_of_gres(value)}"

    if path == ("command",) and kind == "tuple_type" and not isinstance(value, str):
        why, instead = "expected the list of its words", "write for example [python, train.py]"
    elif kind in {"model_type", "model_attributes_type"}:
        why = "expected a section"
        instead = _first_field(path)
    elif is_secret(path):
        hidden_value = None if value is None else _HIDDEN
        why, instead = _reason(error, hidden_value, None)
    else:
        why, instead = _reason(error, value, written)
    if is_secret(path) and not isinstance(value, dict | list | None):
        return f"contains a value that is not shown here, {why}; {instead}"
    value_text = shown(value, written=written)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and kind == "string_type":
        value_text = f"the number {value_text}"
    return f"is {value_text}, {why}; {instead}"


def _sentence_about_missing(path: Path) -> str:
    if path[-1].isdecimal():
        return f"is missing from the list; write {int(path[-1]) + 1} items or more"
    return f"is missing; write for example {path[-1]}: {example_of(path) or '...'}"


def _instead_of_gres(text: str) -> str:
    """Return the fields to write in place of a text of sbatch's ``--gres``."""
    written = []
    for field, value in fields_of_gres(text):
        section, _, name = field.partition(".")
        written.append(f'{section}: {{"{name}": {value}}}' if name else f"{field}: {value}")
    return f"{', '.join(written)} in resources"


def _first_field(path: Path) -> str:
    """Return what to write in place of one value for a section: its first field, which most people mean."""
    key_type = find_key(path)
    if key_type is None or key_type.section is None:
        return "write its fields below it"
    return f"write {dotted((*path, next(iter(key_type.section.model_fields))))}"


def _reason(error: ErrorDetails, value: object, written: str | None) -> Reason:
    context = error.get("ctx", {})
    if error["type"] == REFUSED:
        return f"and {context['why']}", context["instead"]
    explain = _REASONS.get(error["type"])
    if explain is None:
        return "which is not valid", error["msg"].lower()
    return explain(_WrongValue(value=value, written=written, context=context))


@dataclass(frozen=True, slots=True, kw_only=True)
class _WrongValue:
    """A value that does not fit its type.

    Args:
        written: how it was spelled, where it was no text.
        context: the parameters of pydantic's error, such as the bound of a number.
    """

    value: object
    written: str | None
    context: Mapping[str, Any]


def _text(wrong: _WrongValue) -> Reason:
    if wrong.value is None:
        return "expected a string", "write one, or leave the key out"
    if isinstance(wrong.value, dict | list):
        return "expected a string", "write one text"
    quoted = "put double quotes around it" if wrong.written is None else f'quote it: "{wrong.written}"'
    return "expected a string", quoted


def _whole_number(wrong: _WrongValue) -> Reason:
    value = wrong.value
    if isinstance(value, str) and re.fullmatch("[0-9]+", value, re.ASCII):
        return "a string, expected an integer", f"write {value} without quotes"
    if isinstance(value, float) and value.is_integer():
        return "expected an integer", f"write {int(value)}"
    return "expected an integer", "write one without quotes, point or unit, or leave it out"


def _number(wrong: _WrongValue) -> Reason:
    value = wrong.value
    if isinstance(value, str) and re.fullmatch(r"[-+.0-9eE]+", value, re.ASCII):
        return "a string, expected a number", f"write {value} without quotes"
    return "expected a number", "write one without quotes or unit, or leave it out"


LONG_YES = {"yes": "true", "on": "true", "no": "false", "off": "false"}


def _truth(wrong: _WrongValue) -> Reason:
    meant = LONG_YES.get(wrong.value.lower()) if isinstance(wrong.value, str) else None
    if meant is not None:
        return f"a string in YAML 1.2, expected {meant}", f"write {meant}"
    return "expected true or false", "write one of them without quotes"


def _one_of(wrong: _WrongValue) -> Reason:
    choices = re.findall(r"'([^']*)'", str(wrong.context.get("expected", "")))
    listed = ", ".join(choices)
    return f"expected one of {listed}", did_you_mean(str(wrong.value), choices, f"write one of {listed}")


def _bound(relation: str, key: str, advice: str) -> Callable[[_WrongValue], Reason]:
    def explain(wrong: _WrongValue) -> Reason:
        limit = wrong.context[key]
        bound = f"{limit:.15g}" if isinstance(limit, float) else limit
        return f"and it must be {relation} {bound}", advice.format(bound)

    return explain


def _mapping(_: _WrongValue) -> Reason:
    return "expected a mapping", "write keys with values below it, or {key: value}"


def _list(wrong: _WrongValue) -> Reason:
    short = isinstance(wrong.value, str | int | float) and len(str(wrong.value)) <= LONGEST_EXAMPLE
    if not short:
        return "expected a list", "write [...]"
    if wrong.written is None and isinstance(wrong.value, str):
        return "expected a list", f"write [{', '.join(map(_item, _words(wrong.value)))}]"
    return "expected a list", f"write [{wrong.written or wrong.value}]"


def _words(text: str) -> list[str]:
    """Return the words of a text as a shell divides it."""
    try:
        return shlex.split(text)
    except ValueError:
        # An unclosed quote.
        return [text]


def _item(word: str) -> str:
    """Return a word as an item of a list in YAML: a text also where it looks like a number."""
    plain = re.fullmatch(r"(?!(?:true|false|null)$)[A-Za-z/_][\w./=+-]*", word, re.ASCII | re.IGNORECASE)
    return word if plain else json.dumps(word)


def _finite(_: _WrongValue) -> Reason:
    return "expected a finite number", "write one"


def _length(wrong: _WrongValue) -> Reason:
    count = wrong.context.get("min_length", wrong.context.get("max_length"))
    return f"and it has {wrong.context.get('actual_length')} items", f"write {count}"


_REASONS: Mapping[str, Callable[[_WrongValue], Reason]] = {
    "string_type": _text,
    "int_type": _whole_number,
    "int_from_float": _whole_number,
    "float_type": _number,
    "bool_type": _truth,
    "literal_error": _one_of,
    "greater_than_equal": _bound("at least", "ge", "write {} or more"),
    "greater_than": _bound("more than", "gt", "write a number above {}"),
    "less_than_equal": _bound("at most", "le", "write {} or less"),
    "less_than": _bound("less than", "lt", "write a number below {}"),
    "mapping_type": _mapping,
    "dict_type": _mapping,
    "tuple_type": _list,
    "too_short": _length,
    "too_long": _length,
    "finite_number": _finite,
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
