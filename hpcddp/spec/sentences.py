"""One sentence for every way in which a value can fail the types: what it holds, why not, what instead."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from pydantic_core import ErrorDetails

from hpcddp.spec.document import Path
from hpcddp.spec.fields import REFUSED
from hpcddp.spec.fieldtree import find_place
from hpcddp.spec.names import nearest
from hpcddp.spec.problems import shown
from hpcddp.spec.suggestions import unknown_key

Reason = tuple[str, str]
"""Why the value cannot be, and what to write instead."""

# Values of the environment and shell lines may hold what should have been named in pass_env.
SECRETS: tuple[Path, ...] = (("environment", "env"), ("environment", "setup"))
LONG_YES = {"yes": "true", "on": "true", "no": "false", "off": "false"}

_HIDDEN = object()

EXAMPLES = {
    ("name",): "name: my-job",
    ("batch",): "batch: {global_batch_size: 256}",
    ("batch", "global_batch_size"): "global_batch_size: 256",
    ("train", "model"): "model: resnet18",
    ("train", "dataset"): "dataset: digits",
}


def is_secret(path: Path) -> bool:
    """Return whether the value of a key path is not to be repeated, because it is or holds what may be a secret."""
    return any(path[: len(secret)] == secret[: len(path)] for secret in SECRETS)


def sentence_of(error: ErrorDetails, path: Path, written: str | None) -> str:
    """Return the sentence for one error of the types.

    Args:
        error: what pydantic found.
        path: its key path.
        written: how the value was spelled, where it was no text.
    """
    value = error["input"]
    if error["type"] == "extra_forbidden":
        return unknown_key(path)
    if error["type"] == "missing" and path[-1].isdecimal():
        return f"is missing from the list; write {int(path[-1]) + 1} items or more"
    if error["type"] == "missing":
        return f"is missing; write for example {EXAMPLES.get(path, f'{path[-1]}: ...')}"
    if "[key]" in error["loc"]:
        why, instead = _reason(error, value, None)
        return f"cannot stand here: {why.removeprefix('and ')}; {instead}"
    if error["type"] in {"model_type", "model_attributes_type"}:
        why, instead = "and a section belongs here", f"write {_first_field(path)} below it"
    elif is_secret(path):
        why, instead = _reason(error, value if value is None else _HIDDEN, None)
    else:
        why, instead = _reason(error, value, written)
    if is_secret(path) and not isinstance(value, dict | list | None):
        return f"holds a value that is not repeated here, {why}; {instead}"
    number = isinstance(value, int | float) and not isinstance(value, bool)
    kind = "the number " if number and error["type"] == "string_type" else ""
    return f"is {kind}{shown(value, written=written)}, {why}; {instead}"


def _first_field(path: Path) -> str:
    place = find_place(path)
    fields = list(place.section.model_fields) if place is not None and place.section is not None else []
    return f"'{fields[0]}: ...'" if fields else "its fields"


def _reason(error: ErrorDetails, value: Any, written: str | None) -> Reason:  # noqa: ANN401
    context = error.get("ctx", {})
    if error["type"] == REFUSED:
        return f"and {context['why']}", context["instead"]
    explain = _REASONS.get(error["type"])
    if explain is None:
        return "and that cannot be", error["msg"].lower()
    return explain(context, value, written)


def _text(_: Mapping[str, Any], value: Any, written: str | None) -> Reason:  # noqa: ANN401
    if value is None:
        return "and a text belongs here", "write one, or leave the key out"
    if isinstance(value, dict | list):
        return "and a text belongs here", "write one text"
    return "and a text belongs here", "put double quotes around it" if written is None else f'quote it: "{written}"'


def _whole_number(_: Mapping[str, Any], value: Any, written: str | None) -> Reason:  # noqa: ANN401, ARG001
    if isinstance(value, str) and re.fullmatch("[0-9]+", value, re.ASCII):
        return "a text, and a whole number belongs here", f"write {value} without quotes"
    if isinstance(value, float) and value.is_integer():
        return "and a whole number belongs here", f"write {int(value)}"
    return "and a whole number belongs here", "write one without quotes, point or unit, or leave the key out"


def _number(_: Mapping[str, Any], value: Any, written: str | None) -> Reason:  # noqa: ANN401, ARG001
    if isinstance(value, str) and re.fullmatch(r"[-+.0-9eE]+", value, re.ASCII):
        return "a text, and a number belongs here", f"write {value} without quotes"
    return "and a number belongs here", "write one without quotes or unit, or leave the key out"


def _truth(_: Mapping[str, Any], value: Any, written: str | None) -> Reason:  # noqa: ANN401, ARG001
    meant = LONG_YES.get(value.lower()) if isinstance(value, str) else None
    if meant is not None:
        return f"which is a text in YAML 1.2, and {meant} belongs here", f"write {meant}"
    return "and true or false belongs here", "write one of them without quotes"


def _one_of(context: Mapping[str, Any], value: Any, written: str | None) -> Reason:  # noqa: ANN401, ARG001
    known = re.findall(r"'([^']*)'", str(context.get("expected", "")))
    near = nearest(value, known) if isinstance(value, str) else None
    choices = ", ".join(known)
    return f"and it can be {choices}", f"did you mean {near}?" if near else f"write one of {choices}"


def _bound(relation: str, key: str, advice: str) -> Callable[[Mapping[str, Any], Any, str | None], Reason]:
    def explain(context: Mapping[str, Any], value: Any, written: str | None) -> Reason:  # noqa: ANN401, ARG001
        bound = f"{context[key]:.15g}" if isinstance(context[key], float) else context[key]
        return f"and it must be {relation} {bound}", advice.format(bound)

    return explain


def _mapping(_: Mapping[str, Any], value: Any, written: str | None) -> Reason:  # noqa: ANN401, ARG001
    return "and a mapping belongs here", "write keys with values below it, or {key: value}"


def _list(_: Mapping[str, Any], value: Any, written: str | None) -> Reason:  # noqa: ANN401
    example = f"[{written or value}]" if isinstance(value, str | int | float) and len(str(value)) < 40 else "[...]"  # noqa: PLR2004
    return "and a list belongs here", f"write {example}"


def _finite(_: Mapping[str, Any], value: Any, written: str | None) -> Reason:  # noqa: ANN401, ARG001
    return "and a finite number belongs here", "write one"


def _length(context: Mapping[str, Any], value: Any, written: str | None) -> Reason:  # noqa: ANN401, ARG001
    count = context.get("min_length", context.get("max_length"))
    return f"and it has {context.get('actual_length')} items", f"write {count}"


_REASONS: Mapping[str, Callable[[Mapping[str, Any], Any, str | None], Reason]] = {
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
